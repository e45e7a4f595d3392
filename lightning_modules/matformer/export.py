"""Submodels on disk, for timm or transformers alone.

Cut out of the nested model, a submodel is written as any other (lightning_modules/standalone.py):
where the library's own arguments can say the sizes (all layers alike), as the library's folder;
where they cannot (Mix'n'Match, fewer heads), with a loader beside it. manifest.json says besides
which granularity of which model it is.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from timm.models._input import get_model_args
from torch import nn

from lightning_modules import standalone
from lightning_modules.matformer.nest import Granularity, Nesting, extract, nesting_of


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
        classes: names of the classes, as for `standalone.save`.
        preprocessing: of images, likewise.
        tokenizer: of transformers, likewise.

    Returns:
        The folder.

    Raises:
        ValueError: before anything is written; see `standalone.save`.
    """
    nesting = nesting_of(model)
    chosen = nesting.resolve(granularity)
    small, label = extract(model, chosen).eval(), nesting.label(chosen)
    blocks, attributes = _sizes(small, nesting, chosen)
    of_timm = not isinstance(model, transformers.PreTrainedModel) and hasattr(
        model, "pretrained_cfg"
    )
    cut = standalone.Cut(
        parent=model,
        guesses=_arguments(model, nesting, chosen) if of_timm else (),
        blocks=blocks,
        attributes=attributes,
        about={
            "granularity": label,
            "widths": {
                f"{layer.axis}:{layer.name}": layer.widths[index]
                for layer, index in zip(nesting.layers, chosen, strict=True)
            },
            "parent_sha256": fingerprint(model),
        },
        title=f", granularity {label}",
        origin=", cut out of a nested model (MatFormer, arXiv 2310.07707)",
    )
    return standalone.save(small, folder, classes, preprocessing, tokenizer, cut)


def fingerprint(model: nn.Module) -> str:
    """SHA-256 over the names, shapes, types and bytes of a model's state_dict."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _arguments(model: Any, nesting: Nesting, chosen: Sequence[int]) -> list[dict[str, Any]]:
    """What of timm's arguments may say the sizes."""
    arguments = get_model_args(model)
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


def _kept(nesting: Nesting, chosen: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Name of the list of blocks, and the blocks of it that stay."""
    return next(
        (layer.name, layer.kept[index])
        for layer, index in zip(nesting.layers, chosen, strict=True)
        if layer.axis == "depth"
    )


def _sizes(
    small: nn.Module, nesting: Nesting, chosen: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The blocks that stay, and the attributes that repeat sizes."""
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
    return blocks, attributes
