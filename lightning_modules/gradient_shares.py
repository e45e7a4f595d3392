"""Measures how much each term of a loss contributes to the gradient."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def gradient_shares(
    weighted: Mapping[str, Tensor], parameters: Iterable[torch.nn.Parameter]
) -> dict[str, Tensor]:
    """‖g_i‖ / Σ_j ‖g_j‖ by name, where g_i is the gradient of term i.

    The graph is retained, so that the loss can still be back-propagated.

    Args:
        weighted: the loss's terms by name, each with its weight applied.
        parameters: the gradient is taken with respect to these; frozen ones are left out.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    norms = {}
    for name, value in weighted.items():
        gradients = torch.autograd.grad(value, trained, retain_graph=True, allow_unused=True)
        parts = [g.float().norm() for g in gradients if g is not None]
        norms[name] = torch.stack(parts).norm()
    total = torch.stack(list(norms.values())).sum().clamp(min=1e-30)
    return {name: norm / total for name, norm in norms.items()}


def log_gradient_shares(module: Any, weighted: Mapping[str, Tensor]) -> None:
    """Log `train/share_…` of a loss's terms at the steps that the trainer logs.

    Costs one more backward pass for each term. Nothing is logged for a single term, nor where
    parameters are sharded.

    Args:
        module: a LightningModule whose network is `module.model`.
        weighted: see `gradient_shares`.
    """
    trainer = module._trainer
    if len(weighted) < 2 or trainer is None or module.device_mesh is not None:
        return
    if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
        shares = gradient_shares(weighted, module.model.parameters())
        module.log_dict({f"train/share_{name}": share for name, share in shares.items()})
