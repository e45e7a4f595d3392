"""A cache of keys and values that is cut back and written over."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

ROOM = 256  # tokens by which a full buffer grows


class OverwrittenLayer(CacheLayerMixin):
    """Keys and values of one layer, in buffers of which the first `length` tokens count.

    transformers' DynamicLayer joins all that it holds anew for each token.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Empty buffers in the shape of the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (B, H, n, D) after what counts, and give all that counts, (B, H, length, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys = _hold(self.keys, key_states, self.length)
        self.values = _hold(self.values, value_states, self.length)
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Tokens that a pass over `query_length` more attends to, from the first on."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens that count."""
        return self.length

    def get_max_length(self) -> int:
        """There is no maximum."""
        return -1


class KVCache(Cache):
    """A cache whose length can be set back at no cost."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=OverwrittenLayer)

    @property
    def length(self) -> int:
        """Tokens that count."""
        return max((layer.length for layer in self.layers), default=0)  # type: ignore

    def cut(self, length: int) -> None:
        """Forget all beyond the first `length` tokens; the next pass writes over it."""
        for layer in self.layers:
            layer.length = min(layer.length, length)  # type: ignore


def _hold(buffer: Tensor | None, states: Tensor, start: int) -> Tensor:
    """The buffer with `states` from `start` on, grown where it is too short."""
    assert buffer is not None
    end = start + states.shape[2]
    if end > buffer.shape[2]:
        grown = states.new_empty(*states.shape[:2], end + ROOM, states.shape[3])
        grown[:, :, :start] = buffer[:, :, :start]
        buffer = grown
    buffer[:, :, start:end] = states
    return buffer
