"""ALBEF's losses (arXiv 2107.07651, Eqs 1–7) as plain functions, in float32 also under autocast."""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # a label that takes no part


def contrastive_targets(logits_m: Tensor, positive: Tensor, alpha: float) -> Tensor:
    """What an image (or text) should be like (Eq. 6).

        y = α · softmax(s_m / τ) + (1 − α) · y_true,   y_true shared evenly by what is positive

    Args:
        logits_m: the momentum model's similarities over τ, (B, K).
        positive: which of the keys are of the same id, (B, K); at least one in each row.
        alpha: share of the momentum model's opinion, 0 to 1.
    """
    truth = positive.to(logits_m.dtype)
    truth = truth / truth.sum(1, keepdim=True)
    return alpha * logits_m.softmax(1) + (1 - alpha) * truth


def contrastive_loss(
    image_logits: Tensor, text_logits: Tensor, image_targets: Tensor, text_targets: Tensor
) -> Tensor:
    """L_itc (Eqs 2 and 6): cross-entropy on soft targets, mean of both directions; all (B, K)."""
    image_loss = F.cross_entropy(image_logits, image_targets)
    return (image_loss + F.cross_entropy(text_logits, text_targets)) / 2


def draw_negatives(logits: Tensor, ids: Tensor) -> Tensor:
    """A hard negative for every row: another of the batch, more often the more similar it is.

    Drawn from softmax(logits) over those of another id (Section 3.2 of the paper).

    Args:
        logits: similarities over τ within the batch, (B, B).
        ids: which image each belongs to, (B,).

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

    1 for a match, 0 for none, `IGNORED` where there was no negative to draw.
    """
    negatives = torch.cat([image_negatives, text_negatives])
    zeros = torch.zeros_like(negatives).masked_fill(negatives == IGNORED, IGNORED)
    return torch.cat([torch.ones_like(image_negatives), zeros])


def matching_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """L_itm (Eq. 4): cross-entropy of (N, 2) on labels (N,)."""
    return F.cross_entropy(precise(logits), labels, ignore_index=IGNORED)


def distilled_cross_entropy(
    logits: Tensor, labels: Tensor, logits_m: Tensor | None, alpha: float
) -> Tensor:
    """Cross-entropy on the labels and on the momentum model's opinion (Eq. 7), a number each.

        (1 − α) · CE(labels, p) + α · CE(softmax(logits_m), p)

    Args:
        logits: (N, classes).
        labels: (N,), none ignored.
        logits_m: of the momentum model, (N, classes); None when there is none.
        alpha: its share, 0 to 1.

    Returns:
        (N,).
    """
    hard = F.cross_entropy(precise(logits), labels, reduction="none")
    if logits_m is None or alpha == 0:
        return hard
    soft = F.cross_entropy(precise(logits), precise(logits_m).softmax(-1), reduction="none")
    return (1 - alpha) * hard + alpha * soft


def mean_or_zero(values: Tensor) -> Tensor:
    """The mean, and 0 with its gradient of 0 where there are none: no token was masked."""
    return values.sum() / max(1, len(values))


def precise(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
