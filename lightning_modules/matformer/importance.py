"""Measures the importance of neurons, heads and blocks, and sorts them by it.

When a nested model is trained from scratch, its first neurons become the most important ones
(MatFormer, arXiv 2310.07707). The neurons of a pre-trained model are in no such order, so nesting
it without sorting would drop important ones. Permuting hidden neurons (or heads, together with the
key/value head they share) does not change the function, so they are sorted by importance first, as
DynaBERT (arXiv 2004.04037) and Minitron (arXiv 2407.14679) do.

The importance of neuron j with activation a_j is the root mean square of its contribution to the
output:

    s_j = √E[a_j²] · ‖column j of the down projection‖

That of a head, or a group of heads, is the root of the sum of s_j² over its columns of the output
projection. That of a block is 1 - E[cos(input, output)] (ShortGPT, arXiv 2403.03853).
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_modules.backbones import call, to_device
from lightning_modules.layouts import Cut, Layer, attentions, feed_forwards
from lightning_modules.matformer.nest import NestedLayer, granularity
from lightning_modules.matformer.nested_layers import Nested, refuse_unknown
from lightning_modules.modes import evaluating

Scores = dict[str, dict[str, Tensor]]


@torch.no_grad()
def importance(
    model: nn.Module, batches: Iterable[Any], part: str | Sequence[str] | None = None
) -> Scores:
    """The importance of every unit, measured on data in evaluation mode.

    Args:
        model: nested or not; it is measured at its largest granularity.
        batches: inputs of the model: tensors, tuples, or dicts of keyword arguments; they are moved
            to the device of its first parameter. Tokens whose `attention_mask` in such a dict is 0
            do not count; in an encoder–decoder's decoder, whose `decoder_attention_mask` is 0.
        part: "ffn", "heads", "depth" or several; None for the axes in which the model is nested,
            or "ffn" if it is not nested.

    Returns:
        Scores (units,) in float64, by part and by name of the layer.

    Raises:
        ValueError: if there is no batch, a layer's layout is unknown, the heads of a layer cannot
            be reordered, or "depth" is asked for and the model is not nested in it.
    """
    layers = _layers(model, part)
    stacks = [x for x in _nested(model) if x.axis == "depth" and "depth" in layers]
    sums = {
        (axis, x.name): torch.zeros(()) for axis, axis_layers in layers.items() for x in axis_layers
    }
    sums |= {("depth", stack.name): torch.zeros(len(stack.module)) for stack in stacks}  # type: ignore[arg-type]
    tokens = dict.fromkeys(sums, 0.0)
    masks: Mapping[str, Tensor] = {}
    apart = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    device = next(model.parameters()).device
    hooks = []

    def mask_of(name: str) -> Tensor | None:
        decoder = apart and "decoder" in name.split(".")
        return masks.get("decoder_attention_mask" if decoder else "attention_mask")

    def add_squares(key: tuple[str, str]) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            values, counted = _flat(args[0], mask_of(key[1]))
            sums[key] = sums[key].to(values.device) + (values.double().square() * counted).sum(0)
            tokens[key] += counted.sum().item()

        return hook

    def add_angles(key: tuple[str, str], place: int) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
            block_input = args[0] if args else kwargs["hidden_states"]
            values, counted = _flat(block_input, mask_of(key[1]))
            cosine = F.cosine_similarity(values.double(), output.reshape(values.shape).double(), -1)
            sums[key] = sums[key].to(values.device, torch.float64)
            sums[key][place] += ((1 - cosine) * counted[:, 0]).sum()
            tokens[key] += counted.sum().item() / len(sums[key])

        return hook

    for axis, axis_layers in layers.items():
        for layer in axis_layers:
            reducing = layer.module.get_submodule(layer.reducing.path)
            hooks.append(reducing.register_forward_pre_hook(add_squares((axis, layer.name))))
    for stack in stacks:
        for place, block in enumerate(stack.module.children()):
            hook = add_angles(("depth", stack.name), place)
            hooks.append(block.register_forward_hook(hook, with_kwargs=True))
    try:
        with evaluating(model), _at_largest(model):
            for batch in batches:
                masks = batch if isinstance(batch, Mapping) else {}
                call(model, to_device(batch, device))
    finally:
        for handle in hooks:
            handle.remove()
    if not all(tokens.values()):
        raise ValueError("importance needs at least one batch that reaches every layer; got none")
    scores: Scores = {axis: {} for axis in layers}
    for axis, axis_layers in layers.items():
        for layer in axis_layers:
            mean = sums[axis, layer.name] / tokens[axis, layer.name]
            scores[axis][layer.name] = _unit_scores(layer, mean)
    for stack in stacks:
        key = ("depth", stack.name)
        scores["depth"][stack.name] = sums[key] / tokens[key]
    return scores


@torch.no_grad()
def reorder(model: nn.Module, scores: Scores) -> nn.Module:
    """Sort neurons, heads or groups by decreasing importance, in place, without changing outputs.

    Blocks are not permuted. For the "depth" of a nested model the scores instead decide which
    blocks a smaller granularity skips; it always keeps the first one.

    Args:
        model: nested or not.
        scores: from `importance`.

    Returns:
        The same model.

    Raises:
        ValueError: before anything is changed, if the scores do not fit the model's layers, or a
            layer is not of a class that can be nested, such as one with an adapter.
    """
    moves: list[tuple[Layer, Tensor]] = []
    for axis, axis_layers in _layers(model, tuple(scores)).items():
        for layer in axis_layers:
            values = scores[axis].get(layer.name)
            if values is None or values.shape != (layer.units,):
                raise ValueError(
                    f"the scores of {layer.name} are {None if values is None else values.shape}: "
                    f"expected one for each of its {layer.units} units"
                )
            for cut in layer.cuts:
                child = layer.module.get_submodule(cut.path)
                if not isinstance(child, Nested):
                    refuse_unknown(f"{layer.name}.{cut.path}", child)
            moves.append((layer, values.argsort(descending=True, stable=True)))
    for layer, order in moves:
        for cut in layer.cuts:
            _permute(layer.module.get_submodule(cut.path), cut, order)
    for stack in (x for x in _nested(model) if x.axis == "depth" and "depth" in scores):
        values = scores["depth"][stack.name].clone()
        values[0] = torch.inf  # a decoder reads the length of its cache in the first block
        ranking = values.argsort(descending=True, stable=True).tolist()
        stack.kept = tuple(tuple(sorted(ranking[:width])) for width in stack.widths)
        stack.select(stack.granularity)
    return model


def _nested(model: nn.Module) -> list[NestedLayer]:
    nesting = getattr(model, "nesting", None)
    return nesting.layers if nesting else []


def _layers(model: nn.Module, part: str | Sequence[str] | None) -> dict[str, Sequence[Layer]]:
    """The layers to score, by axis; none for "depth"."""
    nested = _nested(model)
    axes = tuple(dict.fromkeys(layer.axis for layer in nested))
    wanted = (part,) if isinstance(part, str) else part or axes or ("ffn",)
    layers: dict[str, Sequence[Layer]] = {}
    for axis in wanted:
        if axis in axes:
            layers[axis] = [x.layer for x in nested if x.axis == axis and x.layer]
        elif axis == "ffn":
            layers[axis] = feed_forwards(model)
        elif axis == "heads":
            axis_layers = attentions(model)
            for layer in axis_layers:
                if layer.layout.fixed:
                    raise ValueError(
                        f"the heads of {layer.name} cannot be reordered: {layer.layout.fixed}"
                    )
            layers[axis] = axis_layers
        else:
            raise ValueError(
                f"part {axis!r}: expected 'ffn', 'heads', or an axis of a nested model"
            )
    return layers


def _at_largest(model: nn.Module) -> Any:
    nested = _nested(model)
    return granularity(model, len(nested[0].widths) - 1) if nested else nullcontext()


def _flat(values: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Values as (tokens, features), and their weights (tokens, 1): 0 for masked tokens, else 1."""
    counted = torch.ones(values.shape[:-1], device=values.device, dtype=torch.float64)
    if weight is not None and weight.numel() == counted.numel():
        counted = weight.to(counted).reshape(counted.shape)
    return values.reshape(-1, values.shape[-1]), counted.reshape(-1, 1)


def _unit_scores(layer: Layer, mean_squares: Tensor) -> Tensor:
    """The importance (units,) of a layer's units, from E[a_j²] of the reducing layer's inputs."""
    cut = layer.reducing
    child: Any = layer.module.get_submodule(cut.path)
    columns = child.weight.double().square().sum(1 if isinstance(child, Conv1D) else 0)
    contributions = (mean_squares * columns)[cut.indices(torch.arange(cut.units))]
    return contributions.view(cut.units, -1).sum(1).sqrt().cpu()


def _permute(child: Any, cut: Cut, order: Tensor) -> None:
    """Reorder the units of a child layer, in place: unit `order[i]` becomes unit i."""
    for parameter in child.parameters(recurse=False):
        if parameter.ndim == 1 and cut.dim == 1:
            continue  # the bias of a reducing layer
        axis = 0 if parameter.ndim == 1 else cut.dim ^ isinstance(child, Conv1D)
        index = torch.arange(parameter.shape[axis], device=parameter.device)
        units = torch.arange(cut.units, device=parameter.device)
        index[cut.indices(units)] = cut.indices(order.to(parameter.device))
        parameter.copy_(parameter.index_select(axis, index))
