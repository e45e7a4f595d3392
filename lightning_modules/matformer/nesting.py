"""The record of what is nested in a model and which size is in use.

`nest` stores it as `model.nesting`.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import nn

from lightning_modules.layouts import FeedForward, Layer
from lightning_modules.matformer.nested_layers import Nested, slice_layer

GRANULARITIES = ("S", "M", "L", "XL")
Granularity = str | int | Sequence[int] | Mapping[str, "str | int | Sequence[int]"]


def granularity_names(count: int) -> tuple[str, ...]:
    """The names of so many granularities: S, M, L, XL if there are four, else "0", "1", …"""
    return GRANULARITIES if count == 4 else tuple(str(place) for place in range(count))


@dataclass
class NestedLayer:
    """One feed-forward network, attention or stack of blocks whose size varies.

    Attributes:
        name: path of the module in the model, such as "blocks.3.mlp".
        axis: "ffn", "heads" or "depth".
        module: the module whose children are sliced; for depth, the list of blocks.
        widths: number of neurons, heads (groups of heads where they share keys and values) or
            blocks at each granularity, increasing.
        layer: the layout of its weights; None for depth.
        kept: for depth, indices of the blocks that each granularity keeps.
        granularity: index of the granularity that is set.
        originals: values at the largest granularity of the module's attributes that depend on it.
    """

    name: str
    axis: str
    module: nn.Module
    widths: tuple[int, ...]
    layer: Layer | None = None
    kept: tuple[tuple[int, ...], ...] = ()
    granularity: int = -1
    originals: dict[str, Any] = field(default_factory=dict)

    @property
    def units(self) -> int:
        """Neurons, heads or blocks in use."""
        return self.widths[self.granularity]

    def select(self, granularity: int) -> None:
        """Use the first widths[granularity] units (for depth, the blocks kept) from now on."""
        self.granularity = granularity
        if self.layer is None:
            for index, block in enumerate(self.module.children()):
                vars(block)["forward"].skipped = index not in self.kept[granularity]
            return
        for child in self.slices().values():
            child.select(self.units)
        full = self.units == self.widths[-1]
        off = self.layer.layout.switch_off if isinstance(self.layer, FeedForward) else ()
        changed = self.layer.attributes(self.units) | ({} if full else dict.fromkeys(off, 0))
        set_attributes(self.module, self.originals | changed)

    def slices(self) -> dict[str, Nested]:
        """The sliced children by path, after `begin`; empty for depth."""
        if self.layer is None:
            return {}
        return {cut.path: self.module.get_submodule(cut.path) for cut in self.layer.cuts}  # type: ignore[misc]

    def begin(self) -> None:
        """Turn the children into nested layers, and set the largest granularity."""
        if self.layer is None:
            for block in self.module.children():
                block.forward = Skip(block)
        else:
            names = self.layer.attributes(self.layer.units)
            if isinstance(self.layer, FeedForward):
                names |= dict.fromkeys(self.layer.layout.switch_off, 0)
            self.originals = {name: attrgetter(name)(self.module) for name in names}
            for cut in self.layer.cuts:
                slice_layer(self.module.get_submodule(cut.path), cut)
        self.select(len(self.widths) - 1)


class Skip:
    """Replaces the forward of a residual block: while `skipped` is set, it returns the input."""

    def __init__(self, block: nn.Module):
        self.block = block
        self.skipped = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.skipped:
            return args[0] if args else kwargs["hidden_states"]
        return type(self.block).forward(self.block, *args, **kwargs)


@dataclass
class Nesting:
    """What `nest` did to a model; stored as `model.nesting`.

    Attributes:
        axes: the fractions of the granularities, by axis ("ffn", "heads", "depth").
        layers: the nested layers, in the order of the model's modules.
    """

    axes: dict[str, tuple[float, ...]]
    layers: list[NestedLayer]

    @property
    def names(self) -> tuple[str, ...]:
        """The granularities' names, see `granularity_names`."""
        return granularity_names(len(next(iter(self.axes.values()))))

    def resolve(self, granularity: Granularity) -> list[int]:
        """The index of the granularity for each layer.

        Args:
            granularity: one name or index for all layers; one index for each layer, in the order
                of `layers`, also as a text such as "0,0,1,1"; a label such as "S*6+M*6"; or a dict
                of these by axis (axes left out get the largest).

        Raises:
            ValueError: for an unknown name, index or axis, or a list of another length.
        """
        if isinstance(granularity, str) and ":" in granularity:  # a label of several axes
            parts = [part.partition(":") for part in granularity.split(",")]
            granularity = {axis: label for axis, _, label in parts}
        if not isinstance(granularity, Mapping):
            return self._indices(granularity, len(self.layers))
        for axis in granularity:
            if axis not in self.axes:
                raise ValueError(
                    f"unknown axis {axis!r}: this model is nested in {', '.join(self.axes)}"
                )
        chosen = {
            axis: iter(
                self._indices(
                    granularity.get(axis, len(self.names) - 1),
                    sum(layer.axis == axis for layer in self.layers),
                )
            )
            for axis in self.axes
        }
        return [next(chosen[layer.axis]) for layer in self.layers]

    def _indices(self, granularity: Any, layers: int) -> list[int]:
        names, given = self.names, granularity
        if isinstance(granularity, str):
            granularity = self._parsed(granularity, layers)
        chosen = [granularity] * layers if isinstance(granularity, int) else list(granularity)
        if len(chosen) != layers:
            raise ValueError(
                f"granularity {given!r} has {len(chosen)} entries: this model has {layers} nested "
                f"layers, give one for each, such as {self._example(layers)}"
            )
        for index in chosen:
            if index not in range(len(names)):
                raise ValueError(
                    f"unknown granularity {index!r}: this model has 0 to {len(names) - 1} "
                    f"({', '.join(names)})"
                )
        return chosen

    def _example(self, layers: int) -> str:
        """A label of so many layers."""
        return self._runs([0] * (layers - layers // 2) + [len(self.names) - 1] * (layers // 2))

    def _parsed(self, text: str, layers: int) -> int | list[int]:
        """The index for all layers that a name means, or the list that a label or text means."""
        names, numbers = self.names, text.split(",")
        if text in names:
            return names.index(text)
        runs = [part.partition("*") for part in text.split("+")]
        if all(name in names and count.isdigit() for name, _, count in runs):
            return [names.index(name) for name, _, count in runs for _ in range(int(count))]
        if all(number.isdigit() for number in numbers):
            return [int(number) for number in numbers]
        raise ValueError(
            f"unknown granularity {text!r}: this model has {', '.join(names)}, and mixes of them "
            f"by layer such as {self._example(layers)}"
        )

    def label(self, granularity: Granularity) -> str:
        """A short name: "M"; "M*8+L*4" for a list; "heads:M,ffn:L" where axes differ.

        `resolve` understands it.
        """
        chosen = self.resolve(granularity)
        if len(set(chosen)) == 1 or len(self.axes) == 1:
            return self._runs(chosen)
        return ",".join(
            f"{axis}:"
            + self._runs([i for i, x in zip(chosen, self.layers, strict=True) if x.axis == axis])
            for axis in self.axes
        )

    def _runs(self, chosen: Sequence[int]) -> str:
        runs = [(self.names[i], len(list(group))) for i, group in itertools.groupby(chosen)]
        return runs[0][0] if len(runs) == 1 else "+".join(f"{name}*{k}" for name, k in runs)


def nesting_of(model: nn.Module) -> Nesting:
    """The record of what `nest` did to the model.

    Raises:
        ValueError: if the model is not nested.
    """
    nesting = getattr(model, "nesting", None)
    if nesting is None:
        raise ValueError(
            f"{type(model).__name__} is not nested: call nest(model) first (in YAML: set "
            "model.fractions, or leave GranularitySampling out of trainer.callbacks)"
        )
    return nesting


def set_granularity(model: nn.Module, granularity: Granularity) -> None:
    """Use the given submodel from now on.

    Args:
        model: a nested model.
        granularity: "S", "M", "L", "XL" or an index, for all layers; one index for each layer; or
            {"ffn": …, "heads": …}.

    Raises:
        ValueError: if the model is not nested, or there is no such granularity.
    """
    nesting = nesting_of(model)
    for layer, index in zip(nesting.layers, nesting.resolve(granularity), strict=True):
        layer.select(index)


@contextmanager
def granularity(model: nn.Module, granularity: Granularity) -> Iterator[nn.Module]:
    """Use the given submodel inside a `with` block, and restore the previous one after it.

    Raises:
        ValueError: if the model is not nested, or there is no such granularity.
    """
    before = [layer.granularity for layer in nesting_of(model).layers]
    set_granularity(model, granularity)
    try:
        yield model
    finally:
        set_granularity(model, before)


def set_attributes(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Set attributes by dotted name, "self.num_attention_heads" for example."""
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(path), attribute, value)
