"""Measurements of tuned models: score, cost, decoded texts, and the majority-class baseline."""

import math
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch

from lightning_modules.decoding import generate
from lightning_modules.vera.scores import classification_scores
from recipes.experiment import Measuring
from recipes.records import Finished, at, best, best_of
from recipes.results import Row
from recipes.tables import COLLAPSED


def measure_score(m: Measuring) -> Iterator[Row]:
    """The score and cost of a training; of several trainings, of the best on validation.

    Settings: `row` and `set` in the table; `metric`; `part`: "val" takes the run's best validation
    score, as the papers do; "test" scores the last checkpoint on the held-out test split.
    """
    metric, part = m.settings["metric"], m.settings["part"]
    stage = best_of(list(m.stages.values()), f"val/{metric}", at_end=part != "val")
    data = stage.datamodule()
    if part == "val":
        logged = stage.history[f"val/{metric}"]
        place = logged.index(top) if (top := best(logged)) in logged else 0
        scores = {
            name: stage.history[f"val/{name}"][place]
            for name in (metric, COLLAPSED)
            if f"val/{name}" in stage.history
        }
    else:
        scores = scores_on_test(stage.module(), data)
    # the correlation of constant predictions is NaN; it counts as 0, as for the majority class
    values = {"score": 0.0 if math.isnan(scores[metric]) else scores[metric]}
    if COLLAPSED in scores:
        values[COLLAPSED] = scores[COLLAPSED]
    values |= {**costs(stage, data), "scored": len(data.samples(part))}
    for name, value in values.items():
        yield Row(metric=name, value=value, row=m.settings["row"], set=m.settings["set"])


def costs(stage: Finished, data: Any) -> dict[str, float]:
    """Learning rate, trained parameters (without heads; in heads), seconds, updates, examples."""
    return {
        "lr": at(stage.settings, "model.lr"),
        "tuned": stage.metrics["tuned"],
        "heads": stage.metrics["heads"],
        "seconds": stage.seconds,
        "updates": stage.updates,
        "examples": len(data.samples("train")),
    }


def scores_on_test(module: Any, data: Any) -> dict[str, float]:
    """The scores of a module on the test split, by name."""
    [scores] = silent_trainer().test(module, datamodule=data, verbose=False)
    return {name.removeprefix("test/"): float(value) for name, value in scores.items()}


def silent_trainer(**settings: Any) -> L.Trainer:
    """A trainer on one device that writes no files and prints nothing.

    Args:
        **settings: Lightning's, such as the accelerator, which is else the quickest there is.
    """
    return L.Trainer(
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def decode_test_part(model: Any, data: Any, **decoding: Any) -> list[str]:
    """A model's text for each of `data.prompts("test")`, in their order, each in one line.

    Args:
        model: see `lightning_modules.decoding.generate`.
        data: a `datamodules.prompted.PromptedData`.
        **decoding: further arguments of `generate`.
    """
    texts = [""] * len(data.prompts("test"))
    for batch in data.prompt_dataloader("test"):
        places = batch.pop("labels").tolist()
        decoded = generate(model, batch, data.tokenizer, **decoding)
        for place, text in zip(places, decoded, strict=True):
            texts[place] = " ".join(text.split())
    return texts


def measure_majority(m: Measuring) -> Iterator[Row]:
    """The score of always predicting the most frequent class of the training split.

    It is 0 for correlations (regression, Matthews), which constant predictions do not have.
    """
    data, metric = m.datamodule("stage"), m.settings["metric"]
    value = 0.0
    if data.num_classes > 1:
        labels, scored = (
            torch.tensor([sample["labels"] for sample in data.samples(part)])
            for part in ("train", m.settings["part"])
        )
        scores = classification_scores(data.num_classes)
        scores.update(torch.full_like(scored, int(labels.mode().values)), scored)
        value = float(scores.compute()[metric])
    yield Row(metric="score", value=value, row="majority", set=m.settings["set"])
