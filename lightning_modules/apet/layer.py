"""The layers that APET tunes: subclasses of the original classes with the paper's terms added.

APET (arXiv 2306.02320), Section 5.1. A linear layer f becomes

    h_out = f(h_in) + α·h_in·W_3·W_4 + σ(f(h_in)·W_5 + b_5)·W_6 + b_6

where f has trainable elements added to its weight and bias (ADD), W_3 and W_4 are the factors of
CONCAT, and W_5 and W_6 the adapter of PLUG. product.py computes it. Any other module, such as a
norm or an embedding, computes with its parameters plus their trainable elements; a norm may get a
bias as well. All added terms start at zero. Most inputs are recomputed in the backward pass instead
of saved (recompute.py).
"""

import functools
import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_modules.apet.product import TunedProduct, add_at
from lightning_modules.apet.recompute import recompute_instead_of_saving
from lightning_modules.layouts import is_layer_norm, shape_of


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
        values = self._parameters.get("apet_add_weight")
        names = ("apet_index_weight", "apet_starts_weight", "apet_columns_weight")
        elements = [values, *(self._buffers.get(name) for name in names)]
        weight: Any = self._parameters["weight"]
        if elements[1] is None:
            weight, elements[0] = self.tuned("weight"), None
        bias: Tensor | None = self._parameters.get("apet_bias")
        if bias is None and self._parameters.get("bias") is not None:
            bias = self.tuned("bias")
        terms = [bias, *self.terms(), *self.neurons()]
        terms = [None if term is None else term.to(x.dtype) for term in terms]
        transposed = isinstance(self, Conv1D)
        output = TunedProduct.apply(x, weight, *terms, *elements, self.apet_scale, transposed)
        b6 = self._parameters.get("apet_b6")
        return output if b6 is None else output + b6.to(x.dtype)

    def terms(self) -> tuple[Tensor, Tensor]:
        """The factors of CONCAT: W_3 transposed, (r, in), and W_4 (r, out)."""
        return _rows(self, "w3"), _rows(self, "w4")

    def neurons(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """The adapter of PLUG: W_5 transposed, (w, out), b_5 (w,), and W_6 (w, out).

        b_5 is None if no element of it is trained: it is zero.
        """
        w5 = _rows(self, "w5")
        b5: Tensor | None = self._parameters.get("apet_b5")
        if b5 is not None and len(b5) < len(w5):
            b5 = F.pad(b5, (0, len(w5) - len(b5)))
        return w5, b5, _rows(self, "w6")


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
        return add_at(base, values, index, base.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        base = grad if ctx.needs_input_grad[0] else None
        return base, grad.flatten()[index].float(), None


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
    """A matrix of `give_rows`, from its trainable and its fixed elements; without rows if none."""
    trained, rest = layer._parameters.get(f"apet_{name}"), layer._buffers.get(f"apet_{name}_rest")
    parts = [part for part in (trained, rest) if part is not None]
    if not parts:
        outputs, inputs = shape_of(layer)
        return layer._parameters["weight"].new_empty(0, inputs if name == "w3" else outputs)
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    return flat.view(-1, layer.apet_widths[name])
