"""Costs by layer add up to those of the extracted model, in every unit that can be counted."""

import pytest
import timm
import torch
import transformers

from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.matformer import choose, extract, layer_costs, nest, set_granularity
from lightning_modules.matformer.nest import nesting_of

QUARTERS = (1 / 4, 1 / 2, 3 / 4, 1)
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}


def vit():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **SMALL)


def vit_with_a_norm_inside():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, scale_mlp_norm=True, **SMALL)


def swin():
    settings = {"embed_dim": 24, "depths": (1, 1, 2, 1), "num_classes": 3}
    return timm.create_model("swin_tiny_patch4_window7_224", **settings)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=3,
        intermediate_size=64, vocab_size=50,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("unit", ["parameters", "macs"])
@pytest.mark.parametrize(
    ("build", "axes", "shape"),
    [
        (vit, {"ffn": QUARTERS}, (1, 3, 16, 16)),
        (vit, {"ffn": QUARTERS, "heads": QUARTERS}, (2, 3, 16, 16)),
        (vit_with_a_norm_inside, {"ffn": QUARTERS}, (1, 3, 16, 16)),
        (swin, {"ffn": QUARTERS}, (1, 3, 224, 224)),
    ],
)
def test_a_submodel_costs_the_rest_and_the_sum_of_its_layers(unit, build, axes, shape):
    model = nest(build(), axes)
    set_granularity(model, "M")
    costs, rest = layer_costs(model, unit, torch.zeros(shape))
    layers = nesting_of(model).layers
    assert {layer.granularity for layer in layers} == {1}  # left as it was
    for chosen in (0, 3, [i % 4 for i in range(len(layers))]):
        chosen = nesting_of(model).resolve(chosen)
        small = extract(model, chosen)
        expected = count_parameters(small) if unit == "parameters" else count_macs(small, shape)
        total = rest + sum(layer[index] for layer, index in zip(costs, chosen, strict=True))
        assert total == expected


def test_a_transformers_model_takes_a_dict():
    model = nest(llama(), {"ffn": QUARTERS, "heads": QUARTERS})
    batch = {"input_ids": torch.zeros(1, 6, dtype=torch.long)}
    costs, rest = layer_costs(model, "macs", batch)
    padded = {**batch, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    assert layer_costs(model, "macs", padded) == (costs, rest)
    # three matrices of 32 x 16 at S, six tokens
    ffn = [c for c, x in zip(costs, nesting_of(model).layers, strict=True) if x.axis == "ffn"]
    assert ffn == [[3 * 32 * 16 * 6 * k for k in (1, 2, 3, 4)]] * 3
    # four projections of 32 x 8 and two products of 6 x 6 x 8
    heads = [c for c, x in zip(costs, nesting_of(model).layers, strict=True) if x.axis == "heads"]
    assert heads == [[(4 * 32 * 8 * 6 + 2 * 36 * 8) * k for k in (1, 2, 3, 4)]] * 3
    assert rest == 32 * 50 * 6


def test_milliseconds_are_measured():
    model = nest(timm.create_model("vit_tiny_patch16_224", depth=2))
    costs, rest = layer_costs(model, "ms", torch.zeros(8, 3, 224, 224))
    assert len(costs) == 2 and all(len(layer) == 4 for layer in costs)
    for layer in costs:
        assert 0 < layer[0] < layer[3]  # an eighth of the work takes less time
    assert rest > 0
    assert not model.blocks[0].mlp.fc1._forward_pre_hooks
    assert model.training


@pytest.mark.parametrize("build", [vit, swin])
def test_a_choice_uses_the_budget_and_keeps_within_it(build):
    """Swin's stages differ: counted by the first stage's widths, budgets would be broken."""
    model = nest(build())
    sizes = [count_parameters(extract(model, index)) for index in range(4)]
    assert choose(model, sizes[2]) == [2] * len(nesting_of(model).layers)
    for budget in (sizes[0], (sizes[0] + sizes[1]) // 2, (sizes[2] + sizes[3]) // 2, 10 * sizes[3]):
        chosen = choose(model, budget)
        assert count_parameters(extract(model, chosen)) <= budget
        assert chosen == sorted(chosen) and chosen[-1] - chosen[0] <= 1
        raised = next((i for i in reversed(range(len(chosen))) if chosen[i] == chosen[0]), None)
        if chosen[0] < 3:
            chosen[raised] += 1
            assert count_parameters(extract(model, chosen)) > budget
    with pytest.raises(
        ValueError, match="the budget of 1 is below the smallest submodel's cost of "
    ):
        choose(model, 1)


def test_what_has_no_cost_by_layer():
    model = nest(vit())
    with pytest.raises(ValueError, match="macs depend on the input: give a batch"):
        layer_costs(model, "macs")
    with pytest.raises(ValueError, match="unknown unit 'joules'"):
        layer_costs(model, "joules")
    with pytest.raises(ValueError, match="a nested depth has no cost by layer"):
        layer_costs(nest(vit(), (1 / 3, 1), "depth"))
