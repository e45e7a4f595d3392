"""A model on disk that timm or transformers loads without this repository.

What is left of an adaptation is first written into the weights (`plain`). A folder then holds
model.safetensors, the library's config.json with class names and preprocessing, and a README.md
with the lines that load it. A low-rank model has a load.py of some ten lines besides, which needs
that library only. (Submodels of nested models: lightning_modules/matformer/export.py.)
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf
from timm.models._input import get_model_args
from torch import nn

from lightning_modules import apet, vera
from lightning_modules.counting import count_parameters
from lightning_modules.pela.layers import low_rank_layers

LOADER = '''"""Loads the low-rank model of this folder; needs {library} and safetensors."""

import json
from collections import OrderedDict
from pathlib import Path

import {library}
from safetensors.torch import load_file
from torch import nn


def load(folder=Path(__file__).parent):
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
{build}
    for name, (inputs, rank, outputs, bias) in manifest["low_rank"].items():
        pair = OrderedDict(u=nn.Linear(inputs, rank, False), v=nn.Linear(rank, outputs, bias))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Sequential(pair))
    tensors = load_file(Path(folder) / "model.safetensors")
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys, missing.unexpected_keys
{after}    return model.eval()
'''
BUILD = {
    "timm": '    model = timm.create_model(manifest["architecture"], **manifest["model_args"])',
    "transformers": """\
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, manifest["architecture"])(config)""",
}
AFTER = {"timm": "", "transformers": "    model.tie_weights()\n"}


def plain(model: nn.Module) -> nn.Module:
    """Write what VeRA, APET or peft have trained into the weights, in place.

    Returns:
        The model, made of ordinary layers; low-rank layers stay.

    Raises:
        ValueError: for what cannot be written into weights (adapters, prompts, quantised weights).
    """
    if hasattr(model, "vera"):
        return vera.strip(vera.merge(model))
    if hasattr(model, "apet"):
        return apet.merge(model)
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "base_layer") and hasattr(layer, "merge"):  # peft's
            parent, _, child = name.rpartition(".")
            layer.merge()
            setattr(model.get_submodule(parent), child, layer.base_layer)
        elif hasattr(layer, "adapter"):
            raise ValueError(
                f"{name} has a bottleneck adapter behind it, which no weight can take up: keep the "
                "checkpoint, or tune with vera or lora"
            )
    return model


def save(
    model: Any,
    folder: str | Path,
    classes: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> Path:
    """Write a plain or low-rank model to a folder.

    Args:
        model: of timm or transformers, not nested, nothing adapted (see `plain`).
        folder: is made when it is missing.
        classes: names of the classes.
        preprocessing: of images, in timm's terms: input_size (3, H, W), mean, std, interpolation,
            crop_pct; the model's own where None.
        tokenizer: of transformers, saved beside the model.

    Returns:
        The folder.

    Raises:
        ValueError: if the model is of neither library, or there are not as many names as classes.
    """
    folder = Path(folder)
    library = "transformers" if isinstance(model, transformers.PreTrainedModel) else "timm"
    if library == "timm" and not hasattr(model, "pretrained_cfg"):
        raise ValueError(
            f"{type(model).__name__} is neither a timm nor a transformers model: save its "
            "state_dict instead"
        )
    outputs = model.config.num_labels if library == "transformers" else model.num_classes
    if classes and len(classes) != outputs:
        raise ValueError(f"{len(classes)} class names were given for {outputs} classes")
    folder.mkdir(parents=True, exist_ok=True)
    pairs: dict[str, Any] = dict(low_rank_layers(model))
    if library == "timm":
        lines = _save_timm(model, folder, classes, preprocessing)
    else:
        lines = _save_transformers(model, folder, classes, whole=not pairs)
    if pairs:
        manifest = {
            "architecture": type(model).__name__,
            "low_rank": {
                name: [pair.u.in_features, len(pair.u.weight), len(pair.v.weight), has_bias]
                for name, pair in pairs.items()
                for has_bias in [pair.v.bias is not None]
            },
        }
        if library == "timm":
            manifest["architecture"] = model.pretrained_cfg["architecture"]
            manifest["model_args"] = {**get_model_args(model), "num_classes": model.num_classes}
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        code = LOADER.format(library=library, build=BUILD[library], after=AFTER[library])
        (folder / "load.py").write_text(code)
        path = ["import sys", "sys.path.insert(0, folder)"]
        lines = [f"import {library}", *path, "from load import load", "model = load()"]
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        lines.append("tokenizer = transformers.AutoTokenizer.from_pretrained(folder)")
    (folder / "README.md").write_text(_readme(model, classes, lines, len(pairs)))
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():  # safetensors writes files that only their owner can read
        if file.is_file():
            file.chmod(0o666 & ~mask)
    return folder


def _save_timm(
    model: Any,
    folder: Path,
    classes: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
) -> list[str]:
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    save_config_for_hf(
        model,
        str(folder / "config.json"),
        model_config={"label_names": list(classes)} if classes else None,
        data_config=dict(preprocessing) if preprocessing else None,
    )
    line = 'model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()'
    return ["import timm", line]


def _save_transformers(
    model: Any, folder: Path, classes: Sequence[str] | None, whole: bool
) -> list[str]:
    if classes:
        model.config.id2label = dict(enumerate(classes))
        model.config.label2id = {label: index for index, label in enumerate(classes)}
    if whole:
        model.save_pretrained(folder)
    else:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        distinct: dict[int, str] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            distinct.setdefault(id(value), name)  # tied: the first name, the loader ties again
        state = {name: model.state_dict()[name].contiguous() for name in distinct.values()}
        save_file(state, folder / "model.safetensors")
    line = f"model = transformers.{type(model).__name__}.from_pretrained(folder).eval()"
    return ["import transformers", line]


def _readme(
    model: nn.Module, classes: Sequence[str] | None, lines: Sequence[str], low_rank: int
) -> str:
    code = "\n".join(['folder = "."  # where this file lies', *lines])
    named = f" Classes: {', '.join(classes)}." if classes else ""
    kind = f", {low_rank} of its layers of low rank" if low_rank else ""
    return (
        f"# {type(model).__name__}\n\nA model of {count_parameters(model):,} parameters{kind}."
        f"{named}\n\n```python\n{code}\n```\n"
    )
