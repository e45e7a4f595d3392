"""Loading trained language models, taking submodels of them, and scoring them and chance."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from datamodules import CorpusData
from datamodules.loading import IGNORED
from lightning_modules.counting import count_non_embedding, count_parameters
from lightning_modules.matformer import extract, set_granularity
from lightning_modules.matformer.consistency import (
    SubmodelMetrics,
    logits_in_pieces,
    score_tokens,
)
from lightning_modules.matformer.nest import nesting_of
from recipes.experiment import Measuring
from recipes.nodes import device
from recipes.results import Row, by_seed

CHUNK = 2**24  # tokens counted at a time: 128 MB

Model = Callable[[Tensor, int], Iterator[Tensor]]  # see `score_tokens`


def text_settings(data: dict[str, Any]) -> dict[str, Any]:
    """Settings of a measurement that reads a text itself, see `corpus`; as in Stage.fingerprint.

    Args:
        data: arguments of CorpusData.
    """
    text = CorpusData.text_of(**data)
    return {"data": data, **({"text": text} if text else {})}


def corpus(m: Measuring) -> CorpusData:
    """The text of a measurement that needs no trained stage; see `text_settings`."""
    return CorpusData(**{**m.settings["data"], "seed": m.seed})


def submodels(model: nn.Module, chosen: Iterable[Sequence[int]]) -> dict[str, Model]:
    """Submodels of a nested model by label; they share its weights."""
    nesting = nesting_of(model)
    return {nesting.label(mix): _in_pieces(model, list(mix)) for mix in chosen}


def plain(model: nn.Module) -> Model:
    """A plain model (or a nested one at its current granularity) as a function of tokens."""
    return _in_pieces(model, None)


def _in_pieces(model: nn.Module, chosen: list[int] | None) -> Model:
    return partial(logits_in_pieces, model, partial(_logits, model, chosen))


def _logits(model: Any, chosen: list[int] | None, ids: Tensor) -> Tensor:
    if chosen is not None:
        set_granularity(model, chosen)
    return model(ids, use_cache=False).logits


@torch.no_grad()
def score(
    models: Mapping[str, Model], loader: Iterable[Mapping[str, Tensor]], vocabulary: int
) -> dict[str, dict[str, float]]:
    """Loss, perplexity, agreement and KL of several models in one pass over the data.

    Args:
        models: by label; the first is the reference that the others are compared with.
        loader: batches of `input_ids` and `labels`.
        vocabulary: number of tokens.

    Returns:
        By label: loss, perplexity, agreement, kl, and the number of tokens scored.
    """
    metrics, count = SubmodelMetrics(list(models)).to(device()), 0
    for batch in loader:
        on_device = {name: values.to(device()) for name, values in batch.items()}
        score_tokens(metrics, models, on_device, vocabulary)
        count += int((batch["labels"][:, 1:] != IGNORED).sum())
    return {
        label: {
            "loss": values["loss"].item(),
            "perplexity": values["loss"].exp().item(),
            "agreement": values["agreement"].item(),
            "kl": values["kl"].item(),
            "tokens scored": count,
        }
        for label, values in metrics.compute().items()
    }


def measure_unigram(m: Measuring) -> Iterator[Row]:
    """Score a prediction without context, on the text of the stage that is given."""
    ((name, _),) = m.stages.items()
    yield from unigram(m.datamodule(name))


def unigram(data: CorpusData) -> Iterator[Row]:
    """Loss and perplexity of a prediction without context, on the tokens that models are scored on.

    It predicts every token from its share of the training tokens, each counted once more than it
    occurs, so that none has probability 0. A model that is no better has learnt nothing of the
    order of tokens.
    """
    stream, counts = data.stream("train"), torch.ones(data.vocab_size, dtype=torch.float64)
    for first in range(0, len(stream), CHUNK):
        counts += stream.read(first, first + CHUNK).bincount(minlength=data.vocab_size)
    shares = counts.log() - counts.sum().log()
    labels = torch.cat([batch["labels"][:, 1:].flatten() for batch in data.val_dataloader()])
    loss = -shares[labels[labels != IGNORED]].mean()
    yield Row("unigram", "loss", loss.item())
    yield Row("unigram", "perplexity", loss.exp().item())


def said_unigram(table: pd.DataFrame) -> str:
    """A sentence on the prediction without context; "" if it was not measured."""
    loss, perplexity = (
        by_seed(table, metric, {"row": "unigram"}) for metric in ("loss", "perplexity")
    )
    return (
        f" Without context, from the tokens' shares in the training text, the loss is "
        f"{loss.mean():.2f} and the perplexity {perplexity.mean():,.0f}."
    ) * bool(len(loss))


def scored_text(table: pd.DataFrame, data: Any) -> str:
    """Words for the report: the tokens on which a table's losses were measured, and the windows.

    Args:
        table: of the report.
        data: the settings of CorpusData.
    """
    counts = table.loc[table["metric"] == "tokens scored", "value"]
    how_many = f"{counts.max():,.0f}" if len(counts) else "up to data.eval_tokens"
    stride = data.eval_stride or data.length - 1
    windows = "disjoint windows" if stride == data.length - 1 else f"windows {stride} tokens apart"
    files = [data.val] if isinstance(data.val, str) else data.val or ["the validation text"]
    return (
        f"{how_many} tokens from the beginning of {', '.join(files)}, each scored once, in "
        f"{windows} of {data.length} tokens"
    )


def sizes(model: Any, granularity: Sequence[int] | None) -> dict[str, int]:
    """Parameters with and without embeddings of a submodel, or with None of a plain model."""
    small = model if granularity is None else extract(model, granularity)
    return {"parameters": count_parameters(small), "non_embedding": count_non_embedding(small)}


def rows_of(
    method: str,
    scores: Mapping[str, Mapping[str, float]],
    costs: Mapping[str, Mapping[str, float | None]],
) -> Iterator[Row]:
    """Table rows of several models' scores and costs: `row` is the method, `set` the size."""
    for label, values in scores.items():
        for metric, value in {**values, **costs[label]}.items():
            yield Row(method, metric, value, set=label)
