"""The cost of each nested layer at each granularity: parameters, multiply-adds or milliseconds.

`costs[layer][granularity]`, in the order of `nesting.layers`, counts the nested layers alone. A
submodel costs the sum of its layers and the rest of the model. Mix'n'Match (MatFormer, arXiv
2310.07707, Section 3.3) takes a budget in any of these units.
"""

import copy
import statistics
import time
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_modules.backbones import call, to_device
from lightning_modules.matformer.mix_and_match import mix_and_match
from lightning_modules.matformer.nest import NestedLayer, granularity, nesting_of
from lightning_modules.modes import evaluating

Unit = Literal["parameters", "macs", "ms"]
REPEATS = 9  # timed passes after one warm-up pass; the result is their median


def layer_costs(
    model: nn.Module, unit: Unit = "parameters", batch: Any = None
) -> tuple[list[list[float]], float]:
    """The cost of every nested layer at every granularity, and that of the rest of the model.

    Args:
        model: nested in "ffn", "heads" or both; its granularity and mode are restored.
        unit: "parameters"; "macs", multiply-adds of one pass over the batch, the attention's
            matrix products included; or "ms", measured on the model's device in evaluation mode.
        batch: the model's input (a tensor, a tuple or a dict), for "macs" and "ms".

    Returns:
        `costs[layer][granularity]` and the cost of everything else.

    Raises:
        ValueError: for a model that is not nested, or whose depth is (Mix'n'Match chooses within
            blocks, not which blocks to skip), an unknown unit, or no batch where one is needed.
    """
    layers = nesting_of(model).layers
    if any(layer.axis == "depth" for layer in layers):
        raise ValueError("a nested depth has no cost by layer: choose a uniform granularity")
    if unit not in ("parameters", "macs", "ms"):
        raise ValueError(f"unknown unit {unit!r}: expected 'parameters', 'macs' or 'ms'")
    if unit != "parameters" and batch is None:
        raise ValueError(f"{unit} depend on the input: give a batch")
    by_granularity: list[list[float]] = []
    rest = 0.0
    for index in range(len(nesting_of(model).names)):
        with granularity(model, index):
            if unit == "parameters":
                total: float = sum(p.numel() for p in model.parameters())
                total -= sum(sum(_parameters(layer)) for layer in layers)
                nested: list[float] = [_parameters(layer)[0] for layer in layers]
                rest = total
            elif unit == "macs":
                nested, total = _macs(model, batch)
                rest = total - sum(nested)
            else:
                nested, total = _milliseconds(model, batch)
                rest = total - sum(nested)  # the value at the largest granularity is returned
        by_granularity.append(nested)
    return [list(costs) for costs in zip(*by_granularity, strict=True)], rest


def choose(model: nn.Module, budget: float) -> list[int]:
    """The Mix'n'Match granularities for a budget of parameters.

    Args:
        model: nested in "ffn", "heads" or both.
        budget: the most parameters of the full submodel, layers that are not nested included.

    Returns:
        One granularity index for each nested layer.

    Raises:
        ValueError: if the smallest submodel exceeds the budget, or as `layer_costs`.
    """
    costs, rest = layer_costs(model)
    return mix_and_match(costs, budget, rest)


def _parameters(layer: NestedLayer) -> tuple[int, int]:
    """Number of parameters of the layer's sliced children: in use, and not in use."""
    in_use = full = 0
    for child in layer.slices().values():
        for name, parameter in child.named_parameters(recurse=False):
            axis = child.axis(name)
            kept = sum(stop - start for start, stop in child.runs)
            rows = parameter.shape[axis] if axis is not None else 1
            full += parameter.numel()
            in_use += parameter.numel() // rows * (kept if axis is not None else 1)
    return in_use, full - in_use


def _macs(model: nn.Module, batch: Any) -> tuple[list[float], float]:
    """Multiply-adds of each nested layer and of the model, counted on the meta device."""
    meta_copy = copy.deepcopy(model).to("meta").eval().requires_grad_(False)
    if isinstance(batch, Mapping):  # padding counts as tokens; transformers reads a mask's values
        batch = {name: one for name, one in batch.items() if name != "attention_mask"}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call(meta_copy, to_device(batch, "meta"))
    counts = counter.get_flop_counts()
    root = type(model).__name__
    nested: list[float] = []
    for layer in nesting_of(model).layers:
        # all of an attention module counts, but only the sliced children of a feed-forward
        # network, whose module may be the full block
        paths = [""] if layer.axis == "heads" else [f".{path}" for path in layer.slices()]
        name = f"{root}.{layer.name}" if layer.name else root
        # modules without products, such as norms, have no entry
        nested.append(sum(sum(counts.get(name + path, {}).values()) for path in paths) // 2)
    return nested, counter.get_total_flops() // 2


@torch.no_grad()
def _milliseconds(model: nn.Module, batch: Any) -> tuple[list[float], float]:
    """Median time in milliseconds of each nested layer and of the model."""
    layers = nesting_of(model).layers
    device = next(model.parameters()).device
    seconds: list[list[float]] = [[] for _ in layers]
    start_times: dict[int, float] = {}
    hooks = []

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    for place, layer in enumerate(layers):
        first, last = _ends(layer)
        hooks += [
            first.register_forward_pre_hook(
                lambda *_, place=place: start_times.update({place: now()})
            ),
            last.register_forward_hook(
                lambda *_, place=place: seconds[place].append(now() - start_times[place])
            ),
        ]
    totals = []
    try:
        with evaluating(model):
            for _ in range(REPEATS + 1):
                start = now()
                call(model, to_device(batch, device))
                totals.append(now() - start)
    finally:
        for hook in hooks:
            hook.remove()
    median = statistics.median
    return [1e3 * median(times[1:]) for times in seconds], 1e3 * median(totals[1:])


def _ends(layer: NestedLayer) -> tuple[nn.Module, nn.Module]:
    """The modules at whose start and end a layer is timed: the module, or its outer children."""
    if layer.axis == "heads":
        return layer.module, layer.module
    children = list(layer.slices().values())
    return children[0], children[-1]
