"""Supervised contrastive learning, with which an encoder is further pre-trained (Table 5).

Khosla et al., Supervised Contrastive Learning (arXiv 2004.11362), Eq. 2. Afterwards the projection
head is dropped, and a linear classifier trained on the frozen encoder with cross-entropy.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def supervised_contrastive(features: Tensor, labels: Tensor, temperature: float = 0.1) -> Tensor:
    """L = mean over anchors i of −1/|P_i| Σ_{j∈P_i} log(exp(z_i·z_j/τ) / Σ_{k≠i} exp(z_i·z_k/τ)).

    z are the features at unit length, P_i the other examples of i's class. Anchors whose class has
    no other example in the batch are left out. Khosla et al. sum over anchors; the mean keeps the
    step independent of the batch's size. Computed in float32 also under autocast (float64 for
    float64).

    Args:
        features: (B, D), projected; with two views of each example B counts both.
        labels: (B,) classes.
        temperature: τ, above 0.

    Returns:
        A scalar; zero, with zero gradients, if no anchor has another of its class.

    Raises:
        ValueError: for a temperature of 0 or less.
    """
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: expected a number above 0")
    with torch.autocast(features.device.type, enabled=False):
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        unit = F.normalize(features, dim=-1)
        itself = torch.eye(len(unit), dtype=torch.bool, device=unit.device)
        positive = (labels[:, None] == labels) & ~itself
        # Finite, so that a batch of one gives 0 and not NaN.
        similar = (unit @ unit.T / temperature).masked_fill(itself, torch.finfo(unit.dtype).min)
        chances = similar.log_softmax(-1).masked_fill(~positive, 0)
        numbers = positive.sum(1)
        anchors = -chances.sum(1) / numbers.clamp(min=1)
        return anchors.sum() / (numbers > 0).sum().clamp(min=1)


def projection_head(encoder: Any, outputs: int = 128) -> nn.Module:
    """Khosla et al.'s projection: a hidden layer of the encoder's width, and 128 outputs.

    Args:
        encoder: a timm ViT, or a transformers model.
        outputs: D of the features.
    """
    width = getattr(encoder, "embed_dim", None) or encoder.config.hidden_size
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs))
