"""`compress` on models of three libraries, with batches of three kinds."""

import copy

import pytest
import timm
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

from lightning_modules.counting import count_parameters
from lightning_modules.pela import (
    compress,
    factorize,
    low_rank_layers,
    plan_energy,
    plan_of,
    plan_uniform,
)
from lightning_modules.pela.calibration import Calibration, run
from lightning_modules.pela.compress import compress_each, layer_moments, truncate
from lightning_modules.pela.factorize import product
from lightning_modules.pela.layers import dense_weight, find_layers


class Two(nn.Module):
    """A plain module of two arguments."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(24, 32), nn.Linear(24, 32)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, y):
        return self.drop(self.a(x) + self.b(y))


def vit():
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=12, **settings)


def bert():
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    return BertModel(config)


def gpt2():
    return GPT2Model(GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=1, n_head=4))


def tokens():
    ids = torch.randint(50, (4, 12))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


CASES = {
    "timm": (vit, lambda: torch.randn(8, 3, 16, 16)),
    "bert": (bert, tokens),
    "gpt2": (gpt2, tokens),
    "plain": (Two, lambda: (torch.randn(64, 24), torch.randn(64, 24))),
}


def output_error(dense, low_rank, moments):
    """The squared error of the layers' outputs as a share of their energy, summed."""
    total = 0.0
    for name, layer in find_layers(dense).items():
        weight = dense_weight(layer).double()
        lost = product(*low_rank.get_submodule(name)).double() - weight
        total += (
            (lost @ moments[name] * lost).sum() / (weight @ moments[name] * weight).sum()
        ).item()
    return total


@pytest.mark.parametrize("case", CASES)
def test_whitened_factors_lose_less_of_the_outputs(case):
    torch.manual_seed(0)
    make, draw = CASES[case]
    dense = make().train()
    batches = [draw() for _ in range(4)]
    with Calibration(dense) as calibration:
        run(dense, batches)
    assert dense.training  # as before
    moments = calibration.moments()
    errors, sizes = {}, set()
    for factors in ("svd", "asvd", "whitened"):
        model = copy.deepcopy(dense)
        assert compress(model, batches, 2.0, factors=factors) is model
        errors[factors] = output_error(dense, model, moments)
        sizes.add(count_parameters(model))
    assert errors["whitened"] < 0.999 * min(errors["svd"], errors["asvd"])
    assert len(sizes) == 1 and sizes.pop() < count_parameters(dense)


def test_asvd_scales_by_the_root_of_the_mean_magnitude():
    """arXiv 2312.05821: W S = A Σ Bᵀ, S = diag(mean|x|)^½, written out."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"fc": nn.Linear(20, 30)}).double()
    x = torch.randn(50, 20, dtype=torch.float64) * torch.rand(20, dtype=torch.float64) * 10
    weight = model["fc"].weight.detach().clone()
    with Calibration(model, kind="asvd") as calibration:
        model["fc"](x)
    moments = calibration.moments()
    s = x.abs().mean(0).sqrt()
    a, sigma, bt = torch.linalg.svd(weight * s, full_matrices=False)
    expected = (a[:, :6] * sigma[:6]) @ bt[:6] / s
    found = product(*factorize(model, ranks={"fc": 6}, moments=moments)["fc"])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_calibration_moves_batches_to_the_models_device(elsewhere):
    layer = nn.Sequential(nn.Dropout(), nn.Linear(3, 16))  # calibrated without dropout
    inputs = torch.randn(2, 4, 3)  # of 8 tokens
    with Calibration(layer) as calibration:
        run(layer, [elsewhere(inputs)])
    (moment,) = calibration.moments().values()
    tokens = inputs.double().flatten(0, 1)
    assert torch.allclose(moment, tokens.T @ tokens / 8)


def test_energy_ranks_are_the_plans():
    torch.manual_seed(0)
    model = vit()
    plan = plan_energy(model, 3.0, multiple=2)
    assert plan_of(compress(model, ratio=3.0, ranks="energy", multiple=2)) == plan
    assert all(rank % 2 == 0 for rank in plan.values())
    costs = {n: sum(dense_weight(layer).shape) for n, layer in find_layers(vit()).items()}
    spent, allowed = (
        sum(ranks[n] * cost for n, cost in costs.items())
        for ranks in (plan, plan_uniform(vit(), 3.0, multiple=2))
    )
    assert spent <= allowed


def test_bad_choices():
    for said, settings in (
        ("unknown ranks 'best'", {"ranks": "best"}),
        ("unknown factors 'qr'", {"factors": "qr"}),
        ("factors 'whitened' need batches", {"factors": "whitened"}),
    ):
        model = vit()
        with pytest.raises(ValueError, match=said):
            compress(model, **settings)
        assert not low_rank_layers(model)
    with pytest.raises(ValueError, match="unknown kind 'mean' of calibration"):
        Calibration(vit(), kind="mean")


@pytest.mark.parametrize("ranks", ["uniform", "energy"])
@pytest.mark.parametrize("factors", ["svd", "asvd", "whitened"])
def test_several_ratios_from_one_decomposition(ranks, factors):
    """What `compress` gives at each ratio; the dense model is left as it was."""
    torch.manual_seed(0)
    dense = vit().double()
    batches = [torch.randn(8, 3, 16, 16, dtype=torch.float64) for _ in range(4)]
    before = copy.deepcopy(dense.state_dict())
    moments = layer_moments(dense, batches, factors)
    several = compress_each(dense, [1.5, 3.0], ranks, moments)
    assert not low_rank_layers(dense)
    torch.testing.assert_close(dense.state_dict(), before, rtol=0, atol=0)
    for ratio, model in several.items():
        alone = compress(copy.deepcopy(dense), batches, ratio, ranks, factors)
        assert plan_of(model) == plan_of(alone)
        assert count_parameters(model) == count_parameters(alone) < count_parameters(dense)
        torch.testing.assert_close(model(batches[0]), alone(batches[0]))
        u = next(iter(low_rank_layers(model).values())).u
        assert u.weight.untyped_storage().nbytes() == u.weight.nbytes  # nothing larger is kept


def test_truncate_refuses_before_it_changes_anything():
    model = factorize(vit(), 2.0)
    plan = plan_of(model)
    name, rank = next(iter(plan.items()))
    for said, ranks in (
        ("'nowhere' is no low-rank layer of VisionTransformer", {name: 1, "nowhere": 1}),
        (f"rank {rank + 1} for {name}: expected 1 to its rank {rank}", {name: rank + 1}),
        (f"rank 0 for {name}", {name: 0}),
    ):
        with pytest.raises(ValueError, match=said):
            truncate(model, ranks)
        assert plan_of(model) == plan
