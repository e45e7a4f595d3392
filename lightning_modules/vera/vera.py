"""Vector-based random matrix adaptation: two trained vectors for each layer.

VeRA (arXiv 2310.11454), Equation 2:

    h = W0 x + Λ_b B Λ_d A x

A (r, n) and B (m, r) are frozen, random and shared by all layers (projections.py). b (m,) starts
at zero and d (r,) at d_init, so that a new model has its base's outputs. Σ (m + r) numbers are
trained. The names of a layer's weight and bias do not change; `vera_b` and `vera_d` are added to
them (`vera_b_q`, … for a slice of a fused projection).

layer.py has the adapted layers and their computation.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_modules.layouts import shape_of
from lightning_modules.vera.layer import (
    Slice,
    VeraLayer,
    adapted_class,
    is_dense,
    parse_slice,
)
from lightning_modules.vera.projections import INITS, Init, Projections
from lightning_modules.vera.targets import Targets, check_blocks, resolve


@dataclass(frozen=True)
class Vera:
    """What `add_vera` did to a model; stored as `model.vera`.

    Attributes:
        rank, seed, init, d_init, shared, train, heads: the arguments of `add_vera`.
        layers: the labels of the adapted slices, by name of the layer; ("",) for all of a layer.
    """

    rank: int
    seed: int
    init: Init
    d_init: float
    shared: bool
    train: tuple[str, ...]
    layers: dict[str, tuple[str, ...]]
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
            head or classifier. Slices of a fused projection follow a colon: "c_attn:q,v" for two
            thirds of [q | k | v], "gate_up_proj:0of2" for the first of two equal blocks. A mapping
            {"c_attn": ["q", "v"]} is equivalent.
        d_init: initial value of every entry of d.
        seed: of the random draw of A and B.
        init: distribution of A and B; "kaiming_uniform" is the paper's default.
        shared: one A and B for all layers. Otherwise each layer has its own (Table 7), drawn from
            the seed and the layer's name.
        train: the vectors to train (Table 6). With "b" alone d stays at d_init. With "d" alone b
            stays at one and d starts at zero whatever d_init is, so that the outputs still start
            as the base's.
        heads: names of modules that stay trainable in full; targets do not match inside them.

    Returns:
        The same model; `model.vera` records what was done.

    Raises:
        ValueError: before anything is changed, for a rank below 1, a target or head that matches
            nothing, layers that VeRA cannot adapt or that share their weights, an unknown init,
            vectors other than b and d, or a model adapted already.
    """
    plan = resolve(model, targets, heads)
    record = Vera(rank, seed, init, d_init, shared, tuple(train), plan, tuple(heads))
    return attach(model, record)


def attach(model: nn.Module, record: Vera, given: tuple[Tensor, Tensor] | None = None) -> nn.Module:
    """Adapt a model in place as a record says.

    Args:
        model: a plain model.
        record: what to do; its layers and slices must be the model's.
        given: A and B from a file, to use instead of a draw.

    Raises:
        ValueError: as `add_vera`.
    """
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
        base_class: Any = type(layer)
        layer.__class__ = adapted_class(base_class)
        layer.slices = tuple(slices)
        layer.starts = (1.0, 0.0) if record.train == ("d",) else (0.0, record.d_init)
        for piece in slices:
            sizes = (block, record.rank)
            for letter, attribute, size in zip(("b", "d"), piece.names, sizes, strict=True):
                vector = torch.empty(size, device=weight.device, dtype=dtype)
                setattr(layer, attribute, nn.Parameter(vector, letter in record.train))
        layer.reset_vectors()
    for head in record.heads:
        model.get_submodule(head).requires_grad_(True)
    model.vera = record  # type: ignore[assignment]
    if weight.device.type != "meta":
        for projections in projections_of(model):
            projections.on(torch.device("cpu"), torch.float32)  # draw now, not in the first step
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
    """b (m,) and d (r,) of every layer and slice, by "name" or "name:label".

    Raises:
        ValueError: if the model has no VeRA layer.
    """
    return {
        f"{name}:{piece.label}" if piece.label else name: layer.vectors(piece)
        for name, layer in layers_of(model).items()
        for piece in layer.slices
    }


def projections_of(model: nn.Module) -> list[Projections]:
    """The distinct pairs of A and B: one, unless they are not shared."""
    pieces = [piece for layer in layers_of(model).values() for piece in layer.slices]
    return list({id(piece.projections): piece.projections for piece in pieces}.values())


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Add ΔW to every adapted weight, in place, so that inference costs no more than the base's.

    A copy of the base weights is kept for `unmerge`. A second call has no effect.

    Raises:
        ValueError: if the model has no VeRA layer, or a weight is quantised.
    """
    layers = layers_of(model)
    for name, layer in layers.items():
        if not is_dense(layer):
            raise ValueError(
                f"{name}.weight is of type {layer.weight.dtype}: an adapter can only be merged "
                "into a floating-point weight; load the base unquantised to merge"
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
    """Restore the base weights exactly, in place; layers that are not merged stay as they are.

    Raises:
        ValueError: if the model has no VeRA layer.
    """
    for layer in layers_of(model).values():
        if layer.kept is not None:
            layer.weight.copy_(layer.kept)  # type: ignore[operator]
            layer.kept = None
    return model


def strip(model: nn.Module) -> nn.Module:
    """Remove VeRA from the model, in place, and keep its current weights.

    After `merge` these are the adapted weights, otherwise the base's. Frozen parameters stay
    frozen.

    Raises:
        ValueError: if the model has no VeRA layer.
    """
    for layer in layers_of(model).values():
        for piece in layer.slices:
            for attribute in piece.names:
                delattr(layer, attribute)
        for attribute in ("slices", "starts", "kept", "rows"):
            layer.__dict__.pop(attribute, None)
        layer.__class__ = type(layer).__mro__[2]
    del model.vera
    return model


def _seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8]) >> 1


def _check(model: nn.Module, record: Vera) -> None:
    if hasattr(model, "vera"):
        raise ValueError("the model has VeRA layers already: strip(model) first")
    rank, seed = record.rank, record.seed
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank {rank!r} is not a whole number of at least 1: give for example 256")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed {seed!r} is not a whole number of at least 0: give for example 0")
    if not math.isfinite(record.d_init):
        raise ValueError(f"d_init {record.d_init} is not a finite number: give for example 0.1")
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
        check_blocks(model, name, labels)
        if uses[id(layer.weight)] > 1:
            raise ValueError(
                f"{name}.weight is shared with another module, which merging would change too: "
                "leave it out of the targets, or untie them"
            )
