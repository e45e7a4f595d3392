"""Key/value caches that can be shortened and overwritten without copying."""

import copy
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache

GROWTH = 256  # spare tokens in a buffer that has been enlarged


class OverwrittenLayer(CacheLayerMixin):
    """Keys and values of one layer, in buffers whose first `length` tokens are valid.

    transformers' DynamicLayer instead concatenates all keys and values again for each token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make empty buffers with the batch, heads and head size of the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append n tokens (B, H, n, D); returns all valid keys and values, (B, H, length, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys = _write(self.keys, key_states, self.length)
        self.values = _write(self.values, value_states, self.length)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that the next `query_length` tokens attend to, and the first key's index.

        Called by transformers when it builds the attention mask.
        """
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Number of valid tokens."""
        return self.length

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1


class KVCache(Cache):
    """A growing cache for a decoder of transformers, which can be shortened without copying."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=OverwrittenLayer)

    @property
    def length(self) -> int:
        """Number of valid tokens."""
        return max((layer.length for layer in self.layers), default=0)  # type: ignore

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens; the next pass overwrites what lies beyond them."""
        for layer in self.layers:
            layer.length = min(layer.length, length)  # type: ignore


class FixedKVCache(StaticCache):
    """A cache of fixed size that can be shortened; its shapes are the same in all passes.

    Args:
        config: of a model whose layers have full attention. A sliding window in it, which no text
            may reach, is ignored: transformers' caches of a window cannot be shortened.
        slots: the most tokens.

    Attributes:
        length: number of valid tokens; the caller of a pass has to increase it.
    """

    length = 0

    def __init__(self, config: Any, slots: int) -> None:
        full = copy.deepcopy(config)
        full.sliding_window = None
        if getattr(full, "layer_types", None):
            full.layer_types = ["full_attention"] * len(full.layer_types)
        super().__init__(full, max_cache_len=slots)

    def cut(self, length: int) -> None:
        """Keep the first `length` tokens; the next pass overwrites what lies beyond them."""
        self.length = min(self.length, length)
        for layer in self.layers:
            layer.cumulative_length.fill_(self.length)  # type: ignore[union-attr]


def _write(buffer: Tensor | None, states: Tensor, start: int) -> Tensor:
    """The buffer with `states` written at `start`; a larger one where it was too short."""
    assert buffer is not None
    end = start + states.shape[2]
    if end > buffer.shape[2]:
        grown = states.new_empty(*states.shape[:2], end + GROWTH, states.shape[3])
        grown[:, :, :start] = buffer[:, :, :start]
        buffer = grown
    buffer[:, :, start:end] = states
    return buffer
