"""How many tunable parameters are enough? (Section 5.3, Fig. 5)

Measures the score against the number of trainable parameters, at random positions. Each seed's
curve gives two thresholds: `low`, the smallest count from which on the score stays above guessing,
and `high`, the smallest count from which on it stays level with full fine-tuning. Both allow for
the sampling error of a test part of n examples: 1.64·√(p(1 − p)/n), the one-sided 95 % bound. Where
no count of the sweep reaches a threshold, it has no value for that seed; a claim is judged only on
tasks where both models reach it with every seed. Guessing means always answering the commonest
class. The paper's guessing score, 100 % divided by the number of classes, is lower: on MRPC a
constant answer exceeds it.

    python -m recipes.apet.counts                  generated sentences, on a CPU
    make weights && python -m recipes.apet.counts --preset small --seeds 3 --jobs 2
    python -m recipes.apet.counts --preset paper --seeds 3      BERT-small and BERT-large
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from recipes.apet.cells import (
    GRID,
    PAIRS,
    Cell,
    at_random,
    chosen,
    gain,
    gates,
    majority,
    of_method,
    options,
    score,
    values_of,
)
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.plots import curves
from recipes.provenance import provenance
from recipes.results import Row, by_seed, select
from recipes.runner import run_experiment
from recipes.tables import Table, summary

ONE_SIDED = 1.6449  # standard errors: 95 % on one side
PAPER = {  # Fig. 5, low thresholds
    "BERT-large": "8.0e2 to 3.2e3",
    "BERT-small": "4.0e2 to 1.6e3",
    "BLOOM-7.1B": "8.2e3 to 4.1e4",
    "BLOOM-560M": "8.2e3 to 4.1e3 (as printed)",
    "T5-XXL": "7.9e3 to 8.5e3",
    "T5-small": "8.0e2 to 7.9e3",
}


def declare(run: Run) -> None:
    """Declare the sweep over counts of each model and task, and its thresholds."""
    grid = run.grid(GRID)
    settings = grid["counts"]
    for seed in run.seeds:
        for model in chosen(run, "models", settings["models"]):
            for task in chosen(run, "tasks", settings["tasks"]):
                full = Cell(model, task, "full", of_method(grid, "full", model), seed)
                gain(run, grid, full)
                nodes = {
                    "full": score(run, grid, full),
                    "majority": majority(run, grid, full),
                }
                for budget in settings["budgets"]:
                    first = Cell(model, task, f"{budget}", in_all(budget, 0), 0)
                    drawn = replace(first, settings=in_all(budget, seed), seed=seed)
                    nodes[f"{budget}"] = score(run, grid, replace(drawn, like=first))
                name, given = f"{task} {model} thresholds", {"row": model, "set": task}
                run.measure(name, seed, measure_thresholds, nodes, given)


def in_all(budget: int, seed: int) -> dict[str, Any]:
    """The settings of APET with `budget` trainable parameters in all, the classifier's included.

    No head trains in full, since a new classifier's hundreds of parameters would beat guessing by
    themselves; its elements may be drawn like all others.
    """
    return {**at_random(budget, seed), "model.heads": []}


def measure_thresholds(m: Measuring) -> Iterator[Row]:
    """The curve of one seed, and its two thresholds as decimal logarithms of the count."""
    scores = {name: values_of(node) for name, node in m.stages.items()}
    guess, full = (scores.pop(name) for name in ("majority", "full"))
    curve = {int(name): values["score"] for name, values in scores.items()}
    row, name = m.settings["row"], m.settings["set"]
    for count, value in curve.items():
        yield Row(row=row, set=name, metric="curve", x=count, value=value)
    yield Row(row=row, set=name, metric="guessing", value=guess["score"])
    yield Row(row=row, set=name, metric="full", value=full["score"])
    counts_reached = thresholds(curve, guess["score"], full["score"], int(full["scored"]))
    for metric, reached in counts_reached.items():
        yield Row(row=row, set=name, metric=f"{metric} reached", value=reached is not None)
        if reached is not None:
            yield Row(row=row, set=name, metric=metric, value=math.log10(reached))


def thresholds(
    curve: Mapping[int, float], guess: float, full: float, examples: int
) -> dict[str, int | None]:
    """The counts from which on a curve stays above guessing, and level with full fine-tuning.

    Args:
        curve: scores, between 0 and 1, by count.
        guess: the score of guessing.
        full: the score of full fine-tuning.
        examples: number of examples in the test part.

    Returns:
        `low` and `high`; None for a threshold that is not reached.
    """

    def error(share: float) -> float:
        return ONE_SIDED * math.sqrt(share * (1 - share) / examples)

    levels = {"low": guess + error(guess), "high": full - error(full)}
    smallest: dict[str, int | None] = {}
    for name, level in levels.items():
        smallest[name] = None
        for count in sorted(curve, reverse=True):
            # a score equal to the level is level with full fine-tuning, but not above guessing
            if curve[count] < level or (name == "low" and curve[count] == level):
                break
            smallest[name] = count
    return smallest


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """The thresholds by model and task, and the curves."""
    settings = run.grid(GRID)["counts"]
    models, tasks = (chosen(run, what, settings[what]) for what in ("models", "tasks"))
    rows = [
        [model, task, *(_threshold(table, run, model, task, name) for name in ("low", "high"))]
        for task in tasks
        for model in models
    ]
    levels = {f"{model}, full fine-tuning": ("full", model) for model in models}
    levels["guessing"] = ("guessing", models[0])
    curves(
        with_levels(table, levels), run.out / "counts.png", "curve", panel="set",
        where={"set": tasks}, titles={name: name for name in (*models, *levels)},
        baselines=list(levels), marks={"low": "low threshold", "high": "high threshold"},
        scale=100, log=True, xlabel="trainable parameters", ylabel="score, %",
    )  # fmt: skip
    return [
        f"# The number of tunable parameters, preset {run.preset}",
        provenance(run, table),
        "Log₁₀ of the smallest count of the sweep from which on the score stays above guessing "
        "(low) and level with full fine-tuning (high), allowing for the sampling error of the test "
        "part; mean ± standard deviation over the seeds that reach it; in brackets how many do.",
        Table(["model", "task", "low", "high"], rows).markdown(),
        "![Score against the number of trainable parameters](counts.png)",
        "Vertical lines are at the median threshold over the seeds that reach it.",
        "**The paper's Fig. 5**, low thresholds over its tasks:",
        Table(["model", "parameters"], [list(row) for row in PAPER.items()]).markdown(),
        "Its high threshold falls with scale (a figure).",
    ]


def with_levels(table: pd.DataFrame, levels: Mapping[str, tuple[str, str]]) -> pd.DataFrame:
    """A table for the plot: thresholds as counts, and levels as series of their own.

    Args:
        table: the tidy table, in which thresholds are logarithms.
        levels: name of a series → metric and row that it shows.
    """
    counts = 10 ** table["value"].clip(upper=12)
    parts = [table.assign(value=table["value"].mask(table["metric"].isin(["low", "high"]), counts))]
    for name, (metric, row) in levels.items():
        parts.append(select(table, {"metric": metric, "row": row}).assign(row=name, metric="curve"))
    return pd.concat(parts, ignore_index=True)


def _threshold(table: pd.DataFrame, run: Run, model: str, task: str, name: str) -> str:
    values = by_seed(table, name, {"row": model, "set": task})
    text = summary(values, digits=2) if len(values) else "not reached"
    return f"{text} ({len(values)} of {len(run.seeds)})"


def claims(small: str, large: str, preset: str) -> list[Claim]:
    """The two claims of Fig. 5 about a smaller and a larger model."""
    pair = (small, large)
    return [
        Claim(
            name=f"high threshold falls: {small} → {large}",
            paper="APET",
            sentence=f"{large} needs fewer parameters than {small} to be level with full "
            "fine-tuning.",
            where="Section 5.3, Fig. 5",
            number="a figure",
            test=Comparison("high", small, large, mean_over="set"),
            gate=gates(pair, "high reached"),
            preset=preset,
        ),
        Claim(
            name=f"low threshold is alike: {small}, {large}",
            paper="APET",
            sentence=f"{small} and {large} need about as many parameters to exceed guessing, "
            "within a factor of ten.",
            where="Section 5.3, Fig. 5",
            number="BERT-large 8.0e2 to 3.2e3, BERT-small 4.0e2 to 1.6e3",
            test=(
                Comparison("low", small, large, threshold=-1.0, mean_over="set"),
                Comparison("low", large, small, threshold=-1.0, mean_over="set"),
            ),
            # and log10 of both thresholds exceeds 1: they lie above 10, the sweep's smallest count
            gate=(
                *gates(pair, "low reached"),
                *(Comparison("low", model, threshold=1.0) for model in pair),
            ),
            preset=preset,
        ),
    ]


CLAIMS = [claim for pair, preset in PAIRS.items() for claim in claims(*pair, preset)]
EXPERIMENT = Experiment("apet.counts", __file__, "encoder", __doc__ or "", declare, report, options)


def main(argv: list[str] | None = None) -> Run:
    """Run the experiment."""
    return run_experiment(EXPERIMENT, argv)


if __name__ == "__main__":
    console(main)
