"""What APET's experiments share: one model tuned on one task by one method, and its score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.experiment import Measurement, Run, Stage
from recipes.vera.methods import measure_majority, measure_score

METHODS = {
    "majority": "majority class",
    "prompt": "Prompt",
    "bitfit": "BitFit",
    "lora": "LoRA",
    "adapter": "Adapter",
    "full": "full",
}
PET = ("prompt", "bitfit", "lora", "adapter")  # between which the paper takes the deviation
VARIED = (
    "model.method",
    "model.method_args",
    "model.rank",
    "model.architecture",
    "model.model_args",
    "data.task",
    "data.tokenizer",
    "data.label_words",
)
GRID = "apet_grid"


@dataclass(frozen=True)
class Cell:
    """One training of an experiment's grid.

    Attributes:
        model, task: names in the grid.
        row: the method's name, or another for the table.
        settings: the method's.
        seed: of the training.
    """

    model: str
    task: str
    row: str
    settings: Mapping[str, Any]
    seed: int

    @property
    def set(self) -> str:
        """In the table: task and model."""
        return f"{self.task}, {self.model}"


def of_method(grid: Mapping[str, Any], method: str) -> dict[str, Any]:
    """The settings of a usual tuning method."""
    return dict(grid["methods"][method])


def at_random(budget: int, seed: int) -> dict[str, Any]:
    """The settings of APET with that many parameters at the positions of a seed."""
    return {"model.method": "apet", "model.method_args": {"budget": budget, "seed": seed}}


def train(run: Run, grid: Mapping[str, Any], cell: Cell) -> Stage:
    """Declare a training; its learning rate is the best of the grid's on the held-out part."""
    model, task = grid["models"][cell.model], dict(grid["tasks"][cell.task])
    words, config = task.pop("words"), model["config"]
    no_budget = {"model.method_args": None}  # the stage file's is of method apet
    settings = {**task, **model["settings"], **no_budget, **cell.settings}
    if config == "decoder":
        settings["data.label_words"] = words
    varied = {key: settings.pop(key) for key in VARIED if key in settings}
    rates = grid["rates"][config]
    if "model.lr" not in settings and len(rates) == 1:
        settings["model.lr"] = rates[0]
    elif "model.lr" not in settings:
        trials = [
            run.stage(
                f"{name_of(cell)} lr {rate:g}", config, 0, {**varied, "model.lr": rate}, settings
            )
            for rate in rates
        ]
        settings |= run.best(trials, f"val/{grid['metrics'][cell.task]}", ["model.lr"])
    return run.stage(name_of(cell), config, cell.seed, varied, settings)


def score(run: Run, grid: Mapping[str, Any], cell: Cell) -> Measurement:
    """Declare a training and the measurement of its score."""
    scoring = {"set": cell.set, "metric": grid["metrics"][cell.task], "part": grid["part"]}
    nodes, settings = {"stage": train(run, grid, cell)}, {**scoring, "row": cell.row}
    return run.measure(f"{name_of(cell)} score", cell.seed, measure_score, nodes, settings)


def majority(run: Run, grid: Mapping[str, Any], cell: Cell) -> Measurement:
    """Declare the measurement of guessing the commonest class, on the data of a cell."""
    scoring = {"set": cell.set, "metric": grid["metrics"][cell.task], "part": grid["part"]}
    nodes = {"stage": train(run, grid, cell)}
    name = f"{cell.task} {cell.model} majority"
    return run.measure(name, cell.seed, measure_majority, nodes, scoring)


def name_of(cell: Cell) -> str:
    """Of the cell's folder."""
    return f"{cell.task} {cell.model} {cell.row}"


def cells(
    grid: Mapping[str, Any],
    models: Sequence[str],
    tasks: Sequence[str],
    rows: Sequence[str],
    seed: int,
) -> list[Cell]:
    """The usual tuning methods on models and tasks."""
    return [
        Cell(model, task, row, of_method(grid, row), seed)
        for model in models
        for task in tasks
        for row in rows
    ]
