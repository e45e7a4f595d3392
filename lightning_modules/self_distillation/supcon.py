"""Supervised contrastive learning: a baseline for further pre-training an encoder.

Self-distillation (arXiv 2210.02871), Table 5; Khosla et al., Supervised Contrastive Learning (arXiv
2004.11362), Eq. 2. Afterwards the projection head is dropped, and a linear classifier is trained on
the frozen encoder with cross-entropy.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.modes import precise


def supervised_contrastive(features: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """L = mean over anchors i of −1/|P_i| Σ_{j∈P_i} log(exp(z_i·z_j/τ) / Σ_{k≠i} exp(z_i·z_k/τ)).

    z are the features scaled to unit length, P_i the other examples of i's class. Anchors whose
    class has no other example in the batch are left out. Khosla et al. sum over anchors; the mean
    makes the step size independent of the batch size. Computed in float32 even under autocast
    (float64 features in float64).

    Args:
        features: (B, D), projected; with two views of each example B counts both.
        labels: (B,), class indices.
        temperature: τ, above 0.

    Returns:
        A scalar; zero, with zero gradients, if no anchor has another of its class.

    Raises:
        ValueError: for a temperature of 0 or less.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: expected a number above 0")
    with torch.autocast(features.device.type, enabled=False):
        features = precise(features)
        unit = F.normalize(features, dim=-1)
        same_example = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
        positive = (labels[:, None] == labels) & ~same_example
        # not -inf, so that a batch of one gives 0 and not NaN
        similar = (unit @ unit.T / temperature).masked_fill(
            same_example, torch.finfo(unit.dtype).min
        )
        log_probabilities = similar.log_softmax(-1).masked_fill(~positive, 0)
        counts = positive.sum(1)
        losses = -log_probabilities.sum(1) / counts.clamp(min=1)
        return losses.sum() / (counts > 0).sum().clamp(min=1)


def projection_head(encoder: Any) -> nn.Module:
    """Khosla et al.'s projection head: a hidden layer of the encoder's width, and 128 outputs.

    Args:
        encoder: a timm ViT or a transformers model.
    """
    width = getattr(encoder, "embed_dim", None) or encoder.config.hidden_size
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 128))
