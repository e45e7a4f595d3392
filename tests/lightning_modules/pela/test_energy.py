"""Energy ranks and calibrated factors against the uniform ratio, at equal parameters."""

import copy

import pytest
import timm
import torch
from torch import nn

from lightning_modules.counting import count_parameters
from lightning_modules.pela import Calibration, factorize, plan_energy, plan_uniform
from lightning_modules.pela.factorize import product
from lightning_modules.pela.layers import find_layers


def vit():
    """A small ViT whose layers differ in how fast their singular values fall."""
    torch.manual_seed(0)
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=12, **settings).double().eval()
    with torch.no_grad():
        for i, layer in enumerate(find_layers(model).values()):
            a, sigma, bt = torch.linalg.svd(torch.randn_like(layer.weight), full_matrices=False)
            decay = torch.exp(-torch.arange(len(sigma), dtype=torch.float64) * 0.04 * (i % 4))
            layer.weight.copy_(a * (sigma * decay) @ bt / 10)
    return model


def images(seed, count=16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 16, 16, dtype=torch.float64, generator=generator)


def errors(dense, low_rank, moments=None):
    """Each layer's squared error as a share of its energy, of the weight or of the output."""
    shares = []
    for name, layer in find_layers(dense).items():
        difference = product(*low_rank.get_submodule(name)) - layer.weight
        moment = torch.eye(layer.in_features).double() if moments is None else moments[name]
        energy = (layer.weight @ moment * layer.weight).sum()
        shares.append(((difference @ moment * difference).sum() / energy).item())
    return shares


@pytest.fixture(scope="module")
def moments():
    model = vit()
    with torch.no_grad(), Calibration(model) as calibration:
        model(images(1, 8))
        model(images(2, 8))
    return calibration.moments()


@pytest.mark.parametrize("ratio", [1.5, 2, 3])
def test_energy_keeps_more_at_no_more_parameters(ratio):
    dense = vit()
    uniform = factorize(copy.deepcopy(dense), ratio)
    energy = factorize(copy.deepcopy(dense), ranks=plan_energy(dense, ratio))
    largest = max(layer.in_features + layer.out_features for layer in find_layers(dense).values())
    spare = count_parameters(uniform) - count_parameters(energy)
    assert 0 <= spare < largest
    assert sum(errors(dense, energy)) < 0.95 * sum(errors(dense, uniform))


@pytest.mark.parametrize("ratio, multiple", [(10, 8), (8, 8), (4, 16)])
def test_multiples_above_the_uniform_rank_keep_the_budget(ratio, multiple):
    layers = [nn.Linear(64, 64) for _ in range(4)]
    for i, layer in enumerate(layers):  # so that energy would move rank between them
        nn.init.orthogonal_(layer.weight)
        layer.weight.data *= torch.exp(-torch.arange(64) * 0.1 * i)[:, None]
    model = nn.Sequential(*layers)
    uniform = plan_uniform(model, ratio, multiple=multiple)
    energy = plan_energy(model, ratio, multiple=multiple)
    assert sum(energy.values()) <= sum(uniform.values())


def test_moments_lower_every_layers_output_error(moments):
    dense = vit()
    plain = factorize(copy.deepcopy(dense))
    whitened = factorize(copy.deepcopy(dense), moments=moments)
    assert count_parameters(plain) == count_parameters(whitened)
    pairs = zip(errors(dense, whitened, moments), errors(dense, plain, moments), strict=True)
    assert all(better <= worse * (1 + 1e-3) for better, worse in pairs)
    assert sum(errors(dense, whitened, moments)) < 0.95 * sum(errors(dense, plain, moments))


def test_energy_with_moments_lowers_the_output_error_further(moments):
    dense = vit()
    uniform = factorize(copy.deepcopy(dense), moments=moments)
    plan = plan_energy(dense, moments=moments)
    energy = factorize(copy.deepcopy(dense), ranks=plan, moments=moments)
    assert count_parameters(energy) <= count_parameters(uniform)
    assert sum(errors(dense, energy, moments)) < sum(errors(dense, uniform, moments))


def test_equal_layers_get_the_uniform_ranks():
    fc = nn.Linear(32, 48)
    model = nn.ModuleDict({"a": fc, "b": copy.deepcopy(fc)})
    assert plan_energy(model) == plan_uniform(model)


def test_moments_are_the_mean_over_tokens():
    model = nn.ModuleDict({"fc": nn.Linear(12, 16)})
    batches = [torch.randn(2, 5, 12), torch.randn(3, 12)]
    with Calibration(model) as calibration:
        for batch in batches:
            model["fc"](batch)
    model["fc"](torch.randn(4, 12))  # outside: not counted
    x = torch.cat([batches[0].flatten(0, 1), batches[1]]).double()
    torch.testing.assert_close(calibration.moments()["fc"], x.T @ x / 13)


def test_bad_input(moments):
    with pytest.raises(ValueError, match="ratio is 0.7: expected at least 1"):
        plan_energy(vit(), 0.7)
    with pytest.raises(ValueError, match=r"blocks.0.attn.qkv is on the meta device"):
        plan_energy(vit().to("meta"))
    with pytest.raises(ValueError, match=r"blocks.0.attn.qkv has seen no input"):
        Calibration(vit()).moments()
    less = {name: moment for name, moment in moments.items() if name != "blocks.1.mlp.fc1"}
    for call in (plan_energy, factorize):
        with pytest.raises(ValueError, match=r"moments lack blocks.1.mlp.fc1"):
            call(vit(), moments=less)
    zero = nn.ModuleDict({"fc": nn.Linear(16, 16)})
    nn.init.zeros_(zero["fc"].weight)
    with pytest.raises(ValueError, match=r"fc.weight is zero"):
        plan_energy(zero)
    model = nn.ModuleDict({"fc": nn.Linear(16, 16)})
    with Calibration(model) as calibration:
        model["fc"](torch.full((2, 16), float("nan")))
    with pytest.raises(ValueError, match="fc has seen NaN"):
        calibration.moments()


@pytest.mark.parametrize("seed", range(3))
def test_normalised_inputs_can_be_whitened_in_float32(seed):
    """LayerNorm's outputs lie in a hyperplane: rounded sums would not be positive definite."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64))
    with torch.no_grad(), Calibration(model, skip=()) as calibration:
        for _ in range(4):
            model(1000 + 1000 * torch.randn(200, 64))
    moments = calibration.moments()
    assert moments["1"].dtype == torch.float64
    dense = model[1].weight.detach().clone()
    factorize(model, ranks={"1": 48}, moments=moments)
    assert model[1].u.weight.dtype == torch.float32
    error = model[1].v.weight @ model[1].u.weight - dense
    assert torch.isfinite(error).all() and error.norm() < dense.norm()
