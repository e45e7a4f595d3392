"""Which parameters decay, and what the schedules do."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

from lightning_modules.optim import (
    build_optimizer,
    head_parameters,
    parameter_groups,
    split_groups,
    training_steps,
    with_schedule,
)

TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}


def names(model, group):
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    return {own[id(parameter)] for parameter in group["params"]}


def test_biases_norms_and_what_timm_names_do_not_decay():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **TINY)
    model.blocks[0].attn.proj.weight.requires_grad_(False)
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert names(model, decayed) == {
        "patch_embed.proj.weight",
        "blocks.0.attn.qkv.weight",
        "blocks.0.mlp.fc1.weight",
        "blocks.0.mlp.fc2.weight",
        "head.weight",
    }
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert names(model, kept) == trained - names(model, decayed)
    assert {"cls_token", "pos_embed"} <= names(model, kept)  # two- or three-dimensional, yet named


def test_decay_of_vectors_takes_everything():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **TINY)
    [group] = parameter_groups(model, 0.1, decay_vectors=True)
    assert names(model, group) == {name for name, _ in model.named_parameters()}
    assert group["weight_decay"] == 0.1


def test_heads_have_settings_of_their_own():
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, **TINY)
    heads = head_parameters(model, ["head", "no.such.module"])
    assert heads == set(model.head.parameters())
    groups = split_groups(parameter_groups(model, 0.1), heads, {"lr": 1.0}, {"lr": 2.0})
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(1, 0.1), (2, 0.1), (1, 0), (2, 0)]
    assert [names(model, g) for g in groups if g["lr"] == 2] == [{"head.weight"}, {"head.bias"}]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    model.head.requires_grad_(False)
    groups = split_groups(parameter_groups(model, 0.1), heads, {"lr": 1.0}, {"lr": 2.0})
    assert [g["lr"] for g in groups] == [1, 1]  # no empty group


def one_step(name, **settings):
    weight = nn.Parameter(torch.tensor([2.0]))
    groups = [{"params": [weight], "weight_decay": 0.5}]
    optimizer = build_optimizer(name, groups, lr=0.1, **settings)
    for _ in range(2):
        weight.grad = torch.tensor([3.0])
        optimizer.step()
    return weight.item()


def test_adamw_decays_apart_from_the_gradient():
    # with a constant gradient the normalised step is 1: θ ← (1 - lr·λ)·θ - lr
    once = (1 - 0.05) * 2.0 - 0.1
    assert one_step("adamw", betas=(0.5, 0.5)) == pytest.approx((1 - 0.05) * once - 0.1)


def test_sgd_decays_through_its_momentum():
    velocity = 3 + 0.5 * 2.0
    once = 2.0 - 0.1 * velocity
    velocity = 0.8 * velocity + 3 + 0.5 * once
    assert one_step("sgd", momentum=0.8) == pytest.approx(once - 0.1 * velocity)


def test_an_unknown_optimizer():
    with pytest.raises(ValueError, match="unknown optimizer 'lion': expected 'adamw' or 'sgd'"):
        build_optimizer("lion", [], lr=0.1)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("cosine", [0.0, 0.5, 1.0, 0.75, 0.25, 0.0]),
        ("linear", [0.0, 0.5, 1.0, 2 / 3, 1 / 3, 0.0]),
        ("constant_with_warmup", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_schedules_warm_up_and_end_with_the_run(schedule, expected):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    built = with_schedule(optimizer, schedule, warmup_steps=2, total_steps=5)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"] / 2.0)
        optimizer.step()
        built["lr_scheduler"]["scheduler"].step()
    assert rates == pytest.approx(expected)
    assert built["lr_scheduler"]["interval"] == "step"


@pytest.mark.parametrize(("warmup", "steps"), [(0.29, 29), (1, 1), (2, 2)])
def test_warmup_below_one_is_a_share(warmup, steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    built = with_schedule(optimizer, "constant_with_warmup", warmup, 100)
    [factor] = built["lr_scheduler"]["scheduler"].lr_lambdas
    assert factor(steps) == 1 and factor(steps - 1) == pytest.approx((steps - 1) / steps)


def test_a_schedule_needs_an_end():
    trainer = SimpleNamespace(
        estimated_stepping_batches=float("inf"), max_epochs=-1, max_steps=-1, fit_loop=None
    )
    with pytest.raises(
        ValueError, match="max_epochs is -1 and max_steps -1, .* set trainer.max_st"
    ):
        training_steps(trainer)
