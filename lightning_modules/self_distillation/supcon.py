"""Supervised contrastive learning beside cross-entropy.

Gunel et al., Supervised Contrastive Learning for Pre-trained Language Model Fine-tuning
(arXiv 2011.01403).
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def supervised_contrastive(features: Tensor, labels: Tensor, temperature: float = 0.3) -> Tensor:
    """SCL = mean over anchors i of −1/|P_i| Σ_{j∈P_i} log(exp(φ_i·φ_j/τ) / Σ_{k≠i} exp(φ_i·φ_k/τ)).

    φ are the features at unit length, P_i the other examples of i's class. Anchors whose class has
    no other example in the batch are left out. Gunel et al. sum over anchors; the mean keeps the
    weight α independent of the batch's size. Computed in float32 also under autocast (float64 for
    float64).

    Args:
        features: (B, D), of [CLS].
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


def contrastive_loss(
    logits: Tensor, features: Tensor, labels: Tensor, alpha: float = 0.9, temperature: float = 0.3
) -> Tensor:
    """(1 − α) · CE + α · SCL.

    Args:
        logits: (B, C).
        features: (B, D), of [CLS].
        labels: (B,) classes.
        alpha: α, in [0, 1].
        temperature: τ, above 0.

    Raises:
        ValueError: for alpha or temperature out of range.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}: expected a share between 0 and 1")
    contrast = supervised_contrastive(features, labels, temperature)
    return (1 - alpha) * F.cross_entropy(logits, labels) + alpha * contrast
