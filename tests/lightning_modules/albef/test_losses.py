"""ALBEF's losses against their formulas, in float64."""

import math

import pytest
import torch

from lightning_modules.albef.losses import (
    IGNORED,
    contrastive_loss,
    contrastive_targets,
    distilled_cross_entropy,
    draw_negatives,
    matching_labels,
    matching_loss,
    mean_or_zero,
)


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_contrast_by_hand():
    torch.manual_seed(0)
    image, text, image_m, text_m = (random(3, 7) for _ in range(4))
    ids, keys = torch.tensor([4, 5, 4]), torch.tensor([4, 5, 4, 9, 5, -100, 4])
    positive = ids[:, None] == keys
    alpha, expected = 0.3, 0.0
    for logits, logits_m in ((image, image_m), (text, text_m)):
        for row in range(3):
            shared = sum(int(keys[k] == ids[row]) for k in range(7))
            total = sum(math.exp(v) for v in logits[row].tolist())
            total_m = sum(math.exp(v) for v in logits_m[row].tolist())
            for k in range(7):
                truth = float(keys[k] == ids[row]) / shared
                target = alpha * math.exp(logits_m[row, k]) / total_m + (1 - alpha) * truth
                expected -= target * math.log(math.exp(logits[row, k]) / total)
    expected /= 3 * 2
    targets = (contrastive_targets(m, positive, alpha) for m in (image_m, text_m))
    assert contrastive_loss(image, text, *targets).item() == pytest.approx(expected, rel=1e-12)


def test_distillation_by_hand():
    torch.manual_seed(0)
    logits, logits_m, labels = random(4, 5), random(4, 5), torch.tensor([0, 3, 3, 1])
    losses = distilled_cross_entropy(logits, labels, logits_m, 0.4)
    for row in range(4):
        log_p = [v - math.log(sum(map(math.exp, logits[row].tolist()))) for v in logits[row]]
        q = [math.exp(v) / sum(map(math.exp, logits_m[row].tolist())) for v in logits_m[row]]
        expected = -0.6 * log_p[labels[row]] - 0.4 * sum(a * b for a, b in zip(q, log_p))  # noqa: B905
        assert losses[row].item() == pytest.approx(float(expected), rel=1e-12)
    hard = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    assert torch.equal(distilled_cross_entropy(logits, labels, None, 0.4), hard)
    assert mean_or_zero(losses[:0]) == 0


def test_hard_negatives_follow_the_similarities_and_never_share_the_id():
    torch.manual_seed(0)
    ids = torch.tensor([7, 7, 8, 9])
    logits = torch.tensor([[9.0, 9.0, 0.0, math.log(3.0)]] * 4)
    drawn = torch.stack([draw_negatives(logits, ids) for _ in range(4000)])
    for row in range(4):
        assert not (ids[drawn[:, row]] == ids[row]).any()
    # of the two that the first may have, the fourth is three times as likely
    assert (drawn[:, 0] == 3).double().mean().item() == pytest.approx(0.75, abs=0.03)
    # a similarity whose softmax over the whole row underflows can still be drawn
    sharp = torch.tensor([[0.0, -1e4, -1e4 + 1], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert draw_negatives(sharp, torch.arange(3))[0] in (1, 2)


def test_a_batch_of_one_id_has_no_negatives():
    none = draw_negatives(torch.randn(3, 3), torch.tensor([5, 5, 5]))
    assert none.tolist() == [IGNORED] * 3
    labels = matching_labels(none, none)
    assert labels.tolist() == [1, 1, 1] + [IGNORED] * 6
    logits = random(9, 2)
    expected = -logits[:3].log_softmax(1)[:, 1].mean()
    assert matching_loss(logits, labels).item() == pytest.approx(expected.item())
