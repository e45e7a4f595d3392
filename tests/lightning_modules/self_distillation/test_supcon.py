"""The contrastive loss against its formula; anchors without positives."""

import pytest
import timm
import torch
from torch.nn import functional as F
from transformers import BertConfig, BertModel

from lightning_modules.self_distillation import supervised_contrastive
from lightning_modules.self_distillation.supcon import projection_head

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
    torch.testing.assert_close(supervised_contrastive(x, LABELS, 0.3), expected)
    torch.testing.assert_close(supervised_contrastive(3 * x, LABELS, 0.3), expected)  # unit length
    torch.testing.assert_close(supervised_contrastive(x, LABELS), reference(x, LABELS, 0.1))


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
        (gradient,) = torch.autograd.grad(supervised_contrastive(x, LABELS, 0.3), x)
        x = (x - gradient).detach().requires_grad_()
    unit = F.normalize(x, dim=-1)
    assert unit[0] @ unit[2] > 0.99 > unit[0] @ unit[1]


def test_bad_settings():
    with pytest.raises(ValueError, match="temperature is 0: expected a number above 0"):
        supervised_contrastive(features(), LABELS, 0)


def test_the_projection_has_the_encoders_width():
    settings = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    for encoder in (
        timm.create_model("vit_tiny_patch16_224", num_classes=0, **settings),
        BertModel(
            BertConfig(
                vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                intermediate_size=8,
            )
        ),
    ):  # fmt: skip
        head = projection_head(encoder)
        assert [tuple(p.shape) for p in head.parameters()] == [(8, 8), (8,), (128, 8), (128,)]
