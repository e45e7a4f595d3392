"""A step changes only the slices that took part in it."""

import pytest
import timm
import torch

from lightning_modules.matformer.idle_tail import freeze_idle_tail
from lightning_modules.matformer.nest import nest, set_granularity


def build(frozen, mlp_layer=None, part="ffn"):
    torch.manual_seed(0)
    arguments = {"mlp_layer": mlp_layer} if mlp_layer else {}
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=3, **arguments,
    )  # fmt: skip
    nest(model, (1 / 4, 1 / 2, 3 / 4, 1), part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    if frozen:
        freeze_idle_tail(optimizer, model)
    return model, optimizer


def step(model, optimizer, granularity):
    set_granularity(model, granularity)
    optimizer.zero_grad()
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("frozen", [True, False])
def test_adamw_moves_the_idle_tail_unless_it_is_frozen(frozen):
    model, optimizer = build(frozen)
    step(model, optimizer, "XL")
    mlp = model.blocks[1].mlp
    before = {k: v.clone() for k, v in mlp.state_dict().items()}
    moments = optimizer.state[mlp.fc1.weight]["exp_avg"].clone()
    step(model, optimizer, "M")
    half = 32
    after = mlp.state_dict()
    idle = [
        torch.equal(before["fc1.weight"][half:], after["fc1.weight"][half:]),
        torch.equal(before["fc1.bias"][half:], after["fc1.bias"][half:]),
        torch.equal(before["fc2.weight"][:, half:], after["fc2.weight"][:, half:]),
        torch.equal(moments[half:], optimizer.state[mlp.fc1.weight]["exp_avg"][half:]),
    ]
    assert idle == [frozen] * 4
    for name in ("fc1.weight", "fc1.bias"):
        assert (before[name][:half] != after[name][:half]).any()
    assert (before["fc2.weight"][:, :half] != after["fc2.weight"][:, :half]).any()
    assert (before["fc2.bias"] != after["fc2.bias"]).all()


def test_each_part_of_a_fused_projection_has_its_own_tail():
    model, optimizer = build(True, part="heads")
    step(model, optimizer, "XL")
    qkv = model.blocks[0].attn.qkv
    before = qkv.weight.detach().clone()
    step(model, optimizer, "M")
    moved = (before != qkv.weight).any(1).unflatten(0, (3, 16))
    assert moved[:, :8].all() and not moved[:, 8:].any()


def test_steps_at_the_largest_granularity_are_plain_adamw():
    torch.manual_seed(3)
    frozen, frozen_optimizer = build(True)
    torch.manual_seed(3)
    plain, plain_optimizer = build(False)
    for seed in range(3):
        torch.manual_seed(seed)
        step(frozen, frozen_optimizer, "XL")
        torch.manual_seed(seed)
        step(plain, plain_optimizer, "XL")
    for a, b in zip(frozen.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
