"""Layouts: which rows are which, for every class in the table that is built here."""

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn

from lightning_modules.layout_table import LAYOUTS, FeedForwardLayout
from lightning_modules.layouts import attentions, feed_forwards, fused_slice, uncalled_layers


def text(kind: str, **settings) -> nn.Module:
    """A tiny transformers model of a type."""
    small = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
    config = transformers.AutoConfig.for_model(
        kind, **({} if kind in ("t5", "distilbert") else small) | settings
    )
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config, attn_implementation="eager").double().eval()


def encoder_layer() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(24, 4, 48, batch_first=True).double().eval()


def vit(**settings) -> nn.Module:
    torch.manual_seed(0)
    small = {"embed_dim": 24, "depth": 2, "num_heads": 4, "img_size": 16, "patch_size": 8}
    return timm.create_model("vit_tiny_patch16_224", **small | settings).double().eval()


GQA = {"num_key_value_heads": 2, "intermediate_size": 48}
FFN = {"intermediate_size": 48}
T5 = {"d_model": 24, "d_ff": 48, "d_kv": 6, "num_heads": 4, "num_layers": 2, "vocab_size": 50}
TEXT = {  # kind → settings, hidden neurons
    "llama": (GQA, 48),
    "mistral": (GQA | {"head_dim": 6}, 48),
    "qwen2": (GQA, 48),
    "qwen3": (GQA | {"head_dim": 10}, 48),
    "smollm3": (GQA | {"pad_token_id": 0}, 48),
    "gemma": (GQA | {"num_key_value_heads": 1, "head_dim": 8}, 48),
    "gemma2": (GQA | {"head_dim": 8}, 48),
    "phi3": (GQA | {"pad_token_id": 0}, 48),
    "starcoder2": (GQA, 48),
    "gpt2": ({"n_inner": 48}, 48),
    "gpt_neox": (FFN, 48),
    "gpt_bigcode": ({"n_inner": 48, "multi_query": True}, 48),
    "bloom": ({}, 96),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 24}, 48),
    "bert": (FFN, 48),
    "roberta": (FFN, 48),
    "electra": (FFN | {"embedding_size": 24}, 48),
}
MORE = {
    "gpt_bigcode, many keys": lambda: text("gpt_bigcode", n_inner=48, multi_query=False),
    "codegen": lambda: text("codegen", n_inner=48, rotary_dim=4),
    "distilbert": lambda: text(
        "distilbert", hidden_dim=48, dim=24, n_heads=4, n_layers=2, vocab_size=50
    ),
}


def build(kind: str) -> nn.Module:
    return MORE[kind]() if kind in MORE else text(kind, **TEXT[kind][0])


def hidden(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).last_hidden_state.detach()


@pytest.mark.parametrize("kind", [*TEXT, *MORE])
def test_with_one_token_only_values_matter(kind):
    """One token attends to itself with weight 1, whatever its query and key are."""
    model = build(kind)
    ids = torch.tensor([[7]])
    before = hidden(model, ids)
    names = {id(module): name for name, module in model.named_modules()}
    for letter, matters in (("q", False), ("k", False), ("v", True)):
        for layer in attentions(model):
            child, ranges = layer.rows(letter)
            projection = layer.module.get_submodule(child)
            if child not in ("self.query", "self.key", "self.value"):  # the public way to ask
                assert fused_slice(model, names[id(projection)], letter) == ranges
            columns = isinstance(projection, transformers.pytorch_utils.Conv1D)
            weight = projection.weight.data.T if columns else projection.weight.data
            for rows in ranges:
                weight[rows.start : rows.stop] += torch.randn_like(weight[rows.start : rows.stop])
        changed = (hidden(model, ids) - before).abs().max() > 1e-9
        assert changed == matters, letter


@pytest.mark.parametrize("kind", [*TEXT, *MORE])
def test_the_letters_of_a_projection_share_out_its_outputs(kind):
    for layer in attentions(build(kind)):
        by_child: dict[str, list[int]] = {}
        for letter in "qkv":
            child, ranges = layer.rows(letter)
            count = layer.heads if letter == "q" else layer.key_value_heads
            rows = [row for piece in ranges for row in piece]
            assert len(rows) == count * layer.head_dim
            by_child.setdefault(child, []).extend(rows)
        for child, rows in by_child.items():
            projection = layer.module.get_submodule(child)
            outputs = getattr(projection, "out_features", None) or projection.nf
            assert sorted(rows) == list(range(outputs))


@pytest.mark.parametrize("kind", TEXT)
def test_heads_and_neurons_are_counted(kind):
    settings, neurons = TEXT[kind]
    model = build(kind)
    assert [layer.units for layer in feed_forwards(model)] == [neurons] * 2
    for layer in attentions(model):
        assert layer.heads == 4
        pairs = 1 if settings.get("multi_query") else settings.get("num_key_value_heads", 4)
        assert layer.key_value_heads == pairs
        assert layer.units == (pairs if pairs > 1 else 4)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (lambda: vit(), 2),
        (lambda: timm.create_model("vit_relpos_small_patch16_224", depth=2, embed_dim=24), 2),
        (lambda: timm.create_model("mixer_s32_224"), 8),
        (lambda: timm.create_model("swinv2_cr_tiny_224", embed_dim=12, depths=(1, 1)), 2),
        (lambda: timm.create_model("swinv2_tiny_window8_256", embed_dim=24, depths=(1, 1)), 2),
        (lambda: timm.create_model("convnext_tiny", depths=(1, 1, 1, 1)), 4),
        (lambda: torchvision.models.VisionTransformer(16, 8, 2, 4, 24, 48), 2),
        (lambda: nn.TransformerEncoder(encoder_layer(), 3), 3),
        (lambda: text("t5", **T5 | {"feed_forward_proj": "gated-gelu"}), 4),
        (lambda: text("t5", **T5), 4),
    ],
)
def test_feed_forward_networks_are_the_blocks_and_nothing_else(model, count):
    """Not ViT-relpos' bias MLPs, Mixer's token-mixing MLPs, SwinV2's cpb_mlp."""
    layers = feed_forwards(model())
    assert len(layers) == count
    assert not [layer.name for layer in layers if "token" in layer.name or "pos" in layer.name]


@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_dinov3",
        "eva02_tiny_patch14_224",
        "beit_base_patch16_224",
        "swin_tiny_patch4_window7_224",
        "vit_relpos_small_patch16_224",
    ],
)
def test_other_attention_is_refused_by_name(name):
    with torch.device("meta"):
        model = timm.create_model(name, depth=1) if "swin" not in name else timm.create_model(name)
    with pytest.raises(ValueError, match=r"Attention.*layout_table.py; add it: LAYOUTS\['timm"):
        attentions(model)


def with_images(name: str, **sizes) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A timm model and its arguments."""
    model = timm.create_model(name, **sizes)
    return model, (torch.zeros(1, *model.default_cfg["input_size"]),)


def decoder_layer() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """torch's decoder layer, which calls its linear layers in evaluation too, and its arguments."""
    layer = nn.TransformerDecoderLayer(24, 4, 48, batch_first=True)
    return layer, (torch.zeros(1, 3, 24), torch.zeros(1, 3, 24))


ONE = {"embed_dim": 24, "depth": 1, "num_heads": 2}
SWIN = {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2)}


@pytest.mark.parametrize(
    ("build", "qkv"),
    [
        (lambda: with_images("beit_base_patch16_224", **ONE), True),
        (lambda: with_images("eva02_tiny_patch14_224", **ONE), True),
        (lambda: with_images("eva02_base_patch14_224", **ONE), False),
        (lambda: with_images("swinv2_tiny_window8_256", **SWIN), True),
        (lambda: with_images("vit_tiny_patch16_224", **ONE), False),
        (decoder_layer, False),
    ],
)
def test_uncalled_layers_are_those_that_a_forward_pass_does_not_call(build, qkv):
    model, arguments = build()
    linear = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    for training in (True, False):
        called = set()
        handles = [
            m.register_forward_hook(lambda *_, n=n, called=called: called.add(n))
            for n, m in linear.items()
        ]
        model.train(training)(*arguments)
        for handle in handles:
            handle.remove()
        assert uncalled_layers(model) == set(linear) - called
    assert any(n.endswith("attn.qkv") for n in uncalled_layers(model)) == qkv


def test_timm_attention_by_its_formula():
    """softmax(q kᵀ / √d) v from the rows of the table is what the output projection reads."""
    model = vit()
    layer = attentions(model)[1]
    seen = {}
    layer.module.qkv.register_forward_hook(lambda *a: seen.update(qkv=a[2]))
    layer.module.proj.register_forward_pre_hook(lambda _, x: seen.update(o=x[0]))
    model(torch.randn(2, 3, 16, 16, dtype=torch.float64))
    q, k, v = (
        seen["qkv"][..., [i for r in layer.rows(x)[1] for i in r]]
        .unflatten(-1, (4, 6))
        .transpose(1, 2)
        for x in "qkv"
    )
    expected = (q @ k.transpose(-1, -2) / 6**0.5).softmax(-1) @ v
    torch.testing.assert_close(seen["o"], expected.transpose(1, 2).flatten(-2))


def test_torch_attention_is_in_one_parameter():
    layer = encoder_layer()
    assert fused_slice(layer, "self_attn.in_proj_weight", "k") == [range(24, 48)]


def test_a_model_without_a_known_layer_names_what_it_is_made_of():
    class Ffn(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    model = nn.Sequential(nn.Linear(4, 4), Ffn())
    path = f"{Ffn.__module__}.{Ffn.__qualname__}"
    with pytest.raises(ValueError, match=r"is not in .*layout_table.py; add it: LAYOUTS"):
        feed_forwards(model)
    LAYOUTS[path] = FeedForwardLayout(("up",), "down")
    try:
        (layer,) = feed_forwards(model)
    finally:
        del LAYOUTS[path]
    assert (layer.name, layer.units) == ("1", 8)
    with pytest.raises(ValueError, match=r"made of torch.nn.modules.container.Sequential"):
        feed_forwards(nn.Sequential(nn.Linear(4, 4)))


def test_an_unknown_fused_projection_is_refused():
    model = nn.ModuleDict({"qkv": nn.Linear(4, 12)})
    with pytest.raises(ValueError, match=r"how q, k and v lie in qkv is not known"):
        fused_slice(model, "qkv", "q")
    with pytest.raises(ValueError, match="does not compute 'q'"):
        fused_slice(text("llama", **TEXT["llama"][0]), "layers.0.self_attn.k_proj", "q")
