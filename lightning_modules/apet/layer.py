"""The layers that APET tunes: subclasses of the original classes with the paper's terms added.

APET (arXiv 2306.02320), Section 5.1. A linear layer f becomes

    h_out = f(h_in) + α·h_in·W_3·W_4 + σ(f(h_in)·W_5 + b_5)·W_6 + b_6

where f has trainable elements added to its weight and bias (ADD), W_3 and W_4 are the factors of
CONCAT, and W_5 and W_6 the adapter of PLUG. Any other module, such as a norm or an embedding,
computes with its parameters plus their trainable elements; a norm may get a bias as well. All added
terms start at zero.

Element-wise tuning needs ∂L/∂W at a few thousand positions, and a dense gradient costs half as much
as the rest of the layer's computation. `_TunedLinear` computes it at those positions only, as
Σ_t g_ti·x_tj, where that is cheaper. W plus its elements is recomputed in the backward pass instead
of saved, and so are most inputs (recompute.py).
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
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_modules.apet.recompute import recompute_instead_of_saving
from lightning_modules.layouts import is_layer_norm
from lightning_modules.modes import precise

# upper bound of the cost of one element of a sampled product, in elements of a dense product, which
# uses the processor's cache better
SAMPLE_COST = 12
# device types on which torch can compute single elements of a product
SAMPLED_DEVICES = ("cpu", "cuda")
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")


class Tuned(nn.Module):
    """A module with trainable elements added to some of its parameters.

    The parameters keep their names and values. The parameter `apet_add_<name>` is added to the
    elements of <name> that the buffer `apet_index_<name>` lists, or to all elements without one.
    """

    def tuned(self, name: str) -> Tensor:
        """A parameter of this module with its trainable elements added."""
        base: Any = self._parameters[name]
        values = self._parameters.get(f"apet_add_{name}")
        # FSDP2 reads the attribute, through this method, while it shards and gathers the parameter
        if values is None or isinstance(base, DTensor):
            return base
        index = self._buffers.get(f"apet_index_{name}")
        if index is None:
            return (base + values).to(base.dtype)
        return _ScatterAdd.apply(base, values, index)

    def __reduce__(self) -> Any:
        kind, names = type(self).apet_kind, type(self).apet_names  # type: ignore[attr-defined]
        return _rebuild, (kind, names), self.__getstate__()


class TunedLinear(Tuned):
    """A linear layer (nn.Linear, or transformers' Conv1D) with APET's terms.

    Attributes:
        apet_scale: α.
    """

    apet_scale: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        with recompute_instead_of_saving(x):
            return self.output(x)

    def output(self, x: Tensor) -> Tensor:
        """h_out (…, out) of an input x (…, in), in the type of x."""
        transposed = isinstance(self, Conv1D)  # the weight is (in, out)
        weight: Any = self._parameters["weight"]
        values = self._parameters.get("apet_add_weight")
        index = self._buffers.get("apet_index_weight")
        bias: Tensor | None = self._parameters.get("apet_bias")
        if bias is None and self._parameters.get("bias") is not None:
            bias = self.tuned("bias")
        bias = None if bias is None else bias.to(x.dtype)
        if values is not None and index is not None:
            pattern = [self._buffers.get(f"apet_{name}_weight") for name in ("starts", "columns")]
            y = _TunedLinear.apply(x, weight, bias, values, index, *pattern, transposed)
        else:
            weight = self.tuned("weight").to(x.dtype)
            y = F.linear(x, weight.T if transposed else weight, bias)
        output = y
        if "apet_w4" in self._parameters:
            w3, w4 = self.terms()
            output = _add_product(output, F.linear(x, w3.to(x.dtype)), w4, self.apet_scale)
        if "apet_w6" in self._parameters:
            w5, b5, w6, b6 = self.neurons()
            hidden = _DownProjection.apply(y, w5.to(y.dtype), x, bias, self)
            if b5 is not None:
                hidden = hidden + b5.to(y.dtype)
            output = _add_product(output, F.gelu(hidden), w6)
            if b6 is not None:
                output = output + b6.to(y.dtype)
        return output

    def terms(self) -> tuple[Tensor, Tensor]:
        """The factors of CONCAT: W_3 transposed, (r, in), and W_4 (r, out)."""
        return _rows(self, "w3"), _rows(self, "w4")

    def neurons(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """The adapter of PLUG: W_5 transposed, (w, out), b_5 (w,), W_6 (w, out), and b_6 (out,).

        A bias of which no element is trained is None: it is zero.
        """
        w5 = _rows(self, "w5")
        b5: Tensor | None = self._parameters.get("apet_b5")
        if b5 is not None and len(b5) < len(w5):
            b5 = F.pad(b5, (0, len(w5) - len(b5)))
        return w5, b5, _rows(self, "w6"), self._parameters.get("apet_b6")


class TunedEmbedding(Tuned):
    """An embedding that adds trainable elements only to the rows that a batch reads."""

    def forward(self, ids: Tensor) -> Tensor:
        table: Any = self._parameters["weight"]
        values = self._parameters.get("apet_add_weight")
        index: Any = self._buffers.get("apet_index_weight")
        if values is None or index is None or self.max_norm is not None:
            return super().forward(ids)
        rows, local_ids = ids.unique(return_inverse=True)
        row, column = index // table.shape[1], index % table.shape[1]
        local_row = torch.searchsorted(rows, row).clamp(max=len(rows) - 1)
        read = rows[local_row] == row
        where = (local_row[read], column[read])
        dtype = torch.promote_types(table.dtype, values.dtype)
        read_rows = table[rows].to(dtype).index_put(where, values[read].to(dtype), accumulate=True)
        return F.embedding(local_ids, read_rows.to(table.dtype))


class TunedNorm(Tuned):
    """A norm that adds a new bias, if it has been given one (T5's norms have none)."""

    def forward(self, *inputs: Tensor) -> Tensor:
        output = super().forward(*inputs)
        bias = self._parameters.get("apet_bias")
        return output if bias is None else output + bias.to(output.dtype)


class _ScatterAdd(torch.autograd.Function):
    """A parameter with values added at some of its elements."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return add_at(base, values, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        base = grad if ctx.needs_input_grad[0] else None
        return base, grad.flatten()[index].float(), None


class _TunedLinear(torch.autograd.Function):
    """x (W + Δ)ᵀ, or x (W + Δ) where W is (in, out), with a sparse Δ; W gets no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        values: Tensor,
        index: Tensor,
        starts: Tensor | None,
        columns: Tensor | None,
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, values, index, starts, columns)
        ctx.transposed = transposed
        full = add_at(weight, values, index).to(x.dtype)
        y = F.linear(x, full.T if transposed else full, bias)
        return torch.ops.aten._unsafe_view(y, y.shape)  # a view could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, values, index, starts, columns = ctx.saved_tensors
        grad_x = grad_bias = grad_values = None
        if ctx.needs_input_grad[0]:
            full = add_at(weight, values, index).to(grad.dtype)
            grad_x = grad @ (full.T if ctx.transposed else full)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(0)
        if ctx.needs_input_grad[3]:
            # the gradient of the weight is leftᵀ · right
            left, right = (x, grad) if ctx.transposed else (grad, x)
            left, right = left.flatten(0, -2), right.flatten(0, -2)
            pattern = None if starts is None else (starts, columns)
            grad_values = product_elements(left, right, index, weight.shape[1], pattern)
            grad_values = grad_values.to(values.dtype)
        return grad_x, None, grad_bias, grad_values, None, None, None, None


class _DownProjection(torch.autograd.Function):
    """The adapter's y W_5ᵀ of a linear layer's output y = x Wᵀ + b, without saving y.

    ∂L/∂W_5 = gᵀ y = (gᵀ x) Wᵀ + (Σ_t g_t) bᵀ, which is cheap because gᵀ x has few rows.
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


def add_at(base: Tensor, values: Tensor, index: Tensor) -> Tensor:
    """A copy of a parameter with values added at flat indices, summed in at least float32."""
    full = base.clone(memory_format=torch.contiguous_format)
    flat = full.view(-1)
    if base.dtype == values.dtype:
        flat.index_add_(0, index, values)
    else:
        dtype = torch.promote_types(base.dtype, values.dtype)
        flat[index] = (flat[index].to(dtype) + values).to(base.dtype)
    return full


def _add_product(y: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """y (…, out) + scale · left (…, r) · right (r, out), in the type of y, as one operation."""
    rows, factor = y.flatten(0, -2), left.flatten(0, -2)
    return torch.addmm(rows, factor, right.to(y.dtype), alpha=scale).view(y.shape)


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
    index: Tensor,
    columns: int,
    pattern: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The elements (n,) of leftᵀ · right at flat indices, in at least float32 where they are few.

    Args:
        left: (T, rows).
        right: (T, columns).
        index: (n,), row · columns + column, ascending.
        columns: number of columns of the product.
        pattern: `pattern_of` the index; computed when None.
    """
    rows = left.shape[1]
    if not is_sampled(len(index), rows * columns) or left.device.type not in SAMPLED_DEVICES:
        return (left.T @ right).flatten()[index]
    left, right = precise(left), precise(right)  # sampled_addmm has no 16-bit types
    starts, cols = pattern_of(index, rows, columns) if pattern is None else pattern
    zeros = torch.sparse_csr_tensor(
        starts, cols, left.new_zeros(len(index)), (rows, columns), check_invariants=False
    )
    return torch.sparse.sampled_addmm(zeros, left.T.contiguous(), right, beta=0.0).values()


@functools.cache
def tuned_class(kind: Any, names: tuple[str, ...]) -> type:
    """The subclass of a module's class in which the named parameters have trainable elements.

    Args:
        kind: the module's class.
        names: local names of those parameters.
    """

    def with_elements(name: str) -> property:
        return property(lambda module: module.tuned(name))

    base = {nn.Linear: TunedLinear, Conv1D: TunedLinear, nn.Embedding: TunedEmbedding}
    other = TunedNorm if is_layer_norm(kind) else Tuned
    members: dict[str, Any] = {name: with_elements(name) for name in names}
    members |= {"apet_kind": kind, "apet_names": names, "__module__": kind.__module__}
    return type(kind.__name__, (base.get(kind, other), kind), members)


def _rebuild(kind: type, names: tuple[str, ...]) -> Any:
    """An empty module of a tuned class, for pickle and copy."""
    tuned: Any = tuned_class(kind, names)
    return tuned.__new__(tuned)


def initial_values(seed: int, name: str, shape: tuple[int, int]) -> Tensor:
    """Random initial values of W_3 or W_5, uniform in ±1/√fan_in, the same on every machine.

    This is nn.Linear's initialisation (Kaiming uniform with a = √5), which LoRA's A and adapters
    have as well.

    Args:
        seed: of the random numbers.
        name: distinguishes the layers of a model.
        shape: (rows, fan_in).
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    random = np.random.RandomState(np.frombuffer(digest[:16], dtype="<u4"))
    bound = 1 / math.sqrt(shape[1])
    return torch.from_numpy(random.uniform(-bound, bound, shape).astype(np.float32))


def give_rows(
    layer: nn.Module, name: str, rows: int, width: int, trainable: int, initial: Tensor | None
) -> None:
    """Add a matrix (rows, width) to a layer, whose first elements, row by row, are trainable.

    Args:
        layer: receives the parameter `apet_<name>`, and the buffer `apet_<name>_rest` for the
            elements that are not trainable.
        name: "w3", "w4", "w5" or "w6".
        rows: number of rows of the matrix.
        width: number of columns of the matrix.
        trainable: number of trainable elements; the others keep their initial values.
        initial: initial values; zeros when None.
    """
    device = layer._parameters["weight"].device  # type: ignore[union-attr]
    flat = torch.zeros(rows * width) if initial is None else initial.flatten()
    flat = flat.to(device)
    if trainable:
        setattr(layer, f"apet_{name}", nn.Parameter(flat[:trainable].clone()))
    if trainable < rows * width:
        layer.register_buffer(f"apet_{name}_rest", flat[trainable:].clone())
    layer.__dict__.setdefault("apet_widths", {})[name] = width


def _rows(layer: Any, name: str) -> Tensor:
    """A matrix of `give_rows`, from its trainable and its fixed elements."""
    trained, rest = layer._parameters.get(f"apet_{name}"), layer._buffers.get(f"apet_{name}_rest")
    parts = [part for part in (trained, rest) if part is not None]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return flat.view(-1, layer.apet_widths[name])
