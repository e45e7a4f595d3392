"""The models of speculative decoding (draft and verifier) and the tokens in their caches."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.counting import count_parameters
from lightning_modules.matformer.kv_cache import KVCache
from lightning_modules.matformer.nest import nesting_of
from lightning_modules.matformer.views import (
    as_set,
    first_layers,
    first_tokens,
    for_few_rows,
    submodel,
)


class Slots:
    """The tokens that the caches hold or will hold next, one slot a token, aligned over the batch.

    All rows have equally many slots. Where a row had fewer drafted tokens accepted than another,
    its surplus slots are invalid: no token attends to them, and positions do not count them.

    Attributes:
        tokens: (B, T), token ids.
        positions: (B, T), each token's position in its own text.
        valid: (B, T), False for padding and rejected tokens.
        last_position: the model's largest position; larger ones are clamped to it.
    """

    def __init__(self, prompts: Tensor, mask: Tensor, limit: int | None) -> None:
        self.tokens, self.valid = prompts, mask.bool()
        self.positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        self.last_position = math.inf if limit is None else limit - 1

    def __len__(self) -> int:
        return self.tokens.shape[1]

    def add(self, tokens: Tensor, positions: Tensor) -> None:
        """Append one slot: tokens (B,) and their positions (B,)."""
        self.tokens = torch.cat([self.tokens, tokens[:, None]], 1)
        # only rows that are finished go beyond the limit, and their tokens are discarded
        positions = positions.clamp(max=self.last_position)
        self.positions = torch.cat([self.positions, positions[:, None]], 1)
        self.valid = torch.cat([self.valid, torch.ones_like(tokens[:, None], dtype=torch.bool)], 1)

    def cut(self, length: int) -> None:
        """Keep the first `length` slots."""
        self.tokens, self.positions = self.tokens[:, :length], self.positions[:, :length]
        self.valid = self.valid[:, :length]


class Reader:
    """A model and its cache of keys and values.

    Args:
        model: a decoder of transformers; a nested one as `as_set` gives it.
        cache: a cache to share with another reader; a new one when None.
    """

    def __init__(self, model: Any, cache: KVCache | None = None) -> None:
        self.model = for_few_rows(model)
        self.cache = KVCache() if cache is None else cache

    def read(self, slots: Slots, keep: int = 1) -> Tensor:
        """Logits (B, keep, V) after the last `keep` slots, by a pass over the uncached slots."""
        start = self.cache.length
        return self.model(
            slots.tokens[:, start:],
            attention_mask=None if bool(slots.valid.all()) else slots.valid.long(),
            position_ids=slots.positions[:, start:],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits


def drafter(
    model: Any,
    draft: Any,
    shared: KVCache | None = None,
    layers: int | None = None,
    vocabulary: int | None = None,
) -> Reader:
    """The draft model, with the verifier's cache where the two can share it.

    Args:
        model: the verifier.
        draft: see `speculative_generate`.
        shared: the verifier's cache; None for separate caches.
        layers: the draft runs only so many of its first layers; all when None.
        vocabulary: the draft proposes only so many of the first tokens; all when None.

    Raises:
        ValueError: if the draft is larger than the verifier or has another vocabulary, or there
            are fewer layers or tokens than asked for.
    """
    if isinstance(draft, nn.Module):
        small, shared = as_set(_checked(draft, model)), None
    elif draft is None:
        small = as_set(model)
    else:
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
        if any(layer.axis == "heads" for layer, _ in changed):
            shared = None  # keys and values have another shape
        small = submodel(model, chosen)
    if layers is not None:
        small = first_layers(small, layers)
    if vocabulary is not None:
        small = first_tokens(small, vocabulary)
    return Reader(small, shared)


def _checked(draft: Any, model: Any) -> Any:
    """A separate draft model, if its vocabulary and size fit the verifier's."""
    if draft.config.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"the draft has a vocabulary of {draft.config.vocab_size} tokens and the verifier "
            f"of {model.config.vocab_size}: give two models of one tokenizer"
        )
    if count_parameters(draft) > count_parameters(model):
        raise ValueError(
            f"the draft has {count_parameters(draft):,} parameters, more than the verifier's "
            f"{count_parameters(model):,}: swap the two"
        )
    return draft
