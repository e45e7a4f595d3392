"""A low-rank layer is an ordinary one; what cannot be replaced is refused before any change."""

import copy
import pickle

import peft
import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import prune
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

from lightning_modules.matformer import nest
from lightning_modules.pela import factorize, merge, plan_of, plan_uniform
from lightning_modules.pela.layers import find_layers
from lightning_modules.vera import add_vera

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}


def vit(name="vit_tiny_patch16_224", **settings):
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=12, **{**VIT, **settings}).double().eval()


def images():
    return torch.randn(3, 3, 16, 16, dtype=torch.float64)


def refusal(call, model):
    """The message of a refusal, which must leave the model as it was."""
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError) as caught:
        call()
    assert before == [(name, type(module)) for name, module in model.named_modules()]
    return str(caught.value)


def test_a_low_rank_layer_is_two_plain_linear_layers():
    layer = factorize(vit()).blocks[0].mlp.fc1
    assert type(layer) is nn.Sequential
    assert [(name, type(part)) for name, part in layer.named_children()] == [
        ("u", nn.Linear),
        ("v", nn.Linear),
    ]


def test_hooks_on_the_factors_act():
    """A forward of its own went past them."""
    model, x = factorize(vit(), ranks={"blocks.0.mlp.fc1": 13}), images()
    expected, seen = model(x), []
    handle = model.blocks[0].mlp.fc1.u.register_forward_hook(lambda *a: seen.append(a[2].shape[-1]))
    model(x)
    assert seen == [13]
    handle.remove()
    model.blocks[0].mlp.fc1.v.register_forward_hook(lambda *a: a[2] + 1)
    assert not torch.allclose(model(x), expected)


def test_torchs_pruning_trains():
    model = factorize(vit())
    prune.l1_unstructured(model.blocks[0].mlp.fc1.u, "weight", 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the second backward pass failed
        optimizer.zero_grad()
        model(images()).square().sum().backward()
        optimizer.step()
    assert (model.blocks[0].mlp.fc1.u.weight == 0).double().mean() >= 0.5


def test_pickles_and_copies_compute_the_same():
    model, x = factorize(vit()), images()
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(again(x), model(x)) and plan_of(again) == plan_of(model)


def test_lora_on_the_factors():
    model, x = factorize(vit()), images()
    expected = model(x)
    config = peft.LoraConfig(r=2, target_modules=r".*\.qkv\.[uv]")
    peft.inject_adapter_in_model(config, model)
    torch.testing.assert_close(model(x), expected)
    assert plan_of(model)["blocks.0.attn.qkv"] == 12
    assert "blocks.0.attn.qkv.u is a Linear and not a plain" in refusal(lambda: merge(model), model)


def test_ranks_rounded_to_a_multiple():
    model = nn.ModuleDict({"wide": nn.Linear(768, 3072), "narrow": nn.Linear(12, 12)}).to("meta")
    assert plan_uniform(model) == {"wide": 307, "narrow": 3}
    assert plan_of(factorize(model, multiple=8)) == {"wide": 304, "narrow": 3}
    with pytest.raises(ValueError, match="multiple is 0"):
        plan_uniform(vit(), multiple=0)


@pytest.mark.parametrize(
    ("make", "reader", "child"),
    [
        (lambda: vit("beit_base_patch16_224"), "Attention", "qkv"),
        (
            lambda: timm.create_model(
                "swinv2_tiny_window8_256", img_size=32, window_size=4, embed_dim=16,
                depths=(1, 1), num_heads=(1, 2),
            ),
            "WindowAttention",
            "qkv",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
            ),
            "T5DenseActDense",
            "wo",
        ),
    ],
)  # fmt: skip
def test_layers_that_are_read_are_refused_by_name(make, reader, child):
    model = make()
    message = refusal(lambda: factorize(model), model)
    assert (
        f".{child} is not called by {reader}, which reads its weight: add '{child}' to" in message
    )
    factorize(model, skip=[child])
    assert not any(child in name.split(".") for name in plan_of(model))
    assert not any("cpb_mlp" in name for name in plan_of(model))


def test_a_plan_that_names_a_layer_that_is_read_is_refused():
    model = vit("beit_base_patch16_224")
    call = lambda: factorize(model, ranks={"blocks.0.attn.qkv": 4})  # noqa: E731
    assert "is not called by Attention" in refusal(call, model)


def test_torchs_transformer_layers_run_in_eval_mode():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    model, x = encoder.eval(), torch.randn(2, 5, 32)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        full = {f"layers.{i}.linear{j}": 32 for i in range(2) for j in (1, 2)}
        factorize(model, ranks=full)
        found = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-4, atol=1e-5)


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config).double().eval()


def test_gpt2s_conv1d():
    model, tokens = gpt2(), torch.arange(12).reshape(2, 6)
    expected, before = model(tokens).logits, gpt2().state_dict()
    plan = {name: min(layer.weight.shape) for name, layer in find_layers(model).items()}
    assert "transformer.h.1.mlp.c_fc" in plan and "lm_head" not in plan
    factorize(model, ranks=plan)
    torch.testing.assert_close(model(tokens).logits, expected)
    merge(model)
    assert type(model.transformer.h[0].attn.c_attn) is Conv1D
    torch.testing.assert_close(model(tokens).logits, expected)
    assert {n: v.shape for n, v in model.state_dict().items()} == {
        n: v.shape for n, v in before.items()
    }


def test_heads_of_transformers_are_kept():
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=64, num_labels=20,
    )  # fmt: skip
    plan = plan_uniform(BertForSequenceClassification(config))
    assert "classifier" not in plan and "bert.pooler.dense" in plan
    model = factorize(BertForSequenceClassification(config), ranks={**plan, "classifier": 5})
    assert plan_of(model)["classifier"] == 5  # a plan says exactly which layers


def adapted_lora(model):
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["blocks.0.attn.qkv"]), model)


def adapted_vera(model):
    add_vera(model, rank=4, targets=["qkv"])


def nested(model):
    nest(model)


def hooked(model):
    model.blocks[1].mlp.fc1.register_forward_hook(lambda *a: a[2])


def pruned(model):
    prune.l1_unstructured(model.blocks[1].mlp.fc1, "weight", 0.5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (adapted_lora, "of peft: merge the adapter first|is a Linear, which factorize does not"),
        (adapted_vera, "blocks.0.attn.qkv is a .*Vera.*merge or extract the model first"),
        (nested, "blocks.0.mlp.fc1 is a NestedLinear, which factorize does not know"),
        (hooked, "blocks.1.mlp.fc1 carries hooks"),
        (pruned, "blocks.1.mlp.fc1 carries hooks"),
    ],
)
def test_what_other_methods_have_changed_is_refused(change, said):
    model = vit()
    change(model)
    message = refusal(lambda: factorize(model), model)
    with pytest.raises(ValueError, match=said):
        raise ValueError(message)
