"""Every export is loaded by its own README in a process that has never heard of this repository."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys

import pytest
import timm
import torch
import transformers

from lightning_modules.matformer import extract, granularity, nest
from lightning_modules.matformer.export import save
from lightning_modules.pela import factorize
from lightning_modules.vera import add_vera

QUARTERS = (1 / 4, 1 / 2, 3 / 4, 1)
SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
CLEAN = """
import os, sys
for name in ("lightning_modules", "recipes", "datamodules", "callbacks", "cpu_torchvision"):
    sys.modules[name] = None
import torch
{torchvision}
for folder in sys.argv[1:]:
    os.chdir(folder)
    sys.modules.pop("load", None)
    sys.path_importer_cache.clear()
    scope = dict()
    exec(open("lines.py").read(), scope)
    given = torch.load("inputs.pt", weights_only=True)
    with torch.no_grad():
        out = scope["model"](**given) if isinstance(given, dict) else scope["model"](given)
    torch.save(out if isinstance(out, torch.Tensor) else out[0], "outputs.pt")
"""
# a CPU-only torch beside PyPI's torchvision dies at import without it (cpu_torchvision.py)
DECLARE = """
library = torch.library.Library("torchvision", "FRAGMENT")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def vit(architecture="vit_tiny_patch16_224", **settings):
    torch.manual_seed(0)
    return timm.create_model(architecture, num_classes=3, **SMALL | settings).eval()


def text(kind, auto=transformers.AutoModelForCausalLM, **settings):
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 50}
    config = transformers.AutoConfig.for_model(kind, **small | settings)
    torch.manual_seed(0)
    return auto.from_config(config).eval()


def lines_of(folder):
    """The code in a folder's README."""
    (lines,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return lines


def in_a_clean_process(folders, inputs):
    """What the lines of each folder's README make of its inputs, run in the folder."""
    for folder, given in zip(folders, inputs, strict=True):
        (folder / "lines.py").write_text(lines_of(folder))
        torch.save(given, folder / "inputs.pt")
    code = CLEAN.format(torchvision=DECLARE)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, folders)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / "outputs.pt", weights_only=True) for folder in folders]


def dinov2():
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "patch_size": 8}
    config = transformers.Dinov2Config(**small, image_size=16, mlp_ratio=4, num_labels=3)
    torch.manual_seed(0)
    return transformers.Dinov2ForImageClassification(config).eval()


IDS = {"input_ids": torch.arange(14).view(2, 7)}
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
LLAMA = {"num_key_value_heads": 2, "intermediate_size": 64}
BERT = {"intermediate_size": 64, "num_labels": 3}
CASES = {  # what, how it is nested, granularity, whether the library alone says its sizes
    "vit M": (vit, {"ffn": QUARTERS}, "M", True),
    "vit mixed": (vit, {"ffn": QUARTERS}, [0, 1, 1, 3], False),
    "vit heads": (vit, {"heads": QUARTERS}, [1, 1, 2, 3], False),
    "vit depth": (vit, {"depth": QUARTERS}, "M", True),
    "vit all": (vit, {"ffn": QUARTERS, "heads": QUARTERS, "depth": QUARTERS}, "M", False),
    "llama S": (lambda: text("llama", **LLAMA), {"ffn": QUARTERS}, "S", True),
    "llama all": (
        lambda: text("llama", **LLAMA, tie_word_embeddings=True),
        {"ffn": (1 / 4, 1), "heads": (1 / 2, 1), "depth": (1 / 2, 1)},
        0,
        True,
    ),
    "llama mixed": (
        lambda: text("llama", **LLAMA, tie_word_embeddings=True),
        {"ffn": QUARTERS, "depth": QUARTERS},
        {"ffn": [0, 1, 2, 3], "depth": "M"},
        False,
    ),
    "gpt2 L": (lambda: text("gpt2", n_inner=64), {"ffn": QUARTERS}, "L", True),
    "gpt2 heads": (lambda: text("gpt2"), {"heads": QUARTERS}, "S", False),
    "bert M": (
        lambda: text("bert", transformers.AutoModelForSequenceClassification, **BERT),
        {"ffn": QUARTERS},
        "M",
        True,
    ),
    # transformers' DINOv2 has no hidden neurons in its configuration but a whole ratio
    "vit dinov2 S": (dinov2, {"ffn": (1 / 8, 1)}, 0, False),
    "vit dinov2 half": (dinov2, {"ffn": (1 / 2, 1), "depth": (1 / 2, 1)}, 0, True),
    "vit low rank": (lambda: factorize(vit()), {"ffn": QUARTERS}, "M", False),
    "gpt2 low rank": (lambda: factorize(text("gpt2")), {"ffn": QUARTERS}, [0, 1, 2, 3], False),
    # whatever the family has for hidden neurons: SwiGLU of 8/3 of the width; stages that differ
    "vit eva 224": (
        lambda: timm.create_model("eva02_tiny_patch14_224", num_classes=3, depth=2).eval(),
        {"ffn": (1 / 8, 1 / 4, 1 / 2, 1)},
        "M",
        True,
    ),
    "vit siglip 224": (
        lambda: vit("vit_so400m_patch14_siglip_224", img_size=224, patch_size=14, embed_dim=60),
        {"ffn": QUARTERS},
        "M",
        True,
    ),
    "vit swin 224": (
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", num_classes=3, embed_dim=24, depths=(1, 1, 2, 1)
        ).eval(),
        {"ffn": QUARTERS},
        [0, 3, 1, 2, 3],
        False,
    ),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Of every case: its folder, what the nested model gives, and what a clean process gives."""
    folders, inputs, expected = [], [], []
    for case, (build, axes, chosen, _) in CASES.items():
        model = nest(build(), axes)
        classes = ["cat", "dog", "owl"] if "vit" in case or "bert" in case else None
        folder = tmp_path_factory.mktemp("exports") / case.replace(" ", "_")
        folders.append(save(model, chosen, folder, classes))
        inputs.append(
            torch.randn(1, 3, 224, 224)
            if "224" in case
            else (IMAGES if case.startswith("vit") else IDS)
        )
        with granularity(model, chosen), torch.no_grad():
            out = model(**inputs[-1]) if isinstance(inputs[-1], dict) else model(inputs[-1])
        expected.append(getattr(out, "logits", out))
    outputs = in_a_clean_process(folders, inputs)
    return dict(zip(CASES, zip(folders, expected, outputs, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_exports_load_without_this_repository(exported, case):
    folder, expected, outputs = exported[case]
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    assert (folder / "load.py").exists() != CASES[case][3]
    config = json.loads((folder / "config.json").read_text())
    if "vit" in case or "bert" in case:
        names = config.get("label_names") or list(config["id2label"].values())
        assert names == ["cat", "dog", "owl"]


def test_smollm2_at_every_size(tmp_path):
    """SmolLM2-135M's configuration: counts, and random weights that transformers loads again."""
    shape = {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
    }
    axes = {"ffn": (1 / 4, 1 / 2, 3 / 4, 1), "heads": (1 / 3, 2 / 3, 2 / 3, 1)}
    config = transformers.LlamaConfig(**shape, num_hidden_layers=30)
    with torch.device("meta"):
        full = nest(transformers.LlamaForCausalLM(config), axes)
    attention, neuron = 2 * 576 * 64 * 4, 3 * 576  # of a group of heads; of a hidden neuron
    for index, (neurons, groups) in enumerate([(384, 1), (768, 2), (1152, 2), (1536, 3)]):
        small = extract(full, index)
        rest = 49152 * 576 + 576
        layer = groups * attention + neurons * neuron + 2 * 576
        assert sum(p.numel() for p in small.parameters()) == rest + 30 * layer
        assert small.config.intermediate_size == neurons
        assert small.config.num_attention_heads == 3 * groups
        assert small.config.num_key_value_heads == groups
        assert small.config.head_dim == 64
    assert sum(p.numel() for p in full.parameters()) == 134_515_008

    torch.manual_seed(0)
    model = nest(transformers.LlamaForCausalLM(config).eval(), axes)
    names, expected = ("S", "M", "L"), []
    for name in names:
        extract(model, name).save_pretrained(tmp_path / name)
        (tmp_path / name / "README.md").write_text(
            "```python\nimport transformers\n"
            'model = transformers.AutoModelForCausalLM.from_pretrained(".").eval()\n```\n'
        )
        with torch.no_grad(), granularity(model, name):
            expected.append(model(**IDS).logits)
    outputs = in_a_clean_process([tmp_path / name for name in names], [IDS] * 3)
    for name, output, logits in zip(names, outputs, expected, strict=True):
        torch.testing.assert_close(output, logits, rtol=1e-5, atol=1e-5)
        shutil.rmtree(tmp_path / name)  # hundreds of megabytes


def test_preprocessing_tokenizer_and_modes(tmp_path):
    before = os.umask(0o027)
    try:
        folder = save(
            nest(vit()), "S", tmp_path / "images", preprocessing={"mean": (0.1, 0.2, 0.3)}
        )
        modes = {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
    finally:
        os.umask(before)
    assert modes == {0o640}
    config = json.loads((folder / "config.json").read_text())
    assert config["pretrained_cfg"]["mean"] == [0.1, 0.2, 0.3]
    assert config["pretrained_cfg"]["input_size"] == [3, 16, 16]
    assert config["model_args"]["mlp_ratio"] == 0.5

    from tokenizers import Tokenizer, models

    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    )
    folder = save(nest(text("llama", **LLAMA), QUARTERS), "S", tmp_path / "text", tokenizer=words)
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded.get_vocab() == {"a": 0, "b": 1}
    assert "AutoTokenizer.from_pretrained(folder)" in (folder / "README.md").read_text()


def test_manifest_names_the_parent(tmp_path):
    hashes = []
    for number in range(3):
        model = nest(vit())
        with torch.no_grad():
            model.head.bias[0] += number // 2
        folder = save(model, "S", tmp_path / str(number))
        hashes.append(json.loads((folder / "manifest.json").read_text())["parent_sha256"])
    assert hashes[0] == hashes[1] != hashes[2]


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(ValueError, match="2 class names were given for 3 classes"):
        save(nest(vit()), "S", tmp_path / "a", ["cat", "dog"])
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64)
    with pytest.raises(ValueError, match="neither a timm nor a transformers model"):
        save(nest(torch.nn.Sequential(layer)), "S", tmp_path / "a")
    with pytest.raises(ValueError, match="vera_b is no parameter of VisionTransformer: merge and"):
        save(nest(add_vera(vit(), 4, "attn.proj")), "S", tmp_path / "a")
    assert not (tmp_path / "a").exists()
