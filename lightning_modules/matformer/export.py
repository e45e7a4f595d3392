"""Writes submodels to folders that timm or transformers loads without this repository.

The submodel is extracted and written by lightning_modules/standalone.py: as a folder of the library
where the library's own arguments can express the sizes (all layers alike), and otherwise
(Mix'n'Match, fewer heads) with a loader beside the weights. manifest.json also records the
granularity and the parent model's hash.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from timm.models import get_model_args
from torch import nn

from lightning_modules import standalone
from lightning_modules.matformer.nest import Granularity, Nesting, extract, nesting_of
from lightning_modules.weights import fingerprint


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
        folder: created if it is missing.
        classes: names of the classes, as for `standalone.save`.
        preprocessing: of images, as for `standalone.save`.
        tokenizer: of transformers, as for `standalone.save`.

    Returns:
        The folder.

    Raises:
        ValueError: before anything is written, if the model is not nested or has no such
            granularity, or for the reasons given at `standalone.save`.
    """
    nesting = nesting_of(model)
    chosen = nesting.resolve(granularity)
    small, label = extract(model, chosen).eval(), nesting.label(chosen)
    blocks, attributes = _sizes(small, nesting, chosen)
    is_timm = not isinstance(model, transformers.PreTrainedModel) and hasattr(
        model, "pretrained_cfg"
    )
    submodel = standalone.Submodel(
        parent=model,
        guesses=_arguments(model, nesting, chosen) if is_timm else (),
        blocks=blocks,
        attributes=attributes,
        about={
            "granularity": label,
            "widths": {
                f"{layer.axis}:{layer.name}": layer.widths[index]
                for layer, index in zip(nesting.layers, chosen, strict=True)
            },
            "parent_sha256": fingerprint(model.state_dict()),
        },
        title=f", granularity {label}",
        origin=", cut out of a nested model (MatFormer, arXiv 2310.07707)",
    )
    return standalone.save(small, folder, classes, preprocessing, tokenizer, submodel)


def _arguments(model: Any, nesting: Nesting, chosen: Sequence[int]) -> list[dict[str, Any]]:
    """Candidate arguments of timm.create_model, one of which may build the submodel."""
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
                # half a neuron more, because timm rounds mlp_ratio * dim down
                ratios.append({"mlp_ratio": (layer.widths[index] + 0.5) / dim})
    return [ratio | depth for ratio in ratios]


def _kept(nesting: Nesting, chosen: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """The name of the list of blocks, and the indices of the blocks that the submodel keeps."""
    return next(
        (layer.name, layer.kept[index])
        for layer, index in zip(nesting.layers, chosen, strict=True)
        if layer.axis == "depth"
    )


def _sizes(
    small: nn.Module, nesting: Nesting, chosen: Sequence[int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`blocks` and `attributes` of standalone.Submodel."""
    blocks: dict[str, Any] = {}
    renumbered: dict[str, str] = {}  # a block's prefix in the parent → in the submodel
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
            block = next((old for old in renumbered if prefix.startswith(old)), None)
            if block is None:
                continue  # in a block that the submodel leaves out
            prefix = renumbered[block] + prefix.removeprefix(block)
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
