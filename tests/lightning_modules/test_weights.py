"""Weights of one image size start a model of another."""

import pytest
import timm
import torch
from timm.models.vision_transformer import checkpoint_filter_fn

from lightning_modules.weights import load_weights

SMALL = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}


def vit(img_size, **changes):
    return timm.create_model("vit_tiny_patch16_224", img_size=img_size, **{**SMALL, **changes})


@pytest.mark.parametrize("changes", [{}, {"no_embed_class": True}, {"reg_tokens": 2}], ids=str)
def test_position_embeddings_are_resampled_as_timm_does(tmp_path, changes):
    source, model = vit(8, **changes), vit((16, 12), **changes)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    report = load_weights(model, tmp_path / "weights.pt")
    expected = checkpoint_filter_fn(source.state_dict(), model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert len(report.resampled) == 1 and report.resampled[0].startswith("pos_embed (1, ")
    assert "pos_embed" in report.loaded
    assert not (report.missing or report.unexpected or report.reshaped)
    assert "1 resampled: pos_embed" in str(report)


def test_position_embeddings_of_another_width_stay_as_they_were(tmp_path):
    source, model = vit(8, embed_dim=24), vit(16)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    before = model.pos_embed.clone()
    report = load_weights(model, tmp_path / "weights.pt")  # the head's bias still fits
    assert report.loaded == ["head.bias"] and not report.resampled
    assert any(name.startswith("pos_embed") for name in report.reshaped)
    assert torch.equal(model.pos_embed, before)
