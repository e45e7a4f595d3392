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
from safetensors.torch import load_file, save_file
from timm.layers import Attention
from torch import nn

from lightning_modules.matformer.nest import (
    Granularity,
    extract,
    nest,
    nesting_of,
    set_granularity,
)

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
    uniform = len(set(chosen)) == 1 and nesting.part == "ffn"
    arguments = dict(model_args)
    if uniform and chosen[0] != len(nesting.fractions) - 1:
        arguments["mlp_ratio"] = model_args.get("mlp_ratio", 4.0) * nesting.fractions[chosen[0]]
    manifest = {
        "format": FORMAT,
        "architecture": architecture,
        "model_args": arguments,
        "part": nesting.part,
        "granularity": nesting.label(chosen),
        "widths": {
            layer.name: layer.widths[index]
            for layer, index in zip(nesting.layers, chosen, strict=True)
        },
        "timm_alone_loads_it": uniform or set(chosen) == {len(nesting.fractions) - 1},
        "parent_sha256": fingerprint(model),
    }
    small = extract(model, chosen)
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
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit its manifest: {error}") from error
    return model


def _narrow(model: nn.Module, part: str, widths: dict[str, int]) -> nn.Module:
    """Give the named layers their widths; the weights are about to be replaced."""
    layers = dict(model.named_modules())
    module: Any = layers[next(iter(widths))]
    full = module.num_heads if isinstance(module, Attention) else module.fc2.in_features
    fractions = sorted({width / full for width in widths.values()} | {1.0})
    nest(model, fractions, part)  # type: ignore[arg-type]
    chosen = [layer.widths.index(widths[layer.name]) for layer in nesting_of(model).layers]
    set_granularity(model, chosen)
    return extract(model, chosen)
