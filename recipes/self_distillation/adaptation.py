"""What images.py and text.py share: the stages in order, what is measured after them, the report.

A grid (images_grid.yaml, …) says what is run. `adaptations` are stages between pre-training and
fine-tuning, by name: settings that are laid over <kind>_adapt.yaml, with two keys of their own,
`teacher`, the adaptation whose encoder teaches, and `times`, how many times the steps. `rows` are
fine-tunings: settings laid over <kind>_finetune.yaml, and `from`, the adaptation that one begins
with, or without it the original; `default` lists those that run unless --rows says otherwise.
Every adaptation begins with the original weights, and is trained once however many rows need it.
"""

import argparse
import importlib
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from matplotlib import pyplot as plt
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_modules.self_distillation import distance, fingerprint
from lightning_modules.weights import read_state_dict
from recipes.cli import parse
from recipes.experiment import Experiment, StageResult, from_command_line
from recipes.report import (
    markdown_table,
    mean_sd,
    save_plot,
    show_table,
    write_json,
    write_report,
)

NAMES = {
    "finetune": "fine-tune only",
    "recadam": "RecAdam",
    "mars": "MARS",
    "r3f": "R3F",
    "supcon": "supervised contrastive",
    "further": "further pre-training",
    "further_x2": "further pre-training × 2",
    "self_distillation": "self-distillation",
    "rounds_2": "self-distillation, 2 rounds",
    "rounds_3": "self-distillation, 3 rounds",
    "rounds_4": "self-distillation, 4 rounds",
    "without_mae": "w/o L_MAE",
    "predictions": "prediction matching",
    "weights_l2": "weight matching, ℓ2",
    "weights_mars": "weight matching, MARS",
    "lambda_0.5": "λ = 0.5",
    "lambda_0.3": "λ = 0.3",
    "lambda_0.1": "λ = 0.1",
}
ROUNDS = ("further", "self_distillation", "rounds_2", "rounds_3", "rounds_4")
TEACHER = "callbacks.frozen_teacher.FrozenTeacher"

# of the paper: caption → (columns, row → values)
Tables = dict[str, tuple[list[str], dict[str, Sequence[float]]]]
# of one seed: set → "rows" → row → scores, and "adaptations" → name → what became of it
Results = dict[str, dict[str, dict[str, Any]]]


@dataclass
class Study:
    """One experiment on images or on text.

    Attributes:
        experiment: its presets, folders and further arguments.
        kind: "images" or "text": the beginning of its files' names.
        title: of the report.
        parts: the loaders to score on: "train" and "test", and any more.
        encoder: the encoder's weights in a checkpoint.
        paper: its tables.
        remarks: paragraphs about the data of a set, given its name and its DataModule.
        rows: rows to run; all of the grid's when empty.
        unlabelled: settings of the data that adaptations see instead of the labelled ones'.
    """

    experiment: Experiment
    kind: str
    title: str
    parts: Callable[[Any], dict[str, DataLoader]]
    encoder: Callable[[Path], dict[str, Tensor]]
    paper: Tables
    remarks: Callable[[Any], str]
    rows: list[str] = field(default_factory=list)
    unlabelled: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Experiment:
        """Train, measure and report, seed after seed."""
        self.grid = yaml.safe_load(self.experiment.files(f"{self.kind}_grid")[-1].read_text())
        self.rows = self.rows or self.grid.get("default") or list(self.grid["rows"])
        if unknown := set(self.rows) - set(self.grid["rows"]):
            raise ValueError(
                f"--rows has {min(unknown)!r}: expected some of {', '.join(self.grid['rows'])}"
            )
        self.original = self.begin()
        self.original_weights = self.encoder(self.original)
        results: list[Results] = []
        for seed in range(self.experiment.seeds):
            results.append({name: self.measure(name, seed) for name in self.grid["sets"]})
            self.report(results)
        return self.experiment

    def begin(self) -> Path:
        """The checkpoint of (θ_init, φ_init), with which everything begins.

        The grid's `pretrain` makes it, unless --model.init_from names one. Without `pretrain` it
        is what the stage's file names: the hub's weights, read once.
        """
        name = f"{self.kind}_adapt"
        given = parse(str(self.experiment.files(name)[-1]), self.experiment.extra).model
        if self.grid["pretrain"] is not None and given.init_args.init_from is None:
            return self.experiment.stage("pretrain", name, 0, self.grid["pretrain"]).checkpoint
        if not (given.init_args.pretrained or given.init_args.init_from):
            raise ValueError(
                f"nothing was pre-trained: give --model.init_from, or `pretrain` in {name}'s grid"
            )
        L.seed_everything(0, verbose=False)  # of a decoder that does not come with the weights
        module = build(given)
        path = self.experiment.out / "original.ckpt"
        state = {f"model.{key}": value for key, value in module.model.state_dict().items()}
        if not path.is_file() or fingerprint(read_state_dict(path)) != module.start:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"state_dict": state}, path)
        return path

    def measure(self, name: str, seed: int) -> dict[str, dict[str, Any]]:
        """All rows of one set and seed, and the adaptations they needed."""
        adapted: dict[str, StageResult] = {}
        overrides = {"model.pretrained": False, **self.grid["sets"][name]}
        data = self.data(overrides, seed)
        rows = {}
        for row in self.rows:
            settings = dict(self.grid["rows"][row])
            chain = self.chain(settings.pop("from", None))
            for stage in reversed(chain):
                self.adapt(stage, name, seed, overrides, adapted)
            source = adapted[chain[0]].checkpoint if chain else self.original
            result = self.experiment.stage(
                f"{name} {row}",
                f"{self.kind}_finetune",
                seed,
                {**overrides, **settings, "model.init_from": source},
            )
            rows[row] = self.score(result, data)
            before = sum(adapted[stage].seconds for stage in chain)
            rows[row]["seconds"] = {"adaptation": before, "fine-tuning": result.seconds}
        return {
            "rows": rows,
            "adaptations": {stage: self.trace(found) for stage, found in adapted.items()},
            "data": {"remark": self.remarks(data)},
        }

    def chain(self, adaptation: str | None) -> list[str]:
        """An adaptation, its teacher, the teacher's teacher, …"""
        found = []
        while adaptation is not None:
            found.append(adaptation)
            adaptation = self.grid["adaptations"][adaptation].get("teacher")
        return found

    def adapt(
        self,
        stage: str,
        name: str,
        seed: int,
        overrides: dict[str, Any],
        adapted: dict[str, StageResult],
    ) -> None:
        """Train an adaptation, unless it is there, and add it to `adapted`."""
        if stage in adapted:
            return
        config = f"{self.kind}_adapt"
        settings = dict(self.grid["adaptations"][stage])
        settings = {**overrides, **self.unlabelled, "model.init_from": self.original, **settings}
        if teacher := settings.pop("teacher", None):
            settings["model.teacher_from"] = adapted[teacher].checkpoint
            settings["trainer.callbacks"] = [{"class_path": TEACHER}]
        if times := settings.pop("times", None):
            trainer = parse(str(self.experiment.files(config)[-1]), self.experiment.extra).trainer
            length = "max_steps" if trainer.max_steps > 0 else "max_epochs"
            settings[f"trainer.{length}"] = times * trainer[length]
        adapted[stage] = self.experiment.stage(f"{name} adapt {stage}", config, seed, settings)

    def data(self, overrides: dict[str, Any], seed: int) -> Any:
        """The DataModule that fine-tuning uses."""
        given = [
            f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in overrides.items()
            if key.partition(".")[0] == "data"
        ]
        experiment = replace(self.experiment, extra=[*self.experiment.extra, *given])
        return experiment.datamodule(f"{self.kind}_finetune", seed)

    def score(self, result: StageResult, data: Any) -> dict[str, Any]:
        """Loss, accuracy and F1 on each part, the generalisation gap and the distance gone.

        They are kept beside the checkpoint, which a stage that is trained anew takes away.
        """
        file = result.folder / "scores.json"
        if file.is_file():
            return json.loads(file.read_text())
        settings = parse(str(self.experiment.files(f"{self.kind}_finetune")[-1])).model
        module = type_of(settings).load_from_checkpoint(result.checkpoint, map_location="cpu")
        trainer = L.Trainer(
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        scores: dict[str, Any] = {}
        for part, loader in self.parts(data).items():
            (found,) = trainer.test(module, loader, verbose=False)
            scores[part] = {key.removeprefix("test/"): value for key, value in found.items()}
        scores["gap"] = scores["test"]["loss"] - scores["train"]["loss"]
        scores["distance"] = distance(self.encoder(result.checkpoint), self.original_weights)
        write_json(file, scores)
        return scores

    def trace(self, result: StageResult) -> dict[str, Any]:
        """What an adaptation began with, how far it went, and its L_MAE on the validation part."""
        checkpoint = torch.load(result.checkpoint, map_location="cpu", weights_only=True)
        return {
            "start": checkpoint["start"],
            "distance": distance(self.encoder(result.checkpoint), self.original_weights),
            "mae": result.metrics.get("val/mae"),
            "seconds": result.seconds,
        }

    def report(self, results: Sequence[Results]) -> None:
        """Write report.md, metrics.json and the plot, and show the table."""
        experiment, sets = self.experiment, list(self.grid["sets"])
        metric = self.grid["metrics"]
        columns = {
            (name, part): f"{name}, {metric[name]}" + ("" if part == "test" else ", new texts")
            for name in sets
            for part in results[0][name]["rows"][self.rows[0]]
            if part in ("test", "new")
        }
        header = ["", *columns.values()]
        table = [
            [
                NAMES.get(row, row),
                *(
                    mean_sd([r[name]["rows"][row][part][metric[name]] for r in results], 100)
                    for name, part in columns
                ),
            ]
            for row in self.rows
        ]
        show_table(f"{self.title} ({experiment.preset}), %", header, table)
        original = fingerprint(read_state_dict(self.original))
        both = any(part == "new" for _, part in columns)
        text = [
            f"# {self.title}, preset {experiment.preset}",
            experiment.provenance(len(results)),
            "On the test part, in %, mean ± standard deviation over seeds, of the weights after "
            "the last step. Every row begins with the same original weights; rows that share an "
            "adaptation share its training."
            + both
            * " `new texts` are the test part without what stands in training too.",
            markdown_table(header, table),
            *(f"{name}: {results[0][name]['data']['remark']}" for name in sets),
            "## Generalisation gap and distance",
            "Test loss less training loss, and ‖θ_init − θ_final‖₂ of the encoder (Section 5.2).",
            *self.analyses(results),
            "![distance by round, and generalisation gap](analyses.png)",
            "## Adaptations",
            f"SHA-256 of the original weights: `{original[:16]}…`. Each adaptation's own first "
            "weights are compared with it; `val/mae` is L_MAE on the validation part.",
            *self.adaptations(results, original),
            "## Time",
            "Seconds of training, mean over seeds (Appendix B): all adaptations that a row needs, "
            "and its fine-tuning. The paper, CUB on one RTX 3090: 32 min of fine-tuning, 1 h 30 "
            "more with further pre-training, another 5 h 13 with distillation.",
            *self.times(results),
            "## The paper",
            *(
                f"**{caption}**\n\n"
                + markdown_table(
                    ["", *columns],
                    [[NAMES.get(r, r), *map(str, values)] for r, values in rows.items()],
                )
                for caption, (columns, rows) in self.paper.items()
            ),
            "The scale differs unless the preset is `paper`: compare how the rows stand to each "
            "other, not the numbers.",
        ]
        self.plot(results)
        provenance = experiment.provenance(len(results))
        metrics = {"provenance": provenance, "original": original, "seeds": results}
        write_report(experiment.out, text, metrics)

    def analyses(self, results: Sequence[Results]) -> list[str]:
        """A table for each set."""
        header = ["", "training loss", "test loss", "gap", "distance"]
        return [
            f"**{name}**\n\n"
            + markdown_table(
                header,
                [
                    [
                        NAMES.get(row, row),
                        *(
                            mean_sd([pick(r[name]["rows"][row]) for r in results], 1, 3)
                            for pick in (
                                lambda found: found["train"]["loss"],
                                lambda found: found["test"]["loss"],
                                lambda found: found["gap"],
                                lambda found: found["distance"],
                            )
                        ),
                    ]
                    for row in self.rows
                ],
            )
            for name in self.grid["sets"]
        ]

    def adaptations(self, results: Sequence[Results], original: str) -> list[str]:
        """A table for each set."""
        header = ["", "teacher", "begins with the original", "distance", "val/mae"]
        tables = []
        for name in self.grid["sets"]:
            rows = []
            for stage in results[0][name]["adaptations"]:
                found = [r[name]["adaptations"][stage] for r in results]
                same = all(one["start"] == original for one in found)
                rows.append(
                    [
                        stage,
                        self.grid["adaptations"][stage].get("teacher", ""),
                        "yes" if same else "no",
                        mean_sd([one["distance"] for one in found], 1, 3),
                        mean_sd([one["mae"] for one in found], 1, 3) if found[0]["mae"] else "",
                    ]
                )
            tables.append(f"**{name}**\n\n" + markdown_table(header, rows))
        return tables

    def times(self, results: Sequence[Results]) -> list[str]:
        """A table of all sets together."""
        rows = []
        for row in self.rows:
            found = [r[name]["rows"][row]["seconds"] for r in results for name in r]
            means = [
                statistics.fmean(one[part] for one in found)
                for part in ("adaptation", "fine-tuning")
            ]
            rows.append([NAMES.get(row, row), *(f"{value:.1f}" for value in [*means, sum(means)])])
        return [markdown_table(["", "adaptation", "fine-tuning", "together"], rows)]

    def plot(self, results: Sequence[Results]) -> None:
        """Fig. 5: distance after each round's adaptation and fine-tuning; and every row's gap."""
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
        rounds = [row for row in ROUNDS if row in self.rows]
        for name in self.grid["sets"]:
            places = [ROUNDS.index(row) for row in rounds]
            adapted, tuned = [], []
            for row in rounds:
                stage = self.grid["rows"][row]["from"]
                adapted.append([r[name]["adaptations"][stage]["distance"] for r in results])
                tuned.append([r[name]["rows"][row]["distance"] for r in results])
            (line,) = left.plot(places, list(map(statistics.fmean, tuned)), "o-", label=name)
            left.plot(
                places,
                list(map(statistics.fmean, adapted)),
                "s--",
                color=line.get_color(),
                label=f"{name}, before fine-tuning",
            )
            gaps = [
                statistics.fmean(r[name]["rows"][row]["gap"] for r in results) for row in self.rows
            ]
            right.plot(gaps, range(len(self.rows)), "o", label=name)
        left.set(
            xlabel="rounds of self-distillation (0: further pre-training)",
            ylabel="‖θ_init − θ‖₂",
            xticks=range(len(ROUNDS)),
        )
        right.set_yticks(range(len(self.rows)), [NAMES.get(row, row) for row in self.rows])
        right.invert_yaxis()
        right.set_xlabel("test loss − training loss")
        if rounds:
            left.legend(fontsize="small")
        right.legend(fontsize="small")
        save_plot(figure, self.experiment.out / "analyses.png")


def type_of(settings: Any) -> Any:
    """The class that a parsed stage names."""
    module, _, name = settings.class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def build(settings: Any) -> Any:
    """The LightningModule that a parsed stage describes, with its model and weights."""
    module = type_of(settings)(**settings.init_args.as_dict())
    module.configure_model()
    return module


def command_line(
    name: str, file: str, description: str, argv: list[str] | None
) -> tuple[Experiment, list[str], str | None]:
    """The experiment, the rows it is limited to and a source of unlabelled data.

    Args:
        name: such as "images"; also the beginning of its files' names.
        file: the recipe's __file__.
        description: shown by --help.
        argv: arguments; sys.argv's by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rows", default="")
    parser.add_argument("--unlabelled")
    options, rest = parser.parse_known_args(argv)
    experiment = from_command_line(
        f"self_distillation.{name}", file, f"{name}_adapt", description, rest
    )
    command = shlex.join(["python", "-m", f"recipes.{experiment.name}", *argv])
    rows = [row for row in options.rows.split(",") if row]
    return replace(experiment, command=command), rows, options.unlabelled
