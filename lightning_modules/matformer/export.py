"""Submodels on disk: safetensors and a manifest.

A folder holds `model.safetensors` and `manifest.json`. When all layers have the same width the
manifest's `model_args` describe it to timm, and nothing else is needed to load it:

    timm.create_model(manifest["architecture"], **manifest["model_args"]).load_state_dict(...)

Per-layer widths (Mix'n'Match) and heads are beyond timm's arguments: `load` narrows those layers.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file
from timm.layers import Attention
from torch import nn

from lightning_modules.matformer.nest import (
    Granularity,
    extract,
    nest,
    nesting_of,
    set_granularity,
)
from lightning_modules.weights import read_file

FORMAT = 1


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names, shapes, types and bytes of a model's state_dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def save(
    model: nn.Module,
    granularity: Granularity,
    folder: str | Path,
    architecture: str,
    model_args: dict[str, Any],
) -> Path:
    """Extract a submodel and write it to a folder.

    Args:
        model: a nested timm model.
        granularity: as for `set_granularity`.
        folder: is made when it is missing.
        architecture: the timm name that `model` was built from.
        model_args: the arguments of timm.create_model that it was built with, num_classes too.

    Returns:
        The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    nesting = nesting_of(model)
    chosen = nesting.resolve(granularity)
    small = extract(model, chosen)
    ((part, fractions),) = nesting.axes.items()
    arguments = dict(model_args)
    if len(set(chosen)) == 1 and part == "ffn":
        arguments["mlp_ratio"] = model_args.get("mlp_ratio", 4.0) * fractions[chosen[0]]
    fitting = [
        given
        for given in (model_args, arguments)
        if shapes(timm.create_model(architecture, **given)) == shapes(small)
    ]
    manifest = {
        "format": FORMAT,
        "architecture": architecture,
        "model_args": fitting[0] if fitting else model_args,
        "part": part,
        "granularity": nesting.label(chosen),
        "widths": {
            layer.name: layer.widths[index]
            for layer, index in zip(nesting.layers, chosen, strict=True)
        },
        "timm_alone_loads_it": bool(fitting),
        "parent_sha256": fingerprint(model),
    }
    save_file(
        {k: v.contiguous() for k, v in small.state_dict().items()}, folder / "model.safetensors"
    )
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return folder


def load(folder: str | Path) -> nn.Module:
    """The submodel that `save` wrote: a plain timm model.

    Raises:
        FileNotFoundError: if the folder has no manifest.
        ValueError: if the manifest is of another format or the weights do not fit it.
    """
    folder = Path(folder)
    file = folder / "manifest.json"
    if not file.is_file():
        raise FileNotFoundError(f"no manifest.json in {folder}: expected a folder written by save")
    manifest = json.loads(file.read_text())
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{file} has format {manifest.get('format')!r}, expected {FORMAT}")
    model = timm.create_model(manifest["architecture"], **manifest["model_args"])
    if not manifest["timm_alone_loads_it"]:
        model = _narrow(model, manifest["part"], manifest["widths"])
    try:
        model.load_state_dict(read_file(folder / "model.safetensors"))
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit its manifest: {error}") from error
    return model


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Of everything in its state_dict."""
    return {name: value.shape for name, value in model.state_dict().items()}


def full_width(layer: Any) -> int:
    """Heads of an attention, hidden neurons of a feed-forward layer."""
    return layer.num_heads if isinstance(layer, Attention) else layer.fc2.in_features


def _narrow(model: nn.Module, part: str, widths: dict[str, int]) -> nn.Module:
    """Give the named layers their widths; the weights are about to be replaced."""
    layers: dict[str, Any] = dict(model.named_modules())
    fractions = sorted({width / full_width(layers[name]) for name, width in widths.items()} | {1.0})
    nest(model, fractions, part)  # type: ignore[arg-type]
    chosen = [layer.widths.index(widths[layer.name]) for layer in nesting_of(model).layers]
    set_granularity(model, chosen)
    return extract(model, chosen)
