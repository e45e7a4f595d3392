"""Ranks by the error of the last feature, against the definition written out."""

import copy

import pytest
import timm
import torch

from lightning_modules.counting import count_parameters
from lightning_modules.pela import compress, factorize, merge, plan_of, plan_uniform
from lightning_modules.pela.compress import layer_moments
from lightning_modules.pela.feature_error import plan_feature_error
from lightning_modules.pela.layers import find_layers


def vit():
    """A small ViT of which some layers matter much more than others."""
    torch.manual_seed(0)
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=12, **settings).double().eval()
    with torch.no_grad():
        for i, layer in enumerate(find_layers(model).values()):
            a, sigma, bt = torch.linalg.svd(torch.randn_like(layer.weight), full_matrices=False)
            decay = torch.exp(-torch.arange(len(sigma), dtype=torch.float64) * 0.05 * (i % 4))
            layer.weight.copy_(a * (sigma * decay) @ bt / 10)
    return model


IMAGES = torch.randn(16, 3, 16, 16, dtype=torch.float64, generator=torch.manual_seed(1))


@torch.no_grad()
def error(model, name, rank, moments):
    """Of one layer alone, through `factorize` and the model's own methods."""
    changed = merge(factorize(copy.deepcopy(model), ranks={name: rank}, moments=moments))
    wanted, found = (
        m.forward_head(m.forward_features(IMAGES), pre_logits=True) for m in (model, changed)
    )
    return ((found - wanted).square().mean() / found.square().mean()).item()


def test_every_layer_has_the_least_rank_below_one_threshold():
    model, step = vit(), 4
    before = copy.deepcopy(model.state_dict())
    moments = layer_moments(model, [IMAGES], "whitened")
    plan = plan_feature_error(model, IMAGES, 2.0, moments=moments, multiple=step)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    layers = find_layers(model)
    assert plan.keys() == layers.keys() and len(set(plan.values())) > 3
    caps = {n: w.numel() // sum(w.shape) for n, w in ((n, x.weight) for n, x in layers.items())}
    reached = [error(model, n, r, moments) for n, r in plan.items() if r < caps[n] // step * step]
    missed = [error(model, n, r - step, moments) for n, r in plan.items() if r > step]
    assert len(reached) >= 2
    assert max(reached) < min(missed)


@pytest.mark.parametrize("ratio", [1.5, 2.0, 3.0])
def test_the_budget_is_kept_and_used(ratio):
    model = vit()
    low_rank = compress(copy.deepcopy(model), [IMAGES], ratio, "feature_error", "whitened", (), 2)
    uniform = factorize(copy.deepcopy(model), ratio)
    assert count_parameters(low_rank) <= count_parameters(uniform)
    assert count_parameters(low_rank) > 0.9 * count_parameters(uniform)
    assert plan_of(low_rank) != plan_uniform(model, ratio)
    assert all(rank % 2 == 0 for rank in plan_of(low_rank).values())


def test_where_no_ranks_are_cheap_enough_the_plan_is_uniform():
    model = vit()
    plan = plan_feature_error(model, IMAGES, 10.0, multiple=16)
    assert plan == plan_uniform(model, 10.0)


def test_it_needs_images():
    with pytest.raises(ValueError, match="ranks 'feature_error' need batches"):
        compress(vit(), ranks="feature_error")
