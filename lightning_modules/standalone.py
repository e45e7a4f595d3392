"""Writes a model to a folder that timm or transformers loads without this repository.

`plain` first merges an adaptation into the weights. `save` then writes model.safetensors, the
library's config.json with class names and preprocessing, and a README.md with the lines that load
the model. Where the library's own arguments can express all sizes, these are
`timm.create_model("local-dir:FOLDER", pretrained=True)` or `AutoModel….from_pretrained("FOLDER")`.
Where they cannot (low rank, Mix'n'Match, fewer heads), the folder also gets a load.py of some
twenty lines, which needs only that library, and a manifest.json that lists what load.py changes.
"""

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from safetensors.torch import save_file
from timm.models import get_model_args
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn

from lightning_modules import apet, vera
from lightning_modules.counting import count_parameters
from lightning_modules.pela.layers import low_rank_layers
from lightning_modules.pela.tome import MergingBlock, refuse_merging

FORMAT = 3
LOADER = '''"""Loads the model of this folder; needs {library} and safetensors."""

import json
from collections import OrderedDict
from pathlib import Path

import {library}
from safetensors.torch import load_file
from torch.nn import Linear, Sequential


def load(folder=Path(__file__).parent):
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
{build}
    for path, kept in manifest["blocks"].items():
        stack = model.get_submodule(path)
        stack._modules = dict(zip(stack._modules, [list(stack)[i] for i in kept]))
    for path, (inputs, rank, outputs, bias) in manifest["low_rank"].items():
        parent, _, name = path.rpartition(".")
        pair = OrderedDict(u=Linear(inputs, rank, False), v=Linear(rank, outputs, bias))
        setattr(model.get_submodule(parent), name, Sequential(pair))
    for path, value in manifest["attributes"].items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, value)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, value in load_file(Path(folder) / "model.safetensors").items():
        tensors[name].data = value
    return model.eval()
'''
FIRST_LINE = 'folder = "."  # the folder of this file'  # of the code in an exported README.md
BUILD = {
    "timm": """\
    config = json.loads((Path(folder) / "config.json").read_text())
    model = timm.create_model(manifest["architecture"], **manifest["model_args"])
    model.pretrained_cfg = config["pretrained_cfg"] | {"label_names": config.get("label_names")}""",
    "transformers": """\
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, manifest["architecture"])(config)""",
}


@dataclass(frozen=True)
class Submodel:
    """How a model that is saved differs from the model that its library would build.

    Attributes:
        parent: the larger model, as its library builds it.
        guesses: candidate arguments of timm.create_model for the smaller model; the first that
            give its shapes are used, and if none do, the folder gets a load.py.
        blocks: by the name of a list of blocks, indices of the parent's blocks that are kept.
        attributes: by dotted name, values of attributes that differ from the parent's.
        about: further entries of manifest.json.
        title: text for README.md's title, after the class name.
        origin: text for README.md, after the number of parameters.
    """

    parent: Any
    guesses: Sequence[Mapping[str, Any]] = ()
    blocks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    origin: str = ""


def mergeable(model: nn.Module) -> bool:
    """Whether a folder can hold what was trained: no adapters, prompts or biases were inserted.

    Nor may the blocks merge tokens, which no folder would tell timm.
    """
    parts: list[Any] = [part for part in model.modules() if hasattr(part, "apet")]
    placements = [part.apet.placement for part in parts]
    apart = any(one.plug or one.prompt or one.bias for one in placements)
    return not apart and not any(
        hasattr(part, "adapter") or isinstance(part, MergingBlock) for part in model.modules()
    )


def plain(model: nn.Module) -> nn.Module:
    """Merge what VeRA, APET or peft have trained into the weights, in place.

    Returns:
        The model, made of ordinary layers; low-rank layers stay as they are.

    Raises:
        ValueError: for what cannot be merged (bottleneck adapters, prompts, quantised weights).
    """
    if hasattr(model, "vera"):
        return vera.strip(vera.merge(model))
    if hasattr(model, "apet"):
        return apet.merge(model)
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "base_layer") and hasattr(layer, "merge"):  # a layer of peft
            parent, _, child = name.rpartition(".")
            layer.merge()
            setattr(model.get_submodule(parent), child, layer.base_layer)
        elif hasattr(layer, "adapter"):
            raise ValueError(
                f"{name} has a bottleneck adapter behind it, which cannot be merged into weights: "
                "keep the checkpoint, or tune with vera or lora"
            )
    return model


def save(
    model: Any,
    folder: str | Path,
    classes: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    submodel: Submodel | None = None,
) -> Path:
    """Write a model to a folder: a plain one, one with low-rank layers, or a submodel.

    Args:
        model: of timm or transformers, neither nested nor adapted (see `plain`).
        folder: created if it is missing.
        classes: names of the classes, for config.json (timm's label_names, transformers'
            id2label).
        preprocessing: of images, in timm's terms: input_size (3, H, W), mean, std, interpolation,
            crop_pct; None for the model's default.
        tokenizer: of transformers, saved beside the model.
        submodel: needed for a model that was cut out of a larger one.

    Returns:
        The folder.

    Raises:
        ValueError: before anything is written, if the model is of neither library, holds
            parameters that its library does not know or merges tokens, or there are not as many
            names as classes.
    """
    submodel = submodel or Submodel(model)
    library = "transformers" if isinstance(model, transformers.PreTrainedModel) else "timm"
    if library == "timm" and not hasattr(submodel.parent, "pretrained_cfg"):
        raise ValueError(
            f"{type(model).__name__} is neither a timm nor a transformers model: save its "
            "state_dict instead"
        )
    outputs = model.config.num_labels if library == "transformers" else model.num_classes
    if classes and len(classes) != outputs:
        raise ValueError(f"{len(classes)} class names were given for {outputs} classes")
    _refuse_unknown(model, _build(submodel.parent))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("load.py", "manifest.json"):  # of a model that was saved here before
        (folder / name).unlink(missing_ok=True)
    if library == "timm":
        lines, loader_entries = _save_timm(model, folder, classes, preprocessing, submodel)
    else:
        lines, loader_entries = _save_transformers(model, folder, classes, submodel)
    manifest = {"format": FORMAT, **submodel.about} if submodel.about or loader_entries else {}
    pairs: dict[str, Any] = dict(low_rank_layers(model))
    if loader_entries:
        ranks = {name: _sizes(pair) for name, pair in pairs.items()}
        manifest |= loader_entries
        manifest |= {"low_rank": ranks, "blocks": submodel.blocks}
        manifest |= {"attributes": submodel.attributes}
        (folder / "load.py").write_text(LOADER.format(library=library, build=BUILD[library]))
        lines = ["import sys", "sys.path.insert(0, folder)", "from load import load"]
        lines = [f"import {library}", *lines, "model = load()"]
    if manifest:
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        more = [] if library == "transformers" else ["import transformers"]
        lines += [*more, "tokenizer = transformers.AutoTokenizer.from_pretrained(folder)"]
    if library == "timm":
        lines += ["from timm.data import create_transform, resolve_data_config"]
        lines += ["transform = create_transform(**resolve_data_config(model=model))  # of an image"]
    text = _readme(model, classes, lines, len(pairs), submodel)
    (folder / "README.md").write_text(text, encoding="utf-8")
    mask = os.umask(0)  # the process's umask can only be read by setting it
    os.umask(mask)
    for file in folder.iterdir():  # safetensors writes files that only their owner can read
        if file.is_file():
            file.chmod(0o666 & ~mask)
    return folder


def _build(model: Any, **changes: Any) -> nn.Module:
    """The model as its library builds it, on the meta device; `changes` to timm's arguments."""
    with torch.device("meta"):
        if isinstance(model, transformers.PreTrainedModel):
            return type(model)(copy.deepcopy(model.config))
        arguments = {"num_classes": model.num_classes, **get_model_args(model), **changes}
        return timm.create_model(model.pretrained_cfg["architecture"], **arguments)


def _refuse_unknown(model: nn.Module, dense: nn.Module) -> None:
    """Refuse a model with tensors that are neither the library's nor a low-rank layer's.

    Also one whose blocks merge tokens: its tensors are the library's, and its outputs are not.
    """
    refuse_merging(model, "which a model of timm does not")
    known = dense.state_dict().keys()
    pairs = tuple(f"{name}.{part}." for name in low_rank_layers(model) for part in "uv")
    for name in model.state_dict():
        low_rank = name.startswith(pairs) and name.endswith((".weight", ".bias"))
        if name not in known and not low_rank:
            raise ValueError(
                f"{name} is no parameter of {type(dense).__name__}: merge and strip what was added "
                "to the model first"
            )


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """The shape of every tensor in the state_dict, by name."""
    return {name: value.shape for name, value in model.state_dict().items()}


def _sizes(pair: Any) -> list[Any]:
    """A low-rank layer's inputs, rank, outputs and whether it has a bias."""
    u, v = pair.u, pair.v
    return [u.in_features, u.out_features, v.out_features, v.bias is not None]


# lines of code that load the model, and the manifest's entries for load.py; one of the two is empty
Written = tuple[list[str], dict[str, Any]]


def _save_timm(
    model: Any,
    folder: Path,
    classes: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
    submodel: Submodel,
) -> Written:
    """Write weights and config.json of a timm model."""
    guesses = submodel.guesses or [{}]
    fits = (one for one in guesses if _shapes(_build(submodel.parent, **one)) == _shapes(model))
    fitting = next(fits, None)
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    save_config_for_hf(
        model,
        str(folder / "config.json"),
        model_config={"label_names": list(classes)} if classes else None,
        model_args=dict(fitting or {}),
        data_config=dict(preprocessing) if preprocessing else None,
    )
    line = 'model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()'
    if fitting is not None:
        return ["import timm", line], {}
    arguments = {**get_model_args(submodel.parent), "num_classes": model.num_classes}
    return [], {
        "architecture": submodel.parent.pretrained_cfg["architecture"],
        "model_args": arguments,
    }


def _save_transformers(
    model: Any, folder: Path, classes: Sequence[str] | None, submodel: Submodel
) -> Written:
    """Write weights and config.json of a transformers model."""
    name = type(model).__name__
    fits = _shapes(_build(model)) == _shapes(model)
    config = model.config if fits else copy.deepcopy(submodel.parent.config)
    if classes:
        config.id2label = dict(enumerate(classes))
        config.label2id = {label: index for index, label in enumerate(classes)}
    if fits:
        model.save_pretrained(folder)
        line = f"model = transformers.{name}.from_pretrained(folder).eval()"
        return ["import transformers", line], {}
    config.architectures = [name]
    config.save_pretrained(folder)
    if model.can_generate():
        submodel.parent.generation_config.save_pretrained(folder)
    distinct: dict[str, Tensor] = {}
    for key, value in model.state_dict().items():
        tied = any(value.data_ptr() == v.data_ptr() and value.numel() for v in distinct.values())
        if not tied:  # only the first of tied tensors: the model that is loaded ties them itself
            distinct[key] = value.contiguous()
    save_file(distinct, folder / "model.safetensors")
    return [], {"architecture": name}


def _readme(
    model: nn.Module,
    classes: Sequence[str] | None,
    lines: Sequence[str],
    low_rank: int,
    submodel: Submodel,
) -> str:
    code = "\n".join([FIRST_LINE, *lines])
    named = f" Classes: {', '.join(classes)}." if classes else ""
    kind = f", {low_rank} of its layers of low rank" if low_rank else ""
    return (
        f"# {type(model).__name__}{submodel.title}\n\nA model of {count_parameters(model):,} "
        f"parameters{submodel.origin}{kind}.{named}\n\n```python\n{code}\n```\n"
    )
