"""Nested feed-forward networks, attention heads and depth: one model that holds many smaller ones.

MatFormer (arXiv 2310.07707), Section 3.1. The hidden neurons of every feed-forward network are
ordered, and granularity i uses the first m_i of them:

    FFN_i(x) = act(x · W1[:m_i]ᵀ + b1[:m_i]) · W2[:, :m_i]ᵀ + b2

Appendix F.2 nests attention in the same way: the first heads instead of the first neurons. A
smaller granularity computes with slices of the weights (not masks), so it needs fewer operations.
Parameter names do not change: the state_dict of a nested model is the original model's.

Where groups of heads share keys and values, whole groups are dropped, so that a smaller granularity
also has a smaller cache; where all heads share them, query heads are dropped. Depth, which the
paper does not nest, drops evenly spaced blocks and keeps the first and, from two on, the last one.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from lightning_modules.layout_table import BLOCKS, class_path
from lightning_modules.layouts import FeedForward, Layer, attentions, feed_forwards
from lightning_modules.matformer.nested_layers import refuse_unknown
from lightning_modules.matformer.nesting import (
    GRANULARITIES,
    Granularity,
    NestedLayer,
    Nesting,
    granularity,
    nesting_of,
    set_attributes,
    set_granularity,
)

AXES = ("ffn", "heads", "depth")
__all__ = [
    "GRANULARITIES",
    "Granularity",
    "NestedLayer",
    "Nesting",
    "extract",
    "granularity",
    "nest",
    "nesting_of",
    "set_granularity",
]


def nest(
    model: nn.Module,
    fractions: Sequence[float] | Mapping[str, Sequence[float]] = (1 / 8, 1 / 4, 1 / 2, 1),
    part: Literal["ffn", "heads", "depth"] = "ffn",
) -> nn.Module:
    """Make every feed-forward network, attention or the depth of the model nested, in place.

    Supports the classes of lightning_modules/layout_table.py. The model starts at the largest
    granularity and computes what it computed before.

    Args:
        model: any module that holds such layers: a timm ViT, a transformers model, …
        fractions: share of the neurons (heads, blocks) at each granularity, increasing; the last
            is 1. Section 3.1: FFN ratios {0.5, 1, 2, 4} of d_model are 1/8, 1/4, 1/2, 1; Appendix
            F.2 takes 1/4, 1/2, 3/4, 1 of the heads. Several axes at once are a dict, {"ffn": …,
            "heads": …}, with equally many fractions each; neighbours may then be equal in one axis.
        part: the axis of a single list of fractions: "ffn", "heads" or "depth". With "depth", a
            skipped block has no gradient, so that DDP needs find_unused_parameters.

    Returns:
        The same model; `model.nesting` records what varies.

    Raises:
        ValueError: before anything is changed, if fractions do not increase up to 1 or do not
            give whole numbers of neurons or heads, or the model is nested already, or holds
            something to nest whose layout or type of layer is not known.
    """
    if hasattr(model, "nesting"):
        raise ValueError("the model is nested already: extract a granularity from it first")
    given = fractions if isinstance(fractions, Mapping) else {part: fractions}
    axes = {axis: tuple(values) for axis, values in given.items()}
    _check_axes(axes)
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    layers = [layer for axis in axes for layer in _describe(model, axis, axes[axis])]
    layers.sort(key=lambda layer: order[layer.name])
    for layer in layers:
        for cut in layer.layer.cuts if layer.layer else ():
            refuse_unknown(f"{layer.name}.{cut.path}", layer.module.get_submodule(cut.path))
    for layer in layers:
        layer.begin()
    model.nesting = Nesting(axes, layers)  # type: ignore[assignment]
    return model


def extract(model: nn.Module, granularity: Granularity) -> nn.Module:
    """A standalone copy of one submodel, plain and no longer nested.

    Weights are sliced as they are copied, so there is never a second full model in memory. Where
    a transformers configuration can express the new sizes (all layers alike) it is updated, and
    save_pretrained and AutoModel….from_pretrained work. export.py saves all other submodels.

    Args:
        model: a nested model; its granularity is restored.
        granularity: as for `set_granularity`.

    Returns:
        A model of the original class, made of ordinary layers, that shares no memory with `model`.

    Raises:
        ValueError: if the model is not nested, or there is no such granularity.
    """
    nesting = nesting_of(model)
    chosen = nesting.resolve(granularity)
    before = [layer.granularity for layer in nesting.layers]
    memo: dict[int, Any] = {id(nesting): None}
    set_granularity(model, chosen)
    try:
        for child in (child for layer in nesting.layers for child in layer.slices().values()):
            memo[id(child)] = child.plain(memo)
        for layer in nesting.layers:
            if layer.axis == "depth":
                memo[id(layer.module)] = _without_skipped(layer, memo)
        small = copy.deepcopy(model, memo)
        _update_configs(model, nesting.layers, memo)
    finally:
        set_granularity(model, before)
    for layer in nesting.layers:
        if id(layer.module) in memo and isinstance(layer.layer, FeedForward):
            off = layer.layer.layout.switch_off
            set_attributes(memo[id(layer.module)], {name: layer.originals[name] for name in off})
    del small.nesting
    return small


def _without_skipped(layer: NestedLayer, memo: dict[int, Any]) -> nn.Module:
    """A copy of the list of blocks with only those in use, renumbered from 0."""
    container, kept = layer.module, layer.kept[layer.granularity]
    copied = container.__class__.__new__(container.__class__)
    vars(copied).update(
        {name: copy.deepcopy(v, memo) for name, v in vars(container).items() if name != "_modules"}
    )
    blocks = [copy.deepcopy(list(container.children())[index], memo) for index in kept]
    vars(copied)["_modules"] = dict(zip(container._modules, blocks, strict=False))
    for number, block in enumerate(blocks):
        del block.forward
        for module in block.modules():
            if hasattr(module, "layer_idx"):  # transformers' index of a layer's cache
                module.layer_idx = number  # type: ignore[assignment]
    return copied


def _update_configs(model: nn.Module, layers: Sequence[NestedLayer], memo: dict[int, Any]) -> None:
    """Write the sizes in use into the copies of the configurations, where all layers agree."""
    modules = dict(model.named_modules())
    sizes: dict[int, dict[str, list[Any]]] = {}
    for layer in layers:
        parts = layer.name.split(".")
        parents = [modules[".".join(parts[:depth])] for depth in range(len(parts) + 1)]
        for config in {id(c): c for m in parents if (c := getattr(m, "config", None))}.values():
            copied = memo.get(id(config))
            if copied is None:
                continue
            if layer.layer is None:
                update_depth(copied, len(layer.module), layer.kept[layer.granularity])  # type: ignore[arg-type]
                continue
            values = layer.layer.config(layer.units) or {}
            if any(hasattr(config, key) for key in values):
                for key, value in values.items():
                    sizes.setdefault(id(copied), {}).setdefault(key, []).append((copied, value))
    for keys in sizes.values():
        for key, values_of_key in keys.items():
            if len({value for _, value in values_of_key}) == 1:
                setattr(values_of_key[0][0], key, values_of_key[0][1])


def update_depth(config: Any, blocks: int, kept: Sequence[int]) -> None:
    """Write the kept blocks into a configuration that describes a model of `blocks` blocks."""
    if getattr(config, "num_hidden_layers", None) != blocks:
        return
    for name, value in list(vars(config).items()):  # such as layer_types: one entry per block
        if isinstance(value, list) and len(value) == blocks:
            setattr(config, name, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)
    if names := getattr(config, "stage_names", None):  # DINOv2's: the stem, then one for each block
        config.stage_names = names[: len(kept) + 1]
        config.out_features = config.stage_names[-1:]  # else it names a stage that is gone


def _check_axes(axes: Mapping[str, tuple[float, ...]]) -> None:
    for axis, fractions in axes.items():
        if axis not in AXES:
            raise ValueError(f"unknown part {axis!r} to nest: expected 'ffn', 'heads' or 'depth'")
        pairs = list(itertools.pairwise(fractions))
        ordered = all(a < b or (a == b and len(axes) > 1) for a, b in pairs)
        if not fractions or fractions[0] <= 0 or fractions[-1] != 1 or not ordered:
            raise ValueError(f"fractions {fractions} must increase from above 0 to exactly 1")
    if len({len(fractions) for fractions in axes.values()}) != 1:
        raise ValueError(
            "every axis needs equally many fractions, one for each granularity: "
            + ", ".join(f"{axis} has {len(fractions)}" for axis, fractions in axes.items())
        )
    steps = zip(*axes.values(), strict=True)
    if any(a == b for a, b in itertools.pairwise(steps)):
        raise ValueError(f"two neighbouring granularities of {dict(axes)} are the same in all axes")


def _describe(model: nn.Module, axis: str, fractions: Sequence[float]) -> list[NestedLayer]:
    if axis == "depth":
        return [_describe_depth(model, fractions)]
    if axis == "ffn":
        return [
            NestedLayer(x.name, axis, x.module, _widths(x, fractions, "hidden neurons"), x)
            for x in feed_forwards(model)
        ]
    layers = attentions(model)
    for layer in layers:
        if layer.layout.fixed:
            raise ValueError(
                f"the heads of {layer.name}, a {type(layer.module).__name__}, cannot be nested: "
                f"{layer.layout.fixed}"
            )
    return [
        NestedLayer(
            x.name,
            axis,
            x.module,
            _widths(x, fractions, "heads" if x.units == x.heads else "groups of heads"),
            x,
        )
        for x in layers
    ]


def _describe_depth(model: nn.Module, fractions: Sequence[float]) -> NestedLayer:
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len(module)
        and all(class_path(type(block)) in BLOCKS for block in module)
    ]
    if len(stacks) != 1:
        raise ValueError(
            f"depth needs one list of blocks that can be skipped; {type(model).__name__} has "
            f"{len(stacks)} ({', '.join(name for name, _ in stacks) or 'none'}): the classes of "
            "such blocks are BLOCKS in lightning_modules/layout_table.py"
        )
    name, stack = stacks[0]
    widths = _unit_counts(name, fractions, len(stack), "blocks")
    remaining = list(range(len(stack)))
    kept = []
    for width in reversed(widths):  # each granularity picks evenly from the next larger one's
        last = max(width - 1, 1)
        remaining = [remaining[round(i * (len(remaining) - 1) / last)] for i in range(width)]
        kept.append(tuple(remaining))
    return NestedLayer(name, "depth", stack, widths, None, tuple(reversed(kept)))


def _widths(layer: Layer, fractions: Sequence[float], what: str) -> tuple[int, ...]:
    return _unit_counts(layer.name, fractions, layer.units, what)


def _unit_counts(name: str, fractions: Sequence[float], full: int, what: str) -> tuple[int, ...]:
    """The fractions of `full` units as numbers of units, which have to be whole and above 0."""
    widths = tuple(round(fraction * full) for fraction in fractions)
    for fraction, width in zip(fractions, widths, strict=True):
        if width == 0 or abs(width - fraction * full) > 1e-6 * full:
            raise ValueError(
                f"{name} has {full} {what}: a fraction of {fraction:g} is {fraction * full:g} of "
                "them, not a whole number"
            )
    return widths
