"""Do parameters tuned on one task work on another? (Appendix E, Fig. 7)

The tuned parameters θ, and the classifier if there is one, are trained on a source task and used
unchanged on a target task. Labels are unified: negative, not-entailment and not-equivalent are 0;
positive, entailment and equivalent are 1. RTE and QNLI, which GLUE numbers the other way round, are
swapped.

A transfer counts only if it beats always answering the commonest class by more than the sampling
error of the target's test part, the one-sided 95 % bound.

    python -m recipes.apet.transfer                  generated sentences, on a CPU
    make weights && python -m recipes.apet.transfer --preset small --seeds 3 --jobs 2
    python -m recipes.apet.transfer --preset paper --seeds 3    BERT-base
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from recipes.apet.cells import (
    GRID,
    METHODS,
    cells,
    chosen,
    majority,
    options,
    sampling_error,
    train,
)
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.methods import scores_on_test
from recipes.provenance import provenance
from recipes.records import Finished, best_of
from recipes.results import Row
from recipes.runner import run_experiment
from recipes.tables import Column, Table, tabulate

SWAPPED = ("RTE", "QNLI")  # GLUE's files have entailment as class 0


def declare(run: Run) -> None:
    """Declare every method's training on every source task, and its scores on all target tasks."""
    grid = _grid(run)
    settings = grid["transfer"]
    model, tasks = settings["model"], two_class_tasks(run, grid)
    for seed in run.seeds:
        for method in run.rows(settings["methods"]):
            stages = {
                f"{cell.task} {place}": stage
                for cell in cells(grid, [model], tasks, [method], seed)
                for place, stage in enumerate(train(run, grid, cell))
            }
            given = {"row": method, "metrics": {task: grid["metrics"][task] for task in tasks}}
            run.measure(f"{method} transfer", seed, measure_transfer, stages, given)
        any_method = run.rows(settings["methods"])[:1]  # the baseline uses only its data
        for cell in cells(grid, [model], tasks, any_method, seed):
            majority(run, grid, cell)


def _grid(run: Run) -> dict[str, Any]:
    """The grid, its tasks with those that only this experiment has."""
    grid = run.grid(GRID)
    return {**grid, "tasks": {**grid["tasks"], **grid["transfer"].get("more", {})}}


def two_class_tasks(run: Run, grid: dict[str, Any]) -> list[str]:
    """The tasks that --tasks names, or the preset's.

    Raises:
        ValueError: if the flag names one that is unknown, or has other than two classes.
    """
    known = [name for name, task in grid["tasks"].items() if len(task.get("words", ())) == 2]
    return chosen(run, "tasks", known, grid["transfer"]["tasks"])


def measure_transfer(m: Measuring) -> Iterator[Row]:
    """Accuracy of the model tuned on each source task, on each target task's test part.

    Settings: `row` in the table; `metrics`: for each task, the metric that chooses the best of its
    trainings.
    """
    trials: dict[str, list[Finished]] = {}
    for name, trial in m.stages.items():
        trials.setdefault(name.rpartition(" ")[0], []).append(trial)
    stages = {
        task: best_of(several, f"val/{m.settings['metrics'][task]}")
        for task, several in trials.items()
    }
    for source, stage in stages.items():
        module = stage.module()
        for target, other in stages.items():
            accuracy = scores_on_test(module, other.datamodule())["accuracy"]
            if (source in SWAPPED) != (target in SWAPPED):
                accuracy = 1 - accuracy  # both tasks have two classes
            name = f"{source} → {target}"
            yield Row(row=m.settings["row"], set=name, metric="accuracy", value=accuracy)


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """For each method, a table of accuracies by source and target."""
    grid = _grid(run)
    settings = grid["transfer"]
    tasks, model = two_class_tasks(run, grid), settings["model"]
    parts = [
        f"# Tuned on one task, used on another, preset {run.preset}",
        provenance(run, table),
        f"Accuracy in % of {model}, mean ± standard deviation over seeds; rows are source tasks, "
        "columns targets.",
    ]
    for method in run.rows(settings["methods"]):
        rows = []
        for source in tasks:
            columns = [
                Column(target, "accuracy", {"set": f"{source} → {target}"}, scale=100)
                for target in tasks
            ]
            measured = tabulate(table, {method: METHODS[method]}, columns).rows
            rows += [[source, *cells[1:]] for cells in measured]
        parts += [f"**{METHODS[method]}**", Table(["source", *tasks], rows).markdown()]
    guesses = [Column(task, "score", {"set": f"{task}, {model}"}, scale=100) for task in tasks]
    shown = tabulate(table, {"majority": METHODS["majority"]}, guesses).markdown()
    return [*parts, "**Always the commonest class**", shown]


EXAMPLES = 277  # of RTE's development part, the test part; 146 are of its commonest class
ABOVE_GUESSING = 146 / EXAMPLES + sampling_error(146 / EXAMPLES, EXAMPLES)
CLAIMS = [
    Claim(
        name="tuned parameters transfer between like tasks",
        paper="APET",
        sentence="LoRA tuned on one sentence-pair task (MRPC) scores above the commonest class on "
        "another (RTE), by more than the test part's sampling error.",
        where="Appendix E, Fig. 7",
        number="a figure",
        test=Comparison(
            "accuracy", {"row": "lora", "set": "MRPC → RTE"}, threshold=ABOVE_GUESSING, scale=100
        ),
        gate=Comparison(
            "accuracy",
            {"row": "lora", "set": "RTE → RTE"},
            threshold=ABOVE_GUESSING,
            scale=100,
            says="LoRA tuned on RTE exceeds the commonest class there",
        ),
    )
]
EXPERIMENT = Experiment(
    "apet.transfer", __file__, "encoder", __doc__ or "", declare, report,
    lambda parser: options(parser, ["tasks"]),
    measured_on={"small": "MiniLM (22.7M parameters), RTE and MRPC"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
