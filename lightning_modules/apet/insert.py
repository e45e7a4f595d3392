"""Inserts trainable parameters at any positions of a model, in place, and removes them again.

APET (arXiv 2306.02320), Section 5.1: only θ is trained, min_θ L(M(Φ, θ)(X), Y). placement.py
chooses the positions of θ, layer.py computes with them. The model's output is unchanged until θ is
trained.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_modules.apet.checks import check_placement, check_plain
from lightning_modules.apet.layer import (
    Tuned,
    TunedLinear,
    give_rows,
    initial_values,
    tuned_class,
)
from lightning_modules.apet.placement import OPERATIONS, Operation, Placement, draw
from lightning_modules.apet.product import is_sampled, pattern_of
from lightning_modules.apet.prompt import add_prompt, remove_prompt
from lightning_modules.layouts import shape_of


@dataclass(frozen=True)
class Apet:
    """What `insert` or `attach` did to a model; stored as `model.apet`.

    Attributes:
        placement: the positions of the parameters.
        seed: of the draw, and of random initial values.
        budget, operations: arguments of the draw; None where a placement was given.
        heads: names of modules that are trained in full in addition.
    """

    placement: Placement
    seed: int = 0
    budget: int | None = None
    operations: tuple[str, ...] | None = None
    heads: tuple[str, ...] = ()


def insert(
    model: nn.Module,
    budget: int,
    seed: int = 0,
    operations: Sequence[Operation] = OPERATIONS,
    heads: Sequence[str] = (),
) -> nn.Module:
    """Make exactly `budget` parameters trainable at random positions, and freeze the rest.

    Args:
        model: a transformers or timm model, or any other module.
        budget: number of trainable parameters.
        seed: the same seed gives the same positions on every machine.
        operations: "add" (elements of the model's parameters), "concat" (low-rank terms parallel to
            linear layers), "plug" (neurons of adapters after linear layers).
        heads: names of modules that are trained in full in addition, such as a new classifier; they
            do not count towards the budget.

    Returns:
        The same model; `model.apet` records what was done.

    Raises:
        ValueError: before anything is changed, for a budget, an operation or a head that does not
            fit the model, or a model whose layers another method has changed.
    """
    check_plain(model, heads)
    placement = draw(model, budget, seed, operations, heads)
    return attach(model, Apet(placement, seed, budget, tuple(operations), tuple(heads)))


def attach(model: nn.Module, record: Apet) -> nn.Module:
    """Insert the parameters of a record, in place, and freeze the rest.

    `attach(model, Apet(bitfit(model), seed=0))` is BitFit.

    Args:
        model: as for `insert`.
        record: a placement, a seed and heads.

    Returns:
        The same model; `model.apet` is the record.

    Raises:
        ValueError: before anything is changed, if the placement, the seed or a head does not fit
            the model, its layers have been changed by another method, or it takes no prompt.
    """
    placement = record.placement
    check_plain(model, record.heads)
    check_placement(model, placement, record.seed)
    modules = dict(model.named_modules())
    owners = _owners(model)
    model.requires_grad_(False)
    changed: dict[nn.Module, set[str]] = defaultdict(set)
    for name in (*placement.concat, *placement.plug, *placement.bias):
        changed[modules[name]] |= set()
    for name, index in placement.add.items():
        parameter: Any = model.get_parameter(name)
        count = parameter.numel() if index is None else len(index)
        shape = parameter.shape if index is None else (count,)
        values = nn.Parameter(torch.zeros(shape, device=parameter.device))
        for module, local in owners[name]:
            changed[module].add(local)
            setattr(module, f"apet_add_{local}", values)
            if index is not None:
                where = index.to(parameter.device)
                module.register_buffer(f"apet_index_{local}", where, persistent=False)
                linear = isinstance(module, nn.Linear | Conv1D) and local == "weight"
                if linear and is_sampled(count, parameter.numel()):
                    starts, columns = pattern_of(where, *parameter.shape)
                    module.register_buffer(f"apet_starts_{local}", starts, persistent=False)
                    module.register_buffer(f"apet_columns_{local}", columns, persistent=False)
    for module, names in changed.items():
        module.__class__ = tuned_class(type(module), tuple(sorted(names)))  # type: ignore[arg-type]
    for name in placement.bias:
        layer: Any = modules[name]
        weight = layer._parameters["weight"]
        layer.apet_bias = nn.Parameter(torch.zeros(len(weight), device=weight.device))
    for name, (down, up) in placement.concat.items():
        layer = modules[name]
        outputs, inputs = shape_of(layer)
        rank = -(-up // outputs)
        initial = initial_values(record.seed, f"{name} concat", (rank, inputs))
        give_rows(layer, "w3", rank, inputs, down, initial)
        give_rows(layer, "w4", rank, outputs, up, None)
        layer.apet_scale = placement.scale
    for name, (down, biases, up, last) in placement.plug.items():
        layer = modules[name]
        outputs, _ = shape_of(layer)
        neurons = -(-up // outputs)
        initial = initial_values(record.seed, f"{name} plug", (neurons, outputs))
        give_rows(layer, "w5", neurons, outputs, down, initial)
        give_rows(layer, "w6", neurons, outputs, up, None)
        if biases:
            layer.apet_b5 = nn.Parameter(torch.zeros(biases, device=_device(layer)))
        if last:
            layer.apet_b6 = nn.Parameter(torch.zeros(last, device=_device(layer)))
    if placement.prompt:
        add_prompt(model, placement.prompt, record.seed)
    for head in record.heads:
        model.get_submodule(head).requires_grad_(True)
    model.apet = record  # type: ignore[assignment]
    return model


def apet_of(model: nn.Module) -> Apet:
    """The record of what `insert` did to the model.

    Raises:
        ValueError: if nothing was inserted.
    """
    record = getattr(model, "apet", None)
    if record is None:
        raise ValueError(
            f"{type(model).__name__} has no parameters of APET: call insert(model, …) first"
        )
    return record


def tunables(model: nn.Module) -> dict[str, nn.Parameter]:
    """θ: the inserted parameters by name, each once, in the model's order.

    Raises:
        ValueError: if nothing was inserted.
    """
    apet_of(model)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[2].startswith("apet_")
    }


@torch.no_grad()
def merge(model: nn.Module) -> nn.Module:
    """Merge θ into the model's weights, in place, and make the model plain again.

    ADD and CONCAT at linear layers are merged up to rounding. Adapters (PLUG), prompts, biases of
    layers without one, and CONCAT at a layer that shares its weight cannot be merged.

    Returns:
        The same model.

    Raises:
        ValueError: if nothing was inserted, or naming what cannot be merged; the model stays
            unchanged then.
    """
    placement = apet_of(model).placement
    fixed = {
        "adapters (plug)": placement.plug,
        "a prompt": placement.prompt,
        "biases of layers without one": placement.bias,
    }
    if kinds := [kind for kind, inserted in fixed.items() if inserted]:
        raise ValueError(
            f"{' and '.join(kinds)} cannot be merged into weights: keep the model as it is, and "
            "save what was trained with lightning_modules.apet.save"
        )
    _check_shared(model, placement)
    merged: dict[Any, Tensor] = {}  # by parameter, so that a shared one is merged once
    for module in _tuned(model):
        for name in type(module).apet_names:  # type: ignore[attr-defined]
            merged[module._parameters[name]] = module.tuned(name)
        if isinstance(module, TunedLinear) and "apet_w4" in module._parameters:
            weight = module.tuned("weight")
            w3, w4 = (
                term.to(torch.promote_types(term.dtype, weight.dtype)) for term in module.terms()
            )
            delta = module.apet_scale * (w3.T @ w4 if isinstance(module, Conv1D) else w4.T @ w3)
            merged[module._parameters["weight"]] = (weight.to(delta.dtype) + delta).to(weight.dtype)
    for parameter, total in merged.items():
        parameter.copy_(total)
    return strip(model)


def strip(model: nn.Module) -> nn.Module:
    """Remove θ, in place; the model is plain again, with its current weights.

    Returns:
        The same model.

    Raises:
        ValueError: if nothing was inserted.
    """
    apet_of(model)
    for module in _tuned(model):
        kind = type(module).apet_kind  # type: ignore[attr-defined]
        for store in (module._parameters, module._buffers):
            for name in [name for name in store if name.startswith("apet_")]:
                delattr(module, name)
        for name in ("apet_widths", "apet_scale"):
            module.__dict__.pop(name, None)
        module.__class__ = kind
    if "apet_prompt" in model._parameters:
        remove_prompt(model)
    del model.apet
    return model


def _tuned(model: nn.Module) -> list[Tuned]:
    return [module for module in model.modules() if isinstance(module, Tuned)]


def _device(layer: nn.Module) -> torch.device:
    weight: Any = layer._parameters["weight"]
    return weight.device


def _owners(model: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """(module, local name) of each module that holds a parameter, by the parameter's first name."""
    names: dict[int, str] = {}
    owners: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for local, parameter in module._parameters.items():
            if parameter is not None:
                name = names.setdefault(id(parameter), f"{prefix}.{local}" if prefix else local)
                owners[name].append((module, local))
    return owners


def _check_shared(model: nn.Module, placement: Placement) -> None:
    """Refuse to merge CONCAT, which is one layer's, into a weight that other modules read too."""
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    for holders in _owners(model).values():
        layers = [names[module] for module, local in holders if local == "weight"]
        merging = [name for name in layers if name in placement.concat]
        if merging and len(holders) > 1:
            others = [names[module] for module, _ in holders if names[module] != merging[0]]
            raise ValueError(
                f"the terms (concat) of {merging[0]} cannot be merged into its weight, which is "
                f"also that of {', '.join(others)}: keep the model as it is, and save what was "
                "trained with lightning_modules.apet.save"
            )
