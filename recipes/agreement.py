"""Settings on which a stage's model and data have to agree: tokenizer, normalisation, weights."""

import contextlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import hf_hub_download
from jsonargparse import Namespace

from lightning_modules.weights import read_checkpoint

Statistics = dict[str, tuple[float, ...]]
HALF: Statistics = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
DATA = "description"  # key of a DataModule's state in a checkpoint
RANDOM = "weights: random"
DESCRIBING = ("config.json", "preprocessor_config.json")  # of a timm model, of a transformers one
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")


def agree(settings: Namespace) -> None:
    """Fill in data settings that follow from the model: tokenizer, mean and standard deviation.

    Args:
        settings: parsed settings of a stage; changed in place.
    """
    imply_tokenizer(settings)
    imply_normalisation(settings)


def imply_tokenizer(settings: Namespace) -> None:
    """Use the tokenizer in the model's local folder if the data name none.

    Args:
        settings: parsed settings of a stage; changed in place.
    """
    data, architecture = _arguments(settings, "data"), _architecture(settings)
    if data is None or "tokenizer" not in data or data["tokenizer"] is not None:
        return
    folder = Path(architecture)
    if architecture and any((folder / name).is_file() for name in TOKENIZERS):
        data["tokenizer"] = architecture


def imply_normalisation(settings: Namespace) -> None:
    """Fill in the data's mean and std where they are null.

    They become those of the pre-trained model, or 0.5 each (pixels in −1 … 1).

    Args:
        settings: parsed settings of a stage; changed in place.
    """
    data, model = _arguments(settings, "data"), _arguments(settings, "model")
    if data is None or None not in (data.get("mean", HALF), data.get("std", HALF)):
        return  # nothing to ask the hub for
    pretrained = model is not None and model.get("pretrained")
    trained = (_statistics(_architecture(settings)) if pretrained else None) or HALF
    for key, value in trained.items():
        if data[key] is None:
            data[key] = value


def imply_ranks(settings: Namespace, checkpoint: Any) -> None:
    """Give a model the low-rank layers of the checkpoint that it is going to load.

    A run that began with low-rank weights has its ranks from these, and no ratio. To score or to
    continue it, init_from need not be named again.

    Args:
        settings: parsed settings of a stage; changed in place.
        checkpoint: its content.
    """
    model = _arguments(settings, "model")
    if model is None or any(model.get(key) for key in ("ranks", "ratio", "init_from")):
        return
    if "ranks" in model and isinstance(checkpoint, dict):
        model["ranks"] = checkpoint.get("hyper_parameters", {}).get("ranks")


def other_normalisation(settings: Namespace) -> str | None:
    """A warning if the data's mean and std differ from those that the weights were trained with.

    Args:
        settings: parsed settings of a stage.
    """
    data, model = _arguments(settings, "data"), _arguments(settings, "model")
    if data is None or model is None or data.get("mean") is None:
        return None
    source, trained = _architecture(settings), None
    if model.get("init_from"):
        source = str(model["init_from"])
        trained = _statistics_of_file(Path(source))
    elif model.get("pretrained"):
        trained = _statistics(source)
    given = {key: tuple(data[key]) for key in ("mean", "std")}
    if trained is None or trained == given:
        return None
    flags = " ".join(f"--data.{key} {list(value)}" for key, value in trained.items())
    return (
        f"{source} was trained on images with mean {trained['mean']} and standard deviation "
        f"{trained['std']}, but the data have {given['mean']} and {given['std']}: set {flags}"
    )


def weights_of(settings: Namespace) -> str | None:
    """A sentence on where a model's weights come from; None if the model has no such setting.

    Args:
        settings: parsed settings of a stage.
    """
    model = _arguments(settings, "model")
    options = [name for name in ("pretrained", "init_from") if model is not None and name in model]
    if not options:
        return None
    if model.get("init_from"):
        return f"weights: {model['init_from']}"
    if model.get("pretrained"):
        return f"weights: {_architecture(settings)}"
    names = " nor ".join(f"model.{name}" for name in options)
    return f"{RANDOM}, since {'neither ' if options[1:] else 'no '}{names} is given"


def _statistics(architecture: str) -> Statistics | None:
    """Mean and std that a pre-trained model of images expects; None if they are not known."""
    folder = Path(architecture.removeprefix("local-dir:"))
    if folder.is_dir():
        return _statistics_of_folder(folder)
    name = architecture.removeprefix("hf-hub:")
    listed = timm.get_pretrained_cfg(name.removeprefix("timm/"))  # on the hub or not
    if listed is not None:
        return _mean_and_std(listed.to_dict())
    return _statistics_on_hub(name) if "/" in name else None


@cache
def _statistics_on_hub(name: str) -> Statistics | None:
    for file in DESCRIBING:
        # what cannot be fetched is reported when the weights are
        with contextlib.suppress(OSError, ValueError):
            folder = Path(hf_hub_download(name, file)).parent
            if found := _statistics_of_folder(folder):
                return found
    return None


def _statistics_of_file(source: Path) -> Statistics | None:
    """Mean and std that a checkpoint, timm folder or file of it was trained with, or None."""
    if source.is_dir() or source.suffix == ".safetensors":
        return _statistics_of_folder(source if source.is_dir() else source.parent)
    if source.suffix != ".ckpt" or not source.is_file():
        return None
    try:
        content = read_checkpoint(source)
    except ValueError:  # loading the weights reports it
        return None
    states = content.values() if isinstance(content, dict) else ()
    described = [one[DATA] for one in states if isinstance(one, dict) and DATA in one]
    return _mean_and_std(described[0].get("transform", {})) if described else None


def _statistics_of_folder(folder: Path) -> Statistics | None:
    """Those that timm or transformers has written into a model's folder."""
    files = [folder / name for name in DESCRIBING]
    timm_model, processor = (json.loads(f.read_text()) if f.is_file() else {} for f in files)
    if "image_mean" in processor and "image_std" in processor:
        return {key: tuple(processor[f"image_{key}"]) for key in ("mean", "std")}
    return _mean_and_std(timm_model.get("pretrained_cfg", {}))


def _mean_and_std(config: dict[str, Any]) -> Statistics | None:
    if "mean" not in config or "std" not in config:
        return None
    return {key: tuple(config[key]) for key in ("mean", "std")}


def _arguments(settings: Namespace, part: str) -> Any:
    chosen = settings.get(part)
    return None if chosen is None else chosen.get("init_args")


def _architecture(settings: Namespace) -> str:
    model = _arguments(settings, "model")
    return "" if model is None else str(model.get("architecture") or "")
