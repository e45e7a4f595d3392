"""Saves and loads VeRA adapters: two vectors for each layer and a seed, some kilobytes.

A folder holds `adapter.safetensors` and `manifest.json`. The tensors are `b`, the concatenation of
all layers' b, `d` (layers, r), and `head.<name>` for each tensor of the heads and each that the
base's files lack (`model.at_random`). A and B are drawn again from the seed (arXiv 2310.11454,
Section 3.1). The manifest has their SHA-256, to notice a random generator that has changed, and
that of the base's other parameters, to notice another base.
"""

import hashlib
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_modules.layouts import inside, shape_of
from lightning_modules.vera.layer import VeraLayer
from lightning_modules.vera.vera import (
    Vera,
    attach,
    layers_of,
    projections_of,
    strip,
    vectors_of,
    vera_of,
)
from lightning_modules.weights import (
    drawn_at_random,
    fingerprint,
    gathered,
    mismatch,
    read_file,
    read_state_dict,
)

FORMAT = 1
MANIFEST, TENSORS = "manifest.json", "adapter.safetensors"


def save_adapter(
    model: nn.Module,
    folder: str | Path,
    projections: bool = False,
    checkpoint: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
) -> Path:
    """Write the vectors and the heads of an adapted model to a folder.

    What the base's files lack (`model.at_random`, see `build_text`) is written like a head.
    Under FSDP2 every process has to call this; the first one writes.

    Args:
        model: a model that `add_vera` has changed, merged or not.
        folder: created if it is missing.
        projections: write A and B too, so that loading does not depend on the random generator.
            Matrices that were not drawn from the seed (loaded from peft) are always written.
        checkpoint: of the same run; its vectors and heads are written instead of the model's.
        about: further entries of the manifest, such as the name of the base and of the classes.

    Returns:
        The folder.

    Raises:
        ValueError: if the model has no VeRA layer, or `projections` is set and they are not shared.
    """
    record = vera_of(model)
    folder = Path(folder)
    values = {**model.state_dict(), **(read_state_dict(checkpoint, model) if checkpoint else {})}
    vectors = [
        [gathered(values[f"{name}.{attribute}"].detach()).cpu() for attribute in piece.names]
        for name, layer in layers_of(model).items()
        for piece in layer.slices
    ]
    tensors = {
        "b": torch.cat([b for b, _ in vectors]),
        "d": torch.stack([d for _, d in vectors]),
    }
    random = drawn_at_random(model, record.heads)
    unmerged = base_parameters(model)
    for name, tensor in values.items():
        if name in random or inside(name, record.heads):
            tensor = unmerged.get(name, tensor)
            tensors[f"head.{name}"] = gathered(tensor.detach()).cpu().clone()
    pairs = projections_of(model)
    projections = projections or any(pair.given is not None for pair in pairs)
    if projections and not record.shared:
        raise ValueError(
            f"{len(pairs)} pairs of projections are not shared: only a shared pair can be written, "
            "save with projections=False"
        )
    if projections:
        a, b_matrix = pairs[0].on(torch.device("cpu"), torch.float32)
        tensors |= {"A": a, "B": b_matrix}
    settings = asdict(record)
    del settings["layers"]
    manifest = {
        **(about or {}),
        "format": FORMAT,
        "method": "vera",
        **settings,
        "torch": torch.__version__,
        "projections_sha256": _sha256_of_projections(model),
        "base_sha256": base_sha256(model, random),
        "layers": layer_shapes(model),
    }
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / TENSORS)
        (folder / MANIFEST).write_text(json.dumps(manifest) + "\n")
    return folder


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str | Path, check_base: bool = True) -> nn.Module:
    """Load an adapter that `save_adapter` wrote into a model, in place.

    Args:
        model: the plain base; or a model adapted in the same way, whose vectors and heads are
            then replaced.
        folder: written by `save_adapter`.
        check_base: compare the base's parameters with those that the adapter was trained on. Set
            it to False for the same base in another dtype, or quantised.

    Returns:
        The same model. It stays unchanged where an error is raised.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the adapter has another base, targets, rank, seed or matrices than the model,
            its files do not match, or the model is merged.
    """
    manifest, tensors = read_adapter(folder)
    record = record_from(manifest)
    if any(isinstance(m, VeraLayer) and m.kept is not None for m in model.modules()):
        raise ValueError(
            f"an adapter is merged into the weights of this {type(model).__name__}: call "
            "unmerge(model) before loading another"
        )
    is_plain = not hasattr(model, "vera")
    trained = [p for p in model.parameters() if p.requires_grad]
    if is_plain:
        _check_layers(model, manifest, folder)
        given = (tensors["A"], tensors["B"]) if "A" in tensors else None
        attach(model, record, given)
    try:
        check_adapter(model, manifest, tensors, folder, check_base)
        heads = head_tensors(model, record, tensors, folder)
    except Exception:
        if is_plain:
            strip(model)
            for parameter in trained:
                parameter.requires_grad_(True)
        raise
    saved = split_vectors(manifest, tensors)
    for key, pair in vectors_of(model).items():
        for vector, value in zip(pair, saved[key], strict=True):
            vector.copy_(value)
    for tensor, value in heads.values():
        tensor.copy_(value)
    if heads:  # so that it is saved again with them
        model.at_random = {*getattr(model, "at_random", ()), *heads}  # type: ignore[assignment]
    return model


def read_adapter(folder: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The manifest and the tensors of an adapter, after checking that they match.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if the manifest has another format, is incomplete, or does not match the
            tensors.
    """
    folder = Path(folder)
    for name in (MANIFEST, TENSORS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"no {name} in {folder}: expected a folder written by save_adapter"
            )
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not readable JSON ({error}): save the adapter again") from None
    version = manifest.get("format") if isinstance(manifest, dict) else None
    if version != FORMAT or manifest.get("method") != "vera":
        raise ValueError(f"{file} has format {version!r}, expected VeRA's {FORMAT}: save it again")
    expected = {*Vera.__dataclass_fields__, "torch", "projections_sha256", "base_sha256"}
    if missing := expected - manifest.keys():
        raise ValueError(f"{file} lacks {', '.join(sorted(missing))}: save the adapter again")
    tensors = read_file(folder / TENSORS)
    sizes = {
        "b": (sum(block for block, _ in manifest["layers"].values()),),
        "d": (len(manifest["layers"]), manifest["rank"]),
    }
    for name, size in sizes.items():
        shape = tuple(tensors[name].shape) if name in tensors else None
        if shape != size:
            raise ValueError(
                f"{name} in {folder / TENSORS} has shape {shape}, but its manifest says {size}: "
                "the two files are of different adapters, save it again"
            )
    return manifest, tensors


def record_from(manifest: dict[str, Any]) -> Vera:
    """The record of `add_vera` for the saved model, from its manifest."""
    layers: dict[str, tuple[str, ...]] = {}
    for key in manifest["layers"]:
        name, _, label = key.partition(":")
        layers[name] = (*layers.get(name, ()), label)
    values = {field: manifest[field] for field in Vera.__dataclass_fields__}
    tuples = {"train": tuple(manifest["train"]), "heads": tuple(manifest["heads"])}
    return Vera(**(values | tuples | {"layers": layers}))


def split_vectors(
    manifest: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, tuple[Tensor, Tensor]]:
    """b (m,) and d (r,) of every layer, by "name" or "name:label"."""
    b = tensors["b"].split([block for block, _ in manifest["layers"].values()])
    return dict(zip(manifest["layers"], zip(b, tensors["d"], strict=True), strict=True))


def check_adapter(
    model: nn.Module,
    manifest: dict[str, Any],
    tensors: dict[str, Tensor],
    folder: str | Path,
    check_base: bool = True,
) -> None:
    """Check that an adapter belongs to an adapted model.

    Raises:
        ValueError: if rank, seed, init, sharing, layers, A and B, or base differ.
    """
    record = vera_of(model)
    for field in ("rank", "seed", "init", "shared"):
        if manifest[field] != getattr(record, field):
            raise ValueError(
                f"the adapter in {folder} has {field} {manifest[field]!r}, but the model has "
                f"{getattr(record, field)!r}: strip(model) and load it again, or add VeRA alike"
            )
    shapes = layer_shapes(model)
    if shapes != manifest["layers"]:
        differing = sorted(
            key
            for key in shapes.keys() | manifest["layers"].keys()
            if shapes.get(key) != manifest["layers"].get(key)
        )
        raise ValueError(
            f"the adapter in {folder} has other targets than the model: {_first_names(differing)} "
            "differ; add VeRA to the same layers, or load it into the plain base"
        )
    if _sha256_of_projections(model) != manifest["projections_sha256"]:
        raise ValueError(
            f"seed {record.seed} gives other matrices A and B in torch {torch.__version__} than "
            f"those that the adapter in {folder} was trained with (torch {manifest['torch']}): "
            "load it with that torch, and save it there with projections=True"
        )
    if check_base and base_sha256(model, held_tensors(tensors)) != manifest["base_sha256"]:
        raise ValueError(
            f"the adapter in {folder} was trained on another base: the frozen parameters of this "
            f"{type(model).__name__} have another SHA-256; load the base that it was trained on, "
            "or give check_base=False if it is the same in another dtype"
        )


def adapted_model(module: Any) -> Any:
    """The part of a LightningModule that `add_vera` has changed; of a plain one, what it would.

    That is its `tuned_model`, or its `model` where it has no such property; None without either.
    """
    plain = getattr(module, "tuned_model", getattr(module, "model", None))
    return next((part for part in module.modules() if hasattr(part, "vera")), plain)


def layer_shapes(model: nn.Module) -> dict[str, list[int]]:
    """[output features, input features] of every adapted layer, by "name" or "name:label"."""
    modules = dict(model.named_modules())
    return {
        key: [len(b), shape_of(modules[key.partition(":")[0]])[1]]
        for key, (b, _) in vectors_of(model).items()
    }


def base_sha256(model: nn.Module, held: Container[str]) -> str:
    """SHA-256 of `base_parameters` but those that the adapter holds."""
    base = base_parameters(model)
    return fingerprint({name: value for name, value in base.items() if name not in held})


def base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The base's parameters, without vectors and heads, as they were before merging."""
    record = vera_of(model)
    kept: dict[str, Tensor] = {}
    skipped = set()
    for name, layer in model.named_modules():
        if isinstance(layer, VeraLayer):
            skipped |= {f"{name}.{vector}" for piece in layer.slices for vector in piece.names}
            if layer.kept is not None:
                kept[f"{name}.weight"] = layer.kept
    return {
        name: kept.get(name, parameter)
        for name, parameter in model.named_parameters()
        if name not in skipped and not inside(name, record.heads)
    }


def _sha256_of_projections(model: nn.Module) -> list[str]:
    """SHA-256 of A and of B; of all layers' hashes where each layer has its own pair."""
    hashes = [projections.sha256() for projections in projections_of(model)]
    if len(hashes) == 1:
        return hashes[0]
    return [
        hashlib.sha256("".join(column).encode()).hexdigest() for column in zip(*hashes, strict=True)
    ]


def _check_layers(model: nn.Module, manifest: dict[str, Any], folder: str | Path) -> None:
    """Check that a plain model has an adapter's layers, with their shapes."""
    modules = dict(model.named_modules())
    for name, labels in record_from(manifest).layers.items():
        layer = modules.get(name)
        key = f"{name}:{labels[0]}" if labels[0] else name
        if layer is None or not hasattr(layer, "weight"):
            raise ValueError(
                f"the adapter in {folder} is of another base: {type(model).__name__} has no layer "
                f"{name}; load it into the model that it was trained on"
            )
        block, inputs = manifest["layers"][key]
        numel = layer.weight.numel()
        if layer.weight.is_floating_point() and (
            shape_of(layer)[1] != inputs or numel % (block * inputs)
        ):
            raise ValueError(
                f"the adapter in {folder} is of another base: {name} has {numel // inputs} × "
                f"{shape_of(layer)[1]} weights, but the adapter's is for {block} × {inputs}; load "
                "it into the model that it was trained on"
            )


def head_tensors(
    model: nn.Module, record: Vera, tensors: dict[str, Tensor], folder: str | Path
) -> dict[str, tuple[Tensor, Tensor]]:
    """(the model's tensor, the saved one) for each tensor that `held_tensors` gives, by name.

    Raises:
        ValueError: if one, or a head's, is missing or has another shape.
    """
    saved = held_tensors(tensors)
    state = model.state_dict()
    present = {n: t for n, t in state.items() if n in saved or inside(n, record.heads)}
    if differing := mismatch(saved, present):
        name, in_file, in_model = differing
        raise ValueError(
            f"the head tensor {name} has shape {in_file} in {folder} and {in_model} in the model: "
            "build the model with the adapter's number of classes"
        )
    return {name: (present[name], saved[name]) for name in present}


def held_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's tensors of the heads and of what the base's files lack, by the model's names."""
    return {n.removeprefix("head."): t for n, t in tensors.items() if n.startswith("head.")}


def held_modules(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Names of the modules that are exchanged as a whole: the heads, and the owners of tensors.

    Args:
        model: an adapted model.
        names: of the tensors, inside the heads or outside.

    Raises:
        ValueError: if a tensor outside the heads is an adapted layer's or the model's own.
    """
    record = vera_of(model)
    owners = {}
    for name in names:
        if not inside(name, record.heads):
            owners[name.rpartition(".")[0]] = name
    for owner, name in owners.items():
        if not owner or any(inside(layer, [owner]) for layer in record.layers):
            raise ValueError(
                f"{name} is random, since the base's files lack it, and its module "
                f"{'is adapted' if owner else 'is the whole model'}, so that neither a file of "
                "peft nor some rows of a batch can have another one: train with targets that leave "
                "it out, or save strip(merge(model)) as a whole"
            )
    return [*record.heads, *sorted(owners)]


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
