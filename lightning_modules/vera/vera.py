"""Vector-based random matrix adaptation: two trained vectors for each layer.

VeRA (arXiv 2310.11454), Equation 2:

    h = W0 x + Λ_b B Λ_d A x

A (r, n) and B (m, r) are frozen, random and shared by all layers (projections.py); b (m,) starts
at zero and d (r,) at d_init, so a new model computes exactly what its base does. Trained are
Σ (m + r) numbers. Names do not change: a layer's weight and bias stay where they were, and
`vera_b` and `vera_d` stand beside them (`vera_b_q`, … for a slice of a fused projection).

layer.py has what a layer becomes, and how it computes.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from lightning_modules.vera.layer import (
    QKV,
    Slice,
    VeraLayer,
    adapted_class,
    is_dense,
    parse_slice,
    shape_of,
)
from lightning_modules.vera.projections import INITS, Init, Projections

Targets = str | Sequence[str] | Mapping[str, Sequence[str]]
INTERLEAVED = ("query_key_value",)  # fused head by head (BLOOM, GPT-NeoX): q is not one block


@dataclass(frozen=True)
class Vera:
    """What `add_vera` did to a model; kept as `model.vera`."""

    rank: int
    seed: int
    init: Init
    d_init: float
    shared: bool
    train: tuple[str, ...]
    layers: dict[str, tuple[str, ...]]  # name of the layer → labels of its slices
    heads: tuple[str, ...]


def add_vera(
    model: nn.Module,
    rank: int,
    targets: Targets,
    d_init: float = 0.1,
    seed: int = 0,
    init: Init = "kaiming_uniform",
    shared: bool = True,
    train: Sequence[str] = ("b", "d"),
    heads: Sequence[str] = (),
) -> nn.Module:
    """Adapt the chosen linear layers by VeRA, in place, and freeze the rest.

    Args:
        model: any module with nn.Linear or transformers' Conv1D layers (or quantised subclasses
            of nn.Linear); it may be on the meta device.
        rank: r; VeRA's are larger than LoRA's (256 or 1024 in the paper).
        targets: the last parts of the layers' dotted names, with wildcards: "query",
            ["query", "value"], "blocks.*.attn.proj"; or "all-linear" for all but the output
            head. A slice of a fused projection follows a colon, "c_attn:q,v" for two thirds of
            [q | k | v] and "gate_up_proj:0of2" for the first of two equal blocks; a mapping
            {"c_attn": ["q", "v"]} says the same.
        d_init: what every entry of d starts at.
        seed: A and B are drawn from it.
        init: how; "kaiming_uniform" is the paper's default.
        shared: one A and B for all layers; else each layer draws its own (Table 7), from the
            seed and its name.
        train: both vectors, or one (Table 6). Only "b": d stays at d_init. Only "d": b stays at
            one and d starts at zero whatever d_init is, so that the start is still the base.
        heads: names of modules that stay trainable in full; no target is looked for in them.

    Returns:
        The same model; `model.vera` says what was done.

    Raises:
        ValueError: for a rank below 1, a target or head that matches nothing, layers that share
            their weights, an unknown init, or a model adapted already.
    """
    plan = _resolve(model, targets, tuple(heads))
    record = Vera(rank, seed, init, d_init, shared, tuple(train), plan, tuple(heads))
    return attach(model, record)


def attach(model: nn.Module, record: Vera, given: tuple[Tensor, Tensor] | None = None) -> nn.Module:
    """Do to a model what a record says; `given` are A and B from a file instead of a draw."""
    _check(model, record)
    modules = dict(model.named_modules())
    shapes = {
        name: (shape_of(modules[name])[0] // parse_slice(labels[0])[1], shape_of(modules[name])[1])
        for name, labels in record.layers.items()
    }
    outputs, inputs = (max(sizes) for sizes in zip(*shapes.values(), strict=True))
    common = Projections(record.rank, inputs, outputs, record.seed, record.init, given)
    model.requires_grad_(False)
    for name, labels in record.layers.items():
        layer: Any = modules[name]
        block, width = shapes[name]
        slices = []
        for label in labels:
            projections = common
            if not record.shared:
                seed = _seed(record.seed, f"{name}:{label}")
                projections = Projections(record.rank, width, block, seed, record.init)
            slices.append(Slice(label, *parse_slice(label), projections))
        weight = layer.weight
        dtype = torch.float32
        if weight.is_floating_point():
            dtype = torch.promote_types(weight.dtype, torch.float32)
        kind: Any = type(layer)
        layer.__class__ = adapted_class(kind)
        layer.slices = tuple(slices)
        only_d = tuple(record.train) == ("d",)
        for piece in slices:
            starts = (1.0 if only_d else 0.0, 0.0 if only_d else record.d_init)
            sizes = (block, record.rank)
            for vector_name, attribute, size, start in zip(
                ("b", "d"), piece.names, sizes, starts, strict=True
            ):
                vector = torch.full((size,), start, device=weight.device, dtype=dtype)
                setattr(layer, attribute, nn.Parameter(vector, vector_name in record.train))
    for head in record.heads:
        model.get_submodule(head).requires_grad_(True)
    model.vera = record  # type: ignore[assignment]
    if weight.device.type != "meta":
        for projections in projections_of(model):
            projections.on(torch.device("cpu"), torch.float32)  # drawn now, not while training
    return model


def vera_of(model: nn.Module) -> Vera:
    """The record of what `add_vera` did to the model.

    Raises:
        ValueError: if the model has no VeRA layer.
    """
    record = getattr(model, "vera", None)
    if record is None:
        raise ValueError(f"{type(model).__name__} has no VeRA layer: call add_vera(model) first")
    return record


def layers_of(model: nn.Module) -> dict[str, VeraLayer]:
    """The adapted layers by name, in the model's order.

    Raises:
        ValueError: if the model has none.
    """
    vera_of(model)
    return {name: m for name, m in model.named_modules() if isinstance(m, VeraLayer)}


def vectors_of(model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """b (m,) and d (r,) of every layer and slice, by "name" or "name:label"."""
    return {
        f"{name}:{piece.label}" if piece.label else name: layer.vectors(piece)
        for name, layer in layers_of(model).items()
        for piece in layer.slices
    }


def projections_of(model: nn.Module) -> list[Projections]:
    """The distinct pairs of A and B: one, unless they are not shared."""
    pieces = [piece for layer in layers_of(model).values() for piece in layer.slices]
    return list({id(piece.projections): piece.projections for piece in pieces}.values())


def trainable_names(model: nn.Module) -> list[str]:
    """Names of the parameters that `add_vera` left trainable: the vectors, then the heads'."""
    record = vera_of(model)
    vectors = [
        f"{name}.{attribute}"
        for name, layer in layers_of(model).items()
        for piece in layer.slices
        for kind, attribute in zip(("b", "d"), piece.names, strict=True)
        if kind in record.train
    ]
    return vectors + [n for n, _ in model.named_parameters() if in_heads(n, record.heads)]


def in_heads(name: str, heads: Sequence[str]) -> bool:
    """Whether a module or parameter is one of the heads or inside one."""
    return any(name == head or name.startswith(f"{head}.") for head in heads)


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Add ΔW to every adapted weight, in place: inference then costs what the base's costs.

    The base weights are kept beside, for `unmerge`. Merging twice does nothing.

    Raises:
        ValueError: if the model has no VeRA layer, or a weight is quantised.
    """
    layers = layers_of(model)
    for name, layer in layers.items():
        if not is_dense(layer):
            raise ValueError(
                f"{name}.weight is of type {layer.weight.dtype}: only a floating-point weight can "
                "take up the adapter; load the base unquantised to merge"
            )
    for layer in layers.values():
        if layer.kept is not None:
            continue
        weight: Any = layer.weight
        layer.kept = weight.detach().clone()
        blocks = (weight.T if isinstance(layer, Conv1D) else weight).chunk(layer.slices[0].blocks)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        for piece in layer.slices:
            block = blocks[piece.index]
            block.copy_(block.to(dtype) + layer.delta(piece, dtype))
    return model


@torch.no_grad()
def unmerge(model: nn.Module) -> nn.Module:
    """Put the base weights back, to the bit; does nothing where nothing is merged.

    Raises:
        ValueError: if the model has no VeRA layer.
    """
    for layer in layers_of(model).values():
        if layer.kept is not None:
            layer.weight.copy_(layer.kept)  # type: ignore[operator]
            layer.kept = None
    return model


def strip(model: nn.Module) -> nn.Module:
    """Turn the model back into a plain one, in place, with the weights it has now.

    After `merge` these are the adapted weights, otherwise the base's. Parameters that were
    frozen stay frozen.

    Raises:
        ValueError: if the model has no VeRA layer.
    """
    for layer in layers_of(model).values():
        for piece in layer.slices:
            for attribute in piece.names:
                delattr(layer, attribute)
        for attribute in ("slices", "kept", "rows"):
            layer.__dict__.pop(attribute, None)
        layer.__class__ = type(layer).__mro__[2]
    del model.vera
    return model


def _is_candidate(module: Any) -> bool:
    """A plain layer, or a quantised subclass, which computes by its own forward."""
    if type(module) in (nn.Linear, Conv1D):
        return True
    if isinstance(module, VeraLayer | NonDynamicallyQuantizableLinear):
        return False
    return isinstance(module, nn.Linear) and not module.weight.is_floating_point()


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]) >> 1


def _specs(targets: Targets) -> list[tuple[str, tuple[str, ...]]]:
    """Every target as (pattern, labels of its slices)."""
    if isinstance(targets, Mapping):
        items = [(str(pattern), list(labels or ())) for pattern, labels in targets.items()]
    else:
        items = []
        for target in [targets] if isinstance(targets, str) else targets:
            pattern, colon, slices = target.partition(":")
            items.append((pattern, slices.split(",") if colon else []))
    specs = []
    for pattern, labels in items:
        labels = [label.strip() for label in labels] or [""]
        if len(set(labels)) < len(labels) or len({parse_slice(label)[1] for label in labels}) > 1:
            raise ValueError(
                f"slices {', '.join(labels)} of target {pattern!r} do not go together: expected "
                "different ones of one division, such as q,v"
            )
        specs.append((pattern, tuple(sorted(labels, key=parse_slice))))
    return specs


def _resolve(
    model: nn.Module, targets: Targets, heads: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """The layers that the targets name, in the model's order."""
    output = _output_layer(model)
    candidates = {
        name: module
        for name, module in model.named_modules()
        if _is_candidate(module) and not in_heads(name, heads)
    }
    if not targets:
        raise ValueError(f"targets {targets!r} name no layer: give 'all-linear', say")
    found: dict[str, tuple[str, ...]] = {}
    for pattern, labels in _specs(targets):
        every = pattern == "all-linear"
        matched = [
            name
            for name, module in candidates.items()
            if (module is not output if every else _fits(name, pattern))
        ]
        if not matched:
            tails = Counter(name.rpartition(".")[2] for name in candidates)
            listed = ", ".join(f"{tail} ({count})" for tail, count in tails.items()) or "none"
            raise ValueError(
                f"target {pattern!r} matches no linear layer of {type(model).__name__}: the names "
                f"there are {listed}"
            )
        for name in matched:
            if name in found:
                raise ValueError(
                    f"{name} is matched by two targets, the second {pattern!r}: name each layer "
                    "once, all of its slices together"
                )
            found[name] = labels
    return {name: found[name] for name in candidates if name in found}


def _fits(name: str, pattern: str) -> bool:
    """Whether the pattern fits the last parts of the dotted name, part by part."""
    wanted = pattern.split(".")
    parts = name.split(".")[-len(wanted) :]
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _output_layer(model: nn.Module) -> nn.Module | None:
    for getter in ("get_output_embeddings", "get_classifier"):
        method = getattr(model, getter, None)
        if callable(method):
            return method()
    return None


def _check(model: nn.Module, record: Vera) -> None:
    if hasattr(model, "vera"):
        raise ValueError("the model has VeRA layers already: strip(model) first")
    rank, seed = record.rank, record.seed
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank {rank!r} is not a whole number of at least 1: give 256, say")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed {seed!r} is not a whole number of at least 0: give 0, say")
    if not math.isfinite(record.d_init):
        raise ValueError(f"d_init {record.d_init} is not a finite number: give 0.1, say")
    if record.init not in INITS:
        raise ValueError(f"unknown init {record.init!r}: expected {', '.join(INITS)}")
    if not record.train or set(record.train) - {"b", "d"}:
        raise ValueError(f"cannot train {record.train!r}: expected b, d or both")
    for head in record.heads:
        try:
            model.get_submodule(head)
        except AttributeError:
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"head {head!r} is no module of {type(model).__name__}: expected a dotted name "
                f"that begins with one of {children}"
            ) from None
    modules = dict(model.named_modules())
    uses = Counter(id(p) for m in modules.values() for p in m._parameters.values() if p is not None)
    for name, labels in record.layers.items():
        layer: Any = modules[name]
        outputs, inputs = shape_of(layer)
        blocks = parse_slice(labels[0])[1]
        if outputs % blocks:
            raise ValueError(
                f"{name} has {outputs} output features, which are not {blocks} equal blocks: "
                "name another division such as 0of2, or the whole layer"
            )
        tail = name.rpartition(".")[2]
        if labels[0] in QKV and (outputs != 3 * inputs or tail in INTERLEAVED):
            raise ValueError(
                f"{name} ({inputs} → {outputs}) is not laid out as [q | k | v] in equal thirds: "
                "name the whole layer, or blocks such as 0of3 if they are what you mean"
            )
        if uses[id(layer.weight)] > 1:
            raise ValueError(
                f"{name}.weight is shared with another module, which merging would change too: "
                "leave it out of the targets, or untie them"
            )
