"""θ on disk: its values and what draws its positions again, a seed and a budget.

A file of safetensors: `values` (budget,), and `heads.<name>` for modules trained in full. Its
metadata hold the seed, the budget and the operations, and two hashes, of the positions and of the
base model's tensors, which `load` compares before anything is changed. A placement that a rule
made (`bitfit`, `lora`, …) is not drawn from a seed: give the same placement to `load`.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_modules.apet.insert import Apet, apet_of, attach, tunables
from lightning_modules.apet.placement import Placement, draw, inside

FORMAT = "apet-1"


def save(model: nn.Module, path: str | Path) -> Path:
    """Write θ, and the heads that are trained beside it.

    Args:
        model: something was inserted into it.
        path: of the file; its folder is made when it is missing.
    """
    record = apet_of(model)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = [parameter.detach().flatten().float().cpu() for parameter in tunables(model).values()]
    tensors = {"values": torch.cat(values)} | {
        f"heads.{name}": value.detach().cpu().contiguous()
        for name, value in model.state_dict().items()
        if inside(name, record.heads)
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
        "base": fingerprint(model, record.heads),
    }
    save_file(tensors, path, metadata)
    return path


def load(model: nn.Module, path: str | Path, placement: Placement | None = None) -> nn.Module:
    """Insert what a file says into a base model, in place, and give it the file's values.

    Args:
        model: the base that `save`'s model was made from, with nothing inserted.
        path: the file.
        placement: where a rule and not a seed said the positions.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is none of `save`'s, the positions or the base are others, or it was
            drawn by no seed and no placement is given.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no values of APET at {path}: give the file that save wrote")
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {metadata.get('format')!r}, expected {FORMAT}: give a file that "
            "lightning_modules.apet.save wrote"
        )
    settings = json.loads(metadata["settings"])
    heads, operations = tuple(settings["heads"]), settings["operations"]
    if placement is None:
        if operations is None:
            raise ValueError(f"{path} holds no draw: give load the placement that it was made with")
        placement = draw(model, settings["budget"], settings["seed"], operations, heads)
    if placement.digest() != metadata["positions"]:
        raise ValueError(
            f"the positions that {path} was trained at are not those of this model: give the model "
            "with the same layers and names, and the same placement"
        )
    if fingerprint(model, heads) != metadata["base"]:
        raise ValueError(
            f"{path} was trained beside other base weights than this {type(model).__name__} has: "
            "load those first"
        )
    operations = None if operations is None else tuple(operations)
    attach(model, Apet(placement, settings["seed"], settings["budget"], operations, heads))
    fill(model, tensors["values"])
    state = {name.removeprefix("heads."): v for name, v in tensors.items() if name != "values"}
    model.load_state_dict(state, strict=False)  # the heads' tensors alone
    return model


@torch.no_grad()
def fill(model: nn.Module, values: Tensor) -> None:
    """Give θ its values.

    Args:
        model: something was inserted into it.
        values: (budget,), in the model's order.

    Raises:
        ValueError: if there are more or fewer of them than places.
    """
    parameters = tunables(model).values()
    places = sum(parameter.numel() for parameter in parameters)
    if len(values) != places:
        raise ValueError(f"{len(values)} values for {places} trainable parameters")
    for parameter, piece in zip(
        parameters, values.split([p.numel() for p in parameters]), strict=True
    ):
        parameter.copy_(piece.view_as(parameter))


def fingerprint(model: nn.Module, heads: tuple[str, ...] = ()) -> str:
    """SHA-256 over the names, shapes and values of the base's parameters outside the heads."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if not inside(name, heads) and not name.rpartition(".")[2].startswith("apet_"):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            flat = parameter.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
