"""Features by hooks are what the models themselves give; hooks come and go."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel

from lightning_modules.pela import Features, factorize
from lightning_modules.pela.features import feature_layers

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def vit():
    torch.manual_seed(0)
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=12, **settings).eval()


def swin(num_classes=12):
    torch.manual_seed(0)
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
        num_classes=num_classes,
    ).eval()


def test_vit_blocks_are_timms_intermediates():
    for model in (vit(), factorize(vit())):
        with Features(model) as features:
            model(IMAGES)
            taken = features.take()
        expected = model.forward_intermediates(
            IMAGES, return_prefix_tokens=True, output_fmt="NLC", intermediates_only=True
        )
        assert features.names == ("blocks.0", "blocks.1", "blocks.2")
        for own, (patches, prefix) in zip(taken, expected, strict=True):
            assert torch.equal(own, torch.cat([prefix, patches], 1))


def test_swin_blocks_stages_and_pooled():
    model, x = swin(), torch.randn(2, 3, 32, 32)
    blocks = [f"layers.{i}.blocks.{j}" for i in range(2) for j in range(2)]
    assert feature_layers(model, "blocks") == blocks
    assert feature_layers(model, "stages") == ["layers.0", "layers.1"]
    with Features(model, "stages") as stages, Features(model, "pooled") as pooled:
        model(x)
        first, last = stages.take()
        (vector,) = pooled.take()
    assert first.shape == (2, 8, 8, 16)
    normed = model.norm(last)
    assert torch.equal(normed, model.forward_features(x))
    assert torch.equal(vector, model.forward_head(normed, pre_logits=True))


@pytest.mark.parametrize("make", [lambda: swin(0), lambda: vit()])
def test_pooled_is_what_the_head_is_given(make):
    model = make()
    x = IMAGES if isinstance(model, timm.models.VisionTransformer) else torch.randn(2, 3, 32, 32)
    with Features(model, "pooled") as pooled:
        model(x)
        (vector,) = pooled.take()
    assert torch.equal(vector, model.forward_head(model.forward_features(x), pre_logits=True))


def test_bert_layers_are_its_hidden_states():
    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    model = BertModel(config).eval()
    with Features(model) as features, Features(model, ["embeddings"]) as embeddings:
        hidden = model(torch.arange(6)[None], output_hidden_states=True).hidden_states
        taken = embeddings.take() + features.take()
    assert all(torch.equal(a, b) for a, b in zip(taken, hidden, strict=True))


def test_take_lets_go_and_asks_for_a_run():
    model = vit()
    features = Features(model)
    with pytest.raises(ValueError, match=r"no feature from blocks.0, blocks.1, blocks.2: run"):
        features.take()
    model(IMAGES)
    features.take()
    assert not any(features.kept.values())
    features.close()
    model(IMAGES)
    assert not any(features.kept.values())
    assert not any(module._forward_hooks for module in model.modules())


def test_copies_of_the_model_do_not_report():
    model = vit()
    with Features(model) as features:
        model(IMAGES)
        expected = [kept.clone() for [kept] in features.kept.values()]
        copy.deepcopy(model)(IMAGES + 1)
        assert all(map(torch.equal, features.take(), expected))


def test_recomputed_blocks_leave_the_losses_alone():
    model = vit()
    blocks = model.blocks
    with Features(model) as features:
        x = torch.randn(2, 5, 32, requires_grad=True)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        features.take()[0].sum().backward()
        model(IMAGES)
        assert [f.shape for f in features.take()] == [(2, 17, 32)] * 3


def test_layers_that_are_not_there():
    with pytest.raises(ValueError, match="unknown features 'layerwise': expected 'blocks'"):
        Features(vit(), "layerwise")
    with pytest.raises(ValueError, match="VisionTransformer has no stages with a known name"):
        Features(vit(), "stages")
    with pytest.raises(ValueError, match=r"no module 'block.0.mlp'.*similar: blocks.0.mlp"):
        Features(vit(), ["block.0.mlp"])
    with pytest.raises(ValueError, match=r"Linear has no get_classifier\(\)"):
        Features(nn.Linear(2, 2), "pooled")


def test_a_layer_that_runs_twice_gives_two_features():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.encoder(self.encoder(x)))

    model, x = Twice(), torch.randn(3, 4)
    with Features(model, ["head", "encoder"]) as features:
        model(x)
        last, first, second = features.take()
    assert torch.equal(first, model.encoder(x))
    assert torch.equal(second, model.encoder(first)) and torch.equal(last, model(x))
