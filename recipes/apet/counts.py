"""How many tunable parameters are enough? (Section 5.3, Fig. 5)

Measures the score against the number of trainable parameters, at random positions. Each seed's
curve gives two thresholds: `low`, the count from which on the score stays above guessing, and
`high`, the count from which on it stays level with full fine-tuning. Both allow for the sampling
error of a test part of n examples: 1.64·√(p(1 − p)/n), the one-sided 95 % bound. Between two counts
of the sweep the curve is taken to be straight over log₁₀ of the count, so a threshold lies where
that line crosses the level. If the whole curve is above the level, the threshold is the smallest
count of the sweep; if its end is below, the seed has no threshold. A claim is judged only on tasks
where both models have one with every seed. Guessing means always answering the commonest class. The
paper's guessing score, 100 % divided by the number of classes, is lower: on MRPC a constant answer
exceeds it.

Full fine-tuning has trials of its own, as many as each count has; in the published run of preset
`small`, which is older, it had only the rate 1e-4.

    python -m recipes.apet.counts                  generated sentences, on a CPU
    make weights && python -m recipes.apet.counts --preset small --seeds 3 --jobs 2
    python -m recipes.apet.counts --preset paper --seeds 3     BERT, BLOOM and T5
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from recipes.apet.cells import (
    GRID,
    MEASURED_ON,
    PAIRS,
    Cell,
    at_random,
    chosen,
    fits,
    gain,
    gates,
    majority,
    of_method,
    options,
    sampling_error,
    score,
    tasks_for,
    values_of,
)
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.plots import curves
from recipes.provenance import provenance
from recipes.results import Row, by_seed, difference, select
from recipes.runner import run_experiment
from recipes.tables import Table, summary

PAPER = {  # Fig. 5, low thresholds over tasks
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
        for model in chosen(run, "models", grid["models"], settings["models"]):
            for task in tasks_for(run, grid, model, settings["tasks"]):
                full = Cell(model, task, "full", of_method(grid, "full", model), seed)
                gain(run, grid, full)
                nodes = {
                    "full": score(run, grid, full),
                    "majority": majority(run, grid, full),
                }
                for budget in settings["budgets"]:
                    first = Cell(model, task, f"{budget}", in_all(budget, 0), 0)
                    drawn = replace(first, settings=in_all(budget, seed), seed=seed)
                    nodes[f"{budget}"] = score(run, grid, replace(drawn, like=(first,)))
                name, given = f"{task} {model} thresholds", {"row": model, "set": task}
                run.measure(name, seed, measure_thresholds, nodes, given)


def in_all(budget: int, seed: int) -> dict[str, Any]:
    """The settings of APET with `budget` trainable parameters in all, the classifier's included.

    No head trains in full, since a new classifier's hundreds of parameters would beat guessing by
    themselves; its elements may be drawn like all others.
    """
    return {**at_random(budget, seed), "model.heads": []}


def measure_thresholds(m: Measuring) -> Iterator[Row]:
    """The curve of one seed, and its two thresholds as decimal logarithms of the count.

    The levels that they are read at follow from `guessing`, `full` and `scored`, the number of
    examples in the test part.
    """
    scores = {name: values_of(node) for name, node in m.stages.items()}
    guess, full = (scores.pop(name) for name in ("majority", "full"))
    curve = {int(name): values["score"] for name, values in scores.items()}
    row, name = m.settings["row"], m.settings["set"]
    for count, value in curve.items():
        yield Row(row=row, set=name, metric="curve", x=count, value=value)
    yield Row(row=row, set=name, metric="guessing", value=guess["score"])
    yield Row(row=row, set=name, metric="full", value=full["score"])
    yield Row(row=row, set=name, metric="scored", value=full["scored"])
    found = thresholds(curve, guess["score"], full["score"], int(full["scored"]))
    for metric, logarithm in found.items():
        yield Row(row=row, set=name, metric=f"{metric} reached", value=logarithm is not None)
        yield Row(row=row, set=name, metric=metric, value=logarithm)


def thresholds(
    curve: Mapping[int, float], guess: float, full: float, examples: int
) -> dict[str, float | None]:
    """The counts from which on a curve stays above guessing, and level with full fine-tuning.

    Args:
        curve: scores, between 0 and 1, by count.
        guess: the score of guessing.
        full: the score of full fine-tuning.
        examples: number of examples in the test part.

    Returns:
        log₁₀ of the counts `low` and `high`; None for a threshold that is not reached.
    """
    # a score equal to the level is level with full fine-tuning, but not above guessing
    low, high = guess + sampling_error(guess, examples), full - sampling_error(full, examples)
    return {
        "low": _crossing(curve, low, lambda score: score > low),
        "high": _crossing(curve, high, lambda score: score >= high),
    }


def _crossing(
    curve: Mapping[int, float], level: float, holds: Callable[[float], bool]
) -> float | None:
    """log₁₀ of the count from which on a curve stays where `holds` is true of its scores.

    It lies on the straight line, over log₁₀ of the count, between the last score that does not
    hold and the next.
    """
    counts = sorted(curve)
    failing = [place for place, count in enumerate(counts) if not holds(curve[count])]
    if not failing:
        return math.log10(counts[0])
    if failing[-1] == len(counts) - 1:
        return None
    below, above = counts[failing[-1]], counts[failing[-1] + 1]
    part = (level - curve[below]) / (curve[above] - curve[below])
    return math.log10(below) + part * math.log10(above / below)


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """The thresholds by model and task, and the curves."""
    grid = run.grid(GRID)
    settings = grid["counts"]
    tasks = chosen(run, "tasks", grid["tasks"], settings["tasks"])
    models = [
        model
        for model in chosen(run, "models", grid["models"], settings["models"])
        if tasks_for(run, grid, model, settings["tasks"])
    ]
    rows = [
        [
            model,
            task,
            *_threshold(table, run, model, task, "low"),
            *_threshold(table, run, model, task, "high"),
        ]
        for task in tasks
        for model in models
        if fits(grid, model, task)
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
        "Log₁₀ of the count from which on the score stays above guessing (low) and level with full "
        "fine-tuning (high), allowing for the sampling error of the test part. Between two counts "
        "of the sweep the curve is taken to be straight. Mean ± standard deviation over the seeds "
        "that reach it, in brackets how many do; and the 95 % interval of the mean (Student's t).",
        Table(["model", "task", "low", "95 %", "high", "95 %"], rows).markdown(),
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


def _threshold(table: pd.DataFrame, run: Run, model: str, task: str, name: str) -> list[str]:
    """A threshold over seeds, and the 95 % interval of its mean; "" for the interval of one."""
    values = by_seed(table, name, {"row": model, "set": task})
    text = summary(values, digits=2) if len(values) else "not reached"
    mean = difference(values, 0.0)
    interval = f"{mean.low:.2f} to {mean.high:.2f}" if mean.n > 1 else ""
    return [f"{text} ({len(values)} of {len(run.seeds)})", interval]


def claims(small: str, large: str, preset: str) -> list[Claim]:
    """The two claims of Fig. 5 about a smaller and a larger model."""
    pair = (small, large)
    shown = pair if preset == "paper" else ("BERT-small", "BERT-large")
    return [
        Claim(
            name=f"high threshold falls: {small} → {large}",
            paper="APET",
            sentence=f"{large} needs fewer parameters than {small} to be level with full "
            "fine-tuning.",
            where="Section 5.3, Fig. 5",
            number="a figure",
            test=Comparison("high", small, large, mean_over="set"),
            gate=gates(pair, "high reached", "some count is level with full fine-tuning"),
            preset=preset,
        ),
        Claim(
            name=f"low threshold is alike: {small}, {large}",
            paper="APET",
            sentence=f"{small} and {large} need about as many parameters to exceed guessing, "
            "within a factor of ten.",
            where="Section 5.3, Fig. 5",
            number=", ".join(f"{model} {PAPER[model]}" for model in shown),
            test=(
                Comparison("low", small, large, threshold=-1.0, mean_over="set"),
                Comparison("low", large, small, threshold=-1.0, mean_over="set"),
            ),
            gate=(
                *gates(pair, "low reached", "some count exceeds guessing"),
                *(
                    Comparison(
                        "low",
                        model,
                        threshold=1.0,
                        says="guessing is exceeded at more "
                        f"than ten parameters, the least count, of {model}",
                    )
                    for model in pair
                ),
            ),
            preset=preset,
        ),
    ]


CLAIMS = [claim for pair, preset in PAIRS.items() for claim in claims(*pair, preset)]
EXPERIMENT = Experiment(
    "apet.counts", __file__, "encoder", __doc__ or "", declare, report, options,
    measured_on=MEASURED_ON,
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
