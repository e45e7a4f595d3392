"""Saves and loads APET's parameters θ: their values, and the seed and budget of their positions.

The safetensors file holds `values` (budget,), and `heads.<name>` for modules trained in full and
for what the base's files lack (`model.at_random`), such as a pooler. Its metadata hold seed, budget
and operations, and hashes of the positions and of the base model's parameters, which `load`
compares before it changes the model. A placement that was not drawn (`bitfit`, `lora`, …) is not in
the file: give the same placement to `load`.
"""

import json
from collections.abc import Container
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from lightning_modules.apet.checks import check_placement, check_plain, tunable_count
from lightning_modules.apet.insert import Apet, apet_of, attach, tunables
from lightning_modules.apet.placement import Placement, draw
from lightning_modules.layouts import inside
from lightning_modules.optim import head_parameters
from lightning_modules.weights import drawn_at_random, fingerprint, mismatch

FORMAT = "apet-1"


def save(model: nn.Module, path: str | Path) -> Path:
    """Write θ and the trained heads to a file.

    Args:
        model: a model that `insert` or `attach` has changed.
        path: of the file; its folder is created if it is missing.

    Returns:
        The path.

    Raises:
        ValueError: if nothing was inserted into the model.
    """
    record = apet_of(model)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    random = drawn_at_random(model, record.heads)
    values = [parameter.detach().flatten().cpu() for parameter in tunables(model).values()]
    tensors = {"values": torch.cat(values)} | {
        f"heads.{name}": value.detach().cpu().contiguous()
        for name, value in model.state_dict().items()
        if name in random or inside(name, record.heads)
    }
    settings = {
        "seed": record.seed,
        "budget": record.budget,
        "operations": record.operations,
        "heads": record.heads,
    }
    metadata = {
        "format": FORMAT,
        "settings": json.dumps(settings),
        "positions": record.placement.digest(),
        "base": base_fingerprint(model, record.heads, random),
    }
    save_file(tensors, path, metadata)
    return path


def load(model: nn.Module, path: str | Path, placement: Placement | None = None) -> nn.Module:
    """Insert a file's θ into a base model, in place.

    Args:
        model: the base model, with nothing inserted.
        path: a file that `save` wrote.
        placement: the positions, where they were not drawn from a seed.

    Returns:
        The same model. It stays unchanged where an error is raised.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if `save` did not write it, positions, base or heads differ, values are missing,
            or the positions were not drawn and no placement is given.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file of APET at {path}: give one that save wrote")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} cannot be read as a safetensors file ({error}): give one that save wrote"
        ) from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {metadata.get('format')!r}, expected {FORMAT}: give a file that "
            "lightning_modules.apet.save wrote"
        )
    settings = json.loads(metadata["settings"])
    heads, operations = tuple(settings["heads"]), settings["operations"]
    check_plain(model, heads)
    if placement is None:
        if operations is None:
            raise ValueError(
                f"{path} holds no seed of its positions: give load the placement that was saved"
            )
        placement = draw(model, settings["budget"], settings["seed"], operations, heads)
    if placement.digest() != metadata["positions"]:
        raise ValueError(
            f"the positions that {path} was trained at are not those of this model: give the model "
            "with the same layers and names, and the same placement"
        )
    held = {name.removeprefix("heads."): v for name, v in tensors.items() if name != "values"}
    if base_fingerprint(model, heads, held) != metadata["base"]:
        raise ValueError(
            f"{path} was trained with other base weights than this {type(model).__name__} has: "
            "load those first"
        )
    state = model.state_dict()
    present = {name: v for name, v in state.items() if name in held or inside(name, heads)}
    if differing := mismatch(held, present):
        name, in_file, in_model = differing
        raise ValueError(
            f"the head tensor {name} has shape {in_file} in {path} and {in_model} in the "
            "model: build the model with the same heads and number of classes"
        )
    check_placement(model, placement, settings["seed"])
    values, count = tensors.get("values", torch.empty(0)), tunable_count(model, placement)
    if values.shape != (count,):
        raise ValueError(
            f"{path} has values of shape {tuple(values.shape)}, expected ({count},), one for each "
            "trained parameter: the file is damaged; save it again"
        )
    operations = None if operations is None else tuple(operations)
    attach(model, Apet(placement, settings["seed"], settings["budget"], operations, heads))
    parameters = list(tunables(model).values())
    pieces = values.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        # copied: at a view's address, in the middle of the file, kernels may round differently
        parameter.data = piece.view_as(parameter).to(parameter.device, copy=True)
    model.load_state_dict(held, strict=False)  # only some tensors, which were checked
    if held:  # so that it is saved again with them
        model.at_random = {*getattr(model, "at_random", ()), *held}  # type: ignore[assignment]
    return model


def base_fingerprint(model: nn.Module, heads: tuple[str, ...], held: Container[str]) -> str:
    """SHA-256 of the base's parameters, without the heads and what the file holds besides."""
    in_heads = head_parameters(model, heads)
    return fingerprint(
        {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter not in in_heads
            and name not in held
            and not name.rpartition(".")[2].startswith("apet_")
        }
    )
