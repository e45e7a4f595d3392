"""A low-rank model on disk: safetensors and the plan.

A folder holds `model.safetensors` and `plan.json`, which names the rank of every low-rank layer
and, for a timm model, how to build the dense one. Loading is strict and decomposes nothing.
"""

import json
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_modules.pela.factorize import factorize
from lightning_modules.pela.layers import plan_of
from lightning_modules.weights import LoadReport, load_weights, read_file, read_state_dict

FORMAT = 1


def save(
    model: nn.Module,
    folder: str | Path,
    architecture: str | None = None,
    model_args: dict[str, Any] | None = None,
) -> Path:
    """Write a low-rank model to a folder.

    Args:
        model: a model that `factorize` has changed.
        folder: is made when it is missing.
        architecture: the timm name that the model was built from; None for any other model,
            which `load` then has to be given.
        model_args: the arguments of timm.create_model that it was built with, num_classes too.

    Returns:
        The folder.

    Raises:
        ValueError: if the model has no low-rank layer.
    """
    content = {
        "format": FORMAT,
        "architecture": architecture,
        "model_args": model_args or {},
        "ranks": plan_of(model),
    }
    text = json.dumps(content, indent=1) + "\n"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        # Tied weights are written once for each name: safetensors takes no shared memory.
        shared = tensor.data_ptr() in seen
        seen.add(tensor.data_ptr())
        state[name] = tensor.clone() if shared else tensor.contiguous()
    save_file(state, folder / "model.safetensors")
    (folder / "plan.json").write_text(text)
    return folder


def load(folder: str | Path, model: nn.Module | None = None) -> nn.Module:
    """The low-rank model that `save` wrote.

    Args:
        folder: written by `save`.
        model: a dense model of the saved architecture, changed in place; needed only where the
            folder names no timm architecture.

    Raises:
        FileNotFoundError: if the folder has no plan.json or no model.safetensors.
        ValueError: if the plan is of another format, no model is known, or the plan or the
            weights do not fit the model.
    """
    folder = Path(folder)
    plan = read_plan(folder)
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(
            f"no model.safetensors in {folder}: expected a folder written by save"
        )
    if model is None:
        if plan["architecture"] is None:
            raise ValueError(
                f"{folder / 'plan.json'} names no timm architecture: give load the dense model"
            )
        arguments = {**plan["model_args"], "pretrained": False}
        model = timm.create_model(plan["architecture"], **arguments)
    factorize(model, ranks=plan["ranks"], method="empty")
    try:
        model.load_state_dict(read_file(weights))
    except RuntimeError as error:
        raise ValueError(f"the weights in {folder} do not fit its plan: {error}") from error
    return model


def start_from(
    model: nn.Module, source: str | Path, ratio: float | None = None
) -> tuple[dict[str, int], LoadReport]:
    """Give a dense model the weights of a file, and make it low-rank if they are.

    Args:
        model: a dense model, changed in place.
        source: weights as `load_weights` takes them: dense ones, a checkpoint of PELA, or a folder
            written by `save`.
        ratio: κ that is to be applied afterwards, which low-rank weights do not allow.

    Returns:
        The rank of every low-rank layer by name (none for dense weights), and what was loaded.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if low-rank weights come with a ratio or do not fit the model.
    """
    end = ".u.weight"
    state = read_state_dict(source)
    ranks = {n.removesuffix(end): len(value) for n, value in state.items() if n.endswith(end)}
    if ranks and ratio is not None:
        raise ValueError(
            f"init_from {source} is low-rank already, so ratio {ratio:g} would do nothing: set "
            "model.ratio to null"
        )
    if ranks:
        factorize(model, ranks=ranks, method="empty")
    report = load_weights(model, source)
    empty = [name for name in report.missing + report.reshaped if name.startswith(tuple(ranks))]
    if empty:
        raise ValueError(
            f"init_from {source} does not fit {type(model).__name__}: {empty[0]}; give the "
            "architecture and model_args that it was made with"
        )
    return ranks, report


def read_plan(folder: str | Path) -> dict[str, Any]:
    """The content of a folder's plan.json: format, architecture, model_args and ranks.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is of another format, incomplete or not JSON.
    """
    file = Path(folder) / "plan.json"
    if not file.is_file():
        raise FileNotFoundError(f"no plan.json in {folder}: expected a folder written by save")
    try:
        plan = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not readable JSON ({error}): save the model again") from error
    version = plan.get("format") if isinstance(plan, dict) else None
    if version != FORMAT:
        raise ValueError(f"{file} has format {version!r}, expected {FORMAT}: save the model again")
    missing = {"architecture", "model_args", "ranks"} - plan.keys()
    if missing:
        raise ValueError(f"{file} lacks {', '.join(sorted(missing))}: save the model again")
    return plan
