"""The contrastive loss against its formula; anchors without positives."""

import pytest
import torch
from torch.nn import functional as F

from lightning_modules.self_distillation import contrastive_loss
from lightning_modules.self_distillation.supcon import supervised_contrastive

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])  # class 2 has one example


def features(dtype=torch.float64):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)


def reference(x, labels, temperature):
    unit = [row / (row**2).sum() ** 0.5 for row in x]
    terms = []
    for i, anchor in enumerate(unit):
        others = [k for k in range(len(unit)) if k != i]
        positives = [j for j in others if labels[j] == labels[i]]
        if positives:
            total = sum((anchor @ unit[k] / temperature).exp() for k in others)
            chances = [(anchor @ unit[j] / temperature).exp() / total for j in positives]
            terms.append(-sum(chance.log() for chance in chances) / len(positives))
    return sum(terms) / len(terms)


def test_its_formula():
    x = features()
    expected = reference(x, LABELS, 0.3)
    torch.testing.assert_close(supervised_contrastive(x, LABELS), expected)
    torch.testing.assert_close(supervised_contrastive(3 * x, LABELS), expected)  # unit length
    logits = torch.randn(6, 3, dtype=torch.float64)
    mixed = contrastive_loss(logits, x, LABELS)
    torch.testing.assert_close(mixed, 0.1 * F.cross_entropy(logits, LABELS) + 0.9 * expected)
    assert contrastive_loss(logits, x, LABELS, alpha=0) == F.cross_entropy(logits, LABELS)


@pytest.mark.parametrize("count", [1, 4])
def test_no_positives_is_no_loss(count):
    x = features()[:count].requires_grad_()
    loss = supervised_contrastive(x, torch.arange(count))
    loss.backward()
    assert loss == 0 and not x.grad.any()


def test_float32_under_autocast():
    x = features(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = supervised_contrastive(x, LABELS)
    assert loss.dtype == torch.float32
    assert loss == supervised_contrastive(x.float(), LABELS)


def test_gradients_draw_a_class_together():
    x = features().requires_grad_()
    for _ in range(300):
        (gradient,) = torch.autograd.grad(supervised_contrastive(x, LABELS), x)
        x = (x - gradient).detach().requires_grad_()
    unit = F.normalize(x, dim=-1)
    assert unit[0] @ unit[2] > 0.99 > unit[0] @ unit[1]


def test_bad_settings():
    with pytest.raises(ValueError, match="temperature is 0: expected a number above 0"):
        supervised_contrastive(features(), LABELS, 0)
    with pytest.raises(ValueError, match="alpha is 1.5: expected a share between 0 and 1"):
        contrastive_loss(torch.zeros(6, 3), features(), LABELS, alpha=1.5)
