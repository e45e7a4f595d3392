"""Views compute what the model they share weights with computes, and leave it as it was."""

import cpu_torchvision  # noqa: F401

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_modules.matformer import extract, nest, set_granularity, views
from lightning_modules.matformer.views import (
    FewRowsLinear,
    at_set_granularity,
    first_layers,
    first_tokens,
    for_few_rows,
    submodel,
)

SIZES = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4},
    "gpt_neox": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
                 "num_attention_heads": 4},
    "phi3": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
}  # fmt: skip
AXES = {
    "ffn": {"ffn": (1 / 4, 1 / 2, 1)},
    "heads": {"heads": (1 / 2, 1)},
    "depth": {"depth": (1 / 2, 1)},
    "all": {"ffn": (1 / 4, 1), "heads": (1 / 2, 1), "depth": (1 / 2, 1)},
}
IDS = torch.arange(24).view(2, 12)


def build(kind="llama", **changes):
    torch.manual_seed(0)
    common = {"vocab_size": 50, "max_position_embeddings": 64, "initializer_range": 0.2}
    config = AutoConfig.for_model(kind, **{**SIZES[kind], **common, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        *((kind, axes) for kind in ("llama", "gpt2") for axes in AXES),
        ("gpt_neox", "heads"),  # queries, keys and values of a head lie together
        ("phi3", "ffn"),  # gate and up are one layer
    ],
)
def test_a_submodel_is_the_nested_model_at_that_size(kind, axes):
    model = nest(build(kind), AXES[axes])
    chosen = [min(place % 2, len(x.widths) - 1) for place, x in enumerate(model.nesting.layers)]
    full = logits(model)
    small = submodel(model, chosen)
    assert not hasattr(small, "nesting")
    assert torch.equal(logits(model), full)  # it is as it was
    set_granularity(model, chosen)
    expected = logits(model)
    assert not torch.allclose(expected, full)
    assert torch.allclose(logits(small), expected, atol=1e-12)
    assert torch.allclose(logits(at_set_granularity(model)), expected, atol=1e-12)
    set_granularity(model, len(next(iter(AXES[axes].values()))) - 1)
    assert torch.allclose(logits(small), expected, atol=1e-12)  # and does not change with it
    assert count(small) == count(extract(model, chosen))


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_a_submodel_of_fewer_blocks_keeps_their_kinds_of_attention():
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    SIZES["qwen2"] = {**SIZES["llama"], "layer_types": kinds}
    SIZES["qwen2"] |= {"use_sliding_window": True, "sliding_window": 3}
    model = nest(build("qwen2"), AXES["depth"])
    del SIZES["qwen2"]
    small = submodel(model, [0])  # the first and the last block
    assert small.config.layer_types == kinds
    set_granularity(model, 0)
    assert torch.allclose(logits(small), logits(model), atol=1e-12)


def test_a_submodel_shares_the_weights():
    model = nest(build(), AXES["ffn"])
    small = submodel(model, [0] * 4)
    assert small.model.embed_tokens is model.model.embed_tokens
    nested, plain = (x.model.layers[1].mlp.down_proj for x in (model, small))
    assert type(plain) is torch.nn.Linear and plain.weight.shape == (32, 16)
    assert plain.weight.data_ptr() == nested.weight.data_ptr()


@pytest.mark.parametrize("kind", SIZES)
def test_first_layers_and_tokens(kind):
    model = build(kind)
    full = logits(model)
    assert torch.equal(logits(first_layers(model, 4)), full)
    assert not torch.allclose(logits(first_layers(model, 3)), full)
    assert torch.allclose(logits(first_tokens(model, 20)), full[..., :20], atol=1e-12)
    both = first_tokens(first_layers(model, 3), 20)
    expected = logits(first_layers(model, 3))[..., :20]
    assert torch.allclose(logits(both), expected, atol=1e-12)
    assert torch.equal(logits(model), full)


def test_an_output_layer_with_a_bias_and_wrong_counts():
    model = build("phi3")
    head = torch.nn.Linear(32, 50, dtype=torch.float64)
    model.set_output_embeddings(head)
    assert torch.allclose(logits(first_tokens(model, 7)), logits(model)[..., :7], atol=1e-12)
    for wrong in (0, 51):
        with pytest.raises(ValueError, match="expected 1 to the model's 50 tokens"):
            first_tokens(model, wrong)
    model.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(ValueError, match="is a Identity, expected nn.Linear"):
        first_tokens(model, 7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 3), (1, 9)])
def test_few_rows(monkeypatch, shape, bias):
    monkeypatch.setattr(views, "LEAST_WEIGHTS", 12)
    plain = torch.nn.Linear(5, 7, bias, dtype=torch.float64)
    small = torch.nn.Linear(5, 2, bias)
    quick = for_few_rows(torch.nn.Sequential(plain, small))
    assert type(quick[0]) is FewRowsLinear and quick[0].weight is plain.weight
    assert quick[1] is small and type(plain) is torch.nn.Linear
    x = torch.randn(*shape, 5, dtype=torch.float64)
    assert torch.allclose(quick[0](x), plain(x), atol=1e-12)
    assert quick[0](x).is_contiguous()


def test_a_model_that_is_not_nested_stays_itself():
    model = build()
    assert at_set_granularity(model) is model
