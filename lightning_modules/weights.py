"""Starting a new run from old weights; what did and did not fit is always said."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

log = logging.getLogger(__name__)


@dataclass
class LoadReport:
    """What `load_weights` did.

    Attributes:
        loaded: names that were taken over.
        missing: names of the model that the source lacks; they keep their initial values.
        unexpected: names in the source that the model lacks.
        reshaped: names whose shapes differ, with both; they keep their initial values.
    """

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded"]
        for what in ("missing", "unexpected", "reshaped"):
            names = getattr(self, what)
            if names:
                shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
                parts.append(f"{len(names)} {what}: {shown}")
        return "; ".join(parts)


def read_state_dict(source: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, by plain names.

    Takes a Lightning checkpoint (the "model." prefix of its names is dropped), a file saved by
    torch.save (a state_dict, or one under "state_dict" or "model"), a safetensors file, or a
    folder with `model.safetensors`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if no tensors are in it.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}: give a checkpoint's path to init_from")
    if path.suffix == ".safetensors":
        return load_file(path)
    content = torch.load(path, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    state = {}
    if isinstance(content, dict):
        state = {name: value for name, value in content.items() if torch.is_tensor(value)}
    if not state:
        raise ValueError(f"{path} holds no state_dict: expected a mapping of names to tensors")
    if all(name.startswith("model.") for name in state):
        state = {name.removeprefix("model."): value for name, value in state.items()}
    return state


def load_weights(model: nn.Module, source: str | Path) -> LoadReport:
    """Copy the weights that fit by name and shape, and log what did not.

    Args:
        model: receives the weights, in place.
        source: see `read_state_dict`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if nothing in it fits the model.
    """
    state = read_state_dict(source)
    own = model.state_dict()
    loaded, reshaped = {}, []
    for name, value in state.items():
        if name in own and own[name].shape == value.shape:
            loaded[name] = value
        elif name in own:
            reshaped.append(f"{name} {tuple(value.shape)} for {tuple(own[name].shape)}")
    if not loaded:
        raise ValueError(
            f"nothing in {source} fits {type(model).__name__}: "
            f"it holds {', '.join(list(state)[:3])}, …, the model has {', '.join(list(own)[:3])}, …"
        )
    missing = sorted(own.keys() - state.keys())
    report = LoadReport(sorted(loaded), missing, sorted(state.keys() - own.keys()), reshaped)
    model.load_state_dict({**own, **loaded})
    complete = not (report.missing or report.unexpected or report.reshaped)
    log.log(logging.INFO if complete else logging.WARNING, "init_from %s: %s", source, report)
    return report
