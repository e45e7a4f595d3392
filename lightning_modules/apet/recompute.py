"""Recomputes the inputs of layers in the backward pass instead of saving them.

The gradient of parameters at a linear layer needs the layer's input. LoRA at queries and values
saves one input for each block. Positions drawn over all layers would also save those of the output
projection and of both feed-forward layers, the last one four times as wide. But most inputs are
cheap functions of tensors that autograd saves anyway: an activation function saves its input, a
norm its input, mean and deviation, a product its factors. The inputs are recomputed from these.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@contextlib.contextmanager
def not_kept(x: Tensor) -> Iterator[None]:
    """Within the context, operations do not save x for the backward pass if it can be recomputed.

    Args:
        x: input of a layer.
    """
    again = origin(x)
    if again is None or not x.is_contiguous():
        yield
        return
    address, count, kind = x.data_ptr(), x.numel(), x.dtype

    def pack(saved: Tensor) -> Any:
        is_x = saved.data_ptr() == address and saved.numel() == count and saved.dtype == kind
        return tuple(saved.shape) if is_x and saved.is_contiguous() else saved

    def unpack(saved: Any) -> Tensor:
        return again().reshape(saved) if isinstance(saved, tuple) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def origin(x: Tensor) -> Callable[[], Tensor] | None:
    """A function that recomputes a tensor from what autograd has saved for its backward pass.

    Returns:
        None if the tensor is the result of anything but GELU, SiLU, layer norm or a product, or if
        autograd's saved tensors cannot be used: in compiled code, and under hooks such as those of
        activation checkpointing.
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
    """Whether other hooks on saved tensors are active (or cannot be determined)."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None
