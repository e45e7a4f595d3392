"""MARS: keeps each layer's weights within a ball around the pre-trained ones.

Gouk et al., Distance-Based Regularisation of Deep Networks (arXiv 2002.08253). The ball is that of
the maximum absolute row sum norm, max_j Σ_i |W_ji − U_ji| ≤ γ.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_modules.weights import mismatch


def constrained(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The weights that MARS constrains: those of linear and convolutional layers, not biases.

    Returns:
        By parameter name, the dimensions of the weight that form a row (the inputs of an output).
    """
    rows: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Conv1D):  # GPT-2's, whose weight is (inputs, outputs)
            dims: tuple[int, ...] = (0,)
        elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            dims = tuple(range(1, module.weight.ndim))
        else:
            continue
        rows[f"{name}.weight" if name else "weight"] = dims
    named = dict(model.named_parameters())  # a weight that two layers share has one name
    return {name: dims for name, dims in rows.items() if name in named}


def mars_start(model: nn.Module, heads: Collection[str] = ()) -> dict[str, Tensor]:
    """The centres w0 of the balls: copies of the constrained weights, zeros for new heads.

    Args:
        model: with its pre-trained weights.
        heads: names of the new modules.

    Returns:
        The centres by parameter name.

    Raises:
        ValueError: if a head has no constrained weight.
    """
    parameters = dict(model.named_parameters())
    start = {name: parameters[name].detach().clone() for name in constrained(model)}
    for head in heads:
        inside = [name for name in start if name.startswith(f"{head}.")]
        if not inside:
            raise ValueError(
                f"head {head!r} has no linear or convolutional layer in {type(model).__name__}: "
                f"expected a module's name, such as {next(reversed(start)).rpartition('.')[0]}"
            )
        for name in inside:
            start[name].zero_()
    return start


@torch.no_grad()
def mars_project(model: nn.Module, start: dict[str, Tensor], radius: float = 4.0) -> nn.Module:
    """Project every row into its ball, in place; to be called after each optimizer step.

    w_j ← w0_j + d / max(1, ‖d‖₁ / γ) with d = w_j − w0_j. Rows within the ball stay
    bit-identical. For a convolution ‖d‖₁ is summed over input channels and kernel.

    Args:
        model: the model in training.
        start: from `mars_start`.
        radius: γ, above 0.

    Returns:
        The same model.

    Raises:
        ValueError: for a radius of 0 or less, or a start of another model.
    """
    if not radius > 0:
        raise ValueError(f"radius is {radius}: expected a number above 0")
    parameters = dict(model.named_parameters())
    rows = constrained(model)
    compared = {n: p for n, p in parameters.items() if n in rows or n in start}
    if differing := mismatch(compared, start):
        name, in_model, in_start = differing
        raise ValueError(
            f"{name} is {in_model} in the model and {in_start} in the start: expected the same "
            "weights; take the start from this model with mars_start"
        )
    for name, dims in rows.items():
        weight, centre = parameters[name], start[name]
        change = weight - centre
        sums = change.abs().sum(dims, keepdim=True)
        projected = centre + change * (radius / sums)
        weight.copy_(torch.where(sums > radius, projected, weight))
    return model


def largest_row(change: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The MARS norm of a layer's change: max_j Σ_i |change_ji|, with i along `dims`."""
    return change.abs().sum(dims).max()
