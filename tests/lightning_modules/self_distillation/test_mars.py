"""The projection: the worked value, every row in its ball, and what is free."""

import pytest
import timm
import torch
from torch import nn
from transformers import GPT2Config, GPT2Model

from lightning_modules.self_distillation import mars_project, mars_start


def test_the_worked_value():
    """d = [3, 1], γ = 2 → [1.5, .5]; a row inside the ball stays."""
    layer = nn.Linear(2, 2)
    start = {"weight": torch.tensor([[1.0, -1.0], [0.0, 5.0]])}
    with torch.no_grad():
        layer.weight.copy_(start["weight"] + torch.tensor([[3.0, 1.0], [-0.5, 1.0]]))
    inside, bias = layer.weight[1].clone(), layer.bias.clone()
    mars_project(layer, start, 2.0)
    assert torch.equal(layer.weight[0], torch.tensor([2.5, -0.5]))
    assert torch.equal(layer.weight[1], inside) and torch.equal(layer.bias, bias)


def moved():
    torch.manual_seed(0)
    settings = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **settings).double()
    start = mars_start(model, heads=["head"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model, start


def test_every_row_is_scaled_radially_into_its_ball():
    model, start = moved()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    radius, scaled = 1.5, 0
    mars_project(model, start, radius)
    for name, parameter in model.named_parameters():
        if name not in start:
            assert torch.equal(parameter, before[name])
            continue
        for j in range(len(parameter)):
            d = (before[name][j] - start[name][j]).flatten()
            length = sum(abs(entry) for entry in d.tolist())
            expected = start[name][j].flatten() + d / max(1.0, length / radius)
            torch.testing.assert_close(parameter[j].flatten(), expected, rtol=1e-12, atol=1e-14)
            scaled += length > radius
    assert 0 < scaled < sum(len(weight) for weight in start.values())
    free = set(before) - set(start)
    assert {"cls_token", "pos_embed", "norm.weight", "head.bias", "patch_embed.proj.bias"} < free
    assert {"patch_embed.proj.weight", "head.weight", "blocks.0.attn.qkv.weight"} < set(start)


def test_a_new_head_is_measured_from_zero():
    model, start = moved()
    assert not start["head.weight"].any() and start["blocks.0.mlp.fc1.weight"].any()
    mars_project(model, start, 0.1)
    assert model.head.weight.abs().sum(1).max() <= 0.1 + 1e-12


def test_gpt2_stores_rows_as_columns():
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=9, n_positions=4, n_embd=8, n_layer=1, n_head=2))
    start = mars_start(model)
    assert all(name.startswith("h.0.") for name in start) and len(start) == 4  # no embeddings
    weight = model.h[0].mlp.c_fc.weight
    with torch.no_grad():
        weight[:, 3] += 1.0
    before = weight.clone()
    mars_project(model, start, 2.0)
    change = weight - start["h.0.mlp.c_fc.weight"]
    torch.testing.assert_close(change[:, 3], torch.full((8,), 0.25))
    others = [i for i in range(32) if i != 3]
    assert torch.equal(weight[:, others], before[:, others])


def test_training_stays_in_the_ball():
    model, start = moved()
    mars_project(model, start, 0.05)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8).double()).square().sum().backward()
        optimizer.step()
        mars_project(model, start, 0.05)
    for name, centre in start.items():
        rows = (model.get_parameter(name) - centre).flatten(1).abs().sum(1)
        assert rows.max() <= 0.05 + 1e-12


def test_bad_input():
    model, start = moved()
    with pytest.raises(ValueError, match="radius is 0: expected a number above 0"):
        mars_project(model, start, 0)
    with pytest.raises(ValueError, match=r"head.weight is \(5, 8\) in the model and None in the"):
        mars_project(model, {n: w for n, w in start.items() if n != "head.weight"}, 1.0)
    with pytest.raises(ValueError, match="head 'classifier' has no linear.*such as head"):
        mars_start(model, ["classifier"])
