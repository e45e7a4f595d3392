"""Choosing a training's settings by trials."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recipes.experiment import Run
from recipes.nodes import Later

Derived = dict[str, Callable[[Any], Any]]  # settings computed from all others


def tuned(
    run: Run,
    name: str,
    config: str,
    varied: Mapping[str, Any],
    candidates: Sequence[Mapping[str, Any]],
    limits: Mapping[str, Any],
    derived: Derived,
    metrics: Sequence[str],
    mode: str = "max",
) -> dict[str, Later]:
    """The candidate whose trial, at seed 0, is best; empty, without trials, if there is none.

    Args:
        run: receives the trials.
        name: of the training, to which "trial 1", "trial 2", … is appended.
        config: the YAML file of the training, without the ending.
        varied: settings in which the training differs from it.
        candidates: sets of settings, all with the same keys. Unlike `varied`, a flag that the user
            types wins over them.
        limits: settings of all trials, such as the images held out.
        derived: settings that follow from others, such as the trials' length; see `Stage`.
        metrics: logged metrics, whose mean counts.
        mode: "max" or "min".
    """
    trials = [
        run.stage(f"{name} trial {number}", config, 0, varied, {**one, **limits}, derived)
        for number, one in enumerate(candidates, 1)
    ]
    return run.best(trials, metrics, list(candidates[0]), mode) if trials else {}
