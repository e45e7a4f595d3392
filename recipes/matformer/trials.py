"""Choosing a training's settings by trials."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from recipes.experiment import Run, Stage
from recipes.nodes import Later
from recipes.records import at

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
    prepared: Sequence[str] = (),
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
        prepared: as for `Run.stage`.
    """
    trials = [
        run.stage(f"{name} trial {number}", config, 0, varied, {**one, **limits}, derived, prepared)
        for number, one in enumerate(candidates, 1)
    ]
    return run.best(trials, metrics, list(candidates[0]), mode) if trials else {}


def language_training(
    run: Run,
    name: str,
    config: str,
    seed: int,
    varied_at: Callable[[int], Mapping[str, Any]],
    derived: Derived,
    metrics: Sequence[str],
    prepared: Sequence[str] = (),
) -> Stage:
    """Declare a decoder's training at the learning rate of its trials, if the preset has trials.

    The trials are those of <config>_grid.yaml. Each has a quarter of the training's steps, at seed
    0, and its loss (the mean of these metrics) is that on the end of the training text, which it
    leaves out: never on what `data.val` or a dataset's validation split has for the tables.

    Args:
        run: receives the stages.
        name: of the stage.
        config: the YAML file of the training, without the ending.
        seed: of the stage.
        varied_at: returns, for a seed, the settings in which it differs from that file.
        derived: see `Stage`.
        metrics: logged losses.
        prepared: as for `Run.stage`.
    """

    def of(key: str, c: Any) -> Any:
        return derived[key](c) if key in derived else at(c, key)

    def steps(c: Any) -> int:
        return max(1, int(of("trainer.max_steps", c)) // 4)

    def warmup(c: Any) -> float:
        given = of("model.warmup_steps", c)
        return given if given < 1 else given // 4

    shorter: Derived = {
        **derived,
        "trainer.max_steps": steps,
        "model.warmup_steps": warmup,
        "trainer.val_check_interval": lambda c: steps(c) * of("trainer.accumulate_grad_batches", c),
        "data.val": lambda c: "train" if of("data.source", c) == "datasets" else None,
    }
    grid = run.grid(f"{config}_grid")
    chosen = tuned(
        run, name, config, varied_at(0), grid["trials"], grid["trial"], shorter, metrics, "min",
        prepared,
    )  # fmt: skip
    return run.stage(name, config, seed, varied_at(seed), chosen, derived, prepared)
