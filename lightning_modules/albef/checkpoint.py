"""ALBEF's checkpoints, and the ViT and BERT that an ALBEF starts from."""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn
from transformers import BertForMaskedLM

from lightning_modules.albef.bert import TokenBert
from lightning_modules.albef.model import ALBEF, AnswerModel
from lightning_modules.backbones import build_vision
from lightning_modules.pela import factorize
from lightning_modules.weights import LoadReport, copy_weights, load_weights, read_state_dict

LAYER = re.compile(r"encoder\.layer\.(\d+)\.")


def load_albef(model: ALBEF, source: str | Path) -> LoadReport:
    """Copy an ALBEF's weights, by the names of its released checkpoints, and log what did not fit.

    The checkpoint may be of another task: pre-training calls its text layers
    `text_encoder.bert.…`, the downstream tasks `text_encoder.…`. An answer decoder that the
    checkpoint lacks starts from the fusion layers, the embeddings and the token head (as ALBEF's
    VQA does). Positions for other image sizes are interpolated. The weights that belong to a
    momentum model, and the queue, are left out: the report calls them unexpected.

    Args:
        model: a dense model, changed in place; made low-rank where the weights are.
        source: a checkpoint of ALBEF, of this repository's modules, or a state_dict.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if nothing in it fits.
    """
    state, end = albef_names(model, read_state_dict(source)), ".u.weight"
    ranks = {n.removesuffix(end): len(value) for n, value in state.items() if n.endswith(end)}
    if ranks:
        known = dict(model.named_modules())
        factorize(model, ranks={n: r for n, r in ranks.items() if n in known}, method="empty")
    return copy_weights(model, state, source)


def albef_names(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an ALBEF by the names that they have in this model."""
    prefix = "model."
    if any(name.startswith(prefix) for name in state):  # a Lightning checkpoint
        state = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
    state = {_plain(name): value for name, value in state.items()}
    if isinstance(model, AnswerModel) and not any(n.startswith("text_decoder.") for n in state):
        state |= _decoder(state, model.bert.text_layers)
    if "temp" in state:
        state["temp"] = state["temp"].reshape(1)
    return {_named(model, name): value for name, value in state.items()}


def start_vision(model: ALBEF, source: str | Path) -> LoadReport:
    """Give the image encoder the weights of a ViT, by timm's names.

    Args:
        model: receives the weights, in place.
        source: a file or folder, or timm's name of a model on the hub.

    Raises:
        ValueError: if nothing in it fits, or there is neither a file nor a model of this name.
    """
    if Path(source).exists():
        return load_weights(model.visual_encoder, source)
    weights = build_vision(str(source), 0, {}, pretrained=True).state_dict()
    return copy_weights(model.visual_encoder, weights, source)


def start_text(model: ALBEF, source: str | Path) -> LoadReport:
    """Give the text and fusion layers the weights of a BERT, its first layers to the text.

    What a BERT lacks, the cross-attention, stays as it is, and so do layers beyond its depth.

    Args:
        model: receives the weights, in place.
        source: a hub name, or a folder that transformers reads.

    Raises:
        OSError: if there is no such BERT.
        ValueError: if nothing in it fits.
    """
    bert = BertForMaskedLM.from_pretrained(str(source))
    state = {f"text_encoder.{name}": value for name, value in bert.state_dict().items()}
    return copy_weights(model, albef_names(model, state), source)


def _plain(name: str) -> str:
    """A name without the step that pre-training's text encoder adds."""
    return re.sub(r"^(text_(?:en|de)coder)\.bert\.", r"\1.", name)


def _named(model: nn.Module, name: str) -> str:
    """A plain name as this model has it."""
    part, _, rest = name.partition(".")
    stepped = isinstance(getattr(model, part, None), TokenBert) and not rest.startswith("cls.")
    return f"{part}.bert.{rest}" if stepped else name


def _decoder(state: Mapping[str, Tensor], text_layers: int) -> dict[str, Tensor]:
    """The answer decoder's start: what the text encoder has, layers counted from the fusion."""
    decoder = {}
    for name, value in state.items():
        if not name.startswith("text_encoder."):
            continue
        place = LAYER.search(name)
        if place:
            layer = int(place[1]) - text_layers
            if layer < 0:
                continue
            name = name.replace(place[0], f"encoder.layer.{layer}.")
        decoder[name.replace("text_encoder.", "text_decoder.", 1)] = value
    return decoder
