"""ALBEF's losses (arXiv 2107.07651, Eqs 1–7), computed in float32 even under autocast."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_modules.labels import IGNORED
from lightning_modules.modes import precise


def contrastive_targets(logits_m: Tensor, positive: Tensor, alpha: float) -> Tensor:
    """Soft targets of the contrastive loss (Eq. 6), for images or for texts.

        y = α · softmax(s_m / τ) + (1 − α) · y_true,   y_true uniform over the positive keys

    Args:
        logits_m: the momentum model's similarities over τ, (B, K).
        positive: true for keys of the row's id, (B, K); at least one in each row.
        alpha: weight of the momentum model's prediction, 0 to 1.

    Returns:
        Probabilities (B, K).
    """
    truth = positive.to(logits_m.dtype)
    truth = truth / truth.sum(1, keepdim=True)
    return alpha * logits_m.softmax(1) + (1 - alpha) * truth


def contrastive_loss(
    image_logits: Tensor, text_logits: Tensor, image_targets: Tensor, text_targets: Tensor
) -> Tensor:
    """L_itc (Eqs 2 and 6): cross-entropy on soft targets, the mean of both directions.

    Args:
        image_logits: similarities of images with text keys over τ, (B, K).
        text_logits: similarities of texts with image keys over τ, (B, K).
        image_targets: from `contrastive_targets`, (B, K).
        text_targets: from `contrastive_targets`, (B, K).

    Returns:
        A scalar.
    """
    image_loss = F.cross_entropy(image_logits, image_targets)
    return (image_loss + F.cross_entropy(text_logits, text_targets)) / 2


def draw_negatives(logits: Tensor, ids: Tensor) -> Tensor:
    """Draw a hard negative for every row, from softmax(logits) over the batch's other ids.

    Section 3.2 of the paper.

    Args:
        logits: similarities over τ within the batch, (B, B).
        ids: id of the image that each belongs to, (B,).

    Returns:
        Indices (B,); `IGNORED` where the batch has no other id.
    """
    same = ids[:, None] == ids[None, :]
    possible = ~same.all(1)
    weights = precise(logits.detach()).masked_fill(same, -torch.inf).softmax(1)
    weights = torch.where(possible[:, None], weights, torch.ones_like(weights))
    drawn = torch.multinomial(weights, 1)[:, 0]
    return torch.where(possible, drawn, torch.full_like(drawn, IGNORED))


def matching_labels(image_negatives: Tensor, text_negatives: Tensor) -> Tensor:
    """Labels (3B,) of the pairs [positive, text with another image, image with another text].

    Args:
        image_negatives: from `draw_negatives`, (B,).
        text_negatives: from `draw_negatives`, (B,).

    Returns:
        1 for a match, 0 for none, `IGNORED` where no negative could be drawn.
    """
    negatives = torch.cat([image_negatives, text_negatives])
    zeros = torch.zeros_like(negatives).masked_fill(negatives == IGNORED, IGNORED)
    return torch.cat([torch.ones_like(image_negatives), zeros])


def matching_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """L_itm (Eq. 4), a scalar: cross-entropy of logits (N, 2) on labels (N,)."""
    return F.cross_entropy(precise(logits), labels, ignore_index=IGNORED)


def distilled_cross_entropy(
    logits: Tensor, labels: Tensor, logits_m: Tensor | None, alpha: float
) -> Tensor:
    """Cross-entropy on the labels and on the momentum model's prediction (Eq. 7).

        (1 − α) · CE(labels, p) + α · CE(softmax(logits_m), p)

    Args:
        logits: (N, classes).
        labels: (N,), class indices.
        logits_m: the momentum model's, (N, classes); None without a momentum model.
        alpha: weight of the momentum model's prediction, 0 to 1.

    Returns:
        One loss for each row, (N,).
    """
    hard = F.cross_entropy(precise(logits), labels, reduction="none")
    if logits_m is None or alpha == 0:
        return hard
    soft = F.cross_entropy(precise(logits), precise(logits_m).softmax(-1), reduction="none")
    return (1 - alpha) * hard + alpha * soft


def mean_or_zero(values: Tensor) -> Tensor:
    """The mean of values (N,); 0 with a gradient of 0 where there are none (no masked token)."""
    return values.sum() / max(1, len(values))
