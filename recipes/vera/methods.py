"""What VeRA's experiments share: the settings of a row on a set, its learning rate, its score.

An experiment's grid (`<experiment>_grid.yaml`) names its rows, the methods that are compared, and
its sets, the tasks or data sets that they train on:

    rows:
      vera: {model.rank: 256, model.lr: 2.0e-2}
    sets:
      RTE: {data.task: RTE, trainer.max_epochs: 20, vera: {model.lr: 1.0e-2}}
    tuning:  # optional: learning rates that are chosen among as many trials for every row
      settings: {}  # what the trials change, so that they are judged on a split not reported
      trials: {vera: {model.lr: [5.0e-3, 2.0e-2]}}
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning as L
import pandas as pd
import torch

from lightning_modules.vera.scores import classification_scores
from recipes.experiment import Measuring, Run, Stage
from recipes.records import Finished, type_of
from recipes.results import Row, by_seed, difference

TITLES = {
    "majority": "majority class",
    "chance": "chance",
    "scratch": "full, from random weights",
    "head": "head only",
    "bitfit": "BitFit",
    "lora": "LoRA",
    "lora_fa": "LoRA-FA",
    "randlora": "RandLoRA",
    "vblora": "VB-LoRA",
    "adapter_h": "Adapter-H",
    "adapter_l": "Adapter-L",
    "adapter_p": "Adapter-P",
    "adapter_d": "Adapter-D",
    "vera": "VeRA",
    "full": "full",
}
METHOD = "model.method"


def settings_of(grid: Mapping[str, Any], row: str, name: str) -> dict[str, Any]:
    """All settings of a row on a set; what comes later wins.

    What is common to all, what the set says of all rows, what the row says, and what the set says
    of the row, or of the rows of its method.
    """
    of_row, of_set = grid["rows"][row], grid["sets"][name]
    method = of_row.get(METHOD, row)
    of_all = {key: value for key, value in of_set.items() if "." in key or key == "data"}
    special = of_set.get(row, of_set.get(method, {}))
    return {**grid.get("common", {}), **of_all, **of_row, **special, METHOD: method}


def train(
    run: Run,
    config: str,
    grid: Mapping[str, Any],
    row: str,
    name: str,
    seed: int,
    varied: Sequence[str],
    metric: str = "",
    mode: str = "max",
) -> Stage:
    """Declare a row's training on a set, at the learning rate that its trials find best.

    Args:
        run: the experiment's.
        config: the stage's YAML file.
        grid: the experiment's.
        row: one of its rows.
        name: one of its sets.
        seed: of the training; trials have seed 0.
        varied: the settings that make a row and a set what they are; no flag may change them.
        metric: by which trials are judged, on their validation part.
        mode: "max" or "min".
    """
    settings = settings_of(grid, row, name)
    fixed = {key: settings.pop(key) for key in (METHOD, *varied) if key in settings}
    tuning = grid.get("tuning", {})
    for key, values in tuning.get("trials", {}).get(row, {}).items():
        before = {**settings, **tuning.get("settings", {})}
        before.pop(key, None)
        label = key.rpartition(".")[2]
        trials = [
            run.stage(f"{name}_{row}_{label}{value:g}", config, 0, {**fixed, key: value}, before)
            for value in values
        ]
        settings |= run.best(trials, metric, [key], mode)
    return run.stage(f"{name}_{row}", config, seed, fixed, settings)


def measure_score(m: Measuring) -> Iterator[Row]:
    """The score of one training, and what it cost.

    Settings: `row` and `set` in the table; `metric`; `part`: "val" takes the best evaluation of the
    run, as the paper does, "test" scores the last checkpoint on the test part, which the run has
    not seen.
    """
    stage, metric = m.stages["stage"], m.settings["metric"]
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
    values |= {
        "tuned": stage.metrics["tuned"],
        "heads": stage.metrics["heads"],
        "seconds": stage.seconds,
        "updates": torch.load(stage.checkpoint, mmap=True, weights_only=True)["global_step"],
        "examples": len(data.samples("train")),
        "scored": len(data.samples(m.settings["part"])),
    }
    for name, value in values.items():
        yield Row(metric=name, value=value, row=m.settings["row"], set=m.settings["set"])


def test(stage: Finished, data: Any) -> dict[str, float]:
    """The scores of a stage's last checkpoint on the test part, by name."""
    module = type_of(stage.settings.model).load_from_checkpoint(
        stage.checkpoint, map_location="cpu"
    )
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        barebones=False,
    )
    [scores] = trainer.test(module, datamodule=data, verbose=False)
    return {name.removeprefix("test/"): value for name, value in scores.items()}


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


def learnt(table: pd.DataFrame, sets: Sequence[str], rows: tuple[str, str]) -> list[str]:
    """The sets in which the first row scores above the second: there methods can differ.

    With two seeds or more the 95 % interval of the paired difference has to lie above zero.
    """
    open_sets = []
    for name in sets:
        values = [by_seed(table, "score", {"row": row, "set": name}) for row in rows]
        compared = difference(*values)
        if (compared.low if compared.n > 1 else compared.mean) > 0:
            open_sets.append(name)
    return open_sets
