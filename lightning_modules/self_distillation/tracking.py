"""The distance of weights from their initial values."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_modules.modes import precise
from lightning_modules.weights import gathered


@torch.no_grad()
def distance(weights: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> float:
    """‖θ_init − θ‖₂ over the floating-point tensors that both have (arXiv 2210.02871, Sec. 5.2).

    Each tensor's squares are summed on its device, in float32 or its own precision if higher.

    Args:
        weights: a state_dict.
        start: the state_dict to compare with, on the same devices, sharded alike or not at all.
            Tensors that only one of them has (a head, a decoder) are left out.

    Raises:
        ValueError: if they have nothing in common, or a tensor's shape differs.
    """
    total, common = 0.0, 0
    for name in sorted(weights.keys() & start.keys()):  # the same order on every rank
        now, then = weights[name], start[name]
        if isinstance(now, DTensor) and not isinstance(then, DTensor):
            now = now.full_tensor()
        if not now.is_floating_point():
            continue
        if now.shape != then.shape:
            raise ValueError(
                f"{name} is {tuple(now.shape)} now and was {tuple(then.shape)}: expected weights "
                "of one architecture"
            )
        total += float(gathered((precise(now) - precise(then)).square().sum()))
        common += 1
    if not common:
        raise ValueError(
            f"no names in common: {', '.join(list(weights)[:3])}, … and "
            f"{', '.join(list(start)[:3])}, …; expected two state_dicts of one architecture"
        )
    return total**0.5
