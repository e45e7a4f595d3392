"""What images.py and text.py share: the stages in order, what is measured after them, the report.

A grid (shared_grid.yaml, under images_grid.yaml at its preset) says what is run.
`adaptations` are stages between pre-training and fine-tuning, by name: settings that are laid over
<kind>_adapt.yaml, with two keys of their own, `teacher`, the adaptation whose encoder teaches, and
`times`, how many times the steps. `rows` are fine-tunings: settings laid over <kind>_finetune.yaml,
and `from`, the adaptation that one begins with, or without it the original; `default` lists those
that run unless --rows says otherwise. Every adaptation begins with the original weights, and is
trained once however many rows need it. `preset` names another preset, which this grid changes and
whose stages it runs. `select` says which checkpoint of a fine-tuning is scored: that of the `last`
step, or the `best` on the validation part.

An argument of the command line goes to every stage, --adapt.model.lr to the adaptations only and
--finetune.model.lr to the fine-tunings.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_modules.self_distillation import distance, fingerprint
from lightning_modules.weights import read_state_dict
from recipes import cli
from recipes.legacy import Experiment, StageResult, from_command_line, grouped, type_of
from recipes.report import write_json
from recipes.self_distillation.tables import Report, Results, Tables


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
        remarks: a sentence about the data of a set, given its DataModule.
        use: lines of Python that follow USE in the report, and classify something new.
        other: settings of unlabelled data, given where it is and the labelled data's settings.
        rows: rows to run; the grid's `default` when empty.
        unlabelled: data that adaptations see instead of the labelled ones'.
        select: "last" or "best"; the grid's when None.
        decoder_steps: first fit a new decoder to the frozen encoder, for weights without one.
    """

    experiment: Experiment
    kind: str
    title: str
    parts: Callable[[Any], dict[str, DataLoader]]
    encoder: Callable[[Path], dict[str, Tensor]]
    paper: Tables
    remarks: Callable[[Any], str]
    use: str
    other: Callable[[str, Any], dict[str, Any]]
    rows: list[str] = field(default_factory=list)
    unlabelled: str | None = None
    select: str | None = None
    decoder_steps: int | None = None

    def run(self) -> Experiment:
        """Train, measure and report, seed after seed."""
        self.grid = read_grid(self.experiment, self.kind)
        given = divided(self.experiment.extra)
        self.adapting, self.tuning = (
            replace(self.experiment, extra=[*given["every"], *given[stage]])
            for stage in ("adapt", "finetune")
        )
        self.unlabelled_data: dict[str, Any] = {}
        if self.unlabelled:
            labelled = self.parsed("adapt").data.init_args
            self.unlabelled_data = self.other(self.unlabelled, labelled)
        self.select = self.select or self.grid["select"]
        if self.select == "best":
            self.require_validation()
        self.rows = self.rows or self.grid["default"] or list(self.grid["rows"])
        if unknown := set(self.rows) - set(self.grid["rows"]):
            raise ValueError(
                f"--rows has {min(unknown)!r}: expected some of {', '.join(self.grid['rows'])}"
            )
        self.original = self.begin()
        self.original_weights = self.encoder(self.original)
        report = Report(
            self.experiment,
            self.title,
            self.grid,
            self.rows,
            self.select,
            fingerprint(read_state_dict(self.original)),
            self.paper,
            type_of(self.parsed("finetune").model).__name__,
            self.use,
        )
        results: list[Results] = []
        for seed in range(self.experiment.seeds):
            results.append({name: self.measure(name, seed) for name in self.grid["sets"]})
            report.write(results)
        return self.experiment

    def parsed(self, stage: str) -> Any:
        """What the files and the command line say of a stage, "adapt" or "finetune"."""
        experiment = self.adapting if stage == "adapt" else self.tuning
        return experiment.parsed(f"{self.kind}_{stage}")

    def require_validation(self) -> None:
        """Refuse to select among checkpoints that are never validated, before anything trains.

        Raises:
            ValueError: naming the settings.
        """
        trainer = self.parsed("finetune").trainer
        steps, interval = trainer.max_steps, trainer.val_check_interval
        late = trainer.check_val_every_n_epoch is None and 0 < steps < (interval or 0)
        if trainer.limit_val_batches == 0 or late:
            raise ValueError(
                "select is best and fine-tuning never validates: its limit_val_batches is "
                f"{trainer.limit_val_batches}, val_check_interval {interval}, max_steps {steps}; "
                "change --finetune.trainer.limit_val_batches or "
                "--finetune.trainer.val_check_interval, or give --select last"
            )

    def begin(self) -> Path:
        """The checkpoint of (θ_init, φ_init), with which everything begins.

        The grid's `pretrain` makes it, unless --model.init_from names one, or its `decoder` for
        --decoder_steps. Without these it is what the stage's file names: the hub's weights, read
        once.
        """
        name = f"{self.kind}_adapt"
        given = self.parsed("adapt").model
        pretrain = self.grid["pretrain"] if given.init_args.init_from is None else None
        if self.decoder_steps:
            pretrain = {
                **self.grid["decoder"],
                **self.unlabelled_data,
                "model.pretrained": given.init_args.pretrained,
                "trainer.max_steps": self.decoder_steps,
            }
        if pretrain is not None:
            return self.adapting.stage("pretrain", name, 0, pretrain).checkpoint
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
        data, splits = self.data("finetune", name, seed, overrides)
        if self.unlabelled_data:
            splits |= self.data("adapt", name, seed, {**overrides, **self.unlabelled_data})[1]
        selection = {}
        if self.select == "best":
            metric = f"val/{self.grid['metrics'][name]}"
            selection = {"monitor": metric, "mode": "max", "filename": "best"}
        rows = {}
        for row in self.rows:
            settings = dict(self.grid["rows"][row])
            chain = self.chain(settings.pop("from", None))
            for stage in reversed(chain):
                self.adapt(stage, name, seed, overrides, adapted)
            source = adapted[chain[0]].checkpoint if chain else self.original
            settings |= {f"checkpoint.{key}": value for key, value in selection.items()}
            result = self.tuning.stage(
                f"{name} {row}",
                f"{self.kind}_finetune",
                seed,
                {**overrides, **settings, "model.init_from": source},
            )
            rows[row] = self.score(result, data)
            rows[row]["checkpoint"] = str(self.chosen(result))
            before = sum(adapted[stage].seconds for stage in chain)
            rows[row]["seconds"] = {"adaptation": before, "fine-tuning": result.seconds}
        return {
            "rows": rows,
            "adaptations": {stage: self.trace(found) for stage, found in adapted.items()},
            "data": {
                "remark": self.remarks(data),
                "splits": splits,
                "file": str(self.split_file(name, seed)),
            },
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
        begun = {**overrides, **self.unlabelled_data, "model.init_from": self.original}
        settings = {**begun, **settings}
        if teacher := settings.pop("teacher", None):
            settings["model.teacher_from"] = adapted[teacher].checkpoint
        if times := settings.pop("times", None):
            trainer = self.parsed("adapt").trainer
            length = "max_steps" if trainer.max_steps > 0 else "max_epochs"
            settings[f"trainer.{length}"] = times * trainer[length]
        adapted[stage] = self.adapting.stage(f"{name} adapt {stage}", config, seed, settings)

    def data(
        self, stage: str, name: str, seed: int, overrides: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """The DataModule of a stage, and what is in its parts: number of examples and SHA-256.

        The file of `split_file` says besides how the DataModule was made and, where a part was
        drawn by the seed, which examples are in it.
        """
        experiment = self.adapting if stage == "adapt" else self.tuning
        given = [
            f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in overrides.items()
            if key.partition(".")[0] == "data"
        ]
        settings = experiment.parsed(f"{self.kind}_{stage}", given).data
        arguments = {**settings.init_args.as_dict(), "seed": seed}
        data = type_of(settings)(**arguments)
        parts = ("train", "val", "test") if stage == "finetune" else ("train", "val")
        manifest = {part: data.manifest(part) for part in parts}
        title = name if stage == "finetune" else f"{name}, unlabelled"
        file = self.split_file(title, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"data": settings.class_path, "settings": arguments, "parts": manifest})
        short = {
            part: {"examples": found["examples"], "sha256": found["sha256"]}
            for part, found in manifest.items()
        }
        return data, {title: short}

    def split_file(self, title: str, seed: int) -> Path:
        """Where the manifest of a set's split is."""
        return self.experiment.out / f"seed{seed}" / f"{title} split.json"

    def chosen(self, result: StageResult) -> Path:
        """The checkpoint of a fine-tuning that is scored."""
        return result.checkpoint.with_stem("best" if self.select == "best" else "last")

    def score(self, result: StageResult, data: Any) -> dict[str, Any]:
        """Loss, accuracy and F1 on each part, the generalisation gap and the distance gone.

        They are kept beside the checkpoint, which a stage that is trained anew takes away.
        """
        file = result.folder / "scores.json"
        if file.is_file():
            return json.loads(file.read_text())
        checkpoint = self.chosen(result)
        module = type_of(self.parsed("finetune").model).load_from_checkpoint(
            checkpoint, map_location="cpu"
        )
        trainer = L.Trainer(
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        scores: dict[str, Any] = {}
        loaders = self.parts(data)
        if self.select == "best":
            loaders["val"] = data.val_dataloader()
        for part, loader in loaders.items():
            (found,) = trainer.test(module, loader, verbose=False)
            scores[part] = {key.removeprefix("test/"): value for key, value in found.items()}
        scores["gap"] = scores["test"]["loss"] - scores["train"]["loss"]
        scores["distance"] = distance(self.encoder(checkpoint), self.original_weights)
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


def read_grid(experiment: Experiment, kind: str) -> dict[str, Any]:
    """The grid of a preset: that of the kind over shared_grid.yaml."""
    shared = cli.grid(experiment.folder / "shared_grid.yaml")
    return experiment.grid(f"{kind}_grid", shared)


def divided(arguments: Sequence[str]) -> dict[str, list[str]]:
    """A command line's arguments for "every" stage, for "adapt" and for "finetune" only."""
    found: dict[str, list[str]] = {"every": [], "adapt": [], "finetune": []}
    for argument, *values in grouped(arguments):
        stage, _, rest = argument.removeprefix("--").partition(".")
        if stage in ("adapt", "finetune") and rest:
            found[stage] += [f"--{rest}", *values]
        else:
            found["every"] += [argument, *values]
    return found


def build(settings: Any) -> Any:
    """The LightningModule that a parsed stage describes, with its model and weights."""
    module = type_of(settings)(**settings.init_args.as_dict())
    module.configure_model()
    return module


def command_line(
    name: str, file: str, description: str, argv: list[str] | None
) -> tuple[Experiment, dict[str, Any]]:
    """The experiment, and what else the command line says of a `Study`.

    Args:
        name: such as "images"; also the beginning of its files' names.
        file: the recipe's __file__.
        description: shown by --help.
        argv: arguments; sys.argv's by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--rows", default=[], type=lambda text: text.split(","))
    parser.add_argument("--unlabelled")
    parser.add_argument("--select", choices=("last", "best"))
    parser.add_argument("--decoder_steps", type=int)
    options, rest = parser.parse_known_args(argv)
    experiment = from_command_line(
        f"self_distillation.{name}", file, f"{name}_grid", description, rest
    )
    command = shlex.join(["python", "-m", f"recipes.{experiment.name}", *argv])
    return replace(experiment, command=command), vars(options)
