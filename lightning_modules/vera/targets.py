"""Finds the linear layers that VeRA's targets name, and refuses unsuitable ones.

A target is the last parts of a layer's dotted name, with wildcards, and after a colon the slices
of a fused layer: "query", "blocks.*.attn.proj", "c_attn:q,v", "gate_up_proj:0of2".
"""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_modules.backbones import classifiers
from lightning_modules.layouts import attentions, fused_slice, inside, shape_of, uncalled_layers
from lightning_modules.vera.layer import QKV, parse_slice

Targets = str | Sequence[str] | Mapping[str, Sequence[str]]
ALL = "all-linear"


def resolve(model: nn.Module, targets: Targets, heads: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The layers that the targets name, in the model's order, each with the labels of its slices.

    A target may name a low-rank layer, an nn.Sequential of two nn.Linear (PELA's u and v). Then
    both of its linear layers are adapted, or with slices only the second, which has the output.

    Args:
        model: not yet adapted.
        targets: see `add_vera`.
        heads: names of modules inside which targets do not match.

    Raises:
        ValueError: if there are no targets, one matches nothing or a layer of a type that VeRA does
            not know, or two match one layer.
    """
    if not targets:
        raise ValueError(f"targets {targets!r} name no layer: give for example {ALL!r}")
    modules = dict(model.named_modules())
    outside = {n: m for n, m in modules.items() if n and not inside(n, heads)}
    layers: dict[str, tuple[str, ...]] = {}
    for pattern, labels in _parsed(targets):
        matched = _matched(model, outside, pattern)
        if not matched:
            raise ValueError(_nothing_matches(model, outside, pattern))
        for name in matched:
            if low_rank(modules[name]):
                first, second = (f"{name}.{child}" for child, _ in modules[name].named_children())
                parts = {first: ("",), second: labels} if labels == ("",) else {second: labels}
            else:
                parts = {name: labels}
            if twice := layers.keys() & parts:
                raise ValueError(
                    f"{min(twice)} is matched by two targets, the second {pattern!r}: name each "
                    "layer once, all of its slices together"
                )
            layers |= parts
    return {name: layers[name] for name in modules if name in layers}


def low_rank(module: nn.Module) -> bool:
    """Whether a module is a low-rank layer: an nn.Sequential of two plain nn.Linear."""
    children = list(module.children())
    return type(module) is nn.Sequential and [type(m) for m in children] == [nn.Linear] * 2


def is_known(module: Any) -> bool:
    """Whether a module is a plain linear layer, or one with quantised weights."""
    if type(module) in (nn.Linear, Conv1D):
        return True
    return isinstance(module, nn.Linear) and not module.weight.is_floating_point()


def check_blocks(model: nn.Module, name: str, labels: Sequence[str]) -> None:
    """Check that a layer's output consists of the equal blocks that the labels name.

    Raises:
        ValueError: if it does not, or holds q, k and v in another order than [q | k | v].
    """
    modules = dict(model.named_modules())
    outputs, _ = shape_of(modules[name])
    blocks = parse_slice(labels[0])[1]
    if outputs % blocks:
        raise ValueError(
            f"{name} has {outputs} output features, which are not {blocks} equal blocks: "
            "name another division such as 0of2, or the whole layer"
        )
    if labels[0] not in QKV:
        return
    parent = name.rpartition(".")[0]
    projection = parent if low_rank(modules[parent]) else name
    size = outputs // 3
    for letter in labels:
        rows = fused_slice(model, projection, letter)
        start = QKV.index(letter) * size
        if rows != [range(start, start + size)]:
            raise ValueError(
                f"{name} does not hold [q | k | v] in equal thirds ({letter} is outputs "
                f"{_some(rows)} of {outputs}): name the layer without slices"
            )


def _parsed(targets: Targets) -> list[tuple[str, tuple[str, ...]]]:
    """Every target as (pattern, labels of its slices in their order)."""
    if isinstance(targets, Mapping):
        items = [(str(pattern), list(labels or ())) for pattern, labels in targets.items()]
    else:
        items = []
        for target in [targets] if isinstance(targets, str) else targets:
            pattern, colon, slices = target.partition(":")
            items.append((pattern, slices.split(",") if colon else []))
    parsed = []
    for pattern, labels in items:
        labels = [label.strip() for label in labels] or [""]
        if len(set(labels)) < len(labels) or len({parse_slice(label)[1] for label in labels}) > 1:
            raise ValueError(
                f"slices {', '.join(labels)} of target {pattern!r} do not go together: expected "
                "different ones of one division, such as q,v"
            )
        parsed.append((pattern, tuple(sorted(labels, key=parse_slice))))
    return parsed


def _matched(model: nn.Module, modules: Mapping[str, nn.Module], pattern: str) -> list[str]:
    """The names of the layers that a pattern matches.

    Raises:
        ValueError: if one of them is linear, but of a type that VeRA does not know, or its weight
            is read without calling it.
    """
    outputs, uncalled = _output_layers(model), uncalled_layers(model)
    if pattern == ALL:
        matched = [name for name, module in modules.items() if module not in outputs]
        experts = [name for name, one in modules.items() if type(one).__name__.endswith("Experts")]
        if experts:  # transformers' mixtures of experts: a tensor of all experts, no linear layers
            warnings.warn(
                f"the weights of {len(experts)} modules such as {experts[0]} stay as they are: "
                "each holds several experts in one tensor, and VeRA adapts linear layers",
                stacklevel=2,
            )
    else:
        matched = [name for name in modules if _fits(name, pattern)]
    for name in matched:
        module: Any = modules[name]
        if name in uncalled:
            raise ValueError(
                f"target {pattern!r} matches {name}, whose weight is read without calling the "
                "layer, so that an adapter would have no effect: name other layers"
            )
        # a classifier of timm repeats its layer's in_features
        linear = hasattr(module, "in_features") and hasattr(module, "weight")
        linear = linear or isinstance(module, Conv1D)
        if linear and not is_known(module):
            raise ValueError(
                f"target {pattern!r} matches {name}, a {type(module).__name__}, and VeRA knows "
                "plain nn.Linear and Conv1D layers only: undo what changed it, or name other layers"
            )
    known = [name for name in matched if is_known(modules[name])]
    pairs = [name for name in matched if low_rank(modules[name])]
    return known + [name for name in pairs if not any(n.startswith(f"{name}.") for n in known)]


def _fits(name: str, pattern: str) -> bool:
    """Whether the pattern matches the last parts of the dotted name, part by part."""
    wanted = pattern.split(".")
    parts = name.split(".")[-len(wanted) :]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _nothing_matches(model: nn.Module, modules: Mapping[str, nn.Module], pattern: str) -> str:
    linear = [name for name, module in modules.items() if is_known(module)]
    tails = Counter(name.rpartition(".")[2] for name in linear)
    listed = ", ".join(f"{tail} ({count})" for tail, count in tails.items()) or "none"
    return (
        f"target {pattern!r} matches no linear layer of {type(model).__name__}: the names there "
        f"are {listed}"
    )


def _some(rows: list[range]) -> str:
    shown = ", ".join(f"{part.start} to {part.stop - 1}" for part in rows[:2])
    return shown + (", …" if len(rows) > 2 else "")


def _output_layers(model: Any) -> Sequence[nn.Module]:
    """The output layer, none, or the two of timm's distilled models.

    Of a classifier of transformers it is all that follows the model proper: a head may have layers.
    """
    if not callable(method := getattr(model, "get_output_embeddings", None)):
        return classifiers(model) if hasattr(model, "get_classifier") else ()
    if (output := method()) is not None:
        return (output,)
    base = set(getattr(model, "base_model", model).modules())
    return [module for module in model.modules() if module not in base]


def query_and_value(model: nn.Module) -> list[str]:
    """The targets that name all query and value projections of a model.

    Raises:
        ValueError: if lightning_modules/layouts.py does not know the model's attention.
    """
    try:
        layers = attentions(model)
    except ValueError as error:
        raise ValueError(f"{error}; or give model.targets") from None
    targets = []
    for attention in layers:
        q, k, v = (f"{attention.name}.{attention.rows(letter)[0]}" for letter in QKV)
        targets += [f"{q}:q,v"] if q == k == v else [q, v]
    return targets
