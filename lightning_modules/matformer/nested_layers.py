"""Layers that use only the first units of their weights: neurons, heads or groups of heads.

`slice_layer` turns a layer into a nested one by changing its class; its parameters, their names and
its hooks do not change.
"""

import copy
from typing import Any

import torch
from timm.layers import LayerNorm as TimmLayerNorm
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_modules.layout_table import class_path
from lightning_modules.layouts import Cut


class Nested(nn.Module):
    """Base class of the nested layers.

    Attributes:
        plain_class: the class of the layer before it was nested.
        outputs: the dimension of the weight that its outputs lie along.
        cut: which outputs or inputs belong to which unit.
        runs: contiguous ranges (start, stop) of the outputs or inputs in use.
    """

    plain_class: type[nn.Module]
    outputs = 0
    cut: Cut
    runs: tuple[tuple[int, int], ...]

    def select(self, units: int) -> None:
        """Use the first `units` units from now on."""
        weight: Any = self.weight
        length: int = weight.shape[self.axis("weight")]
        kept: list[tuple[int, int]] = []
        position = 0
        for start, size in sorted(self.cut.parts):
            kept += [(position, start), (start, start + units * size)]
            position = start + self.cut.units * size
        merged: list[tuple[int, int]] = []
        for start, stop in [*kept, (position, length)]:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            elif start < stop:
                merged.append((start, stop))
        self.runs = tuple(merged)

    def axis(self, name: str) -> int | None:
        """The dimension of a parameter that the units lie along; None for a bias they share."""
        if getattr(self, name).ndim == 1:
            return None if self.cut.dim else 0
        return self.outputs ^ self.cut.dim

    def in_use(self, name: str) -> Tensor | None:
        """The part of a parameter that is in use; a view where it is one contiguous range."""
        parameter = getattr(self, name)
        if parameter is None or (axis := self.axis(name)) is None:
            return parameter
        pieces = [parameter.narrow(axis, start, stop - start) for start, stop in self.runs]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, axis)

    def plain(self, memo: dict[int, Any] | None) -> nn.Module:
        """An ordinary layer with the weights in use.

        Args:
            memo: the memo of the deepcopy that this call is part of: the weights are copied. With
                None they are shared with this layer and do not require gradients.
        """
        replaced = ("_parameters", "cut", "runs")
        layer = self.plain_class.__new__(self.plain_class)
        rest = {name: value for name, value in vars(self).items() if name not in replaced}
        vars(layer).update(rest if memo is None else copy.deepcopy(rest, memo))

        def part(name: str, parameter: nn.Parameter) -> nn.Parameter:
            used: Any = self.in_use(name)
            if memo is None:
                return nn.Parameter(used, requires_grad=False)
            copied = used.detach().clone(memory_format=torch.contiguous_format)
            return nn.Parameter(copied, parameter.requires_grad)

        vars(layer)["_parameters"] = {
            name: None if parameter is None else part(name, parameter)
            for name, parameter in self._parameters.items()
        }
        vars(layer).update(self.sizes(layer._parameters["weight"]))
        return layer

    def sizes(self, weight: Tensor | None) -> dict[str, Any]:
        """The attributes of the plain layer that repeat its sizes."""
        raise NotImplementedError


class NestedLinear(Nested, nn.Linear):
    """A linear layer that uses the outputs or inputs of its first units."""

    plain_class = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.in_use("weight"), self.in_use("bias"))  # type: ignore[arg-type]

    def sizes(self, weight: Tensor | None) -> dict[str, Any]:
        assert weight is not None
        return {"out_features": weight.shape[0], "in_features": weight.shape[1]}


class NestedConv1D(Nested, Conv1D):
    """A nested Conv1D of transformers: a linear layer whose weight is (inputs, outputs)."""

    plain_class = Conv1D
    outputs = 1

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.in_use("weight"), self.in_use("bias")
        flat = torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight)  # type: ignore[arg-type]
        return flat.view(*x.shape[:-1], -1)

    def sizes(self, weight: Tensor | None) -> dict[str, Any]:
        assert weight is not None
        return {"nx": weight.shape[0], "nf": weight.shape[1]}


class NestedLayerNorm(Nested, nn.LayerNorm):
    """Layer normalisation over the first units."""

    plain_class: type[nn.Module] = nn.LayerNorm

    def select(self, units: int) -> None:
        start, size = self.cut.parts[0]
        self.runs = ((start, start + units * size),)

    def forward(self, x: Tensor) -> Tensor:
        shape = (self.runs[0][1],)
        return F.layer_norm(x, shape, self.in_use("weight"), self.in_use("bias"), self.eps)

    def sizes(self, weight: Tensor | None) -> dict[str, Any]:
        return {"normalized_shape": (self.runs[0][1],)}


class NestedTimmLayerNorm(NestedLayerNorm, TimmLayerNorm):
    """Layer normalisation over the first units, for timm's subclass of nn.LayerNorm."""

    plain_class = TimmLayerNorm


NESTED: dict[type, type[Nested]] = {
    kind.plain_class: kind
    for kind in (NestedLinear, NestedConv1D, NestedLayerNorm, NestedTimmLayerNorm)
}


def refuse_unknown(name: str, layer: nn.Module) -> None:
    """Refuse a layer that cannot be sliced or sorted, before anything is changed.

    Raises:
        ValueError: unless its exact type is one of NESTED.
    """
    if type(layer) not in NESTED:
        known = ", ".join(kind.__name__ for kind in (nn.Linear, Conv1D, nn.LayerNorm))
        # an adaptation may keep the name of the class that it derives from
        kind = next((c for c in type(layer).__mro__[1:] if c in NESTED), None)
        adapted = f" (an adapted {kind.__name__})" if kind else ""
        raise ValueError(
            f"{name} is a {class_path(type(layer))}{adapted}, and only plain {known} can be sorted "
            "or nested: sort and nest the model before it is adapted, or merge the adaptation first"
        )


def slice_layer(layer: Any, cut: Cut) -> None:
    """Make a layer of a known type nested, in place; it starts with all units."""
    layer.__class__ = NESTED[type(layer)]
    layer.cut = cut
    layer.select(cut.units)
