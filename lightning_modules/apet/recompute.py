"""Inputs of layers that are computed again in the backward pass rather than kept for it.

What trains beside a linear layer needs the layer's input for its gradient. LoRA at queries and
values keeps one input for each block; a draw over all layers would keep that of the output
projection and both of the feed-forward part too, the last four times as wide. But most inputs are
cheap functions of what autograd keeps anyway: an activation's output of its input, a norm's of its
input, mean and deviation, a gate's of its factors. They are computed from these again.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@contextlib.contextmanager
def not_kept(x: Tensor) -> Iterator[None]:
    """Operations inside do not keep x for the backward pass, where it can be had again.

    Args:
        x: input of a layer.
    """
    again = origin(x)
    if again is None or not x.is_contiguous():
        yield
        return
    place, count, kind = x.data_ptr(), x.numel(), x.dtype

    def pack(kept: Tensor) -> Any:
        is_x = kept.data_ptr() == place and kept.numel() == count and kept.dtype == kind
        return tuple(kept.shape) if is_x and kept.is_contiguous() else kept

    def unpack(kept: Any) -> Tensor:
        return again().reshape(kept) if isinstance(kept, tuple) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def origin(x: Tensor) -> Callable[[], Tensor] | None:
    """What computes a tensor from what autograd keeps for the function that made it.

    Returns:
        None where that function is another than GELU, SiLU, layer norm or a product, and where
        autograd does not keep tensors as they are: in compiled code, and under hooks such as those
        of activation checkpointing.
    """
    node: Any = x.grad_fn
    if node is None or torch.compiler.is_compiling() or _hooked():
        return None
    kind = node.name()
    if kind == "GeluBackward0":
        before, approximate = node._saved_self.detach(), node._saved_approximate
        return lambda: F.gelu(before, approximate=approximate)
    if kind == "SiluBackward0":
        before = node._saved_self.detach()
        return lambda: F.silu(before)
    if kind == "MulBackward0":
        one, other = node._saved_self, node._saved_other
        if one is None or other is None:
            return None
        one, other = one.detach(), other.detach()
        return lambda: one * other
    if kind == "NativeLayerNormBackward0":
        before, mean, rate = node._saved_input, node._saved_result1, node._saved_result2
        return _norm(before.detach(), mean, rate, node._saved_weight, node._saved_bias)
    return None


def _norm(
    x: Tensor, mean: Tensor, rate: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Callable[[], Tensor]:
    weight, bias = (None if one is None else one.detach() for one in (weight, bias))

    def again() -> Tensor:
        normal = (x - mean).mul_(rate)
        if weight is not None:
            normal.mul_(weight)
        return normal if bias is None else normal.add_(bias)

    return again


def _hooked() -> bool:
    """Whether something else decides how tensors are kept."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None
