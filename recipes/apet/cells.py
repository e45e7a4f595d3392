"""Shared by APET's experiments; a cell is one model tuned on one task by one method."""

import math
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipes.apet.texts import measure_nothing, measure_texts
from recipes.claims import Comparison
from recipes.experiment import Measurement, Measuring, Run, Stage
from recipes.flags import names_in
from recipes.methods import measure_majority, measure_score
from recipes.nodes import Later
from recipes.records import Finished, at
from recipes.results import Row
from recipes.tables import COLLAPSED

METHODS = {
    "majority": "majority class",
    "prompt": "Prompt",
    "bitfit": "BitFit",
    "lora": "LoRA",
    "adapter": "Adapter",
    "full": "full",
}
# parameter-efficient tuning: the deviation that the paper reports is between these
PET = ("prompt", "bitfit", "lora", "adapter")
# a smaller and a larger model that the claims compare, and the preset that trains them
PAIRS = {
    ("MiniLM", "bge-small"): "small",
    ("width-64", "width-256"): "small_widths",
    ("BERT-small", "BERT-large"): "paper",
    ("BLOOM-560M", "BLOOM-7.1B"): "paper",
    ("T5-small", "T5-XXL"): "paper",
}
VARIED = (
    "model.method",
    "model.method_args",
    "model.rank",
    "model.architecture",
    "model.model_args",
    "model.init_from",
    "data.task",
    "data.name",
    "data.form",
    "data.tokenizer",
    "data.label_words",
)
GRID = "apet_grid"
ONE_SIDED = 1.6449  # standard errors: 95 % on one side
MEASURED_ON = {"small": "{models}, {sets}"}  # of the experiments, see `Experiment`


def sampling_error(share: float, examples: int) -> float:
    """How far a score may lie from its true value by the choice of the test examples alone.

    The one-sided 95 % bound of a share of right answers p among n examples, 1.64·√(p(1 − p)/n).

    Args:
        share: p, between 0 and 1.
        examples: n.
    """
    return ONE_SIDED * math.sqrt(share * (1 - share) / examples)


def options(parser: ArgumentParser, names: Sequence[str] = ("models", "tasks")) -> None:
    """Add the options of APET's experiments to a command line."""
    for name in names:
        text = f"only these {name} of {GRID}.yaml"
        parser.add_argument(f"--{name}", default=[], type=names_in, metavar="A,B", help=text)


def chosen(run: Run, what: str, known: Iterable[str], default: Sequence[str] = ()) -> list[str]:
    """The models or tasks in `known` that the flag --models or --tasks names.

    Without the flag those in `default`; all if it is empty.

    Raises:
        ValueError: if the flag names an unknown one.
    """
    known = list(known)
    given = getattr(run.options, what)
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"--{what} has {unknown[0]!r}: expected some of {', '.join(known)}")
    wanted = given or default or known
    return [name for name in known if name in wanted]


@dataclass(frozen=True)
class Cell:
    """One training of an experiment's grid.

    Attributes:
        model, task: names in the grid.
        row: of the table; the method's name, or that of a budget or draw.
        settings: of the method.
        seed: of the training.
        like: the cells whose trials choose the learning rate, by their mean held-out score; if
            none, this cell's own with seed 0.
    """

    model: str
    task: str
    row: str
    settings: Mapping[str, Any]
    seed: int
    like: "tuple[Cell, ...]" = ()

    @property
    def set(self) -> str:
        """The value of the column `set`: task and model."""
        return f"{self.task}, {self.model}"

    @property
    def name(self) -> str:
        """The name of the cell's folder."""
        return f"{self.task} {self.model} {self.row}"


def of_method(grid: Mapping[str, Any], method: str, model: str) -> dict[str, Any]:
    """The settings of one of the grid's tuning methods for a model."""
    return {**grid["methods"][method], **grid["models"][model].get(method, {})}


def at_random(budget: int, seed: int) -> dict[str, Any]:
    """The settings of APET with `budget` parameters at positions that the seed draws."""
    return {"model.method": "apet", "model.method_args": {"budget": budget, "seed": seed}}


def train(run: Run, grid: Mapping[str, Any], cell: Cell) -> list[Stage]:
    """Declare the trainings of a cell; if there are several, `score` takes one of them.

    If the grid has several learning rates, the cells that `cell` is like train with each of them;
    other cells train once, with the rate that was best there.
    """
    rates, config, varied, settings = _settings(run, grid, cell)
    if len(rates) == 1:
        settings["model.lr"] = rates[0]
        return [run.stage(cell.name, config, cell.seed, varied, settings)]
    if replace(cell, like=()) in _like(cell):
        return _trials(run, grid, cell)
    settings["model.lr"] = best_rate(run, grid, cell)
    return [run.stage(cell.name, config, cell.seed, varied, settings)]


def best_rate(run: Run, grid: Mapping[str, Any], cell: Cell) -> Later:
    """The learning rate whose trials are best on the held-out part, in the mean over their seeds.

    The loss counts for free text, the task's metric otherwise.
    """
    trials = [trial for like in _like(cell) for trial in _trials(run, grid, like)]
    if is_free_text(grid, cell.task):
        return run.best(trials, "val/loss", ["model.lr"], "min")["model.lr"]
    return run.best(trials, f"val/{grid['metrics'][cell.task]}", ["model.lr"])["model.lr"]


def _like(cell: Cell) -> tuple[Cell, ...]:
    return cell.like or (replace(cell, seed=0),)


def _trials(run: Run, grid: Mapping[str, Any], cell: Cell) -> list[Stage]:
    """Declare a training of the cell with each learning rate."""
    rates, config, varied, settings = _settings(run, grid, cell)
    return [
        run.stage(
            f"{cell.name} lr {rate:g}", config, cell.seed, {**varied, "model.lr": rate}, settings
        )
        for rate in rates
    ]


def is_free_text(grid: Mapping[str, Any], task: str) -> bool:
    """Whether a task's answers are free text; classification tasks have label words."""
    return "words" not in grid["tasks"][task]


def fits(grid: Mapping[str, Any], model: str, task: str) -> bool:
    """Whether a model can be tuned on a task: encoders cannot generate text."""
    return not is_free_text(grid, task) or grid["models"][model]["config"] == "decoder"


def tasks_for(
    run: Run, grid: Mapping[str, Any], model: str, default: Sequence[str] = ()
) -> list[str]:
    """The tasks of `chosen` that a model can be tuned on."""
    tasks = chosen(run, "tasks", grid["tasks"], default)
    return [task for task in tasks if fits(grid, model, task)]


def _settings(
    run: Run, grid: Mapping[str, Any], cell: Cell
) -> tuple[Sequence[float], str, dict[str, Any], dict[str, Any]]:
    """A cell's learning rates, YAML file, varied settings, and settings that flags may change."""
    model, task = grid["models"][cell.model], dict(grid["tasks"][cell.task])
    words, config = task.pop("words", None), model["config"]
    if words is None:
        config = "generation"
    no_budget = {"model.method_args": None}  # the YAML file's arguments are for method apet
    settings = {**task, **model["settings"], **model.get(config, {}), **no_budget, **cell.settings}
    if settings["model.method"] == "prompt":  # draws the tokens whose embeddings initialise it
        settings["model.method_args"] = {"seed": cell.seed}
    if config == "decoder":
        settings["data.label_words"] = words
    if settings.get("data.encoder_decoder"):  # there max_length is of the input alone
        settings["data.max_length"] -= settings["data.target_length"]
    if model.get("pretrain"):
        settings["model.init_from"] = pretrain(run, grid, cell.model)
    # in order of precedence: the method's, the model's, the stage's
    rates = model.get("rates", grid["rates"][model["config"]])
    rates = grid["rates"].get(settings["model.method"], rates)
    varied = {key: settings.pop(key) for key in VARIED if key in settings}
    return rates, config, varied, settings


def pretrain(run: Run, grid: Mapping[str, Any], model: str) -> Stage:
    """Declare the pre-training of a model from random weights, once for all seeds."""
    sizes = {"model.model_args": grid["models"][model]["settings"]["model.model_args"]}
    return run.stage(f"pretrain {model}", "pretrain", 0, sizes)


def score(run: Run, grid: Mapping[str, Any], cell: Cell) -> Measurement:
    """Declare a cell's trainings and the measurement of its score."""
    settings = {"set": cell.set, "metric": grid["metrics"][cell.task], "part": grid["part"]}
    settings["row"] = cell.row
    trained = train(run, grid, cell)
    nodes = {f"stage {place}": stage for place, stage in enumerate(trained)}
    function = measure_texts if is_free_text(grid, cell.task) else measure_score
    if len(trained) > 1 and len(cell.like) > 1:
        settings["lr"], function = best_rate(run, grid, cell), measure_at_rate
    return run.measure(f"{cell.name} score", cell.seed, function, nodes, settings)


def measure_at_rate(m: Measuring) -> Iterator[Row]:
    """The score, as by `measure_score`, of the training whose learning rate is the setting `lr`."""
    chosen = {
        name: stage
        for name, stage in m.stages.items()
        if at(stage.settings, "model.lr") == m.settings["lr"]
    }
    return measure_score(replace(m, stages=chosen))


def majority(run: Run, grid: Mapping[str, Any], cell: Cell) -> Measurement:
    """Declare the guessing baseline on a cell's data: the commonest class, or 0 for free text."""
    scoring = {"set": cell.set, "metric": grid["metrics"][cell.task], "part": grid["part"]}
    nodes = {"stage": train(run, grid, cell)[0]}
    name = f"{cell.task} {cell.model} majority"
    if is_free_text(grid, cell.task):
        return run.measure(name, cell.seed, measure_nothing, {}, {"set": cell.set})
    return run.measure(name, cell.seed, measure_majority, nodes, scoring)


def gain(run: Run, grid: Mapping[str, Any], full: Cell) -> Measurement:
    """Declare the gain of full fine-tuning, the method of the cell `full`, over guessing."""
    nodes = {"full": score(run, grid, full), "majority": majority(run, grid, full)}
    settings = {"row": full.model, "set": full.task}
    return run.measure(f"{full.task} {full.model} gain", full.seed, measure_gain, nodes, settings)


def points(nodes: Mapping[str, Finished]) -> dict[str, float]:
    """The scores of several measurements, in points, by name."""
    return {name: 100 * values_of(node)["score"] for name, node in nodes.items()}


def measure_gain(m: Measuring) -> Iterator[Row]:
    """The score of full fine-tuning less that of the commonest class, in points.

    Where it is small, methods and positions cannot differ.
    """
    scores = points(m.stages)
    value = scores["full"] - scores["majority"]
    yield Row(row=m.settings["row"], set=m.settings["set"], metric="gain", value=value)


def uncollapsed(nodes: Mapping[str, Finished]) -> float:
    """1 if every scored training predicts more than one class, else 0; texts have no classes."""
    return float(all(values_of(node).get(COLLAPSED, 2) > 1 for node in nodes.values()))


def learnt(model: str) -> Comparison:
    """The condition that full fine-tuning of a model is five points above the commonest class."""
    says = f"full fine-tuning of {model} is five points above the commonest class"
    return Comparison("gain", model, threshold=5.0, says=says)


def gates(models: Sequence[str], valid: str, says: str) -> tuple[Comparison, ...]:
    """The conditions for judging a claim: on each task, in each model that it compares.

    Full fine-tuning is five points above the commonest class, else methods cannot differ; and the
    metric `valid`, which is 1 or 0, is 1 for every seed; `says` says what it means.
    """
    return (
        *map(learnt, models),
        *(
            Comparison(valid, one, threshold=0.99, exact=True, unit="of the seeds",
                       says=f"{says} of {one}")
            for one in models
        ),
    )  # fmt: skip


def values_of(node: Finished) -> dict[str, float]:
    """The values of one measurement, by metric."""
    return dict(zip(node.rows["metric"], node.rows["value"], strict=True))


def cells(
    grid: Mapping[str, Any],
    models: Sequence[str],
    tasks: Sequence[str],
    rows: Sequence[str],
    seed: int,
) -> list[Cell]:
    """The cells of the grid's tuning methods `rows`, for every model and task."""
    return [
        Cell(model, task, row, of_method(grid, row, model), seed)
        for model in models
        for task in tasks
        for row in rows
    ]
