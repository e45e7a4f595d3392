"""The report's section on trials: which settings were tried, what came of each, and the choice."""

import math
from collections.abc import Sequence
from typing import Any

from recipes.experiment import Run
from recipes.nodes import Later, Node, Stage, finished, is_measured
from recipes.records import at
from recipes.tables import Table

EDGE, TIE = "†", "‡"
NOTES = {
    EDGE: "the lowest or highest that was tried: a better one may lie beyond.",
    TIE: "the best trials are equal, and the first of them was taken: they choose nothing.",
}


def trials_of(run: Run) -> list[str]:
    """The paragraphs on a run's finished trials; none if it has no trials."""
    users: dict[tuple[tuple[Node, ...], str], tuple[dict[str, Later], list[str]]] = {}
    for node in run.nodes.values():
        for key, value in node.values().items() if isinstance(node, Stage) else ():
            if isinstance(value, Later) and value.scores and all(map(is_measured, value.nodes)):
                values, names = users.setdefault((value.nodes, value.metric), ({}, []))
                values[key] = value
                names.append(node.name)
    lines = [line(values, list(dict.fromkeys(names))) for values, names in users.values()]
    if not lines:
        return []
    marks = "".join(taken for *_, taken in lines)
    notes = [f"{mark} {note}" for mark, note in NOTES.items() if mark in marks]
    header = ["training", "setting", "tried", "metric", "taken"]
    return [
        "## Settings chosen in trials",
        "What was tried, the metric of the trials on validation data, and what was taken.",
        Table(header, lines, notes, words=True).markdown(),
    ]


def line(values: dict[str, Later], names: Sequence[str]) -> list[str]:
    """A line of the table.

    Args:
        values: the settings that the trials choose.
        names: the trainings that take them.
    """
    later = next(iter(values.values()))
    assert later.scores is not None
    trials = [finished(one) for one in later.nodes]
    scores = later.scores(trials)
    tried = [[at(trial.settings, key) for key in values] for trial, _ in scores]
    best = [one.read(trials) for one in values.values()]
    results = [score for _, score in scores]
    taken = results[tried.index(best)]
    marks = EDGE * (len(values) == 1 and at_an_edge(best[0], [one for (one,) in tried]))
    marks += TIE * (len(tried) > 1 and results.count(taken) > 1)
    return [
        names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more",
        ", ".join(key.rpartition(".")[2] for key in values),
        "; ".join(
            f"{shown(one)}: {f'{score:.4g}' if math.isfinite(score) else 'diverged'}"
            for one, score in zip(tried, results, strict=True)
        ),
        later.metric,
        f"{shown(best)} {marks}".strip(),
    ]


def at_an_edge(value: Any, tried: Sequence[Any]) -> bool:
    """Whether a number is the lowest or highest of at least three."""
    numbers = all(isinstance(one, int | float) for one in tried)
    return len(tried) > 2 and numbers and value in (min(tried), max(tried))


def shown(values: Sequence[Any]) -> str:
    """The values of the settings of a trial."""
    return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in values)
