"""Loads initial weights into a model, and logs which tensors fitted and which did not."""

import argparse
import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_modules.layouts import inside

log = logging.getLogger(__name__)


@dataclass
class LoadReport:
    """What `load_weights` did.

    Attributes:
        loaded: names of the tensors that were copied.
        missing: names of the model that the source lacks; they keep their initial values.
        unexpected: names in the source that the model lacks.
        reshaped: names whose shapes differ, with both shapes; they keep their initial values.
        resampled: names of position embeddings that were interpolated to the model's image size,
            with both shapes.
    """

    loaded: list[str]
    missing: list[str]
    unexpected: list[str]
    reshaped: list[str]
    resampled: list[str]

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} tensors loaded"]
        for what in ("missing", "unexpected", "reshaped", "resampled"):
            names = getattr(self, what)
            if names:
                shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
                parts.append(f"{len(names)} {what}: {shown}")
        return "; ".join(parts)


def read_state_dict(source: str | Path, model: nn.Module | None = None) -> dict[str, Tensor]:
    """The tensors of a file by name.

    Args:
        source: a Lightning checkpoint (the "model." prefix of its names is dropped), a file saved
            by torch.save (a state_dict, or one under "state_dict" or "model"), a safetensors file,
            or a folder with `model.safetensors`. What torch.compile and DistributedDataParallel
            put before names is dropped, too.
        model: the model that the tensors are for. Where none of the names is one of its own, a
            second "model." is dropped: that of `LabelWords`, in checkpoints of `LabelWordTuning`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it cannot be read, or holds no tensors.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(
            f"no weights at {path}: expected a checkpoint, a file of weights, or a folder with "
            "model.safetensors"
        )
    content = read_file(path)
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    state = {}
    if isinstance(content, dict):
        state = {name: value for name, value in content.items() if torch.is_tensor(value)}
    if not state:
        raise ValueError(f"{path} holds no state_dict: expected a mapping of names to tensors")
    state = {name.replace("_orig_mod.", ""): value for name, value in state.items()}
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): value for name, value in state.items()}
    # a transformers model's own names may all begin so: a Llama with tied embeddings
    if path.suffix != ".safetensors" and all(name.startswith("model.") for name in state):
        state = {name.removeprefix("model."): value for name, value in state.items()}
        if model is not None and not state.keys() & model.state_dict().keys():
            state = {name.removeprefix("model."): value for name, value in state.items()}
    return state


def read_file(path: Path) -> Any:
    """The content of a safetensors file, or of any other file as torch.save wrote it.

    Raises:
        ValueError: if it is empty, damaged, of another format, or holds objects that torch.load
            refuses under weights_only.
    """
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # timm's and MAE's trainings save their arguments beside the weights
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can raise almost anything
        raise ValueError(
            f"{path} cannot be read as weights ({type(error).__name__}): expected a "
            "safetensors file, a Lightning checkpoint or a state_dict saved by torch.save, with "
            "nothing but plain types in it; fetch or write it again"
        ) from error


def read_checkpoint(path: str | Path) -> Any:
    """The content of a checkpoint; its tensors are mapped from the disk, not read.

    Raises:
        ValueError: if it cannot be read as a checkpoint.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file can raise almost anything
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({type(error).__name__}): it is truncated, or "
            "no checkpoint; expected one that training has written"
        ) from error


def load_weights(model: nn.Module, source: str | Path) -> LoadReport:
    """Copy the weights of a file that fit by name and shape; see `copy_weights`.

    Args:
        model: receives the weights, in place.
        source: see `read_state_dict`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it cannot be read, or nothing in it fits the model.
    """
    return copy_weights(model, read_state_dict(source, model), source)


def load_dense(model: nn.Module, source: str | Path) -> LoadReport:
    """Load a file's weights as `load_weights` does, and refuse those of low rank.

    The model's dense layers would stay at random, and little more than the norms fit.

    Args:
        model: a dense model; receives the weights, in place.
        source: see `read_state_dict`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it cannot be read, nothing in it fits, or its layers are of low rank.
    """
    report = load_weights(model, source)
    low_rank = [name for name in report.unexpected if name.endswith(".u.weight")]
    if low_rank:
        raise ValueError(
            f"init_from {source} is of low rank ({low_rank[0]}, …) and {type(model).__name__} is "
            "dense: give the weights that it was compressed from, or those that "
            "lightning_modules.pela.merge makes of it"
        )
    return report


def copy_weights(
    model: nn.Module, state: Mapping[str, Tensor], source: str | Path = "state_dict"
) -> LoadReport:
    """Copy the weights that fit by name and shape, and log what did not.

    Position embeddings for another image size are interpolated, wherever in the model the ViT is.

    Args:
        model: receives the weights, in place.
        state: the weights by name.
        source: where the weights come from, for messages.

    Raises:
        ValueError: if nothing fits the model.
    """
    current = model.state_dict()
    loaded, reshaped, resampled = {}, [], []
    for name in state.keys() & current.keys():
        value, shape = state[name], current[name].shape
        shapes = f"{name} {tuple(value.shape)} for {tuple(shape)}"
        owner, _, last = name.rpartition(".")
        if value.shape != shape and last == "pos_embed":
            value = resample_positions(model.get_submodule(owner), value)
        if value.shape != shape:
            reshaped.append(shapes)
            continue
        loaded[name] = value
        if value is not state[name]:
            resampled.append(shapes)
    if not loaded:
        raise ValueError(
            f"nothing in {source} fits {type(model).__name__}: "
            f"it holds {', '.join(list(state)[:3])}, …, "
            f"the model has {', '.join(list(current)[:3])}, …"
        )
    # a missing output layer that is tied to the loaded embeddings is not missing
    shared = {current[name].data_ptr() for name in loaded} - {0}
    missing = sorted(
        n for n in current.keys() - state.keys() if current[n].data_ptr() not in shared
    )
    unexpected = sorted(state.keys() - current.keys())
    report = LoadReport(sorted(loaded), missing, unexpected, sorted(reshaped), resampled)
    model.load_state_dict({**current, **loaded})
    complete = not (report.missing or report.unexpected or report.reshaped)
    log.log(logging.INFO if complete else logging.WARNING, "loaded %s: %s", source, report)
    return report


def load_completely(
    model: nn.Module,
    source: str | Path,
    cure: str,
    required: str = "",
    optional: Sequence[str] = (),
) -> LoadReport:
    """Load a file's weights as `load_weights` does, and refuse an incomplete file.

    BERT's pooler, which many published weights lack, may always be missing.

    Args:
        model: receives the weights, in place.
        source: see `read_state_dict`.
        cure: what the user should do instead; the end of the error message.
        required: prefix of the names that must be in the file; all names by default.
        optional: names of modules whose weights may be missing all the same.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if required weights are missing or have other shapes.
    """
    report = load_weights(model, source)
    optional_prefixes = tuple(f"{name}." for name in optional)
    lacking = [
        name
        for name in report.missing + report.reshaped
        if name.startswith(required)
        and not name.startswith(optional_prefixes)
        and ".pooler." not in name
    ]
    if lacking:
        raise ValueError(
            f"{source} does not fit {type(model).__name__}: {', '.join(lacking[:4])}; {cure}"
        )
    return report


def refuse_another_model(
    checkpoint: Mapping[str, Any], hparams: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Refuse a Lightning checkpoint of another model before its tensors are loaded.

    Args:
        checkpoint: the argument of `on_load_checkpoint`.
        hparams: this run's hyperparameters.
        names: the hyperparameters that define the model.

    Raises:
        ValueError: naming the first of them that differs; a missing one counts as None, as do empty
            values.
    """
    saved = checkpoint.get("hyper_parameters", {})
    for name in names:
        theirs, ours = saved.get(name), hparams.get(name)
        if (theirs or None) != (ours or None):
            raise ValueError(
                f"this checkpoint is of another model: its {name} is {theirs!r}, this run's is "
                f"{ours!r}; to start anew from its weights use model.init_from"
            )


def drawn_at_random(model: nn.Module, heads: Sequence[str]) -> set[str]:
    """Names of the tensors outside the heads that the base's files lack, such as a pooler.

    They were initialised at random and stay frozen. No file but that of what was trained can hold
    them.

    Args:
        model: what its base's files lack is in `model.at_random`, see `build_text`.
        heads: names of the modules that are trained, and saved, in full.
    """
    return {name for name in getattr(model, "at_random", ()) if not inside(name, heads)}


Shape = tuple[int, ...] | None  # None: there is no tensor of this name


def mismatch(
    one: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> tuple[str, Shape, Shape] | None:
    """The first name, in alphabetical order, whose shapes differ; with the shape in each."""
    for name in sorted(one.keys() | other.keys()):
        a, b = (tuple(side[name].shape) if name in side else None for side in (one, other))
        if a != b:
            return name, a, b
    return None


def gathered(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all ranks if FSDP2 has sharded it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors: names, shapes, types and bits, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        tensor = gathered(tensor.detach()).cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def resample_positions(model: nn.Module, positions: Tensor) -> Tensor:
    """Interpolate position embeddings (1, N, D) to the image size of a timm ViT.

    The interpolation is bicubic (timm's); class and register tokens keep their embeddings. The
    positions are returned unchanged if the model has no patch grid or theirs was not a square.
    """
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if grid is None or positions.ndim != 3:
        return positions
    special = 0 if getattr(model, "no_embed_class", False) else model.num_prefix_tokens
    patches = positions.shape[1] - special  # type: ignore[operator]
    if patches < 1 or math.isqrt(patches) ** 2 != patches:
        return positions
    return resample_abs_pos_embed(positions, list(grid), num_prefix_tokens=special)
