"""Submodels on disk, for timm or transformers alone.

Where the library's own arguments can say the sizes (all layers alike), the folder is what the
library reads: `timm.create_model("local-dir:FOLDER", pretrained=True)` or
`AutoModel….from_pretrained("FOLDER")`. Where they cannot (Mix'n'Match, fewer heads), a `load.py` of
some ten lines lies beside the weights, which needs that library only. README.md of the folder
holds the loading lines, config.json class names and preprocessing, manifest.json what was cut.
"""

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf
from timm.models._input import get_model_args
from torch import nn

from lightning_modules.counting import count_parameters
from lightning_modules.matformer.nest import Granularity, Nesting, extract, nesting_of

FORMAT = 2
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
    for path, bias in manifest["low_rank"].items():
        parent, _, name = path.rpartition(".")
        pair = Sequential(OrderedDict(u=Linear(1, 1, bias=False), v=Linear(1, 1, bias=bias)))
        setattr(model.get_submodule(parent), name, pair)
    for path, value in manifest["attributes"].items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, value)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, value in load_file(Path(folder) / "model.safetensors").items():
        tensors[name].data = value
    return model.eval()
'''
BUILD = {
    "timm": '    model = timm.create_model(manifest["architecture"], **manifest["model_args"])',
    "transformers": """\
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, manifest["architecture"])(config)""",
}


def save(
    model: Any,
    granularity: Granularity,
    folder: str | Path,
    classes: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
) -> Path:
    """Extract a submodel and write it to a folder.

    Args:
        model: nested, of timm or transformers.
        granularity: as for `set_granularity`.
        folder: is made when it is missing.
        classes: names of the classes, for config.json (label_names of timm, id2label of
            transformers).
        preprocessing: of images, in timm's terms: input_size (3, H, W), mean, std, interpolation,
            crop_pct; the model's own where None.
        tokenizer: of transformers, saved beside the model.

    Returns:
        The folder.

    Raises:
        ValueError: before anything is written, if the model is of neither library or holds
            parameters that its library does not know, or there are not as many names as classes.
    """
    folder = Path(folder)
    nesting = nesting_of(model)
    chosen = nesting.resolve(granularity)
    of_transformers = isinstance(model, transformers.PreTrainedModel)
    if not of_transformers and not hasattr(model, "pretrained_cfg"):
        raise ValueError(
            f"{type(model).__name__} is neither a timm nor a transformers model: save the "
            "state_dict of extract(model, granularity) instead"
        )
    outputs = model.config.num_labels if of_transformers else model.num_classes
    if classes is not None and len(classes) != outputs:
        raise ValueError(f"{len(classes)} class names were given for {outputs} classes")
    small = extract(model, chosen).eval()
    _refuse_strange(small, _dense(model))
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "granularity": nesting.label(chosen),
        "widths": {
            f"{layer.axis}:{layer.name}": layer.widths[index]
            for layer, index in zip(nesting.layers, chosen, strict=True)
        },
        "parent_sha256": fingerprint(model),
    }
    if of_transformers:
        lines, told = _save_transformers(model, small, folder, classes)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
            lines.append("tokenizer = transformers.AutoTokenizer.from_pretrained(folder)")
    else:
        lines, told = _save_timm(model, small, nesting, chosen, folder, classes, preprocessing)
    manifest |= told
    if "attributes" in manifest:  # the library cannot say the sizes
        library = "transformers" if of_transformers else "timm"
        manifest |= _sizes(small, nesting, chosen)
        code = LOADER.format(library=library, build=BUILD[library])
        (folder / "load.py").write_text(code)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / "README.md").write_text(_readme(small, manifest, classes, lines))
    mask = os.umask(0)
    os.umask(mask)
    for file in folder.iterdir():  # safetensors writes files that only their owner can read
        if file.is_file():
            file.chmod(0o666 & ~mask)
    return folder


def _dense(model: Any) -> nn.Module:
    """A model as its library builds it, by the arguments of this one."""
    if isinstance(model, transformers.PreTrainedModel):
        with torch.device("meta"):
            return type(model)(copy.deepcopy(model.config))
    return timm.create_model(model.pretrained_cfg["architecture"], **get_model_args(model))


def _low_rank(model: nn.Module) -> dict[str, nn.Sequential]:
    """Low-rank layers by name: two linear layers u and v in a row (PELA's)."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Sequential and list(module._modules) == ["u", "v"]
    }


def _refuse_strange(small: nn.Module, dense: nn.Module) -> None:
    known = dense.state_dict().keys()
    pairs = tuple(f"{name}.{part}." for name in _low_rank(small) for part in "uv")
    for name in small.state_dict():
        plain = name.startswith(pairs) and name.endswith((".weight", ".bias"))
        if name not in known and not plain:
            raise ValueError(
                f"{name} is no parameter of {type(dense).__name__}: merge and strip what was added "
                "to the model first"
            )


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names, shapes, types and bytes of a model's state_dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Of everything in its state_dict."""
    return {name: value.shape for name, value in model.state_dict().items()}


def _save_timm(
    model: Any,
    small: Any,
    nesting: Nesting,
    chosen: Sequence[int],
    folder: Path,
    classes: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
) -> tuple[list[str], dict[str, Any]]:
    architecture, arguments = model.pretrained_cfg["architecture"], get_model_args(model)
    guesses = _arguments(model, nesting, chosen, arguments)
    fitting = next(
        (
            extra
            for extra in guesses
            if shapes(timm.create_model(architecture, **arguments | extra)) == shapes(small)
        ),
        None,
    )
    save_file({n: v.contiguous() for n, v in small.state_dict().items()}, _weights(folder))
    save_config_for_hf(
        small,
        str(folder / "config.json"),
        model_config={"label_names": list(classes)} if classes else None,
        model_args=fitting or {},
        data_config=dict(preprocessing) if preprocessing else None,
    )
    if fitting is not None:
        line = 'model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()'
        return ["import timm", line], {}
    return _own_loader(), {
        "architecture": architecture,
        "model_args": arguments,
        "attributes": {},
    }


def _arguments(
    model: Any, nesting: Nesting, chosen: Sequence[int], arguments: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What of timm's arguments may say the sizes: whether it does shows in the shapes."""
    depth: dict[str, Any] = {}
    ratios: list[dict[str, Any]] = [{}]
    for axis, fractions in nesting.axes.items():
        layers = [(i, x) for i, x in zip(chosen, nesting.layers, strict=True) if x.axis == axis]
        if axis == "depth":
            depth = {"depth": len(_kept(nesting, chosen)[1])}
        elif axis == "ffn" and len({index for index, _ in layers}) == 1:
            index, layer = layers[0]
            ratios.append({"mlp_ratio": arguments.get("mlp_ratio", 4.0) * fractions[index]})
            if isinstance(dim := getattr(model, "embed_dim", None), int):
                # half a neuron more: timm rounds down
                ratios.append({"mlp_ratio": (layer.widths[index] + 0.5) / dim})
    return [ratio | depth for ratio in ratios]


def _save_transformers(
    model: Any, small: Any, folder: Path, classes: Sequence[str] | None
) -> tuple[list[str], dict[str, Any]]:
    name = type(model).__name__
    with torch.device("meta"):
        fits = shapes(type(model)(copy.deepcopy(small.config))) == shapes(small)
    config = small.config if fits else copy.deepcopy(model.config)
    if classes:
        config.id2label = dict(enumerate(classes))
        config.label2id = {label: index for index, label in enumerate(classes)}
    if fits:
        small.save_pretrained(folder)
        line = f"model = transformers.{name}.from_pretrained(folder).eval()"
        return ["import transformers", line], {}
    config.architectures = [name]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    distinct: dict[str, torch.Tensor] = {}
    for key, value in small.state_dict().items():
        tied = any(value.data_ptr() == v.data_ptr() and value.numel() for v in distinct.values())
        if not tied:  # the first name; the loader's model ties the others itself
            distinct[key] = value.contiguous()
    save_file(distinct, _weights(folder))
    return ["import transformers", *_own_loader()], {"architecture": name, "attributes": {}}


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def _own_loader() -> list[str]:
    return ["import sys", "sys.path.insert(0, folder)", "from load import load", "model = load()"]


def _kept(nesting: Nesting, chosen: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Name of the list of blocks, and the blocks of it that stay."""
    return next(
        (layer.name, layer.kept[index])
        for layer, index in zip(nesting.layers, chosen, strict=True)
        if layer.axis == "depth"
    )


def _sizes(small: nn.Module, nesting: Nesting, chosen: Sequence[int]) -> dict[str, Any]:
    """What the loader changes: the blocks that stay, and the attributes that repeat sizes."""
    blocks: dict[str, Any] = {}
    renumbered: dict[str, str] = {}  # name of a block in the full model → in the small one
    if "depth" in nesting.axes:
        name, kept = _kept(nesting, chosen)
        blocks[name] = kept
        for number, index in enumerate(kept):
            renumbered[f"{name}.{index}."] = f"{name}.{number}."
    attributes: dict[str, Any] = {}
    for layer, index in zip(nesting.layers, chosen, strict=True):
        if layer.layer is None:
            continue
        prefix = f"{layer.name}."
        if renumbered:
            place = next((new for old, new in renumbered.items() if prefix.startswith(old)), None)
            old = next((old for old in renumbered if prefix.startswith(old)), "")
            if place is None:
                continue  # in a block that is skipped
            prefix = place + prefix.removeprefix(old)
        for name, value in layer.layer.attributes(layer.widths[index]).items():
            attributes[prefix + name] = value
        for cut in layer.layer.cuts:
            child = small.get_submodule(prefix + cut.path)
            for name in ("in_features", "out_features", "nx", "nf", "normalized_shape"):
                if hasattr(child, name):
                    attributes[f"{prefix}{cut.path}.{name}"] = getattr(child, name)
    for name, module in small.named_modules():
        if blocks and hasattr(module, "layer_idx"):
            attributes[f"{name}.layer_idx"] = module.layer_idx
    low_rank = _low_rank(small)
    for name, pair in low_rank.items():
        for part, factor in pair.named_children():
            for size in ("in_features", "out_features"):
                attributes[f"{name}.{part}.{size}"] = getattr(factor, size)
    return {
        "blocks": blocks,
        "attributes": attributes,
        "low_rank": {name: f"{name}.v.bias" in small.state_dict() for name in low_rank},
    }


def _readme(
    small: nn.Module,
    manifest: Mapping[str, Any],
    classes: Sequence[str] | None,
    lines: Sequence[str],
) -> str:
    code = "\n".join(['folder = "."  # where this file lies', *lines])
    named = f" Classes: {', '.join(classes)}." if classes else ""
    return (
        f"# {type(small).__name__}, granularity {manifest['granularity']}\n\n"
        f"A submodel of {count_parameters(small):,} parameters, cut out of a nested model "
        f"(MatFormer, arXiv 2310.07707).{named}\n\n```python\n{code}\n```\n"
    )
