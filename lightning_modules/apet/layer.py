"""What a module becomes when APET tunes something in it: its class with the paper's terms added.

APET (arXiv 2306.02320), Section 5.1. A linear layer f becomes

    h_out = f(h_in) + α·h_in·W_3·W_4 + σ(f(h_in)·W_5 + b_5)·W_6 + b_6

where f has trainable elements added to its weight and bias (ADD), W_3, W_4 are the terms of CONCAT
and W_5, W_6 the adapter of PLUG. Any other module, a norm or an embedding, sees its parameters with
their trainable elements added. What is added starts at zero, so the output does too.

Element-wise tuning needs ∂L/∂W at a few thousand places, and a dense gradient costs half of the
layer's other work. `_TunedLinear` computes it at those places only, as Σ_t g_ti·x_tj, as long as
that is cheaper; W plus its elements is built again in the backward pass rather than kept, and so
are most inputs (recompute.py).
"""

import functools
import hashlib
import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_modules.apet.recompute import not_kept

# an element costs at most as much as so many of a dense product, whose numbers are used again for
# neighbours while they are in the cache
SAMPLE_COST = 12
SAMPLED = ("cpu", "cuda")  # where torch has a product that computes some elements only
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


class Tuned(nn.Module):
    """A module some of whose parameters have trainable elements.

    The parameters keep their names and values; `apet_add_<name>` holds what is added to the
    elements that the buffer `apet_index_<name>` lists, or to all of them where there is none.
    """

    def tuned(self, name: str) -> Tensor:
        """A parameter of this module with its trainable elements added."""
        base: Any = self._parameters[name]
        values = self._parameters.get(f"apet_add_{name}")
        if values is None:
            return base
        index = self._buffers.get(f"apet_index_{name}")
        if index is None:
            return (base + values).to(base.dtype)
        return _ScatterAdd.apply(base, values, index)

    def __reduce__(self) -> Any:
        kind, names = type(self).apet_kind, type(self).apet_names  # type: ignore[attr-defined]
        return _rebuild, (kind, names), self.__getstate__()


class TunedLinear(Tuned):
    """A linear layer (nn.Linear, or transformers' Conv1D) with all that APET may add to it."""

    apet_scale: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        with not_kept(x):
            return self.output(x)

    def output(self, x: Tensor) -> Tensor:
        """h_out of an input of the type that is computed in."""
        tall = isinstance(self, Conv1D)
        weight: Any = self._parameters["weight"]
        values = self._parameters.get("apet_add_weight")
        index = self._buffers.get("apet_index_weight")
        bias: Tensor | None = self._parameters.get("apet_bias")
        if bias is None and self._parameters.get("bias") is not None:
            bias = self.tuned("bias")
        bias = None if bias is None else bias.to(x.dtype)
        if values is not None and index is not None:
            y = _TunedLinear.apply(x, weight, bias, values, index, tall)
        else:
            weight = self.tuned("weight").to(x.dtype)
            y = F.linear(x, weight.T if tall else weight, bias)
        output = y
        if "apet_w4" in self._parameters:
            w3, w4 = self.terms()
            output = output + self.apet_scale * F.linear(x, w3.to(x.dtype)) @ w4.to(x.dtype)
        if "apet_w6" in self._parameters:
            w5, b5, w6, b6 = self.neurons()
            hidden = F.gelu(_Behind.apply(y, w5.to(y.dtype), x, bias, self) + b5.to(y.dtype))
            output = output + hidden @ w6.to(y.dtype)
            if b6 is not None:
                output = output + b6.to(y.dtype)
        return output

    def terms(self) -> tuple[Tensor, Tensor]:
        """W_3 as (r, in) and W_4 as (r, out)."""
        return _rows(self, "w3"), _rows(self, "w4")

    def neurons(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """W_5 as (w, out), b_5 (w,), W_6 as (w, out), and b_6 (out,) where there is one."""
        w5, trained = _rows(self, "w5"), self._parameters.get("apet_b5")
        b5 = w5.new_zeros(len(w5))
        if trained is not None:
            b5 = F.pad(trained, (0, len(w5) - len(trained)))
        return w5, b5, _rows(self, "w6"), self._parameters.get("apet_b6")


class TunedEmbedding(Tuned):
    """An embedding that adds to the rows which a batch reads, and to no copy of the whole table."""

    def forward(self, ids: Tensor) -> Tensor:
        table: Any = self._parameters["weight"]
        values = self._parameters.get("apet_add_weight")
        index: Any = self._buffers.get("apet_index_weight")
        if values is None or index is None or self.max_norm is not None:
            return super().forward(ids)
        rows, place = ids.unique(return_inverse=True)
        row, column = index // table.shape[1], index % table.shape[1]
        at_row = torch.searchsorted(rows, row).clamp(max=len(rows) - 1)
        read = rows[at_row] == row
        where = (at_row[read], column[read])
        kind = torch.promote_types(table.dtype, values.dtype)
        read_rows = table[rows].to(kind).index_put(where, values[read].to(kind), accumulate=True)
        return F.embedding(place, read_rows.to(table.dtype))


class _ScatterAdd(torch.autograd.Function):
    """A parameter with values added at some of its elements."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return added(base, values, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        base = grad if ctx.needs_input_grad[0] else None
        return base, grad.flatten()[index].float(), None


class _TunedLinear(torch.autograd.Function):
    """x (W + Δ)ᵀ, or x (W + Δ) where W is (in, out), Δ being sparse and alone trainable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        values: Tensor,
        index: Tensor,
        tall: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, values, index)
        ctx.tall = tall
        full = added(weight, values, index).to(x.dtype)
        return F.linear(x, full.T if tall else full, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, values, index = ctx.saved_tensors
        grad_x = grad_bias = grad_values = None
        if ctx.needs_input_grad[0]:
            full = added(weight, values, index).to(grad.dtype)
            grad_x = grad @ (full.T if ctx.tall else full)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[3]:
            # rows of the weight are those of `left`
            left, right = (x, grad) if ctx.tall else (grad, x)
            left, right = left.flatten(0, -2), right.flatten(0, -2)
            grad_values = at(left, right, index, weight.shape[1]).to(values.dtype)
        return grad_x, None, grad_bias, grad_values, None, None


class _Behind(torch.autograd.Function):
    """y W_5ᵀ behind a linear layer, y = x Wᵀ + b, without keeping y.

    ∂L/∂W_5 = gᵀ y = (gᵀ x) Wᵀ + (Σ_t g_t) bᵀ, of which gᵀ x has few rows.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, w5: Tensor, x: Tensor, bias: Tensor | None, layer: TunedLinear
    ) -> Tensor:
        ctx.save_for_backward(w5, x, bias)
        ctx.layer = layer
        return F.linear(y, w5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w5, x, bias = ctx.saved_tensors
        grad_w5 = None
        if ctx.needs_input_grad[1]:
            weight = ctx.layer.tuned("weight").to(grad.dtype)
            rows = grad.flatten(0, -2)
            grad_w5 = rows.T @ x.flatten(0, -2)
            grad_w5 = grad_w5 @ (weight if isinstance(ctx.layer, Conv1D) else weight.T)
            if bias is not None:
                grad_w5 = grad_w5 + rows.sum(0)[:, None] * bias
        return grad @ w5, grad_w5, None, None, None


def added(base: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """A copy of a parameter with values added at flat indices, summed in at least float32."""
    full = base.clone(memory_format=torch.contiguous_format)
    flat = full.view(-1)
    kind = torch.promote_types(base.dtype, values.dtype)
    flat[index] = (flat[index].to(kind) + values).to(base.dtype)
    return full


def at(left: Tensor, right: Tensor, index: Tensor, columns: int) -> Tensor:
    """Elements of leftᵀ · right, (n,), at flat indices, in at least float32 where they are few.

    Args:
        left: (T, rows).
        right: (T, columns).
        index: (n,), row · columns + column, ascending.
        columns: of the product.
    """
    if len(index) * SAMPLE_COST >= left.shape[1] * columns or left.device.type not in SAMPLED:
        return (left.T @ right).flatten()[index]
    kind = torch.promote_types(left.dtype, torch.float32)  # the product knows no other types
    rows, cols = index // columns, index % columns
    starts = torch.searchsorted(rows, torch.arange(left.shape[1] + 1, device=rows.device))
    pattern = torch.sparse_csr_tensor(
        starts, cols, left.new_zeros(len(index), dtype=kind), (left.shape[1], columns),
        check_invariants=False,
    )  # fmt: skip
    return torch.sparse.sampled_addmm(
        pattern, left.T.to(kind).contiguous(), right.to(kind), beta=0.0
    ).values()


@functools.cache
def tuned_class(kind: Any, names: tuple[str, ...]) -> type:
    """What a module of a class becomes when elements of the named parameters are trainable."""

    def seen(name: str) -> property:
        return property(lambda module: module.tuned(name))

    base = {nn.Linear: TunedLinear, Conv1D: TunedLinear, nn.Embedding: TunedEmbedding}
    members: dict[str, Any] = {name: seen(name) for name in names}
    members |= {"apet_kind": kind, "apet_names": names, "__module__": kind.__module__}
    return type(kind.__name__, (base.get(kind, Tuned), kind), members)


def _rebuild(kind: type, names: tuple[str, ...]) -> Any:
    """An empty module of a tuned class, for pickle and copy."""
    made: Any = tuned_class(kind, names)
    return made.__new__(made)


def start(seed: int, name: str, shape: tuple[int, int]) -> Tensor:
    """Random rows of W_3 or W_5, uniform ±1/√fan_in, the same on every machine.

    nn.Linear's own start (Kaiming uniform with a = √5), which LoRA's A and adapters have.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    random = np.random.RandomState(np.frombuffer(digest[:16], dtype="<u4"))
    bound = 1 / math.sqrt(shape[1])
    return torch.from_numpy(random.uniform(-bound, bound, shape).astype(np.float32))


def give_rows(
    layer: nn.Module, name: str, rows: int, width: int, trainable: int, first: Tensor | None
) -> None:
    """Give a layer a matrix (rows, width) of which the first elements, row by row, train.

    Args:
        layer: receives the parameter `apet_<name>`, and the buffer `apet_<name>_rest` where the
            last row trains in part.
        name: "w3", "w4", "w5" or "w6".
        rows: of the matrix.
        width: of the matrix.
        trainable: elements that train; the others stay what they start as.
        first: what the matrix starts as; zeros when None.
    """
    device = layer._parameters["weight"].device  # type: ignore[union-attr]
    flat = torch.zeros(rows * width) if first is None else first.flatten()
    flat = flat.to(device)
    if trainable:
        setattr(layer, f"apet_{name}", nn.Parameter(flat[:trainable].clone()))
    if trainable < rows * width:
        layer.register_buffer(f"apet_{name}_rest", flat[trainable:].clone())
    layer.__dict__.setdefault("apet_widths", {})[name] = width


def _rows(layer: Any, name: str) -> Tensor:
    trained, rest = layer._parameters.get(f"apet_{name}"), layer._buffers.get(f"apet_{name}_rest")
    parts = [part for part in (trained, rest) if part is not None]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return flat.view(-1, layer.apet_widths[name])
