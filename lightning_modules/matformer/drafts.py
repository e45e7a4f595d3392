"""Draft and verifier of speculative decoding: models with key/value caches, and their tokens."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.backbones import first_position
from lightning_modules.counting import count_parameters
from lightning_modules.matformer.kv_cache import FixedKVCache, KVCache
from lightning_modules.matformer.nest import nesting_of
from lightning_modules.matformer.views import (
    at_set_granularity,
    first_layers,
    first_tokens,
    for_few_rows,
    submodel,
)


class Slots:
    """The tokens of a batch, one column (slot) for each position of the key/value caches.

    All rows have equally many slots. Where a row had fewer drafted tokens accepted than another,
    its surplus slots are invalid: no token attends to them, and positions do not count them.

    Attributes:
        tokens: (B, T), token ids.
        positions: (B, T), each token's position in its own text, from 0.
        valid: (B, T), False for padding and rejected tokens.
        limit: number of the model's positions, within which all are kept; None without a limit.
    """

    def __init__(self, prompts: Tensor, mask: Tensor, limit: int | None) -> None:
        self.tokens, self.valid = prompts, mask.bool()
        self.positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        self.limit = limit

    def __len__(self) -> int:
        return self.tokens.shape[1]

    def add(self, tokens: Tensor, positions: Tensor) -> None:
        """Append one slot: tokens (B,) and their positions (B,)."""
        self.tokens = torch.cat([self.tokens, tokens[:, None]], 1)
        if self.limit is not None:
            # only rows that are finished go beyond it, and their tokens are discarded
            positions = positions.clamp(max=self.limit - 1)
        self.positions = torch.cat([self.positions, positions[:, None]], 1)
        self.valid = torch.cat([self.valid, torch.ones_like(tokens[:, None], dtype=torch.bool)], 1)

    def cut(self, length: int) -> None:
        """Keep the first `length` slots."""
        self.tokens, self.positions = self.tokens[:, :length], self.positions[:, :length]
        self.valid = self.valid[:, :length]


class Reader:
    """A model with its key/value cache.

    Args:
        model: a decoder of transformers; of a nested one, the result of `at_set_granularity`.
        cache: a cache to share with another reader; a new one when None.
        max_slots: size of a fixed cache; all passes but the prompt's are then compiled. None for a
            growing cache and no compilation.
    """

    def __init__(
        self, model: Any, cache: KVCache | FixedKVCache | None = None, max_slots: int | None = None
    ) -> None:
        self.model, self.max_slots = for_few_rows(model), max_slots
        self.first = first_position(model)
        new_cache = KVCache() if max_slots is None else FixedKVCache(model.config, max_slots)
        self.cache = new_cache if cache is None else cache
        self.compiled = None if max_slots is None else torch.compile(self.model, dynamic=False)

    def read(self, slots: Slots, keep: int = 1) -> Tensor:
        """Logits (B, keep, V) after the last `keep` slots, by a pass over the uncached slots."""
        start = self.cache.length
        if isinstance(self.cache, FixedKVCache):
            return self._read_fixed(self.cache, slots, keep)
        return self.model(
            slots.tokens[:, start:],
            attention_mask=None if bool(slots.valid.all()) else slots.valid.long(),
            position_ids=slots.positions[:, start:] + self.first,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits

    def _read_fixed(self, cache: FixedKVCache, slots: Slots, keep: int) -> Tensor:
        assert self.max_slots is not None and self.compiled is not None
        start, end = cache.length, len(slots)
        columns = torch.arange(self.max_slots, device=slots.tokens.device)
        queries = columns[start:end, None]
        visible = (columns < queries) & F.pad(slots.valid, (0, self.max_slots - end))[:, None, :]
        logits = (self.compiled if start else self.model)(  # the prompt's length varies
            _dense(slots.tokens[:, start:]),
            # each token attends to itself, even an invalid one: softmax over no token would be NaN
            attention_mask=(visible | (columns == queries))[:, None],
            position_ids=_dense(slots.positions[:, start:] + self.first),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        cache.length = end
        return logits


def _dense(part: Tensor) -> Tensor:
    """A copy whose strides are those of its shape, so that torch.compile gets no new ones."""
    return part.clone(memory_format=torch.contiguous_format)


def drafter(
    model: Any,
    draft: Any,
    shared: KVCache | FixedKVCache | None = None,
    layers: int | None = None,
    vocabulary: int | None = None,
    max_slots: int | None = None,
) -> Reader:
    """The draft model, with the verifier's cache where the two can share it.

    Args:
        model: the verifier.
        draft: see `speculative_generate`.
        shared: the verifier's cache; None for separate caches.
        layers: number of first layers that the draft runs; all when None.
        vocabulary: number of first tokens that the draft may propose; all when None.
        max_slots: see `Reader`.

    Raises:
        ValueError: if the draft is larger than the verifier or has another vocabulary, or there
            are fewer than `layers` layers or `vocabulary` tokens.
    """
    if isinstance(draft, nn.Module):
        small, shared = _check_draft(draft, model), None
    elif draft is None:
        small = at_set_granularity(model)
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
    return Reader(small, shared, max_slots)


def _check_draft(draft: Any, model: Any) -> Any:
    """Return a separate draft at its set granularity, after checking vocabulary and size."""
    draft, model = at_set_granularity(draft), at_set_granularity(model)
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
