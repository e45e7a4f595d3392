"""Detection and segmentation on dense and low-rank backbones: shared stages, scores and report."""

from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lightning_modules.counting import count_macs, count_parameters
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Run
from recipes.messages import require_at_least
from recipes.nodes import Measuring
from recipes.provenance import provenance
from recipes.results import Row
from recipes.tables import Column, tabulate

TITLES = {
    "dense": "dense",
    "direct": "low-rank, direct",
    "repaired": "low-rank, repaired (PELA)",
    "larger_batch": "the row above with a larger batch (PELA+)",
}


@dataclass(frozen=True)
class Task:
    """A downstream task.

    Attributes:
        name: of the experiment's file and its stage, such as "segmentation".
        title: of the report.
        scores: the report's columns, with the metric that validation logs; the main one first.
        note: the paper's results, and where this experiment differs.
    """

    name: str
    title: str
    scores: dict[str, str]
    note: str


def options(parser: ArgumentParser) -> None:
    """Add these experiments' own command-line flags."""
    add = parser.add_argument
    add("--repaired", metavar="PATH", help="also compare this checkpoint of PELA's repair")
    add("--larger-batch", type=int, metavar="N", help="also train with N images per device (PELA+)")


def experiment(task: Task, file: str, description: str) -> Experiment:
    """The experiment of a task.

    Args:
        task: detection or segmentation.
        file: the recipe's __file__.
        description: its docstring, shown by --help.
    """
    return Experiment(
        f"pela.{task.name}",
        file,
        task.name,
        description,
        lambda run: declare(task, run),
        lambda table, run: report(task, table, run),
        options,
    )


def declare(task: Task, run: Run) -> None:
    """Declare the fine-tuning and the scores of every backbone."""
    repaired = run.options.repaired
    if repaired is not None and not Path(repaired).exists():
        raise FileNotFoundError(
            f"--repaired {repaired} is not there: give a checkpoint of PELA's intermediate stage, "
            "or a folder that `python -m recipes export` wrote"
        )
    backbones = changes(repaired, run.options.larger_batch)
    larger = run.options.larger_batch or 0
    require_at_least(1, **{"larger-batch": run.options.larger_batch})
    factor = larger / run.parsed(task.name).data.init_args.batch_size
    chosen = run.rows(backbones)
    for seed in run.seeds:
        for row in chosen:
            derived = as_many_updates(factor) if row == "larger_batch" else {}
            stage = run.stage(row, task.name, seed, varied=backbones[row], derived=derived)
            settings = {"row": row, "scores": task.scores}
            run.measure(f"{row} score", seed, measure, {"stage": stage}, settings)


def as_many_updates(factor: float) -> dict[str, Callable[[Any], Any]]:
    """Derived settings with `factor` times the epochs, so that larger batches keep the updates.

    The paper fixes the iterations too. A training whose length is given in steps is not changed.
    """

    def epochs(settings: Any) -> int:
        count = settings.trainer.max_epochs
        return round(count * factor) if (count or 0) > 0 else count

    return {"trainer.max_epochs": epochs, "trainer.check_val_every_n_epoch": epochs}


def changes(repaired: str | None, larger_batch: int | None) -> dict[str, dict[str, Any]]:
    """Each row's changes to the stage's file, which factorises dense weights without repair."""
    rows: dict[str, dict[str, Any]] = {"dense": {"model.ratio": None}, "direct": {}}
    if repaired is not None:
        start = {"model.init_from": repaired, "model.pretrained": False}
        rows["repaired"] = {"model.ratio": None, **start}
    if larger_batch is not None:
        last = rows["repaired" if repaired else "direct"]
        rows["larger_batch"] = {**last, "data.batch_size": larger_batch}
    return rows


def measure(m: Measuring) -> Iterator[Row]:
    """The scores of a finished stage, its training time, and its model's size."""
    stage, row = m.stages["stage"], m.settings["row"]
    module = stage.module().requires_grad_(False)
    data = stage.datamodule()
    size = data.image_size
    values: dict[str, float | None] = {
        title: stage.metrics[name] for title, name in m.settings["scores"].items()
    }
    values |= {
        "parameters": count_parameters(module.model),
        "macs": count_macs(module.counted(), (1, 3, size, size)),
        "seconds": stage.seconds,
    }
    for metric, value in values.items():
        yield Row(row=row, metric=metric, value=value)


def report(task: Task, table: pd.DataFrame, run: Run) -> list[str]:
    """Scores and costs of every backbone."""
    first = next(iter(task.scores))
    columns = [Column(f"{title}, %", title, scale=100) for title in task.scores]
    columns += [
        Column(f"{first} − dense", first, scale=100, reference="dense"),
        Column("parameters", "parameters", digits=0, spread=""),
        Column("multiply-adds", "macs", digits=0, spread=""),
        Column("seconds", "seconds", digits=0),
    ]
    missing = (
        "No repaired backbone was compared: `--repaired CHECKPOINT` adds one, of the same "
        "architecture, from PELA's intermediate stage."
    )
    return [
        f"# {task.title} on dense and low-rank backbones, preset {run.preset}",
        provenance(run, table),
        "Scores in %, mean ± standard deviation over seeds, on the validation images; the "
        "difference to the dense backbone seed by seed, with its 95 % interval. Parameters and "
        "multiply-adds (of one image) are those of the whole model, heads included, unless a "
        "sentence below says otherwise. Seconds are those of the training, validation included.",
        tabulate(table, TITLES, columns, heading="backbone").markdown(),
        "" if run.options.repaired else missing,
        task.note,
        "The scale differs unless the preset is `paper`: compare how the rows stand to each "
        "other, not the numbers.",
    ]


def claims(task: Task, where: str) -> list[Claim]:
    """The claims on a task's first score that the rows of `changes` can test, at preset `paper`.

    Those on multiply-adds need no training: recipes/pela/sizes.py has them.

    Args:
        task: detection or segmentation.
        where: the data and the paper's models.
    """
    score = next(iter(task.scores))

    def compare(a: str, b: str, threshold: float = 0.0, says: str = "") -> Comparison:
        return Comparison(score, a, b, threshold, scale=100, says=says)

    gate = compare("dense", "direct", 0.01, "low rank without repair loses more than a point")
    return [
        Claim(
            f"{task.name}: near dense",
            "PELA",
            f"Fine-tuned as the dense backbone is, PELA's is at most one point of {score} below.",
            where,
            "not at hand",
            compare("repaired", "dense", -0.01),
            gate,
            preset="paper",
        ),
        Claim(
            f"{task.name}: repair > direct",
            "PELA",
            f"A backbone repaired before fine-tuning has a higher {score} than low rank without "
            "repair.",
            where,
            "not at hand",
            compare("repaired", "direct"),
            gate,
            preset="paper",
        ),
    ]
