"""Settings on which a stage's model and data have to agree: tokenizer, normalisation, weights."""

import json
from pathlib import Path
from typing import Any

import timm
from jsonargparse import Namespace

from lightning_modules.weights import read_checkpoint

Statistics = dict[str, tuple[float, ...]]
HALF: Statistics = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
DATA = "description"  # key of a DataModule's state in a checkpoint
RANDOM = "weights: random"
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
    if data is None or "mean" not in data:
        return
    pretrained = model is not None and model.get("pretrained")
    trained = (_statistics(_architecture(settings)) if pretrained else None) or HALF
    for key, value in trained.items():
        if data[key] is None:
            data[key] = value


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
    """Mean and std that a pre-trained timm model expects; None if they are not known."""
    folder = architecture.removeprefix("local-dir:")
    if folder != architecture:
        return _statistics_of_folder(Path(folder))
    architecture = architecture.removeprefix("hf-hub:timm/")  # timm's own models, on the hub
    config = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
    return None if config is None else _mean_and_std(config.to_dict())


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
    file = folder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    return _mean_and_std(config.get("pretrained_cfg", {}))


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
