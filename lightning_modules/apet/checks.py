"""What APET refuses before it changes a model: layers, heads and positions that do not fit it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_modules.apet.placement import Placement, check_seed
from lightning_modules.apet.prompt import check_prompt
from lightning_modules.layouts import is_layer_norm, uncalled_layers

# attribute that a method sets on a model whose layers it has changed → what has to be done first
RECORDS = {
    "apet": "strip(model) it first",
    "vera": "merge and strip it first",
    "nesting": "extract a granularity first",
}


def check_plain(model: nn.Module, heads: Sequence[str]) -> None:
    """Refuse a model whose layers a method has changed, and heads that the model does not have.

    Raises:
        ValueError: naming what is changed, or the head that is missing.
    """
    for record, cure in RECORDS.items():
        if hasattr(model, record):
            raise ValueError(
                f"this {type(model).__name__} was changed by {record} before, and its layers are "
                f"not plain: {cure}"
            )
    check_heads(model, heads)


def check_heads(model: nn.Module, heads: Sequence[str]) -> None:
    """Refuse heads that the model does not have.

    Raises:
        ValueError: naming the head and the model's modules.
    """
    modules = dict(model.named_modules())
    for head in heads:
        if head not in modules:
            children = ", ".join(name for name, _ in model.named_children())
            raise ValueError(
                f"head {head!r} is no module of {type(model).__name__}: expected a dotted name "
                f"that begins with one of {children}"
            )


def check_placement(model: nn.Module, placement: Placement, seed: int) -> None:
    """Refuse a placement that does not fit a plain model.

    Raises:
        ValueError: naming the first layer or parameter that does not fit.
    """
    check_seed(seed)
    modules: dict[str, Any] = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    for name, index in placement.add.items():
        if name not in parameters:
            raise ValueError(f"{name} is no parameter of this {type(model).__name__}")
        if index is not None:
            _check_index(name, index, parameters[name].numel())
    for name in (*placement.concat, *placement.plug):
        if type(modules.get(name)) not in (nn.Linear, Conv1D):
            raise ValueError(
                f"{name} is a {type(modules.get(name)).__name__} of this {type(model).__name__}: "
                "expected a plain linear layer (nn.Linear or Conv1D)"
            )
    uncalled = uncalled_layers(model)
    for name in (*placement.concat, *placement.plug, *placement.bias):
        if name in uncalled:
            raise ValueError(
                f"the weight of {name} is read without calling the layer, so that what is added to "
                "it would have no effect: name other layers, or elements of it in Placement.add"
            )
    for name in placement.bias:
        kind = type(modules.get(name))
        if kind not in (nn.Linear, Conv1D) and not is_layer_norm(kind):
            raise ValueError(
                f"{name} is a {kind.__name__} of this {type(model).__name__}: expected a plain "
                "linear layer or a norm"
            )
        if modules[name]._parameters.get("bias") is not None:
            raise ValueError(
                f"{name} has a bias already, which a new one would replace: name {name}.bias in "
                "Placement.add instead"
            )
    if type(placement.prompt) is not int or placement.prompt < 0:
        raise ValueError(
            f"a prompt of {placement.prompt!r} tokens is not possible: give a whole number, 0 for "
            "none"
        )
    if placement.prompt:
        check_prompt(model)


def tunable_count(model: nn.Module, placement: Placement) -> int:
    """The number of parameters that a placement, which fits the model, makes trainable."""
    parameters = dict(model.named_parameters())
    count = sum(
        parameters[name].numel() if index is None else len(index)
        for name, index in placement.add.items()
    )
    count += sum(len(model.get_parameter(f"{name}.weight")) for name in placement.bias)
    count += sum(sum(sizes) for sizes in (*placement.concat.values(), *placement.plug.values()))
    if placement.prompt:
        embed: Any = model.get_input_embeddings()  # type: ignore[operator]
        count += placement.prompt * embed.weight.shape[1]
    return count


def _check_index(name: str, index: Tensor, size: int) -> None:
    # the sampled gradients and the embeddings' rows are computed for ascending positions
    ascending = index.ndim == 1 and bool((index[1:] > index[:-1]).all())
    if index.dtype != torch.long or not ascending or not _within(index, size):
        raise ValueError(
            f"the positions of {name} in Placement.add are not what APET computes with: expected "
            f"a tensor of ascending whole numbers (torch.long) from 0 to {size - 1}, each once; "
            "index.unique() sorts them"
        )


def _within(index: Tensor, size: int) -> bool:
    return not len(index) or (int(index[0]) >= 0 and int(index[-1]) < size)
