"""Backbones by name."""

import pytest
import timm
import torch
from timm.models import save_for_hf

from lightning_modules.backbones import build_vision

TINY = {"img_size": 28, "embed_dim": 32, "depth": 2, "num_heads": 2}


class TestLocalFolder:
    def test_brings_its_settings_and_weights(self, tmp_path):
        torch.manual_seed(0)
        model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, **TINY).eval()
        save_for_hf(model, tmp_path, model_args={**TINY, "num_classes": 0}, safe_serialization=True)
        loaded = build_vision(f"local-dir:{tmp_path}", 0, {}, pretrained=True).eval()
        images = torch.randn(2, 3, 28, 28)
        torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)
        other = build_vision(f"local-dir:{tmp_path}", 7, {"img_size": 42}, pretrained=True)
        assert other(torch.randn(1, 3, 42, 42)).shape == (1, 7)

    def test_without_pretrained_it_is_random(self, tmp_path):
        model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, **TINY)
        save_for_hf(model, tmp_path, model_args={**TINY, "num_classes": 0}, safe_serialization=True)
        loaded = build_vision(f"local-dir:{tmp_path}", 0, {})
        assert not torch.equal(loaded.patch_embed.proj.weight, model.patch_embed.proj.weight)

    def test_a_missing_folder_is_said_with_the_cure(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere has no config\.json.*make weights"):
            build_vision(f"local-dir:{tmp_path}/nowhere", 10, {})


def test_an_unknown_name_suggests_similar_ones():
    with pytest.raises(ValueError, match=r"no model 'vit_bas_patch16_224'; similar: vit_base"):
        build_vision("vit_bas_patch16_224", 10, {})
