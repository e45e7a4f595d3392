"""A saved submodel loads without its parent, and where it can, without this repository."""

import json

import pytest
import timm
import torch
from safetensors.torch import load_file

from lightning_modules.matformer.export import load, save
from lightning_modules.matformer.nest import nest, set_granularity

ARGUMENTS = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 4,
    "num_classes": 5,
}


def nested(part="ffn", fractions=(1 / 8, 1 / 4, 1 / 2, 1)):
    torch.manual_seed(0)
    return nest(timm.create_model("vit_tiny_patch16_224", **ARGUMENTS), fractions, part).eval()


@pytest.mark.parametrize("granularity", ["S", "L", "XL"])
def test_uniform_widths_load_with_timm_alone(tmp_path, granularity):
    model, images = nested(), torch.randn(2, 3, 16, 16)
    folder = save(model, granularity, tmp_path / "out", "vit_tiny_patch16_224", ARGUMENTS)
    manifest = json.loads((folder / "manifest.json").read_text())
    alone = timm.create_model(manifest["architecture"], **manifest["model_args"]).eval()
    alone.load_state_dict(load_file(folder / "model.safetensors"))
    set_granularity(model, granularity)
    expected = model(images)
    torch.testing.assert_close(alone(images), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(load(folder).eval()(images), expected, rtol=1e-6, atol=1e-6)


HEADS = ("heads", (1 / 4, 1 / 2, 3 / 4, 1))


@pytest.mark.parametrize(
    ("part", "fractions", "granularity"),
    [
        ("ffn", (1 / 8, 1 / 4, 1 / 2, 1), [0, 2, 2]),
        (*HEADS, "M"),
        (*HEADS, [0, 1, 3]),
    ],
)
def test_other_widths_load_with_ours(tmp_path, part, fractions, granularity):
    model, images = nested(part, fractions), torch.randn(2, 3, 16, 16)
    folder = save(model, granularity, tmp_path, "vit_tiny_patch16_224", ARGUMENTS)
    set_granularity(model, granularity)
    torch.testing.assert_close(load(folder).eval()(images), model(images), rtol=1e-6, atol=1e-6)


def test_manifest_names_the_parent(tmp_path):
    first, second = nested(), nested()
    with torch.no_grad():
        second.head.bias[0] += 1
    hashes = []
    for i, model in enumerate((first, nested(), second)):
        folder = save(model, "S", tmp_path / str(i), "vit_tiny_patch16_224", ARGUMENTS)
        hashes.append(json.loads((folder / "manifest.json").read_text())["parent_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no manifest.json in"):
        load(tmp_path)
    folder = save(nested(), [0, 1, 2], tmp_path, "vit_tiny_patch16_224", ARGUMENTS)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["widths"]["blocks.0.mlp"] = 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="do not fit its manifest"):
        load(folder)
    (folder / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="has format 99, expected 1"):
        load(folder)


@pytest.mark.parametrize(
    ("architecture", "changes", "granularity"),
    [
        ("eva02_tiny_patch14_224", {"depth": 2}, "M"),  # SwiGLU, 8/3 of the width
        ("vit_so400m_patch14_siglip_224", {"embed_dim": 60, "depth": 2, "num_heads": 4}, "L"),
        (
            "swin_tiny_patch4_window7_224",
            {"embed_dim": 24, "depths": (1, 1, 2, 1)},
            [0, 3, 1, 2, 3],
        ),
    ],
)
def test_whatever_the_family_has_for_hidden_neurons(tmp_path, architecture, changes, granularity):
    torch.manual_seed(0)
    arguments = {"num_classes": 5, **changes}
    model = nest(timm.create_model(architecture, **arguments)).eval()
    folder = save(model, granularity, tmp_path, architecture, arguments)
    set_granularity(model, granularity)
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(load(folder).eval()(images), model(images), rtol=1e-5, atol=1e-5)
    if json.loads((folder / "manifest.json").read_text())["timm_alone_loads_it"]:
        manifest = json.loads((folder / "manifest.json").read_text())
        alone = timm.create_model(manifest["architecture"], **manifest["model_args"])
        alone.load_state_dict(load_file(folder / "model.safetensors"))
