"""Do the positions of the tunable parameters matter? (Section 5.2, Fig. 4)

Tunes as many parameters as Prompt, BitFit, LoRA and Adapter have, but at random positions, in many
draws, in a small and in a large model. The deviation between the draws shows how much positions
matter. Every seed draws other positions.

Where the grid has several learning rates, each of them is tried on the first draw of every seed, as
often for each budget and model, full fine-tuning included. The rate with the best mean score over
the seeds, on the held-out part, is used for all draws and seeds: a rate that is good for one seed
may be too high for another, whose trainings then fail. With more seeds than before, the rate is
chosen anew: the trials of earlier seeds are kept, and everything that was trained at the rate they
chose alone is trained again, even if the choice stays the same. Start with the final --seeds.

    python -m recipes.apet.positions                  generated sentences, on a CPU
    make weights && python -m recipes.apet.positions --preset small --seeds 2 --jobs 2
    python -m recipes.apet.positions --preset paper --seeds 3    BERT, BLOOM and T5
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import nn

from lightning_modules.layouts import inside
from lightning_modules.tuning import trainable, tune
from lightning_modules.vera.targets import query_and_value
from recipes.apet.cells import (
    GRID,
    MEASURED_ON,
    METHODS,
    PAIRS,
    PET,
    Cell,
    at_random,
    chosen,
    fits,
    gain,
    gates,
    of_method,
    options,
    points,
    score,
    tasks_for,
    uncollapsed,
)
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.plots import groups
from recipes.provenance import provenance
from recipes.records import instance_of
from recipes.results import Row, select
from recipes.runner import run_experiment
from recipes.tables import COLLAPSED, Column, tabulate


def declare(run: Run) -> None:
    """Declare trainings at random positions for each budget, and the deviation between draws."""
    grid = run.grid(GRID)
    settings = grid["positions"]
    rows, draws = run.rows(PET), settings["draws"]
    for seed in run.seeds:
        for model in chosen(run, "models", grid["models"], settings["models"]):
            for task in tasks_for(run, grid, model, settings["tasks"]):
                scores: dict[str, dict[str, Any]] = {}
                for row in rows:
                    budget = budget_of(run, grid, model, row)
                    cells = {
                        k: [
                            Cell(
                                model, task, f"APET {row} {n}", at_random(budget, k * draws + n), k
                            )
                            for n in range(draws)
                        ]
                        for k in run.seeds
                    }  # fmt: skip
                    trials = tuple(of_seed[0] for of_seed in cells.values())
                    drawn = [replace(cell, like=trials) for cell in cells[seed]]
                    scores[row] = {cell.row: score(run, grid, cell) for cell in drawn}
                    name = f"{task} {model} {row} spread"
                    given = {
                        "row": row,
                        "set": f"{task}, {model}",
                        "model": model,
                        "budget": budget,
                    }
                    run.measure(name, seed, measure_spread, scores[row], given)
                if scores.keys() != set(PET):
                    continue
                fulls = tuple(
                    Cell(model, task, "full", of_method(grid, "full", model), k) for k in run.seeds
                )
                gain(run, grid, replace(fulls[seed], like=fulls))
                every = {f"{row} {key}": n for row, s in scores.items() for key, n in s.items()}
                name = f"{task} {model} mean spread"
                run.measure(name, seed, measure_mean_spread, every, {"row": model, "set": task})


def budget_of(run: Run, grid: dict[str, Any], model: str, method: str) -> int:
    """The number of parameters that a tuning method trains in a model, without its heads."""
    entry = grid["models"][model]
    parsed = run.parsed(entry["config"], entry["settings"]).model
    arguments: dict[str, Any] = {"num_classes": 2, "pretrained": False, "adapter_only": False}
    if entry["config"] == "decoder":
        arguments["label_tokens"] = [0, 1]
    module = instance_of(parsed.as_dict(), **arguments)
    with torch.device("meta"):
        module.model = module.build()
        return tuned_in(module.tuned_model, module.heads, of_method(grid, method, model))


def tuned_in(model: nn.Module, heads: Sequence[str], settings: Mapping[str, Any]) -> int:
    """Apply a method's settings to a model; count its trainable parameters without the heads."""
    targets = settings.get("model.targets") or query_and_value(model)
    layers = [target.partition(":")[0] for target in targets]  # LoRA has no slices
    arguments, rank = settings.get("model.method_args", {}), settings.get("model.rank", 1)
    tune(model, settings["model.method"], heads, rank, layers, **arguments)
    return sum(p.numel() for name, p in trainable(model).items() if not inside(name, heads))


def measure_spread(m: Measuring) -> Iterator[Row]:
    """Mean and standard deviation over the draws of one budget, in points."""
    values = list(points(m.stages).values())
    row, name = m.settings["row"], m.settings["set"]
    yield Row(row=row, set=name, metric="budget", value=m.settings["budget"])
    yield Row(row=row, set=name, metric="mean", value=statistics.fmean(values))
    yield Row(row=row, set=name, metric="spread", value=statistics.stdev(values))


def measure_mean_spread(m: Measuring) -> Iterator[Row]:
    """The standard deviation over draws, averaged over all four budgets (root mean square).

    In points. `uncollapsed` is 1 if every draw predicts more than one class, else 0.
    """
    groups: dict[str, list[float]] = {}
    for name, value in points(m.stages).items():
        groups.setdefault(name.partition(" ")[0], []).append(value)
    variance = statistics.fmean(statistics.variance(values) for values in groups.values())
    for metric, value in (("deviation", variance**0.5), ("uncollapsed", uncollapsed(m.stages))):
        yield Row(row=m.settings["row"], set=m.settings["set"], metric=metric, value=value)


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Spread by budget and model, and every draw's score."""
    grid = run.grid(GRID)
    settings = grid["positions"]
    models = chosen(run, "models", grid["models"], settings["models"])
    tasks = chosen(run, "tasks", grid["tasks"], settings["tasks"])
    missing = [METHODS[row] for row in PET if row not in set(table["row"])]
    columns = []
    for task in tasks:
        for model in (one for one in models if fits(grid, one, task)):
            where = {"set": f"{task}, {model}"}
            columns += [
                Column(f"{task}, {model}: parameters", "budget", where, digits=0, spread=""),
                Column("mean, %", "mean", where),
                Column("between draws", "spread", where, digits=2),
            ]
    deviation = tabulate(
        table, models,
        [Column(task, "deviation", {"set": task}, digits=2) for task in tasks]
        + [Column("mean", "deviation", mean_over="set", digits=2)],
        heading="model",
    )  # fmt: skip
    groups(
        by_budget(table, tasks, models), run.out / "positions.png", "score",
        [METHODS[row] for row in PET], panel="set", titles={model: model for model in models},
        scale=100, ylabel="score, %", dot="one draw of positions with one seed",
    )  # fmt: skip
    return [
        f"# Positions of the tunable parameters, preset {run.preset}",
        provenance(run, table),
        f"Score of {settings['draws']} draws of positions with as many parameters as each method "
        "has: mean, and standard deviation between the draws, in points.",
        tabulate(
            table, {row: f"APET, {METHODS[row]}" for row in PET}, columns, heading="budget of"
        ).markdown(),
        f"No deviation over all four budgets: {', '.join(missing)} left out."
        if missing
        else "**Between draws, over the four budgets**, in points:",
        deviation.markdown(),
        "![Score of every draw by budget and model](positions.png)",
        "A dot is one draw of one seed, with a cross where its predictions collapsed to one class; "
        "bars are mean ± standard deviation over all of them.",
        "Paper, Fig. 4: positions matter in a small model and hardly in a large one.",
    ]


def by_budget(table: pd.DataFrame, tasks: Sequence[str], models: Sequence[str]) -> pd.DataFrame:
    """The draws' scores for the plot: `set` the task, `row` the model, `x` the budget's place.

    With them come the numbers of classes that they predict.
    """
    parts = []
    for task in tasks:
        for model in models:
            scores = select(table, {"metric": ["score", COLLAPSED], "set": f"{task}, {model}"})
            for place, row in enumerate(PET):
                drawn = scores[scores["row"].str.startswith(f"APET {row} ")]
                parts.append(drawn.assign(set=task, row=model, x=float(place)))
    return pd.concat(parts)


CLAIMS = [
    Claim(
        name=f"positions matter less: {small} → {large}",
        paper="APET",
        sentence=f"The deviation between random positions is smaller in {large} than in {small}, "
        "over the budgets of Prompt, BitFit, LoRA and Adapter.",
        where="Section 5.2, Fig. 4",
        number="a figure",
        test=Comparison("deviation", small, large, mean_over="set"),
        gate=gates((small, large), "uncollapsed", "no training with drawn positions has collapsed"),
        preset=preset,
    )
    for (small, large), preset in PAIRS.items()
]
EXPERIMENT = Experiment(
    "apet.positions", __file__, "encoder", __doc__ or "", declare, report, options,
    measured_on=MEASURED_ON,
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
