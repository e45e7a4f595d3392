"""The losses against their formulas in float64, and who gets the gradients."""

import copy
import math
import weakref

import pytest
import timm
import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_modules.pela import (
    Features,
    factorize,
    feature_distillation,
    low_rank_layers,
    weight_perturbation,
)
from lightning_modules.pela.factorize import product
from lightning_modules.pela.losses import weight_pairs


def pair(ratio=2):
    """A low-rank student and its teacher."""
    torch.manual_seed(0)
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
    teacher = timm.create_model("vit_tiny_patch16_224", num_classes=12, **settings).double().eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return factorize(copy.deepcopy(teacher), ratio), teacher


def error(call):
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


def reference_perturbation(student, teacher, p, epsilon, setting):
    distances = []
    for name, layer in low_rank_layers(student).items():
        entries = (layer.v.weight @ layer.u.weight - teacher.get_submodule(name).weight).abs()
        distances.append(entries.max() if p == math.inf else (entries**p).sum() ** (1 / p))
    if setting == "paper":
        return sum(d - epsilon for d in distances)
    return sum((d - epsilon) ** 2 for d in distances) / len(distances)


def test_feature_distillation_is_its_formula():
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 5, 6), (4, 5, 6), (4, 3)]
    s, t = (
        [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        for _ in range(2)
    )
    for_each_input = [
        sum(((a[b] - c[b]) ** 2).sum() for a, c in zip(s, t, strict=True)) / (2 * 3)
        for b in range(4)
    ]
    torch.testing.assert_close(feature_distillation(s, t), sum(for_each_input) / 4)
    released = sum(nn.functional.mse_loss(a, c) for a, c in zip(s, t, strict=True)) / 3
    torch.testing.assert_close(feature_distillation(s, t, setting="released"), released)
    assert feature_distillation(s, s) == 0


def test_padding_is_left_out_of_feature_distillation():
    """As if each sequence were compared without its padding."""
    generator = torch.Generator().manual_seed(0)
    s, t = (
        [torch.randn(2, 5, 6, dtype=torch.float64, generator=generator) for _ in range(3)]
        for _ in range(2)
    )
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    masks = [mask, None, mask.bool()]
    paper, released = 0.0, 0.0
    for a, b, m in zip(s, t, masks, strict=True):
        lengths = [5, 5] if m is None else [3, 4]
        squares = [((a[i, :n] - b[i, :n]) ** 2).sum() for i, n in enumerate(lengths)]
        paper += sum(squares) / 2 / (2 * 3)
        released += sum(squares) / (sum(lengths) * 6) / 3
    torch.testing.assert_close(feature_distillation(s, t, masks), paper)
    torch.testing.assert_close(feature_distillation(s, t, masks, "released"), released)
    assert "2 masks for 3 features" in error(lambda: feature_distillation(s, t, masks[:2]))
    wrong = [mask[:, :4], None, None]
    assert "mask 0 is (2, 4) for a feature (2, 5, 6)" in error(
        lambda: feature_distillation(s, t, wrong)
    )


def test_momentum_copies_have_no_weight_perturbation():
    student, teacher = pair()
    both = nn.ModuleDict({"online": student, "momentum": copy.deepcopy(student)})
    both["momentum"].requires_grad_(False)
    teachers = nn.ModuleDict({"online": teacher, "momentum": teacher})
    assert weight_perturbation(both, teachers) == weight_perturbation(student, teacher)
    both.requires_grad_(False)
    assert "no low-rank layer that trains" in error(lambda: weight_perturbation(both, teachers))


@pytest.mark.parametrize("setting", ["paper", "released"])
@pytest.mark.parametrize(
    ("p", "epsilon"), [(math.inf, 0.0), (math.inf, 1e-3), (2, 0.1), (1, 0), (3, 0)]
)
def test_weight_perturbation_is_its_formula(p, epsilon, setting):
    student, teacher = pair()
    loss = weight_perturbation(student, teacher, p, epsilon, setting)
    loss.backward()
    gradients = {n: q.grad for n, q in student.named_parameters() if q.grad is not None}
    student.zero_grad()
    expected = reference_perturbation(student, teacher, p, epsilon, setting)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    assert len(gradients) == 2 * 12
    for name, parameter in student.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-10)


def test_weight_perturbation_takes_pairs():
    student, teacher = pair()
    pairs = weight_pairs(student, teacher)
    assert weight_perturbation(pairs) == weight_perturbation(student, teacher)
    assert weight_perturbation(pairs[:1]) < weight_perturbation(pairs)


def test_weight_perturbation_at_full_rank_is_nothing_and_has_finite_gradients():
    student, _ = pair()
    pairs = [(u, v, product(u, v).detach()) for u, v in low_rank_layers(student).values()]
    for p in (1, 2, math.inf):
        loss = weight_perturbation(pairs, p=p)
        loss.backward()
        assert loss < 1e-10
    assert all(torch.isfinite(u.weight.grad).all() for u, _, _ in pairs)


def test_gradients_reach_only_the_student():
    student, teacher = pair()
    x = torch.randn(2, 3, 16, 16).double()
    with Features(student) as s, Features(teacher) as t:
        student(x), teacher(x)
        own, other = s.take(), t.take()
    assert other[0].requires_grad  # were the teacher not frozen, it still would get nothing
    for setting in ("paper", "released"):
        loss = feature_distillation(own, other, setting=setting)
        loss = loss + weight_perturbation(student, teacher, setting=setting)
        loss.backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    for layer in low_rank_layers(student).values():
        assert layer.u.weight.grad.abs().sum() > 0 and layer.v.weight.grad.abs().sum() > 0


def test_float32_under_autocast():
    student, teacher = (model.float() for model in pair())
    x = torch.randn(2, 3, 16, 16)
    outside = weight_perturbation(student, teacher, p=2)
    with Features(student) as s, Features(teacher) as t, torch.autocast("cpu", torch.bfloat16):
        student(x), teacher(x)
        own, other = s.take(), t.take()
        features = feature_distillation(own, other)
        inside = weight_perturbation(student, teacher, p=2)
    assert inside.dtype == features.dtype == torch.float32
    assert torch.equal(inside, outside)
    features = feature_distillation([f.bfloat16() for f in own], other)
    assert features.dtype == torch.float32
    inside.backward()  # computed again outside of autocast: still the same float32
    gradient = student.blocks[0].mlp.fc1.u.weight.grad.clone()
    student.zero_grad()
    outside.backward()
    assert torch.equal(student.blocks[0].mlp.fc1.u.weight.grad, gradient)


class LiveMatrices(TorchDispatchMode):
    """The most tensors of one shape that exist at the same time."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.live, self.most = shape, 0, 0

    def gone(self):
        self.live -= 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if torch.is_tensor(out) and out.shape == self.shape and out is not args[0]:
            self.live += 1
            self.most = max(self.most, self.live)
            weakref.finalize(out, self.gone)
        return out


@pytest.mark.parametrize("p", [2, math.inf])
def test_one_difference_at_a_time_backward_too(p):
    most = []
    for depth in (1, 8):
        torch.manual_seed(0)
        teacher = nn.ModuleList(nn.Linear(24, 40) for _ in range(depth))
        student = factorize(copy.deepcopy(teacher), 3)
        pairs = [(u, v, weight.clone()) for u, v, weight in weight_pairs(student, teacher)]
        with LiveMatrices((40, 24)) as matrices:
            weight_perturbation(pairs, p=p).backward()
        most.append(matrices.most)
    assert most[1] == most[0] > 0


def test_sharded_parameters(tmp_path):
    """FSDP2 on one process: outside of forward the parameters are DTensors."""
    student, teacher = pair()
    expected = weight_perturbation(student, teacher, p=2)
    expected.backward()
    gradient = student.blocks[0].mlp.fc1.u.weight.grad.clone()
    student.zero_grad()
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for model in (student, teacher):
            fully_shard(model, mesh=mesh)
        loss = weight_perturbation(student, teacher, p=2)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        sharded = student.blocks[0].mlp.fc1.u.weight.grad.full_tensor()
        torch.testing.assert_close(sharded, gradient)
    finally:
        destroy_process_group()


def test_features_that_do_not_match():
    a, b = torch.zeros(2, 5, 8), torch.zeros(2, 4, 8)
    message = error(lambda: feature_distillation([a, a], [a]))
    assert "the student gives 2 features and the teacher 1" in message
    assert "gives 0 features" in error(lambda: feature_distillation([], []))
    message = error(lambda: feature_distillation([a, a], [a, b]))
    assert "feature 1 is (2, 5, 8) in the student and (2, 4, 8) in the teacher" in message


def test_bad_settings():
    student, teacher = pair()
    a = [torch.zeros(1, 1)]
    for call in (
        lambda: feature_distillation(a, a, setting="mean"),
        lambda: weight_perturbation(student, teacher, setting="mean"),
    ):
        assert "unknown setting 'mean': expected 'paper' or 'released'" in error(call)
    assert "p is 0.5" in error(lambda: weight_perturbation(student, teacher, p=0.5))
    assert "epsilon is -1" in error(lambda: weight_perturbation(student, teacher, epsilon=-1))
    assert "needs the teacher" in error(lambda: weight_perturbation(student))
    assert "no pairs" in error(lambda: weight_perturbation([]))


def test_a_teacher_that_does_not_match():
    student, teacher = pair()
    assert "has no low-rank layer" in error(lambda: weight_perturbation(teacher, teacher))
    message = error(lambda: weight_perturbation(student, student))
    assert "VisionTransformer has no dense layer blocks.0.attn.qkv" in message
    teacher.blocks[1].mlp.fc1 = nn.Linear(32, 64)
    message = error(lambda: weight_perturbation(student, teacher))
    assert "blocks.1.mlp.fc1 is 32 → 128 in the student and 32 → 64 in the teacher" in message
