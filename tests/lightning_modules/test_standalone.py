"""Plain and low-rank folders, loaded by their own README without this repository."""

import json
import sys

import pytest
import timm
import torch
from PIL import Image
from transformers import BertConfig, BertForMaskedLM

from lightning_modules.apet import insert
from lightning_modules.pela import factorize
from lightning_modules.pela.tome import add_tome
from lightning_modules.standalone import mergeable, plain, save
from lightning_modules.tuning import tune
from lightning_modules.vera import add_vera
from tests.lightning_modules.matformer.test_export import (
    IDS,
    IMAGES,
    in_a_clean_process,
    lines_of,
    vit,
)


def bert():
    torch.manual_seed(0)
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1}
    return BertForMaskedLM(BertConfig(**small, num_attention_heads=4, intermediate_size=64)).eval()


def test_they_load_without_this_repository(tmp_path):
    cases = {
        "plain": (vit(), IMAGES, False),
        "low rank": (factorize(vit()), IMAGES, True),
        "tied, low rank": (factorize(bert()), IDS, True),
        "no head": (factorize(headless()), IMAGES, True),
    }
    folders = [save(model, tmp_path / name) for name, (model, _, _) in cases.items()]
    outputs = in_a_clean_process(folders, [given for _, given, _ in cases.values()])
    for (name, (model, given, own)), folder, out in zip(
        cases.items(), folders, outputs, strict=True
    ):
        with torch.no_grad():
            expected = model(**given).logits if isinstance(given, dict) else model(given)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5, msg=name)
        assert (folder / "load.py").is_file() == (folder / "manifest.json").is_file() == own


@pytest.mark.parametrize("change", [lambda model: model, factorize], ids=["timm", "load.py"])
def test_the_lines_prepare_images_as_in_training_and_name_classes(change, tmp_path, monkeypatch):
    """0.2 everywhere is −1 behind the mean 0.4 and the standard deviation 0.2."""
    prepared = {"input_size": (3, 16, 16), "mean": (0.4,) * 3, "std": (0.2,) * 3}
    save(change(vit()), tmp_path, ["ant", "bee", "fly"], {**prepared, "crop_pct": 0.5})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "load", None)
    del sys.modules["load"]
    sys.path_importer_cache.clear()
    scope = {}
    exec(lines_of(tmp_path), scope)
    image = Image.new("RGB", (64, 64))
    image.paste((51, 51, 51), (16, 16, 48, 48))  # the half that the crop keeps
    inputs = scope["transform"](image)
    assert inputs.shape == (3, 16, 16)
    torch.testing.assert_close(inputs[:, 2:-2, 2:-2], torch.full((3, 12, 12), -1.0))
    assert scope["model"].pretrained_cfg["label_names"] == ["ant", "bee", "fly"]


def headless():
    torch.manual_seed(0)
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=0, **settings).eval()


def test_ranks_stand_in_the_manifest(tmp_path):
    model = factorize(vit(), 2)
    manifest = json.loads((save(model, tmp_path) / "manifest.json").read_text())
    layer = model.blocks[0].attn.qkv
    rank = layer.u.out_features
    assert manifest["low_rank"]["blocks.0.attn.qkv"] == [32, rank, 96, True]
    assert manifest["blocks"] == manifest["attributes"] == {}
    assert manifest["architecture"] == "vit_tiny_patch16_224"


def test_what_peft_has_trained_is_merged():
    model = tune(vit(), "lora", ["head"], 4, ["attn.qkv"])
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        expected = model(IMAGES)
        torch.testing.assert_close(plain(model)(IMAGES), expected, rtol=1e-4, atol=1e-5)
    assert type(model.blocks[0].attn.qkv) is torch.nn.Linear
    assert list(model.state_dict()) == list(vit().state_dict())


@pytest.mark.parametrize("operations", [["add", "concat"], ["plug"]])
def test_it_is_known_what_can_be_merged(operations):
    model = insert(vit(), 200, operations=operations)
    assert mergeable(torch.nn.ModuleList([model])) == ("plug" not in operations)
    if "plug" in operations:
        with pytest.raises(ValueError, match=r"adapters \(plug\) cannot be merged"):
            plain(model)
    else:
        plain(model)
    assert not mergeable(torch.nn.ModuleList([add_tome(vit(), 1)]))


def test_nothing_of_an_earlier_model_stays(tmp_path):
    save(factorize(vit(), 2), tmp_path)
    save(vit(), tmp_path)
    assert not (tmp_path / "load.py").exists() and not (tmp_path / "manifest.json").exists()


def test_what_is_not_plain_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="vera_b is no parameter of VisionTransformer: merge and"):
        save(add_vera(vit(), 4, "attn.proj"), tmp_path / "a")
    with pytest.raises(ValueError, match="neither a timm nor a transformers model"):
        save(torch.nn.Linear(2, 2), tmp_path / "a")
    with pytest.raises(ValueError, match="blocks.0 merges tokens, .* --to pt2"):
        save(add_tome(vit(), 1), tmp_path / "a")
    assert not (tmp_path / "a").exists()
