"""Recomputes the inputs of layers in the backward pass instead of saving them.

The gradient of parameters at a linear layer needs the layer's input. LoRA at queries and values
saves one input for each block. Positions drawn over all layers would also save those of the output
projection and of both feed-forward layers, the last one four times as wide. But most inputs are
cheap functions of tensors that autograd saves anyway: an activation function saves its input, a
norm its input, mean and inverse deviation, a product its factors. The inputs are recomputed from
them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@contextlib.contextmanager
def recompute_instead_of_saving(x: Tensor) -> Iterator[None]:
    """Within the context, operations do not save x for the backward pass if it can be recomputed.

    Args:
        x: input of a layer.
    """
    recompute = origin(x)
    if recompute is None or not x.is_contiguous():
        yield
        return
    address, count, dtype = x.data_ptr(), x.numel(), x.dtype

    def pack(saved: Tensor) -> Any:
        is_x = saved.data_ptr() == address and saved.numel() == count and saved.dtype == dtype
        return tuple(saved.shape) if is_x and saved.is_contiguous() else saved

    def unpack(saved: Any) -> Tensor:
        # a layer norm's statistics are in float32 on a GPU, whatever the type of x
        return recompute().to(dtype).reshape(saved) if isinstance(saved, tuple) else saved

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
    if node is None or torch.compiler.is_compiling() or _has_other_hooks():
        return None
    operation = node.name()
    if operation == "GeluBackward0":
        before, approximate = node._saved_self.detach(), node._saved_approximate
        return lambda: F.gelu(before, approximate=approximate)
    if operation == "SiluBackward0":
        before = node._saved_self.detach()
        return lambda: F.silu(before)
    if operation == "MulBackward0":
        left, right = node._saved_self, node._saved_other
        if left is None or right is None:
            return None
        left, right = left.detach(), right.detach()
        return lambda: left * right
    if operation == "NativeLayerNormBackward0":
        before, mean, rstd = node._saved_input, node._saved_result1, node._saved_result2
        return _layer_norm(before.detach(), mean, rstd, node._saved_weight, node._saved_bias)
    return None


def _layer_norm(
    x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Callable[[], Tensor]:
    weight, bias = (None if term is None else term.detach() for term in (weight, bias))

    def recompute() -> Tensor:
        normal = (x - mean).mul_(rstd)
        if weight is not None:
            normal.mul_(weight)
        return normal if bias is None else normal.add_(bias)

    return recompute


def _has_other_hooks() -> bool:
    """Whether other hooks on saved tensors are active (or cannot be determined)."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None
