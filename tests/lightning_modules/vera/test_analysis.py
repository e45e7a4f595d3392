"""The analyses measure what they say, by formulas written out here."""

import copy
import math

import pytest
import torch
from torch import nn

from lightning_modules.tuning import tune
from lightning_modules.vera import add_vera, merge
from lightning_modules.vera.analysis import (
    cosine_similarity,
    fit_lora,
    fit_vera,
    stable_rank,
    vector_changes,
    weight_changes,
)
from lightning_modules.vera.vera import vectors_of


class Toy(nn.Module):
    """A plain layer and a fused one."""

    def __init__(self):
        super().__init__()
        self.query, self.qkv = nn.Linear(6, 6), nn.Linear(6, 18)

    def forward(self, x):
        return self.qkv(self.query(x))


def toy():
    torch.manual_seed(0)
    return Toy().double()


def scramble(tensors):
    with torch.no_grad():
        for tensor in tensors:
            tensor.normal_()


def test_vectors_have_moved_from_where_they_started():
    model = add_vera(toy(), 4, ["query", "qkv:0of3,2of3"], d_init=0.3)
    for change in vector_changes(model).values():
        assert change.d == pytest.approx(0.3 * math.sqrt(4))
        assert (change.b, change.d_moved, change.b_moved) == (0, 0, 0)
    for b, d in vectors_of(model).values():
        with torch.no_grad():
            b[:] = torch.arange(6.0)
            d[:] = torch.tensor([3.3, 0.3, 4.3, 0.3])
    changes = vector_changes(model)
    assert set(changes) == {"query", "qkv:0of3", "qkv:2of3"}
    for change in changes.values():
        assert change.d_moved == pytest.approx(5)
        assert change.b == change.b_moved == pytest.approx(math.sqrt(55))


def test_only_d_starts_at_zero_and_b_at_one():
    (change,) = vector_changes(add_vera(toy(), 4, "query", train=["d"])).values()
    assert (change.d, change.d_moved, change.b_moved) == (0, 0, 0)
    assert change.b == pytest.approx(math.sqrt(6))


def test_weight_changes_of_vera_are_what_merging_adds():
    model = add_vera(toy(), 4, ["query", "qkv:0of3,2of3"])
    scramble([v for pair in vectors_of(model).values() for v in pair])
    merged, base = merge(copy.deepcopy(model)), toy()
    changes = weight_changes(model)
    torch.testing.assert_close(changes["query"], merged.query.weight - base.query.weight)
    fused = merged.qkv.weight - base.qkv.weight
    torch.testing.assert_close(changes["qkv:0of3"], fused[:6])
    torch.testing.assert_close(changes["qkv:2of3"], fused[12:])


def test_weight_changes_of_lora_are_b_times_a():
    model = tune(toy(), "lora", rank=2, targets=["query"], alpha=6)
    scramble(p for name, p in model.named_parameters() if "lora_" in name)
    weights = {name.split(".")[1]: p for name, p in model.named_parameters() if "lora_" in name}
    changes = weight_changes(model)
    assert set(changes) == {"query"}
    expected = 3 * weights["lora_B"] @ weights["lora_A"]
    torch.testing.assert_close(changes["query"], expected)


def test_a_plain_model_has_no_weight_changes():
    with pytest.raises(ValueError, match="Toy has no layers of VeRA or LoRA"):
        weight_changes(toy())


def test_cosine_and_stable_rank():
    x = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert cosine_similarity(x, 2 * x) == pytest.approx(1)
    assert cosine_similarity(x, torch.tensor([[-1.0, 5.0], [7.0, 0.0]])) == pytest.approx(
        -0.12 / 3**0.5
    )
    assert cosine_similarity(x, torch.zeros(2, 2)) == 0
    assert stable_rank(x) == pytest.approx(25 / 16)
    assert stable_rank(torch.eye(5)) == pytest.approx(5)
    assert stable_rank(torch.zeros(3, 2)) == 0


def targets(count=8, size=10):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, size, size, generator=generator, dtype=torch.float64)


def test_lora_fits_as_well_as_its_rank_allows():
    matrices = targets()
    u, s, v = torch.linalg.svd(matrices)
    best = u[..., :3] @ torch.diag_embed(s[..., :3]) @ v[..., :3, :]
    torch.testing.assert_close(fit_lora(matrices, 3), (matrices - best).square().mean((1, 2)))
    assert fit_lora(matrices, 10).max() < 1e-28


def test_vera_of_rank_one_projects_every_row_on_a():
    matrices = targets()
    generator = torch.Generator().manual_seed(2)
    a = 2 * torch.rand(8, 1, 10, generator=generator, dtype=torch.float64) - 1
    along = (matrices * a).sum(-1) ** 2 / a.square().sum(-1)
    expected = (matrices.square().sum((1, 2)) - along.sum(-1)) / 100
    found = fit_vera(matrices, 1, torch.Generator().manual_seed(2), steps=2)
    torch.testing.assert_close(found, expected)


def test_vera_fits_better_with_more_steps_and_reaches_lora_of_as_many_parameters():
    matrices = targets()
    errors = [
        fit_vera(matrices, 50, torch.Generator().manual_seed(3), steps=steps)
        for steps in (1, 5, 25)
    ]
    assert (errors[0] >= errors[1]).all() and (errors[1] >= errors[2]).all()
    assert errors[2].mean() < fit_lora(matrices, 3).mean()  # both have 60


def test_vera_fits_what_it_can_represent():
    generator = torch.Generator().manual_seed(4)
    bound = [math.sqrt(6 / n) for n in (10, 3)]
    a, b_matrix = (
        (2 * torch.rand(1, *shape, generator=generator, dtype=torch.float64) - 1) * scale
        for shape, scale in zip(((3, 10), (10, 3)), bound, strict=True)
    )
    b, d = torch.rand(10, 1, dtype=torch.float64) + 0.5, torch.tensor([1.0, 2.0, 0.5]).double()
    reachable = b * ((b_matrix * d) @ a)
    assert fit_vera(reachable, 3, torch.Generator().manual_seed(4)).item() < 1e-20
