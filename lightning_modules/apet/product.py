"""A linear layer with all of APET's terms, as one autograd function.

APET (arXiv 2306.02320), Section 5.1, with α for LoRA's scale:

    h_out = y + α·(x W_3) W_4 + GELU(y W_5 + b_5) W_6,    y = x (W + Δ)ᵀ + b

As one function it reads x, W and the output's gradient once for all terms, and does not save y:
∂L/∂W_5 = yᵀ g = (W + Δ) (xᵀ g) + b (Σ_t g_t) is cheap, because g has few columns.

Element-wise tuning (Δ) needs ∂L/∂W at a few thousand positions, and a dense gradient costs half as
much as the rest of the layer's computation. `product_elements` computes it at those positions only,
as Σ_t g_ti·x_tj, where that is cheaper. W + Δ is recomputed in the backward pass instead of saved,
unless it is of another type than W.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_modules.modes import precise

# upper bound of the cost of one element of a sampled product, in elements of a dense product, which
# uses the processor's cache better
SAMPLE_COST = 12
# device types on which torch can compute single elements of a product
SAMPLED_DEVICES = ("cpu", "cuda")
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


class TunedProduct(torch.autograd.Function):
    """h_out (…, out) of x (…, in).

    The arguments of `apply`; a kind of term that the layer does not have has no rows:

        x           (…, in); the floating-point arguments but W and Δ are of its type
        weight      W (out, in), or (in, out) if `transposed`
        bias        b (out,), or None
        w3, w4      W_3 transposed (r, in), and W_4 (r, out)
        w5, b5, w6  W_5 transposed (w, out), b_5 (w,) or None, and W_6 (w, out)
        values      Δ's elements (n,), or None
        index       their flat positions in W, ascending
        starts, columns   `pattern_of` the index, or None
        scale       α
        transposed  whether W is (in, out), as in transformers' Conv1D
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        w3: Tensor,
        w4: Tensor,
        w5: Tensor,
        b5: Tensor | None,
        w6: Tensor,
        values: Tensor | None,
        index: Tensor | None,
        starts: Tensor | None,
        columns: Tensor | None,
        scale: float,
        transposed: bool,
    ) -> Tensor:
        inputs = x.reshape(-1, x.shape[-1])
        full = add_at(weight, values, index, x.dtype)
        y = F.linear(inputs, full.T if transposed else full, bias)
        right, left, hidden = torch.cat([w4, w6]), None, None
        if len(right):
            hidden = F.linear(y, w5, b5)
            left = torch.cat([F.linear(inputs, w3) * scale, F.gelu(hidden)], 1)
            y.addmm_(left, right)
        # x is large, and b, W_4 and W_6 do not need it
        kept = x if any(ctx.needs_input_grad[place] for place in (1, 3, 5, 8)) else None
        # under autocast torch, too, saves a layer's weight in the type of x
        cast = full if full.dtype != weight.dtype else None
        ctx.save_for_backward(
            *(kept, weight, cast, bias, w3, w5, left, right, hidden, values, index, starts, columns)
        )
        ctx.shape, ctx.scale, ctx.transposed = x.shape, scale, transposed
        # a view could not be changed in place
        return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, full, bias, w3, w5, left, right, hidden, values, *positions = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *needs = ctx.needs_input_grad[:9]
        needs_w3, needs_w4, needs_w5, needs_b5, needs_w6, needs_values = needs
        grad = grad.reshape(-1, grad.shape[-1])
        inputs: Any = None if x is None else x.reshape(-1, x.shape[-1])
        ranks = (len(w3), len(w5))
        of_y: Any = grad
        of_terms: Any = None
        of_hidden: Any = None
        if len(right):
            of_terms, of_neurons = (grad @ right.T).split(ranks, 1)
            of_terms = of_terms * ctx.scale
            of_hidden = torch.ops.aten.gelu_backward(of_neurons, hidden)
        if len(w5):
            of_y = torch.addmm(grad, of_hidden, w5)
        of_x = of_weight = of_bias = of_w3 = of_w4 = of_w5 = of_b5 = of_w6 = of_values = None
        if needs_x or needs_w5:
            full = add_at(weight, values, positions[0], grad.dtype) if full is None else full
            full = full.T if ctx.transposed else full
        if needs_x:
            of_x = of_y @ full
            if len(w3):
                of_x.addmm_(of_terms, w3)
            of_x = of_x.view(ctx.shape)
        if needs_bias:
            of_bias = of_y.sum(0)
        if needs_w4 or needs_w6:
            of_w4, of_w6 = (left.T @ grad).split(ranks)
        if needs_w3 or needs_w5:
            of_w3, of_w5 = (torch.cat([of_terms, of_hidden], 1).T @ inputs).split(ranks)
            if needs_w5:
                of_w5 = of_w5 @ full.T
                if bias is not None:
                    of_w5 = of_w5.addr_(of_hidden.sum(0), bias)
        if needs_b5:
            of_b5 = of_hidden.sum(0)
        # the gradient of the weight is firstᵀ · second
        first, second = (inputs, of_y) if ctx.transposed else (of_y, inputs)
        if needs_weight:
            of_weight = (first.T @ second).to(weight.dtype)
        if needs_values:
            of_values = product_elements(first, second, weight.shape[1], *positions)
            of_values = of_values.to(values.dtype)
        given = (of_x, of_weight, of_bias, of_w3, of_w4, of_w5, of_b5, of_w6, of_values)
        return *given, None, None, None, None, None


def add_at(base: Tensor, values: Tensor | None, index: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A parameter with values added at flat indices, in a type; summed in at least float32.

    Without values it is the parameter itself where that is of the type already.
    """
    if values is None or index is None:
        return base.to(dtype)
    full = base.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if full.dtype == base.dtype == values.dtype:
        full.view(-1).index_add_(0, index, values)
    else:
        chosen = base.flatten()[index]
        chosen = chosen.to(torch.promote_types(base.dtype, values.dtype)) + values
        full.view(-1)[index] = chosen.to(dtype)
    return full


def is_sampled(count: int, size: int) -> bool:
    """Whether that many elements of a product of `size` elements are few enough to be sampled."""
    return count * SAMPLE_COST < size


def pattern_of(index: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Where each row starts (rows + 1,) among ascending flat indices (n,), and their columns (n,).

    This is the compressed form (CSR) of `product_elements`' positions, which never change.
    """
    first = torch.arange(rows + 1, device=index.device) * columns
    return torch.searchsorted(index, first), index % columns


def product_elements(
    left: Tensor,
    right: Tensor,
    width: int,
    index: Tensor,
    starts: Tensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """The elements (n,) of leftᵀ · right at flat indices, in at least float32 where they are few.

    Args:
        left: (T, rows).
        right: (T, width).
        width: number of columns of the product.
        index: (n,), row · width + column, ascending.
        starts, columns: `pattern_of` the index; computed when None.
    """
    rows = left.shape[1]
    if not is_sampled(len(index), rows * width) or left.device.type not in SAMPLED_DEVICES:
        return (left.T @ right).flatten()[index]
    left, right = precise(left), precise(right)  # sampled_addmm has no 16-bit types
    if starts is None or columns is None:
        starts, columns = pattern_of(index, rows, width)
    zeros = torch.sparse_csr_tensor(
        starts, columns, left.new_zeros(len(index)), (rows, width), check_invariants=False
    )
    return torch.sparse.sampled_addmm(zeros, left.T.contiguous(), right, beta=0.0).values()
