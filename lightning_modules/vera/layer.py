"""A linear layer with VeRA: Equation 2 (arXiv 2310.11454).

It is computed in one of two ways, chosen for each call by the number of multiply-adds:

    factored   b ⊙ (d ⊙ x Aᵀ) Bᵀ        T·r·(n + m) forward and as many backward
    dense      x (W0 + Λ_b B Λ_d A)ᵀ    m·n·r forward, T·m·n + m·n·r or T·r·(n + m) backward

The dense way is cheaper for many tokens T. With the output's gradient g, its two gradients are
∂L/∂b = M d and ∂L/∂d = Mᵀ b with M = gᵀ x Aᵀ ⊙ B, where gᵀ x Aᵀ is multiplied in the cheaper order.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_modules.layouts import shape_of
from lightning_modules.vera.projections import Projections

QKV = ("q", "k", "v")


@dataclass(frozen=True)
class Slice:
    """A block of a layer's output features, or all of them, with a pair of vectors b and d.

    Attributes:
        label: "" for all of the output, "q", "k", "v", or a block such as "0of2".
        index, blocks: index of the block, and number of equal blocks of the output.
        projections: the A and B of which the block uses slices.
    """

    label: str
    index: int
    blocks: int
    projections: Projections

    @property
    def names(self) -> tuple[str, str]:
        """The attributes of the layer that hold b and d."""
        suffix = f"_{self.label}" if self.label else ""
        return f"vera_b{suffix}", f"vera_d{suffix}"


class VeraLayer(nn.Module):
    """The base of the adapted layers, such as `VeraLinear`; weight and bias are the base layer's.

    Attributes:
        slices: the adapted blocks of the output.
        starts: initial values of the entries of b and of d.
        kept: the base weight while the adapter is merged.
        rows: by label, b and d of each row of a batch whose rows have different adapters (many.py).
    """

    slices: tuple[Slice, ...]
    starts: tuple[float, float]
    kept: Tensor | None = None
    rows: dict[str, tuple[Tensor, Tensor]] | None = None

    def reset_parameters(self) -> None:
        """Initialise the layer, for example after `to_empty` of a model from the meta device."""
        if isinstance(self, nn.Linear):
            super().reset_parameters()  # type: ignore[misc]
        elif isinstance(self, Conv1D):  # it has no reset_parameters; this is what its __init__ does
            nn.init.normal_(self.weight, std=0.02)
            nn.init.zeros_(self.bias)
        self.reset_vectors()

    @torch.no_grad()
    def reset_vectors(self) -> None:
        """Set b and d to their initial values, with which the layer computes what its base does."""
        for piece in self.slices:
            for vector, start in zip(self.vectors(piece), self.starts, strict=True):
                vector.fill_(start)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move and cast the layer, but keep its vectors in at least 32 bits.

        `bf16-true` and `model.bfloat16()` call this. An eight-bit mantissa would lose most updates
        of the vectors.
        """
        vectors = [vector for piece in self.slices for vector in self.vectors(piece)]
        vector_ids = {id(t) for vector in vectors for t in (vector, vector.grad) if t is not None}

        def cast(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in vector_ids and result.dtype.itemsize < 4:
                return tensor.to(result.device)
            return result

        return super()._apply(cast, recurse)

    def vectors(self, piece: Slice) -> tuple[Tensor, Tensor]:
        """b (m,) and d (r,) of a slice."""
        b, d = piece.names
        return getattr(self, b), getattr(self, d)

    def matrices(self, piece: Slice, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A (r, n) and B (m, r) of a slice, on the device of `like`."""
        a, b = piece.projections.on(like.device, dtype)
        outputs, inputs = shape_of(self)
        return a[:, :inputs], b[: outputs // piece.blocks]

    def delta(self, piece: Slice, dtype: torch.dtype) -> Tensor:
        """ΔW (m, n) of a slice."""
        b, d = self.vectors(piece)
        return _product(b.to(dtype), d.to(dtype), *self.matrices(piece, b, dtype))

    def costs(self, tokens: int, grad_input: bool, grad: bool, apart: bool) -> tuple[int, int]:
        """Multiply-adds of the factored and of the dense way, beyond those of the base layer.

        Args:
            tokens: T.
            grad_input: the layer's input needs a gradient.
            grad: the vectors need gradients.
            apart: x is multiplied by ΔW alone, in addition to the base layer's product.
        """
        outputs, inputs = shape_of(self)
        block, rank = outputs // self.slices[0].blocks, self.slices[0].projections.rank
        count, distinct = len(self.slices), len({id(s.projections) for s in self.slices})
        down, up = distinct * tokens * rank * inputs, count * tokens * rank * block
        factored = down + up + (up if grad or grad_input else 0)
        factored += down if grad_input else 0
        build, apply = count * block * inputs * rank, count * tokens * block * inputs
        dense = build
        if grad:
            dense += count * min(_backward_costs(tokens, rank, inputs, block))
        if apart:
            dense += apply + (apply if grad_input else 0)
        return factored, dense

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is not None:
            if self.rows is not None or (self.training and torch.is_grad_enabled()):
                raise RuntimeError(
                    "the adapter is merged into the weights: call unmerge(model) before training "
                    "or before a batch of several adapters"
                )
            return super().forward(x)
        kind, dtype = x.device.type, x.dtype
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x = x.to(dtype)
        if self.rows is not None:
            return self._factored(x, dtype)
        # in a 16-bit type the sum W0 + ΔW would round a small ΔW away
        apart = dtype.itemsize < 4 or not is_dense(self)
        grad = torch.is_grad_enabled() and any(
            v.requires_grad for piece in self.slices for v in self.vectors(piece)
        )
        grad_input = torch.is_grad_enabled() and x.requires_grad
        tokens = x.numel() // max(x.shape[-1], 1)
        factored, dense = self.costs(tokens, grad_input, grad, apart)
        if factored <= dense:
            return self._factored(x, dtype)
        return self._dense_update(x, dtype) if apart else self._dense(x, dtype)

    def _factored(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The output by the factored way."""
        parts = self._parts(super().forward(x))
        inner: dict[int, Tensor] = {}  # x Aᵀ, once for slices that share A
        for piece in self.slices:
            a, b_matrix = self.matrices(piece, x, dtype)
            if id(piece.projections) not in inner:
                inner[id(piece.projections)] = F.linear(x, a)
            b, d = self._row_vectors(piece, x) if self.rows is not None else self.vectors(piece)
            hidden = inner[id(piece.projections)] * d.to(dtype)
            base = parts[piece.index]
            outer = F.linear(hidden, b_matrix).to(base.dtype)
            parts[piece.index] = torch.addcmul(base, outer, b.to(base.dtype))
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _dense(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The output by the dense way, x (W0 + ΔW)ᵀ."""
        blocks = self.slices[0].blocks
        weight: Any = self.weight.T if isinstance(self, Conv1D) else self.weight
        bias: Any = self.bias
        weights = list(weight.chunk(blocks))
        biases = [None] * blocks if bias is None else bias.chunk(blocks)
        adapted = {piece.index: piece for piece in self.slices}
        parts = [
            self._adapted(adapted[i], x, dtype, w, b) if i in adapted else F.linear(x, w, b)
            for i, (w, b) in enumerate(zip(weights, biases, strict=True))
        ]
        return torch.cat(parts, -1) if blocks > 1 else parts[0]

    def _dense_update(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The output by the dense way, but as x W0ᵀ + x ΔWᵀ."""
        parts = self._parts(super().forward(x))
        for piece in self.slices:
            update = self._adapted(piece, x, dtype)
            parts[piece.index] = parts[piece.index] + update.to(parts[piece.index].dtype)
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def _adapted(
        self,
        piece: Slice,
        x: Tensor,
        dtype: torch.dtype,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        b, d = self.vectors(piece)
        matrices = self.matrices(piece, x, dtype)
        return _AdaptedLinear.apply(x, weight, bias, b.to(dtype), d.to(dtype), *matrices)

    def _parts(self, output: Tensor) -> list[Tensor]:
        return list(output.chunk(self.slices[0].blocks, -1))

    def _row_vectors(self, piece: Slice, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.rows is not None
        b, d = self.rows[piece.label]
        if x.ndim < 2 or x.shape[0] != len(b):
            raise ValueError(
                f"adapters were named for {len(b)} rows, but a layer got an input of shape "
                f"{tuple(x.shape)}: name one adapter for each row of the batch, and give copies= "
                "the number of beams or of returned sequences that a row stands for"
            )
        shape = (len(b), *[1] * (x.ndim - 2), -1)
        return b.to(x.device).view(shape), d.to(x.device).view(shape)


class VeraLinear(VeraLayer, nn.Linear):
    """An nn.Linear with vectors beside its weight and bias."""


class VeraConv1D(VeraLayer, Conv1D):
    """A transformers Conv1D, whose weight is (in, out), with vectors beside it."""


class _AdaptedLinear(torch.autograd.Function):
    """x (W0 + Λ_b B Λ_d A)ᵀ + bias, or x (Λ_b B Λ_d A)ᵀ without W0.

    autograd alone would store ΔW's intermediate results and could not choose the cheaper order of
    products in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        b: Tensor,
        d: Tensor,
        a: Tensor,
        b_matrix: Tensor,
    ) -> Tensor:
        delta = _product(b, d, a, b_matrix)
        weight = delta if weight is None else weight + delta
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None, b, d, a, b_matrix)
        y = F.linear(x, weight, bias)
        return torch.ops.aten._unsafe_view(y, y.shape)  # a view could not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, b, d, a, b_matrix = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_x = grad @ weight if needs[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if needs[2] else None
        grad_weight = grad_b = grad_d = None
        x, grad = x.flatten(0, -2), grad.flatten(0, -2)
        through_weight, through_a = _backward_costs(len(x), a.shape[0], a.shape[1], len(b))
        if needs[1] or (through_weight <= through_a and (needs[3] or needs[4])):
            grad_weight = grad.T @ x
        if needs[3] or needs[4]:
            product = grad.T @ (x @ a.T) if grad_weight is None else grad_weight @ a.T
            product = product * b_matrix
            grad_b, grad_d = product @ d, b @ product
        return grad_x, grad_weight if needs[1] else None, grad_bias, grad_b, grad_d, None, None


def _product(b: Tensor, d: Tensor, a: Tensor, b_matrix: Tensor) -> Tensor:
    return (b_matrix * d * b[:, None]) @ a


def _backward_costs(tokens: int, rank: int, inputs: int, outputs: int) -> tuple[int, int]:
    """Multiply-adds of gᵀ x Aᵀ, first as (gᵀ x) Aᵀ, then as gᵀ (x Aᵀ)."""
    return outputs * inputs * (tokens + rank), tokens * rank * (inputs + outputs)


def parse_slice(label: str) -> tuple[int, int]:
    """The index of the block that a label names, and the number of blocks.

    Raises:
        ValueError: for anything but "", "q", "k", "v" or a block such as "0of2".
    """
    if not label:
        return 0, 1
    if label in QKV:
        return QKV.index(label), 3
    index, _, blocks = label.partition("of")
    if index.isdecimal() and blocks.isdecimal() and int(index) < int(blocks):
        return int(index), int(blocks)
    raise ValueError(
        f"unknown slice {label!r} of a target: expected q, k, v, or a block such as 0of2"
    )


@functools.cache
def adapted_class(kind: type) -> type:
    """The adapted counterpart of a class of linear layers."""
    if kind is nn.Linear:
        return VeraLinear
    if kind is Conv1D:
        return VeraConv1D
    return type(f"Vera{kind.__name__}", (VeraLayer, kind), {})


def is_dense(layer: Any) -> bool:
    """Whether a layer's weight is of a floating-point type, not quantised."""
    return layer.weight.is_floating_point()
