"""Nesting of transformers, torchvision and torch models, in neurons, heads and depth."""

from itertools import pairwise

import pytest
import timm
import torch
import torchvision
import transformers
from timm.layers import Mlp
from torch import nn

from lightning_modules.counting import count_parameters
from lightning_modules.matformer import (
    extract,
    granularity,
    importance,
    nest,
    reorder,
    set_granularity,
)
from lightning_modules.matformer.nest import nesting_of

GQA = {"num_key_value_heads": 4, "num_attention_heads": 8, "intermediate_size": 48}
FFN = {"intermediate_size": 48}
KINDS = {
    "llama": GQA,
    "mistral": GQA | {"head_dim": 6},
    "qwen2": GQA,
    "qwen3": GQA | {"head_dim": 10},
    "smollm3": GQA | {"pad_token_id": 0},
    "gemma": GQA | {"num_key_value_heads": 1, "num_attention_heads": 4, "head_dim": 8},
    "gemma2": GQA | {"head_dim": 8},
    "gpt2": {"n_inner": 48},
    "gpt_neox": FFN,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 48},
    "bert": FFN,
    "roberta": FFN,
    "gpt_bigcode": {"n_inner": 48},
    "bloom": {},
    "codegen": {"n_inner": 48, "rotary_dim": 4},
    "phi3": GQA | {"pad_token_id": 0},
    "t5": {"d_model": 48, "d_ff": 48, "d_kv": 12, "num_layers": 4, "vocab_size": 50},
}
FIXED = ("gpt_bigcode", "bloom", "codegen", "phi3", "t5")
UNSKIPPED = ("gpt_neox", "gpt_bigcode", "bloom", "codegen", "phi3", "gemma2", "t5")
QUARTERS = (1 / 4, 1 / 2, 3 / 4, 1)
CASES = [
    *((kind, "ffn") for kind in KINDS),
    *((kind, "heads") for kind in KINDS if kind not in FIXED),
    *((kind, "depth") for kind in KINDS if kind not in UNSKIPPED),
]


def text(kind: str, **more) -> nn.Module:
    small = {"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 50}
    settings = (small if kind != "t5" else {}) | KINDS[kind] | more
    config = transformers.AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    if kind == "t5":
        auto = transformers.AutoModel
    elif kind in ("bert", "roberta"):
        auto = transformers.AutoModelForMaskedLM
    model = auto.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * 9).view(2, 9) % 50
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if kind == "t5" else {})


def output(model: nn.Module, kind: str) -> torch.Tensor:
    out = model(**batch(kind))
    return out.last_hidden_state if kind == "t5" else out.logits


def masked(model: nn.Module, kind: str, chosen: list[int]) -> torch.Tensor:
    """The full model with the idle units multiplied by zero before they are read."""
    hooks = []
    layers = nesting_of(model).layers
    for layer, index in zip(layers, chosen, strict=True):
        cut = layer.layer.reducing
        kept = cut.indices(torch.arange(layer.widths[index]))

        def hide(_, args, kept=kept):
            mask = torch.zeros(args[0].shape[-1], dtype=args[0].dtype)
            mask[kept] = 1
            return (args[0] * mask,)

        hooks.append(layer.module.get_submodule(cut.path).register_forward_pre_hook(hide))
    with granularity(model, len(layers[0].widths) - 1):
        out = output(model, kind)
    for hook in hooks:
        hook.remove()
    return out


@torch.no_grad()
@pytest.mark.parametrize(("kind", "part"), CASES)
def test_slice_equals_mask_equals_extracted(kind, part):
    model = text(kind)
    names, dense = list(model.state_dict()), output(model, kind)
    nest(model, QUARTERS, part)
    assert list(model.state_dict()) == names
    assert torch.equal(output(model, kind), dense)
    layers = nesting_of(model).layers
    for chosen in (0, 2, [i % 4 for i in range(len(layers))]):
        resolved = nesting_of(model).resolve(chosen)
        with granularity(model, chosen):
            sliced = output(model, kind)
        assert torch.equal(output(model, kind), dense)  # what was set before is set again
        if part != "depth":
            torch.testing.assert_close(
                sliced, masked(model, kind, resolved), rtol=1e-10, atol=1e-12
            )
        small = extract(model, chosen)
        torch.testing.assert_close(output(small, kind), sliced, rtol=1e-12, atol=1e-12)
        assert count_parameters(small) < count_parameters(model)
        assert (sliced - dense).abs().max() > 1e-3


@pytest.mark.parametrize("kind", FIXED)
def test_heads_that_cannot_be_dropped_are_refused(kind):
    model = text(kind)
    with pytest.raises(ValueError, match=r"the heads of .* cannot be nested: "):
        nest(model, QUARTERS, "heads")
    assert not hasattr(model, "nesting")


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("llama", {"ffn": QUARTERS, "heads": QUARTERS}),
        ("gpt2", {"ffn": QUARTERS, "heads": QUARTERS}),
        ("llama", {"ffn": (1 / 4, 1 / 2, 1, 1), "depth": (1 / 2, 1 / 2, 1 / 2, 1)}),
        ("qwen3", {"ffn": QUARTERS, "heads": QUARTERS, "depth": (1 / 4, 1 / 2, 3 / 4, 1)}),
    ],
)
def test_several_axes(kind, axes):
    model = text(kind)
    dense = output(model, kind)
    nest(model, axes)
    for chosen in ("S", "L", dict.fromkeys(axes, 1), {"ffn": "S"}, {"ffn": [0, 1, 2, 3]}):
        small = extract(model, chosen)
        set_granularity(model, chosen)
        torch.testing.assert_close(output(model, kind), output(small, kind), rtol=1e-12, atol=1e-12)
    set_granularity(model, "XL")
    assert torch.equal(output(model, kind), dense)
    with pytest.raises(ValueError, match="unknown axis 'width': this model is nested in ffn"):
        set_granularity(model, {"width": 0})


def test_axes_that_do_not_go_together():
    with pytest.raises(ValueError, match="equally many fractions.*ffn has 4, heads has 2"):
        nest(text("llama"), {"ffn": QUARTERS, "heads": (1 / 2, 1)})
    with pytest.raises(ValueError, match="are the same in all axes"):
        nest(text("llama"), {"ffn": (1 / 2, 1 / 2, 1), "heads": (1 / 2, 1 / 2, 1)})
    with pytest.raises(ValueError, match="has 4 groups of heads: a fraction of 0.125 is 0.5"):
        nest(text("llama"), (1 / 8, 1), "heads")


def test_depth_is_nested_even_and_keeps_the_first_block():
    model = nest(text("llama", num_hidden_layers=12), (1 / 4, 1 / 2, 3 / 4, 1), "depth")
    (stack,) = nesting_of(model).layers
    sets = [set(kept) for kept in stack.kept]
    assert all(a < b for a, b in pairwise(sets))
    assert all({0, 11} <= kept for kept in sets)
    small = extract(model, 0)
    assert small.config.num_hidden_layers == 3
    assert [b.self_attn.layer_idx for b in small.model.layers] == [0, 1, 2]


@torch.no_grad()
@pytest.mark.parametrize(("kind", "part"), [c for c in CASES if c[1] != "depth"])
def test_reordering_changes_nothing_about_the_function(kind, part):
    model = text(kind)
    dense = output(model, kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = importance(model, [batch(kind)], part)
    assert reorder(model, scores) is model
    torch.testing.assert_close(output(model, kind), dense, rtol=1e-10, atol=1e-10)
    assert any(not torch.equal(before[n], v) for n, v in model.state_dict().items())
    again = importance(model, [batch(kind)], part)
    for values in again[part].values():
        assert (values.diff() <= 1e-12).all()


@torch.no_grad()
def test_importance_is_the_root_mean_square_times_the_columns_norm():
    model = text("llama")
    seen = []
    down = model.model.layers[1].mlp.down_proj
    hook = down.register_forward_pre_hook(lambda _, x: seen.append(x[0].flatten(0, 1)))
    mask = torch.ones(2, 9)
    mask[1, 4:] = 0
    inputs = batch("llama") | {"attention_mask": mask}
    scores = importance(model, [inputs, inputs])
    hook.remove()
    kept = torch.cat(seen)[mask.flatten().bool().repeat(2)]
    expected = kept.square().mean(0).sqrt() * down.weight.norm(dim=0)
    torch.testing.assert_close(scores["ffn"]["model.layers.1.mlp"], expected)


def test_a_decoder_s_tokens_do_not_count_by_the_encoder_s_mask():
    """Even if there are as many of them."""
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).double().eval()
    ids = torch.arange(2, 10).view(2, 4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids + 5}
    layer = model.decoder.block[0].layer[2].DenseReluDense
    seen = []
    handle = layer.wo.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    scores = importance(model, [inputs], "ffn")["ffn"]
    handle.remove()
    expected = seen[0].flatten(0, 1).square().mean(0).sqrt() * layer.wo.weight.norm(dim=0)
    torch.testing.assert_close(scores["decoder.block.0.layer.2.DenseReluDense"], expected.detach())


@torch.no_grad()
def test_importance_moves_batches_to_the_models_device(elsewhere):
    inputs = batch("llama")
    model = text("llama")
    moved = importance(model, [{key: elsewhere(value) for key, value in inputs.items()}], "ffn")
    for name, scores in importance(model, [inputs], "ffn")["ffn"].items():
        assert torch.equal(moved["ffn"][name], scores)


def test_importance_of_groups_of_heads_is_that_of_their_columns():
    model = nest(text("llama"), QUARTERS, "heads")
    seen = []
    out = model.model.layers[1].self_attn.o_proj
    hook = out.register_forward_pre_hook(lambda _, x: seen.append(x[0].flatten(0, 1)))
    set_granularity(model, "S")
    scores = importance(model, [batch("llama")])
    hook.remove()
    assert nesting_of(model).layers[0].granularity == 0  # and the granularity is left as it was
    each = seen[0].square().mean(0) * out.weight.square().sum(0)
    expected = each.view(4, 2 * 6).sum(1).sqrt()  # 4 groups of 2 heads of 6
    torch.testing.assert_close(scores["heads"]["model.layers.1.self_attn"], expected)


@torch.no_grad()
def test_importance_of_a_block_is_how_far_it_turns_the_tokens_that_count():
    model = nest(text("llama"), (1 / 2, 1), "depth")
    seen = []
    block = model.model.layers[1]
    hook = block.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    mask = torch.ones(2, 9)
    mask[1, 4:] = 0
    scores = importance(model, [batch("llama") | {"attention_mask": mask}])
    hook.remove()
    cosines = nn.functional.cosine_similarity(*seen[0], dim=-1)[mask.bool()]
    torch.testing.assert_close(scores["depth"]["model.layers"][1], 1 - cosines.mean())


def test_importance_is_measured_without_dropout():
    model = nn.Sequential(nn.Dropout(0.5), Mlp(8, 16)).train()
    inputs = [torch.randn(4, 8)]
    scores = importance(model, inputs)["ffn"]["1"]
    assert model.training and model[0].training
    assert torch.equal(scores, importance(model.eval(), inputs)["ffn"]["1"])


@torch.no_grad()
def test_important_neurons_first_lose_less():
    """A neuron that matters and comes last is kept once the neurons are sorted."""
    model = text("llama")
    for layer in model.model.layers:
        layer.mlp.down_proj.weight[:, :36] *= 1e-3
    dense = output(model, "llama")
    small = extract(nest(text_copy(model)), 1)
    lost = (output(small, "llama") - dense).abs().mean()
    reorder(model, importance(model, [batch("llama")]))
    kept = (output(extract(nest(model), 1), "llama") - dense).abs().mean()
    assert kept < 0.05 * lost


def text_copy(model: nn.Module) -> nn.Module:
    copy = text("llama")
    copy.load_state_dict(model.state_dict())
    return copy


@torch.no_grad()
def test_the_least_important_block_is_skipped_first():
    model = nest(text("llama"), (1 / 2, 3 / 4, 1), "depth")
    for name in ("o_proj", "q_proj"):
        getattr(model.model.layers[1].self_attn, name).weight.zero_()
    model.model.layers[1].mlp.down_proj.weight.zero_()
    reorder(model, importance(model, [batch("llama")]))
    (stack,) = nesting_of(model).layers
    assert stack.kept[1] == (0, 2, 3)
    dense = output(model, "llama")
    set_granularity(model, 1)
    torch.testing.assert_close(output(model, "llama"), dense)
    reorder(model, {"depth": {"model.layers": torch.tensor([0.0, 1.0, 3.0, 2.0])}})
    assert stack.kept == ((0, 2), (0, 2, 3), (0, 1, 2, 3))  # the first one whatever its score


def test_scores_that_do_not_fit_are_refused_before_anything_moves():
    model = text("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = importance(model, [batch("llama")])
    scores["ffn"]["model.layers.3.mlp"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"model.layers.3.mlp are torch.Size\(\[3\]\): expected"):
        reorder(model, scores)
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    with pytest.raises(ValueError, match="at least one batch"):
        importance(model, [])


@torch.no_grad()
def test_torch_and_torchvision_models():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double().eval()
    vit = torchvision.models.VisionTransformer(16, 8, 2, 4, 24, 48).double().eval()
    vit.heads.head.weight.normal_()
    for model, x in (
        (encoder, torch.randn(2, 5, 24, dtype=torch.float64)),
        (vit, torch.randn(2, 3, 16, 16, dtype=torch.float64)),
    ):
        dense = model(x)
        nest(model)
        torch.testing.assert_close(model(x), dense)
        small = extract(model, "S")
        set_granularity(model, "S")
        # torch's fused kernel would read all of the weights
        torch.testing.assert_close(model(x), small(x))
        assert (model(x) - dense).abs().max() > 1e-4
        assert count_parameters(small) < count_parameters(model)
        if model is encoder:  # what leaves may use that kernel again
            assert small.layers[0].activation_relu_or_gelu == layer.activation_relu_or_gelu != 0
    assert small.encoder.layers[0].mlp[0].out_features == 6
    with pytest.raises(ValueError, match="takes its head size from the width"):
        nest(torchvision.models.VisionTransformer(16, 8, 2, 4, 24, 48), QUARTERS, "heads")


def test_what_mixes_tokens_or_makes_biases_is_not_nested():
    for name, settings in (
        ("vit_relpos_small_patch16_224", {"depth": 2, "embed_dim": 24}),
        ("mixer_s32_224", {}),
    ):
        model = nest(timm.create_model(name, **settings))
        for layer in nesting_of(model).layers:
            assert layer.name.endswith(("mlp", "mlp_channels")) and "pos" not in layer.name


def test_what_leaves_is_frozen_where_the_model_is_and_has_its_sizes_in_the_configuration():
    model = nest(text("llama"), QUARTERS)
    model.model.layers[1].mlp.down_proj.requires_grad_(False)
    for chosen, size in (("S", 12), ([0, 1, 2, 3], 48)):  # it has no place for a mix of sizes
        small = extract(model, chosen)
        frozen = [name for name, p in small.named_parameters() if not p.requires_grad]
        assert frozen == ["model.layers.1.mlp.down_proj.weight"]
        assert small.config.intermediate_size == size


def test_extracting_never_holds_a_second_full_model():
    """The meta device holds no numbers: what is copied on it is counted by its elements."""
    config = transformers.AutoConfig.for_model("llama", **KINDS["llama"], vocab_size=50)
    with torch.device("meta"):
        model = nest(transformers.AutoModelForCausalLM.from_config(config))
    made = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal made
            out = function(*args, **kwargs or {})
            if function in (torch.ops.aten.clone.default, torch.ops.aten.empty_like.default):
                made += out.numel()
            return out

    with Count():
        small = extract(model, "S")
    assert made <= 1.01 * count_parameters(small)
