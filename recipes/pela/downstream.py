"""What the two downstream experiments share: backbones fine-tuned the same way, and a report."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.pela.downstream.module import Downstream
from recipes.legacy import Experiment, StageResult, from_command_line
from recipes.report import markdown_table, mean_sd, show_table, write_report

TITLES = {
    "dense": "dense",
    "direct": "low-rank, direct",
    "repaired": "low-rank, repaired (PELA)",
    "larger_batch": "the last with a larger batch (PELA+)",
}
COSTS = ("parameters", "macs")

Row = dict[str, float]  # scores, parameters, macs, seconds of one fine-tuned model


@dataclass
class Task:
    """A downstream task.

    Attributes:
        name: of the experiment's file and its stage, such as "segmentation".
        title: of the report.
        module: its LightningModule.
        scores: what validation logs, by column of the report; the first is the task's.
        note: what the paper says, and where this differs.
    """

    name: str
    title: str
    module: type[Downstream]
    scores: dict[str, str]
    note: str


def compare(task: Task, file: str, description: str, argv: list[str] | None = None) -> Experiment:
    """Fine-tune every backbone and report.

    Args:
        task: what is learned.
        file: the recipe's __file__.
        description: its docstring, shown by --help.
        argv: arguments; sys.argv's by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--repaired")
    own.add_argument("--larger-batch", type=int)
    options, others = own.parse_known_args(argv)
    experiment = from_command_line(f"pela.{task.name}", file, task.name, description, others)
    experiment.command = shlex.join(["python", "-m", f"recipes.pela.{task.name}", *argv])
    repaired = None if options.repaired is None else Path(options.repaired)
    if repaired is not None and not repaired.exists():
        raise FileNotFoundError(
            f"--repaired {repaired} is not there: give a checkpoint of PELA's intermediate stage, "
            "or a folder that lightning_modules.pela.checkpoint wrote"
        )
    given = experiment.parsed(task.name)
    backbones = overrides(repaired, options.larger_batch, given)
    results: list[dict[str, Row]] = []
    for seed in range(experiment.seeds):
        size = experiment.datamodule(task.name, seed).image_size
        rows = {}
        for name, changes in backbones.items():
            stage = experiment.stage(name, task.name, seed, changes)
            rows[name] = measure(task, stage, size)
        results.append(rows)
        report(task, experiment, results)
    return experiment


def overrides(
    repaired: Path | None, larger_batch: int | None, stage: Any
) -> dict[str, dict[str, Any]]:
    """What each backbone changes of the stage, which factorises dense weights directly.

    With the larger batch it makes as many updates as the others, as under the paper's fixed number
    of iterations.
    """
    rows: dict[str, dict[str, Any]] = {"dense": {"model.init_args.ratio": None}, "direct": {}}
    if repaired is not None:
        rows["repaired"] = {
            "model.init_args.ratio": None,
            "model.init_args.init_from": repaired,
            "model.init_args.pretrained": False,
        }
    if larger_batch is not None:
        last = rows["repaired" if repaired else "direct"]
        rows["larger_batch"] = last | {"data.init_args.batch_size": larger_batch}
        if (epochs := stage.trainer.max_epochs or 0) > 0:
            longer = round(epochs * larger_batch / stage.data.init_args.batch_size)
            for length in ("trainer.max_epochs", "trainer.check_val_every_n_epoch"):
                rows["larger_batch"][length] = longer
    return rows


def measure(task: Task, stage: StageResult, size: int) -> Row:
    """The scores of a finished stage, and what its model costs."""
    module = task.module.load_from_checkpoint(
        stage.checkpoint, map_location="cpu", weights_only=True
    )
    model = module.model.requires_grad_(False)
    return {
        **{title: stage.metrics[name] for title, name in task.scores.items()},
        "parameters": count_parameters(model),
        "macs": count_macs(model, (1, 3, size, size)),
        "seconds": stage.seconds,
    }


def report(task: Task, experiment: Experiment, results: Sequence[dict[str, Row]]) -> None:
    """Write report.md and metrics.json, and show the table."""
    header = ["backbone", *task.scores, "parameters", "multiply-adds", "time, % of dense"]
    dense = results[0]["dense"]
    rows = []
    for name, found in results[0].items():
        cells = [mean_sd([r[name][score] for r in results], 100) for score in task.scores]
        shares = [r[name]["seconds"] / r["dense"]["seconds"] for r in results]
        cells += [f"{found[cost]:,.0f} ({found[cost] / dense[cost]:.0%})" for cost in COSTS]
        rows.append([TITLES[name], *cells, mean_sd(shares, 100, 0)])
    show_table(f"{task.title} ({experiment.preset})", header, rows)
    text = [
        f"# {task.title} on dense and low-rank backbones, preset {experiment.preset}",
        experiment.provenance(len(results)),
        "Scores in %, mean ± standard deviation over seeds, on the validation images at "
        "`data.image_size`. Parameters and multiply-adds (of one image) are those of the whole "
        "model, heads included, and beside them their share of the dense one's. Time is that of "
        "the training, validation included.",
        markdown_table(header, rows),
    ]
    if "repaired" not in results[0]:
        text.append(
            "No repaired backbone was compared: `--repaired CHECKPOINT` adds one, of the same "
            "architecture, from PELA's intermediate stage."
        )
    text += [
        task.note,
        "The scale differs unless the preset is `paper`: compare how the rows stand to each "
        "other, not the numbers.",
    ]
    write_report(
        experiment.out, text, {"provenance": experiment.provenance(len(results)), "seeds": results}
    )
