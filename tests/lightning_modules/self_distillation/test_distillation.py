"""What ties student to teacher, against formulas written out; who gets the gradients."""

import copy

import pytest
import timm
import torch
from torch import nn

from lightning_modules.self_distillation import (
    distillation,
    prediction_matching,
    token_prediction_matching,
    weight_matching,
)
from lightning_modules.weights import fingerprint


def pair(*shape):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for _ in range(2)
    ]


# Padding right, padding left, none.
ATTENTION = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("match", ["cls", "all", "mean"])
@pytest.mark.parametrize("attention", [None, ATTENTION], ids=["whole", "padded"])
def test_hidden_states(match, reduction, attention):
    student, teacher = pair(3, 5, 4)
    terms = []
    for i in range(3):
        tokens = range(5) if attention is None else ATTENTION[i].nonzero()[:, 0].tolist()
        s, t = (side[i, list(tokens)] for side in (student, teacher))
        if match == "cls":
            squares = (s[0] - t[0]) ** 2
        elif match == "mean":
            squares = (s.mean(0) - t.mean(0)) ** 2
        else:
            squares = (s - t) ** 2
        terms.append(squares.sum() if reduction == "sum" else squares.mean())
    loss = distillation(student, teacher, match, reduction, attention)
    torch.testing.assert_close(loss, sum(terms) / 3)


def test_the_default_is_the_released_codes():
    """Worked by hand: ([3, 4] − [0, 0])² = 25 and 1, over two images; the patches do not count."""
    student = torch.tensor([[[3.0, 4.0], [9.0, 9.0]], [[0.0, 1.0], [9.0, 9.0]]])
    assert distillation(student, torch.zeros(2, 2, 2)) == 13


def test_padding_changes_nothing():
    student, teacher = pair(3, 5, 4)
    other = torch.where(ATTENTION[..., None].bool(), student, 1e6)
    for match in ("cls", "all", "mean"):
        losses = [distillation(s, teacher, match, "sum", ATTENTION) for s in (student, other)]
        assert losses[0] == losses[1]


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_pixels(reduction):
    student, teacher = pair(2, 3, 4)
    squares = [((student[i] - teacher[i]) ** 2).flatten() for i in range(2)]
    expected = sum(s.sum() if reduction == "sum" else s.mean() for s in squares) / 2
    torch.testing.assert_close(prediction_matching(student, teacher, reduction), expected)


def test_tokens():
    """The divergences of all positions but padding, hidden or not."""
    student, teacher = pair(3, 5, 4)
    for attention in (None, ATTENTION):
        terms = []
        for i in range(3):
            places = range(5) if attention is None else ATTENTION[i].nonzero()[:, 0].tolist()
            terms.append([])
            for t in places:
                p, q = teacher[i, t].softmax(-1), student[i, t].softmax(-1)
                terms[-1].append((p * (p / q).log()).sum())
        total = token_prediction_matching(student, teacher, attention)
        torch.testing.assert_close(total, sum(map(sum, terms)) / 3)
        mean = token_prediction_matching(student, teacher, attention, "mean")
        torch.testing.assert_close(mean, sum(sum(one) / len(one) for one in terms) / 3)
    assert token_prediction_matching(student, student) == 0


@pytest.mark.parametrize(
    "loss",
    [
        distillation,
        prediction_matching,
        token_prediction_matching,
    ],
)
def test_gradients_reach_the_student_only_and_in_float32(loss):
    student, teacher = pair(2, 3, 4)
    loss(student, teacher).backward()
    assert student.grad.any() and teacher.grad is None
    student, teacher = (side.detach().bfloat16() for side in (student, teacher))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(student, teacher)
    assert value.dtype == torch.float32
    assert value == loss(student.float(), teacher.float())


def models():
    torch.manual_seed(0)
    settings = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    teacher = timm.create_model("vit_tiny_patch16_224", num_classes=0, **settings).double()
    student = copy.deepcopy(teacher)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(torch.randn_like(parameter))
    return student, teacher


def test_weights():
    student, teacher = models()
    before = fingerprint(teacher.state_dict())
    own, other = dict(student.named_parameters()), dict(teacher.named_parameters())
    squares = sum(((own[n] - other[n]) ** 2).sum() for n in own)
    torch.testing.assert_close(weight_matching(student, teacher), squares)
    layers = [f"blocks.0.{n}.weight" for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    norms = 0.0
    for name in ["patch_embed.proj.weight", *layers]:
        rows = (own[name] - other[name]).flatten(1).tolist()
        norms += max(sum(abs(entry) for entry in row) for row in rows)
    penalty = weight_matching(student, teacher, "mars")
    assert penalty.item() == pytest.approx(norms, rel=1e-12)
    (penalty + weight_matching(student, teacher)).backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad.any() for p in student.parameters())
    assert fingerprint(teacher.state_dict()) == before
    assert weight_matching(teacher, teacher) == 0 == weight_matching(teacher, teacher, "mars")


def test_bad_input():
    student, teacher = pair(2, 3, 4)
    with pytest.raises(ValueError, match="unknown match 'first': expected 'cls', 'all' or 'mean'"):
        distillation(student, teacher, "first")
    with pytest.raises(ValueError, match="unknown reduction 'none'"):
        prediction_matching(student, teacher, "none")
    with pytest.raises(ValueError, match=r"gives \(2, 3, 4\) and the teacher \(2, 2, 4\)"):
        distillation(student, teacher[:, :2])
    with pytest.raises(ValueError, match="unknown norm 'l1'"):
        weight_matching(*models(), "l1")
    with pytest.raises(ValueError, match=r"0.bias is \(3,\) in the student and None in the teach"):
        weight_matching(nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3, bias=False)))
