"""What a stage's model and data have to agree on."""

import json
from pathlib import Path
from typing import Any

import timm
from jsonargparse import Namespace

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json")


def imply_tokenizer(settings: Namespace) -> None:
    """Take the tokenizer of a local model folder, where the data name none.

    Args:
        settings: of a stage, parsed; changed in place.
    """
    data, architecture = _arguments(settings, "data"), _architecture(settings)
    if data is None or "tokenizer" not in data or data["tokenizer"] is not None:
        return
    folder = Path(architecture)
    if architecture and any((folder / name).is_file() for name in TOKENIZERS):
        data["tokenizer"] = architecture


def other_normalisation(settings: Namespace) -> str | None:
    """A sentence if images are normalised otherwise than a pre-trained model was trained with.

    Args:
        settings: of a stage, parsed.
    """
    data, model = _arguments(settings, "data"), _arguments(settings, "model")
    if data is None or model is None or "mean" not in data or not model.get("pretrained"):
        return None
    trained = _statistics(_architecture(settings))
    given = {key: tuple(data[key]) for key in ("mean", "std")}
    if trained is None or trained == given:
        return None
    flags = " ".join(f"--data.{key} {list(value)}" for key, value in trained.items())
    return (
        f"{_architecture(settings)} was trained on images with mean {trained['mean']} and standard "
        f"deviation {trained['std']}, but the data have {given['mean']} and {given['std']}: {flags}"
    )


def _statistics(architecture: str) -> dict[str, tuple[float, ...]] | None:
    folder = architecture.removeprefix("local-dir:")
    if folder != architecture:
        file = Path(folder, "config.json")
        known = json.loads(file.read_text()).get("pretrained_cfg", {}) if file.is_file() else {}
    else:
        known = timm.get_pretrained_cfg(architecture) if timm.is_model(architecture) else None
        known = known.to_dict() if known is not None else {}
    if "mean" not in known or "std" not in known:
        return None
    return {key: tuple(known[key]) for key in ("mean", "std")}


def _arguments(settings: Namespace, part: str) -> Any:
    chosen = settings.get(part)
    return None if chosen is None else chosen.get("init_args")


def _architecture(settings: Namespace) -> str:
    model = _arguments(settings, "model")
    return "" if model is None else str(model.get("architecture") or "")
