"""How VeRA's and APET's experiments score a tuned model, and the guess that it has to beat."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import lightning as L
import torch

from lightning_modules.vera.scores import classification_scores
from recipes.experiment import Measuring
from recipes.nodes import device
from recipes.records import Finished, at, type_of
from recipes.results import Row


def measure_score(m: Measuring) -> Iterator[Row]:
    """The score of one training, and what it cost; of several, that of the best on validation.

    Settings: `row` and `set` in the table; `metric`; `part`: "val" takes the best evaluation of the
    run, as the paper does, "test" scores the last checkpoint on the test part, which the run has
    not seen.
    """
    metric = m.settings["metric"]
    stage = best_of(list(m.stages.values()), f"val/{metric}")
    data = stage.datamodule()
    values: dict[str, float]
    if m.settings["part"] == "val":
        history = stage.history
        scores = history[f"val/{metric}"]
        best = max(range(len(scores)), key=lambda place: scores[place])
        values = {"score": scores[best]}
        if "val/classes_predicted" in history:
            values["classes_predicted"] = history["val/classes_predicted"][best]
    else:
        scores_of_test = test(stage, data)
        values = {"score": scores_of_test[metric]}
        if "classes_predicted" in scores_of_test:
            values["classes_predicted"] = scores_of_test["classes_predicted"]
    values |= {**costs(stage, data), "scored": len(data.samples(m.settings["part"]))}
    for name, value in values.items():
        yield Row(metric=name, value=value, row=m.settings["row"], set=m.settings["set"])


def costs(stage: Finished, data: Any) -> dict[str, float]:
    """What a training took: its rate, what it tuned, how long, and on how much."""
    return {
        "lr": at(stage.settings, "model.lr"),
        "tuned": stage.metrics["tuned"],
        "heads": stage.metrics["heads"],
        "seconds": stage.seconds,
        "updates": torch.load(stage.checkpoint, mmap=True, weights_only=True)["global_step"],
        "examples": len(data.samples("train")),
    }


def best_of(
    trials: Sequence[Finished], metric: str, mode: Literal["max", "min"] = "max"
) -> Finished:
    """The training with the best value of a metric that it logged; the first of equals."""
    pick = max if mode == "max" else min
    if len(trials) == 1:
        return trials[0]
    return pick(trials, key=lambda trial: pick(trial.history[metric]))


def load(stage: Finished) -> Any:
    """The module of a stage's last checkpoint, ready to evaluate."""
    module = type_of(stage.settings.model).load_from_checkpoint(
        stage.checkpoint, map_location=device()
    )
    return module.eval()


def test(stage: Finished, data: Any) -> dict[str, float]:
    """The scores of a stage's last checkpoint on the test part, by name."""
    kind = type_of(stage.settings.model)
    return scores_on_test(kind.load_from_checkpoint(stage.checkpoint, map_location="cpu"), data)


def scores_on_test(module: Any, data: Any) -> dict[str, float]:
    """The scores of a module on the test part, by name."""
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    [scores] = trainer.test(module, datamodule=data, verbose=False)
    return {name.removeprefix("test/"): float(value) for name, value in scores.items()}


def measure_majority(m: Measuring) -> Iterator[Row]:
    """The score of always answering the most frequent class of the training part.

    A constant correlates with nothing: 0 for regression and for Matthews' correlation.
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
