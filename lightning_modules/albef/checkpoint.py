"""Loads ALBEF's checkpoints, and the ViT and BERT that an ALBEF starts from."""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn
from transformers import BertForMaskedLM

from lightning_modules.albef.bert import TokenBert
from lightning_modules.albef.model import ALBEF, AnswerModel
from lightning_modules.backbones import build_vision, name_in_errors
from lightning_modules.layouts import inside
from lightning_modules.pela import factorize
from lightning_modules.weights import LoadReport, copy_weights, load_weights, read_state_dict

LAYER = re.compile(r"encoder\.layer\.(\d+)\.")


def load_albef(model: ALBEF, source: str | Path) -> LoadReport:
    """Load an ALBEF's weights by the names of its released checkpoints, and log what did not fit.

    The checkpoint may be of another task: pre-training calls its text layers
    `text_encoder.bert.…`, the downstream tasks `text_encoder.…`. An answer decoder that the
    checkpoint lacks starts from the fusion layers, the embeddings and the token head (as ALBEF's
    VQA does). Position embeddings of another image size are interpolated. The weights of a momentum
    model and the queue are left out; the report lists them as unexpected.

    Args:
        model: a dense model, changed in place; its layers become low-rank where the source's are.
        source: a checkpoint of ALBEF, of this repository's modules, or a state_dict.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if nothing in it fits, or a low-rank layer has other sizes in this model.
    """
    state, suffix = albef_names(model, read_state_dict(source)), ".u.weight"
    ranks = {n.removesuffix(suffix): len(u) for n, u in state.items() if n.endswith(suffix)}
    if ranks:
        modules = dict(model.named_modules())
        factorize(model, ranks={n: r for n, r in ranks.items() if n in modules}, method="empty")
    report = copy_weights(model, state, source)
    uninitialised = [name for name in report.missing + report.reshaped if inside(name, list(ranks))]
    if uninitialised:
        raise ValueError(
            f"{source} does not fit {type(model).__name__}: {uninitialised[0]}; give the sizes "
            "that it was made with"
        )
    return report


def albef_names(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An ALBEF's state_dict under the names of this model."""
    prefix = "model."
    if any(name.startswith(prefix) for name in state):  # a Lightning checkpoint
        state = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
    state = {_without_bert_level(name): value for name, value in state.items()}
    if isinstance(model, AnswerModel) and not any(n.startswith("text_decoder.") for n in state):
        state |= _decoder_weights(state, model.bert.text_layers)
    if "temp" in state:
        state["temp"] = state["temp"].reshape(1)
    return {_name_in(model, name): value for name, value in state.items()}


def start_vision(model: ALBEF, source: str | Path) -> LoadReport:
    """Load a ViT's weights (under timm's names) into the image encoder.

    Args:
        model: receives the weights, in place.
        source: a file or folder, or timm's name of a model on the hub.

    Raises:
        ValueError: if nothing in it fits, or there is neither a file nor a model of that name.
    """
    if Path(source).exists():
        return load_weights(model.visual_encoder, source)
    weights = build_vision(str(source), 0, {}, pretrained=True).state_dict()
    return copy_weights(model.visual_encoder, weights, source)


def start_text(model: ALBEF, source: str | Path) -> LoadReport:
    """Load a BERT's weights into the text layers and then the fusion layers.

    Cross-attention, which a BERT lacks, and layers beyond its depth keep their values.

    Args:
        model: receives the weights, in place.
        source: a hub name, or a folder that transformers reads.

    Raises:
        OSError: if there is no such BERT.
        ValueError: if nothing in it fits.
    """
    with name_in_errors(str(source)):
        bert = BertForMaskedLM.from_pretrained(str(source))
    state = {f"text_encoder.{name}": value for name, value in bert.state_dict().items()}
    return copy_weights(model, albef_names(model, state), source)


def _without_bert_level(name: str) -> str:
    """A name without the level "bert." that `TokenBert` adds."""
    return re.sub(r"^(text_(?:en|de)coder)\.bert\.", r"\1.", name)


def _name_in(model: nn.Module, name: str) -> str:
    """The model's name for a tensor: with the level "bert." where it has a `TokenBert`."""
    part, _, rest = name.partition(".")
    wrapped = isinstance(getattr(model, part, None), TokenBert) and not rest.startswith("cls.")
    return f"{part}.bert.{rest}" if wrapped else name


def _decoder_weights(state: Mapping[str, Tensor], text_layers: int) -> dict[str, Tensor]:
    """Initial weights of the answer decoder: the text encoder's, from its first fusion layer on."""
    decoder = {}
    for name, value in state.items():
        if not name.startswith("text_encoder."):
            continue
        match = LAYER.search(name)
        if match:
            layer = int(match[1]) - text_layers
            if layer < 0:
                continue
            name = name.replace(match[0], f"encoder.layer.{layer}.")
        decoder[name.replace("text_encoder.", "text_decoder.", 1)] = value
    return decoder
