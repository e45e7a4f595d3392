"""Nested feed-forward networks and attention heads: one model that holds many smaller ones.

MatFormer (arXiv 2310.07707), Section 3.1. The hidden neurons of every feed-forward network are
ordered, and granularity i uses the first m_i of them:

    FFN_i(x) = act(x · W1[:m_i]ᵀ + b1[:m_i]) · W2[:, :m_i]ᵀ + b2

Appendix F.2 nests attention in the same way: the first heads instead of the first neurons. A
smaller granularity reads a slice of the weights, so it does fewer operations; nothing is masked.
Parameter names do not change: the state_dict of a nested model is the original model's.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from timm.layers import Attention, GluMlp, Mlp, SwiGLU
from torch import Tensor, nn
from torch.nn import functional as F

GRANULARITIES = ("S", "M", "L", "XL")
Granularity = str | int | Sequence[int]


class NestedLinear(nn.Linear):
    """A linear layer that uses only its first input or output features.

    The output of a fused projection consists of `parts` blocks of equal size, [gate | up] or
    [q | k | v]; each keeps its own first features. `rows` (of one part) and `columns` say how
    many are in use.
    """

    def __init__(self, linear: nn.Linear, parts: int = 1):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.parts = parts
        self.rows = linear.out_features // parts
        self.columns = linear.in_features

    def in_use(self) -> tuple[Tensor, Tensor | None]:
        """The weight (parts·rows, columns) and bias (parts·rows,) of the current granularity."""
        weight, bias = self.weight, self.bias
        if self.rows * self.parts < self.out_features:
            weight = weight.unflatten(0, (self.parts, -1))[:, : self.rows].flatten(0, 1)
            if bias is not None:
                bias = bias.unflatten(0, (self.parts, -1))[:, : self.rows].flatten()
        return weight[:, : self.columns], bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.in_use())

    def plain(self) -> nn.Linear:
        """An independent nn.Linear with a copy of the weights in use."""
        weight, bias = self.in_use()
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach().clone(), self.weight.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach().clone(), self.bias.requires_grad)
        return linear


class NestedLayerNorm(nn.LayerNorm):
    """Layer normalisation over the hidden neurons in use, the first `rows`."""

    def __init__(self, norm: nn.LayerNorm):
        nn.Module.__init__(self)
        self.normalized_shape, self.eps = norm.normalized_shape, norm.eps
        self.elementwise_affine = norm.elementwise_affine
        self.weight, self.bias = norm.weight, norm.bias
        self.parts = 1
        self.rows = norm.normalized_shape[0]

    def in_use(self) -> tuple[Tensor | None, Tensor | None]:
        """The weight and bias (rows,) of the current granularity."""
        return (
            self.weight[: self.rows] if self.weight is not None else None,
            self.bias[: self.rows] if self.bias is not None else None,
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.rows,), *self.in_use(), self.eps)

    def plain(self) -> nn.LayerNorm:
        """An independent nn.LayerNorm with a copy of the weights in use."""
        weight, bias = self.in_use()
        norm = nn.LayerNorm(
            self.rows, self.eps, weight is not None, bias is not None, device="meta"
        )
        if weight is not None:
            norm.weight = nn.Parameter(weight.detach().clone(), self.weight.requires_grad)
        if bias is not None:
            norm.bias = nn.Parameter(bias.detach().clone(), self.bias.requires_grad)
        return norm


@dataclass
class NestedLayer:
    """One feed-forward network or attention whose width varies.

    Attributes:
        name: path of the module in the model, such as "blocks.3.mlp".
        module: the module whose children are sliced.
        widths: hidden neurons or heads at each granularity, increasing.
        unit: features that one of them stands for: 1, or the size of a head.
        expanding: children whose output is the hidden state.
        reducing: children whose input is the hidden state.
    """

    name: str
    module: nn.Module
    widths: tuple[int, ...]
    unit: int
    expanding: tuple[str, ...]
    reducing: tuple[str, ...]
    granularity: int = -1

    def select(self, granularity: int) -> None:
        """Use the first widths[granularity] neurons or heads from now on."""
        self.granularity = granularity
        features = self.widths[granularity] * self.unit
        for name, child in self.slices().items():
            if name in self.reducing:
                child.columns = features
            else:
                child.rows = features
        if isinstance(self.module, Attention):
            self.module.num_heads = self.widths[granularity]
            self.module.attn_dim = features

    def slices(self) -> dict[str, Any]:
        """The children that are sliced (once `nest` is done), by name."""
        return {name: getattr(self.module, name) for name in (*self.expanding, *self.reducing)}


@dataclass
class Nesting:
    """What `nest` did to a model; kept as `model.nesting`."""

    part: str
    fractions: tuple[float, ...]
    layers: list[NestedLayer]

    @property
    def names(self) -> tuple[str, ...]:
        """The granularities' names: S, M, L, XL when there are four, else "0", "1", …"""
        count = len(self.fractions)
        return GRANULARITIES if count == 4 else tuple(str(i) for i in range(count))

    def resolve(self, granularity: Granularity) -> list[int]:
        """The granularity's index for each layer.

        Args:
            granularity: one name or index for all layers, or one index per layer.

        Raises:
            ValueError: for an unknown name or index, or a list of another length.
        """
        names, layers = self.names, len(self.layers)
        if isinstance(granularity, str):
            if granularity not in names:
                raise ValueError(
                    f"unknown granularity {granularity!r}: this model has {', '.join(names)}"
                )
            return [names.index(granularity)] * layers
        chosen = [granularity] * layers if isinstance(granularity, int) else list(granularity)
        if len(chosen) != layers:
            raise ValueError(
                f"granularity {chosen} has {len(chosen)} entries: this model has {layers} nested "
                "layers, give one index for each"
            )
        for index in chosen:
            if not 0 <= index < len(names):
                raise ValueError(
                    f"unknown granularity {index}: this model has 0 to {len(names) - 1} "
                    f"({', '.join(names)})"
                )
        return chosen

    def label(self, granularity: Granularity) -> str:
        """A short name: "M" for one granularity, "M*8+L*4" for a list of them."""
        chosen = [self.names[i] for i in self.resolve(granularity)]
        runs: list[tuple[str, int]] = []
        for name in chosen:
            if runs and runs[-1][0] == name:
                runs[-1] = (name, runs[-1][1] + 1)
            else:
                runs.append((name, 1))
        return runs[0][0] if len(runs) == 1 else "+".join(f"{n}*{k}" for n, k in runs)


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


def nest(
    model: nn.Module,
    fractions: Sequence[float] = (1 / 8, 1 / 4, 1 / 2, 1),
    part: Literal["ffn", "heads"] = "ffn",
) -> nn.Module:
    """Make every feed-forward network (or attention) of the model nested, in place.

    Knows timm's Mlp, GluMlp (fused GLU and SwiGLUPacked) and SwiGLU, and for heads timm's
    Attention with its fused qkv. The model starts at the largest granularity and computes what
    it computed before.

    Args:
        model: any module that holds such layers, a timm ViT for example.
        fractions: share of the hidden neurons (or heads) at each granularity, increasing; the
            last is 1. Section 3.1: FFN ratios {0.5, 1, 2, 4} of d_model are 1/8, 1/4, 1/2, 1;
            Appendix F.2 takes 1/4, 1/2, 3/4, 1 of the heads.
        part: "ffn" or "heads".

    Returns:
        The same model; `model.nesting` says which layers vary.

    Raises:
        ValueError: if fractions are not increasing up to 1, do not give whole neurons or heads,
            or the model is nested already or has nothing to nest.
    """
    if hasattr(model, "nesting"):
        raise ValueError("the model is nested already: extract a granularity from it first")
    fractions = tuple(fractions)
    ordered = all(a < b for a, b in itertools.pairwise(fractions))
    if not fractions or fractions[0] <= 0 or fractions[-1] != 1 or not ordered:
        raise ValueError(f"fractions {fractions} must increase from above 0 to exactly 1")
    if part not in ("ffn", "heads"):
        raise ValueError(f"unknown part {part!r} to nest: expected 'ffn' or 'heads'")
    describe = _describe_ffn if part == "ffn" else _describe_heads
    layers = [
        layer
        for name, module in model.named_modules()
        if (layer := describe(name, module, fractions)) is not None
    ]
    if not layers:
        kinds = "Mlp, GluMlp or SwiGLU" if part == "ffn" else "Attention with fused qkv"
        raise ValueError(
            f"{type(model).__name__} has nothing to nest for part={part!r}: no timm {kinds} in it"
        )
    for layer in layers:
        for name, child in layer.slices().items():
            if isinstance(child, nn.LayerNorm):
                setattr(layer.module, name, NestedLayerNorm(child))
            elif name in layer.reducing:
                setattr(layer.module, name, NestedLinear(child))
            else:
                parts = child.out_features // (layer.widths[-1] * layer.unit)
                setattr(layer.module, name, NestedLinear(child, parts))
        layer.select(len(fractions) - 1)
    model.nesting = Nesting(part, fractions, layers)  # type: ignore[assignment]
    return model


def set_granularity(model: nn.Module, granularity: Granularity) -> None:
    """Use the given submodel from now on.

    Args:
        model: a nested model.
        granularity: "S", "M", "L", "XL" or an index, for all layers; or one index per layer.

    Raises:
        ValueError: if the model is not nested, or there is no such granularity.
    """
    nesting = nesting_of(model)
    for layer, index in zip(nesting.layers, nesting.resolve(granularity), strict=True):
        layer.select(index)


def extract(model: nn.Module, granularity: Granularity) -> nn.Module:
    """A standalone copy of one submodel, plain and no longer nested.

    Args:
        model: a nested model; it is left as it was.
        granularity: as for `set_granularity`.

    Returns:
        A model of the original class made of ordinary layers, with its own weights; the smallest
        layers hold no trace of the larger ones.
    """
    chosen = nesting_of(model).resolve(granularity)
    model = copy.deepcopy(model)
    set_granularity(model, chosen)
    for layer in nesting_of(model).layers:
        for name, child in layer.slices().items():
            setattr(layer.module, name, child.plain())
    del model.nesting
    return model


def _describe_ffn(name: str, module: nn.Module, fractions: Sequence[float]) -> NestedLayer | None:
    if isinstance(module, SwiGLU):
        expanding: tuple[str, ...] = ("fc1_g", "fc1_x")
    elif isinstance(module, Mlp | GluMlp) and isinstance(module.fc1, nn.Linear):
        expanding = ("fc1",)
    else:
        return None
    hidden: Any = module.fc2.in_features
    widths = _widths(name, fractions, hidden, "hidden neurons")
    return NestedLayer(name, module, widths, 1, expanding + _norm(name, module), ("fc2",))


def _describe_heads(name: str, module: nn.Module, fractions: Sequence[float]) -> NestedLayer | None:
    if not isinstance(module, Attention):
        return None
    heads: Any = module.num_heads
    widths = _widths(name, fractions, heads, "heads")
    gate = ("gate",) if getattr(module, "gate", None) is not None else ()
    expanding = ("qkv", *gate, *_norm(name, module))
    return NestedLayer(name, module, widths, module.head_dim, expanding, ("proj",))


def _norm(name: str, module: nn.Module) -> tuple[str, ...]:
    norm: Callable | None = module.norm  # type: ignore[assignment]
    if isinstance(norm, nn.Identity):
        return ()
    if not isinstance(norm, nn.LayerNorm):
        raise ValueError(
            f"{name}.norm is a {type(norm).__name__}: only LayerNorm over the hidden state can "
            "be nested"
        )
    return ("norm",)


def _widths(name: str, fractions: Sequence[float], full: int, what: str) -> tuple[int, ...]:
    widths = tuple(round(fraction * full) for fraction in fractions)
    for fraction, width in zip(fractions, widths, strict=True):
        if width == 0 or abs(width - fraction * full) > 1e-6 * full:
            raise ValueError(
                f"{name} has {full} {what}: a fraction of {fraction:g} is {fraction * full:g} of "
                "them, not a whole number"
            )
    return widths


def idle_indices(
    layer: NestedLinear | NestedLayerNorm, name: str, offset: int, length: int
) -> tuple[int, Tensor] | None:
    """Where a parameter of a sliced layer is not in use at the current granularity.

    Args:
        layer: the sliced layer.
        name: "weight" or "bias".
        offset: first row of this process's shard of the parameter, in rows of the whole.
        length: rows in that shard.

    Returns:
        The dimension and the indices along it (into the shard), or None when all is in use.
    """
    if isinstance(layer, NestedLinear) and name == "weight" and layer.columns < layer.in_features:
        return 1, torch.arange(layer.columns, layer.in_features)
    parameter = getattr(layer, name)
    size = parameter.shape[0] // layer.parts
    if layer.rows == size:
        return None
    index = torch.arange(length)
    return 0, index[(index + offset) % size >= layer.rows]
