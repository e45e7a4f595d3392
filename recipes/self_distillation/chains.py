"""Declares the stages of images.py and text.py: original weights, adaptations and fine-tunings.

The grid (images_grid.yaml or text_grid.yaml, over shared_grid.yaml) has these keys:

- `adaptations`: stages between pre-training and fine-tuning. Each has settings that override
  <kind>_adapt.yaml, and may have `teacher`, the adaptation that is distilled, and `times`, a factor
  on the number of steps. Every adaptation starts from the original weights. It is trained once;
  the rows that name it share it.
- `rows`: fine-tunings. Each has settings that override <kind>_finetune.yaml, and may have `from`,
  the adaptation that it starts from (else the original weights), and `candidates`, sets of settings
  of which the best on the validation part is taken.
- `select`: which checkpoint of a fine-tuning is scored, that of the `last` step or the `best` on
  the validation part.
- `seeds`: the number of seeds of rows that need fewer than --seeds.
"""

import functools
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from datamodules.tables import TXT
from recipes.experiment import Node, Run, Stage
from recipes.messages import require_at_least
from recipes.nodes import Artifact
from recipes.self_distillation import measures

ROUNDS = ("further", "distil", "distil_2", "distil_3", "distil_4")  # Algorithm 2, T' = 0 … 4


def options(parser: ArgumentParser) -> None:
    """Add these experiments' own command-line flags."""
    add = parser.add_argument
    add(
        "--select",
        choices=("last", "best"),
        help="score the checkpoint of the last step, or the best one on the validation part; "
        "default: the grid's `select`",
    )
    add(
        "--init_from",
        metavar="FILE",
        help="begin with the weights of this checkpoint, state_dict or safetensors file",
    )
    add(
        "--decoder_steps",
        type=int,
        metavar="N",
        help="first fit a new decoder to the frozen encoder for N steps, for weights without one",
    )
    add(
        "--unlabelled",
        metavar="PATH",
        help="adapt to these data instead of the labelled ones: a folder with images at any depth, "
        "a table of texts, or a .txt file with one text on each line",
    )


def declare(run: Run, kind: str) -> None:
    """Declare all stages and measurements.

    Args:
        run: of the experiment.
        kind: "images" or "text", the beginning of its files' names.

    Raises:
        ValueError: if there are no pre-trained weights, --decoder_steps is below 1, or --select is
            best and fine-tuning never validates.
    """
    require_at_least(1, decoder_steps=run.options.decoder_steps)
    for _, key, _ in run.flags.given:
        if key == "model.init_from":
            raise ValueError(
                "--model.init_from is set for each stage by the experiment: give --init_from FILE, "
                "the weights that everything starts from"
            )
    grid = run.grid("shared_grid", f"{kind}_grid")
    rows = run.rows(grid["rows"], grid["default"])
    if grid["steps"] and (plain := [row for row in rows if "from" not in grid["rows"][row]]):
        raise ValueError(
            f"preset {run.preset} varies the steps of adaptations, and the rows {', '.join(plain)} "
            "have none: leave them out of --rows; the curves begin with fine-tuning alone"
        )
    select = run.options.select or grid["select"]
    unlabelled = unlabelled_data(run, kind) if run.options.unlabelled else {}
    if unlabelled:
        require_no_labels(rows, grid)
    original = declare_original(run, kind, grid, unlabelled)
    for seed in run.seeds:
        for name in grid["sets"]:
            chains = Chains(run, kind, grid, name, seed, original, unlabelled)
            tuned = {
                (row, n): chains.fine_tune(row, select, n)
                for row in rows
                if seed < grid["seeds"].get(row, len(run.seeds))
                for n in grid["steps"] or [None]
            }
            if tuned:
                given = {"finetuning": next(iter(tuned.values()))}
                run.measure(f"{name} majority", seed, measures.majority, given, {"set": name})
            of_rows = {row: stage for (row, n), stage in tuned.items() if n is None}
            chains.compare_rounds(of_rows, select)
    if select == "best":
        require_validation(run, kind)


def declare_original(
    run: Run, kind: str, grid: Mapping[str, Any], unlabelled: Mapping[str, Any]
) -> Stage | Artifact:
    """Declare the checkpoint of (θ_init, φ_init), from which all adaptations and baselines start.

    Its weights come from --init_from; else from the grid's `original` stages, each of which
    continues the one before; else from those that the adaptation's YAML file names. --decoder_steps
    replaces the `original` stages by one that fits a decoder.

    Raises:
        ValueError: if there are no such weights.
    """
    config = f"{kind}_adapt"
    named = {"model.init_from": run.options.init_from} if run.options.init_from else {}
    stages = [] if named else list(grid["original"] or [])
    if run.options.decoder_steps:
        steps = {"trainer.max_steps": run.options.decoder_steps, "trainer.max_epochs": -1}
        stages = [{**named, **grid["decoder"], **steps}]
    last: Stage | None = None
    # a decoder is fitted to the data that are adapted to; the grid's own stages have their own data
    data = unlabelled if run.options.decoder_steps else {}
    derived = {key: functools.partial(_constant, value) for key, value in data.items()}
    for place, settings in enumerate(stages):
        before = {"model.init_from": last} if last else {}
        name = "original" if place == len(stages) - 1 else f"original, part {place + 1}"
        last = run.stage(name, config, 0, settings={**settings, **before}, derived=derived)
    if last is not None:
        return last
    settings = run.parsed(config, settings=named)
    if not (settings.model.init_args.pretrained or settings.model.init_args.init_from):
        raise ValueError(
            "there are no pre-trained weights: give --init_from FILE, or `original` in "
            f"{kind}_grid.yaml"
        )
    model = {"class": settings.model.class_path, **settings.model.init_args.as_dict()}
    return (
        run.measure("original", 0, measures.write_original, settings={"model": model})
        / "original.ckpt"
    )


class Chains:
    """Declares the adaptations and fine-tunings of one data set and seed.

    Args:
        run: of the experiment.
        kind: "images" or "text".
        grid: the merged grid, see the module.
        name: of the data set.
        seed: of the stages.
        original: the weights that all adaptations start from.
        unlabelled: settings of other data to adapt to.
    """

    def __init__(
        self,
        run: Run,
        kind: str,
        grid: Mapping[str, Any],
        name: str,
        seed: int,
        original: Stage | Artifact,
        unlabelled: Mapping[str, Any],
    ):
        self.run, self.kind, self.grid, self.name, self.seed = run, kind, grid, name, seed
        self.original, self.unlabelled = original, dict(unlabelled)
        self.data = dict(grid["sets"][name])
        # a varied class of the data would keep flags from changing its arguments (data.root);
        # a varied share of held-out images would keep trials from holding more out
        free = ("data", "data.val_fraction")
        self.settings = {key: self.data.pop(key) for key in free if key in self.data}
        self.metric = grid["metrics"][name]

    def adapt(self, name: str, steps: int | None) -> list[Stage]:
        """Declare an adaptation and its chain of teachers; returns it first, then the teachers.

        Args:
            name: in the grid's `adaptations`.
            steps: of each of them, where the grid has a curve of steps.
        """
        settings = dict(self.grid["adaptations"][name])
        teacher, times = settings.pop("teacher", None), settings.pop("times", 1)
        before = self.adapt(teacher, steps) if teacher else []
        varied = {**self.data, "model.init_from": self.original, **settings}
        # derived settings override flags, which are meant for the labelled data
        derived: dict[str, Any] = {
            key: functools.partial(_constant, value) for key, value in self.unlabelled.items()
        }
        if before:
            varied["model.teacher_from"] = before[0]
        if steps:
            varied |= fixed_length(times * steps)
        elif times > 1:
            length = length_of(self.run.parsed(f"{self.kind}_adapt"))
            derived[f"trainer.{length}"] = functools.partial(_multiple, times, length)
        title = f"{self.name} adapt {name}" + (f" {steps} steps" if steps else "")
        stage = self.run.stage(
            title, f"{self.kind}_adapt", self.seed, varied, self.settings, derived
        )
        self.run.measure(
            f"{title} trace",
            self.seed,
            measures.trace,
            {"adaptation": stage, **self.beginning()},
            {
                "set": self.name,
                "row": name,
                "kind": self.kind,
                "steps": steps,
                "rounds": rounds_of(name),
            },
        )
        return [stage, *before]

    def fine_tune(self, row: str, select: str, steps: int | None) -> Stage:
        """Declare a row of the table: its adaptations, its fine-tuning, and its scores.

        Args:
            row: in the grid's `rows`.
            select: "last" or "best".
            steps: of each adaptation, where the grid has a curve of steps; 0 for none.
        """
        settings = dict(self.grid["rows"][row])
        adaptation, candidates = settings.pop("from", None), settings.pop("candidates", [])
        shared = {**self.settings, **(self.held_out if select == "best" else {})}
        chain = self.adapt(adaptation, steps) if adaptation and steps != 0 else []
        varied = {
            **self.data,
            "model.pretrained": False,
            "model.init_from": chain[0] if chain else self.original,
            **settings,
        }
        if select == "best":
            varied |= {
                "checkpoint.monitor": f"val/{self.metric}",
                "checkpoint.mode": "max",
                "checkpoint.filename": "best",
                "checkpoint.every_n_train_steps": None,  # with every validation
            }
        title = f"{self.name} {row}"
        if candidates:
            varied |= self.chosen(title, varied, candidates, select)
        if steps is not None:
            title = f"{title} {steps} steps" if chain else f"{self.name} without adaptation"
        tuned = self.run.stage(title, f"{self.kind}_finetune", self.seed, varied, shared)
        self.run.measure(
            f"{title} scores" if chain or steps is None else f"{title} scores of {row}",
            self.seed,
            measures.score,
            {"finetuning": tuned, **self.beginning()},
            {
                "set": self.name,
                "row": row,
                "kind": self.kind,
                "select": select,
                "metric": self.metric,
                "steps": steps,
                "rounds": rounds_of(adaptation),
                "by_size": self.grid["by_size"],
            },
            missing=functools.partial(absent, self.run),
        )
        return tuned

    def compare_rounds(self, tuned: Mapping[str, Stage], select: str) -> None:
        """Declare by how much each round shortens the distance from θ_init (Fig. 5).

        Args:
            tuned: fine-tunings by row; with fewer than two rounds there is nothing to compare.
            select: "last" or "best".
        """
        rounds = {
            row: made
            for row in tuned
            if (made := rounds_of(self.grid["rows"][row].get("from"))) is not None
        }
        if {0, 1, 2} <= set(rounds.values()):
            self.run.measure(
                f"{self.name} distance by round",
                self.seed,
                measures.falls,
                {**{row: tuned[row] for row in rounds}, **self.beginning()},
                {"set": self.name, "kind": self.kind, "select": select, "rounds": rounds},
            )

    def chosen(
        self, title: str, varied: Mapping[str, Any], candidates: list[dict[str, Any]], select: str
    ) -> dict[str, Any]:
        """The best candidate on the validation part, each tried with seed 0.

        It is judged by the checkpoint that `select` scores: the "last" or the "best".
        """
        return dict(
            self.run.best_candidate(
                title,
                f"{self.kind}_finetune",
                candidates,
                f"val/{self.metric}",
                {**varied, "trainer.limit_val_batches": 1.0},
                {**self.settings, **self.held_out},
                at_end=select == "last",
            )
        )

    @functools.cached_property
    def held_out(self) -> dict[str, Any]:
        """Settings that hold out a tenth of the training images, where the file holds out none.

        Without them, data without a validation part would choose on the test part. Data that have
        one ignore them.
        """
        config = self.run.parsed(f"{self.kind}_finetune", self.settings, self.data)
        share = config.data.init_args.get("val_fraction")
        return {"data.val_fraction": 0.1} if self.kind == "images" and share == 0 else {}

    def beginning(self) -> dict[str, Node]:
        """The node with the original weights, as an input of measurements."""
        original = self.original
        return {"original": original.node if isinstance(original, Artifact) else original}


def absent(run: Run) -> str:
    """A sentence on a path of --init_from or --unlabelled that is not there, or "".

    Without it, the stages that do not read the path would train first.
    """
    paths = {name: getattr(run.options, name) for name in ("init_from", "unlabelled")}
    found = (f"--{n} {path}" for n, path in paths.items() if path and not Path(path).exists())
    return next((f"{one} is not there: correct the path" for one in found), "")


def rounds_of(adaptation: str | None) -> int | None:
    """Rounds of self-distillation (Fig. 5): 0 for further pre-training, None for other rows."""
    return ROUNDS.index(adaptation) if adaptation in ROUNDS else None


def fixed_length(steps: int) -> dict[str, Any]:
    """Settings of a training with that many steps, validated eight times at most."""
    return {
        "trainer.max_steps": steps,
        "trainer.max_epochs": -1,
        "trainer.check_val_every_n_epoch": None,
        "trainer.val_check_interval": max(1, steps // 8),
    }


def _constant(value: Any, parsed: Any) -> Any:
    return value


def _multiple(times: int, length: str, parsed: Any) -> int:
    return times * parsed.trainer[length]


def length_of(parsed: Any) -> str:
    """The setting that ends a stage's training: "max_steps" or "max_epochs"."""
    return "max_steps" if parsed.trainer.max_steps > 0 else "max_epochs"


def require_no_labels(rows: Iterable[str], grid: Mapping[str, Any]) -> None:
    """Raise an error if a row adapts with labels, which the data of --unlabelled have not.

    Raises:
        ValueError: naming the row.
    """
    for row in rows:
        adaptation = grid["adaptations"].get(grid["rows"][row].get("from"), {})
        if adaptation.get("model.supcon_temperature"):
            raise ValueError(
                f"--unlabelled is given, but the row {row} adapts with labels: leave it out of "
                "--rows"
            )


def require_validation(run: Run, kind: str) -> None:
    """Raise an error, before any training, if fine-tuning never validates: --select best needs it.

    Raises:
        ValueError: naming the settings.
    """
    trainer = run.parsed(f"{kind}_finetune").trainer
    steps, interval = trainer.max_steps, trainer.val_check_interval
    too_late = trainer.check_val_every_n_epoch is None and 0 < steps < (interval or 0)
    if trainer.limit_val_batches == 0 or too_late:
        raise ValueError(
            "--select is best, but fine-tuning never validates: its limit_val_batches is "
            f"{trainer.limit_val_batches}, val_check_interval {interval}, max_steps {steps}; "
            "change --finetune.trainer.limit_val_batches or "
            "--finetune.trainer.val_check_interval, or give --select last"
        )


def unlabelled_data(run: Run, kind: str) -> dict[str, Any]:
    """Settings of the data of --unlabelled: all images below a folder, or all texts of a table."""
    path = run.options.unlabelled
    if kind == "images":
        return {
            "data": "datamodules.ImageFolderData",
            "data.root": str(Path(path).resolve()),
            "data.labelled": False,
            "data.name": None,
            "data.test": None,
            "data.classes": None,
            "data.per_class": None,
        }
    arguments = run.parsed("text_finetune").data.init_args
    is_txt = Path(path).suffix.lower() == ".txt"
    text = TXT if is_txt else arguments.get("text", "sentence")
    # TextData needs a column of labels, which adaptations do not use: the text serves as one
    return {
        "data": "datamodules.TextData",
        "data.train": path,
        "data.val": None,
        "data.test": None,
        "data.text": text,
        "data.label": text,
        "data.limit": None,
        **({"data.pair": None} if is_txt else {}),  # it has one column, whatever the labelled has
    }
