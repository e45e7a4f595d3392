"""Draft and verifier: two models, or one at two granularities, and what they have read so far."""

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.counting import count_parameters
from lightning_modules.matformer.kv_cache import KVCache
from lightning_modules.matformer.nest import granularity, nesting_of


class Slots:
    """The tokens that the caches hold or are about to: one slot for each, in all rows alike.

    A row that had fewer drafted tokens accepted than another keeps slots that are not valid: no
    token attends to them, and positions do not count them.

    Attributes:
        tokens: (B, T).
        positions: (B, T), of each token in its own text.
        valid: (B, T).
    """

    def __init__(self, prompts: Tensor, mask: Tensor, limit: int | None) -> None:
        self.tokens, self.valid = prompts, mask.bool()
        self.positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        self.last_position = math.inf if limit is None else limit - 1

    def __len__(self) -> int:
        return self.tokens.shape[1]

    def add(self, tokens: Tensor, positions: Tensor) -> None:
        """One more slot: tokens (B,) and their positions (B,)."""
        self.tokens = torch.cat([self.tokens, tokens[:, None]], 1)
        # beyond the limit there are only tokens of rows that are longer than asked for
        positions = positions.clamp(max=self.last_position)
        self.positions = torch.cat([self.positions, positions[:, None]], 1)
        self.valid = torch.cat([self.valid, torch.ones_like(tokens[:, None], dtype=torch.bool)], 1)

    def cut(self, length: int) -> None:
        """Keep the first `length` slots."""
        self.tokens, self.positions = self.tokens[:, :length], self.positions[:, :length]
        self.valid = self.valid[:, :length]


class Reader:
    """A model, how it is set while it reads, and its cache."""

    def __init__(
        self,
        model: Any,
        cache: KVCache | None = None,
        chosen: Any = None,
        layers: int | None = None,
    ) -> None:
        self.model = model if layers is None else first_layers(model, layers)
        self.nested, self.chosen = model, chosen
        self.cache = KVCache() if cache is None else cache

    def set(self) -> AbstractContextManager:
        """The model at this reader's granularity."""
        return nullcontext() if self.chosen is None else granularity(self.nested, self.chosen)

    def read(self, slots: Slots, keep: int = 1) -> Tensor:
        """Logits (B, keep, V) after the last `keep` slots; what the cache lacks is read for it."""
        start = self.cache.length
        return self.model(
            slots.tokens[:, start:],
            attention_mask=None if bool(slots.valid.all()) else slots.valid.long(),
            position_ids=slots.positions[:, start:],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits


def first_layers(model: Any, count: int) -> Any:
    """The decoder that stops after its first layers and goes on with norm and output layer.

    It shares all weights with the model, and its keys and values are those of the model's first
    layers.

    Raises:
        ValueError: there are fewer layers, or it is not a decoder of transformers.
    """
    base: Any = getattr(model, "base_model", None)
    lists = {} if base is None else dict(base.named_children())
    lists = {n: m for n, m in lists.items() if isinstance(m, nn.ModuleList) and len(m) > 1}
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has no one list of layers to take the first of: expected a "
            "decoder of transformers"
        )
    ((name, layers),) = lists.items()
    if not 1 <= count <= len(layers):
        raise ValueError(f"draft_layers is {count}, expected 1 to the model's {len(layers)}")
    short, body = copy.copy(model), copy.copy(base)
    # a module's children live in a dictionary, which copy.copy shares
    body._modules = {**base._modules, name: layers[:count]}
    short._modules = {**model._modules, model.base_model_prefix: body}
    return short


def drafter(model: Any, draft: Any, layers: int | None, shared: KVCache | None) -> Reader:
    """The reader that drafts.

    Raises:
        ValueError: the draft is larger than the verifier, or has another vocabulary.
    """
    if isinstance(draft, nn.Module):
        other: Any = draft
        if other.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"the draft has a vocabulary of {other.config.vocab_size} tokens and the verifier "
                f"of {model.config.vocab_size}: give two models of one tokenizer"
            )
        if count_parameters(other) > count_parameters(model):
            raise ValueError(
                f"the draft has {count_parameters(other):,} parameters, more than the verifier's "
                f"{count_parameters(model):,}: swap the two"
            )
        return Reader(other, layers=layers)
    if draft is None:
        return Reader(model, shared, layers=layers)
    nesting = nesting_of(model)
    chosen = nesting.resolve(draft)
    changed = [
        (x, index)
        for x, index in zip(nesting.layers, chosen, strict=True)
        if index != x.granularity
    ]
    for layer, index in changed:
        if index > layer.granularity:
            raise ValueError(
                f"the draft {draft!r} is larger than the verifier: {layer.name} is set to "
                f"granularity {layer.granularity} and would draft at {index}; "
                "set_granularity(model, …) to a larger one"
            )
    # with fewer heads keys and values have another shape
    shareable = all(layer.axis != "heads" for layer, _ in changed)
    return Reader(model, shared if shareable else None, chosen, layers)
