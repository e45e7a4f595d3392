"""Shared by VeRA's experiments: the settings of a row on a data set, and its learning rate trials.

An experiment's grid (`<experiment>_grid.yaml`) names its rows, the methods that are compared, and
its sets, the tasks or data sets that they train on:

    rows:
      vera: {model.rank: 256, model.lr: 2.0e-2}
    sets:
      RTE: {data.task: RTE, trainer.max_epochs: 20, vera: {model.lr: 1.0e-2}}
    tuning:  # optional: learning rates to choose among, as many trials for every row or method
      settings: {}  # of the trials, so that they are judged on data that no report scores
      varied: {}  # likewise, of data made from what a user's flags name: no flag may change them
      trials: {vera: {model.lr: [5.0e-3, 2.0e-2]}}
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from lightning_modules.vera.method_args import ARGUMENTS
from recipes.experiment import Run, Stage
from recipes.results import by_seed, difference

TITLES = {
    "majority": "majority class",
    "chance": "chance",
    "scratch": "full, from random weights",
    "head": "head only",
    "bitfit": "BitFit",
    "lora": "LoRA",
    "lora_fa": "LoRA-FA",
    "randlora": "RandLoRA",
    "vblora": "VB-LoRA",
    "adapter_h": "Adapter-H",
    "adapter_l": "Adapter-L",
    "adapter_p": "Adapter-P",
    "adapter_d": "Adapter-D",
    "vera": "VeRA",
    "full": "full",
}
METHOD = "model.method"
ARGS = "model.method_args"


def settings_of(grid: Mapping[str, Any], row: str, name: str) -> dict[str, Any]:
    """All settings of a row on a set.

    They come from the grid's `common`, the set's settings for all rows, the row's settings, and the
    set's settings for this row (or for its method); each overrides those before.
    """
    row_settings, set_entry = grid["rows"][row], grid["sets"][name]
    method = row_settings.get(METHOD, row)
    all_rows = {key: value for key, value in set_entry.items() if "." in key or key == "data"}
    this_row = set_entry.get(row, set_entry.get(method, {}))
    return {**grid.get("common", {}), **all_rows, **row_settings, **this_row, METHOD: method}


def train(
    run: Run,
    config: str,
    grid: Mapping[str, Any],
    row: str,
    name: str,
    seed: int,
    varied: Sequence[str],
    metric: str = "",
    mode: str = "max",
) -> Stage:
    """Declare a row's training on a set, at the learning rate that is best in its trials.

    Args:
        run: receives the stages.
        config: the stage's YAML file.
        grid: of the experiment.
        row: one of the grid's rows.
        name: one of the grid's sets.
        seed: of the training, and of the random matrices of VeRA and RandLoRA, so that intervals
            over seeds cover their draw; trials have seed 0.
        varied: the settings that define a row or a set; no flag may change them.
        metric: logged on the trials' validation part; the best trial is chosen by it.
        mode: whether "max" or "min" of the metric is best.
    """
    settings = settings_of(grid, row, name)
    fixed = {key: settings.pop(key) for key in (METHOD, *varied) if key in settings}
    tuning = grid.get("tuning", {})
    trials_of = tuning.get("trials", {})
    # a row without trials has its method's, but not of the settings that the row itself fixes
    of_method = trials_of.get(fixed[METHOD], {})
    inherited = {key: values for key, values in of_method.items() if key not in grid["rows"][row]}
    for key, values in trials_of.get(row, inherited).items():
        before = {**settings, **tuning.get("settings", {})}
        before.pop(key, None)
        label = key.rpartition(".")[2]
        of_trials = tuning.get("varied", {})
        trials = [
            run.stage(
                f"{name}_{row}_{label}{value:g}", config, 0, {**fixed, **of_trials, key: value},
                before, prepared=tuple(of_trials),
            )
            for value in values
        ]  # fmt: skip
        settings |= run.best(trials, metric, [key], mode)
    if seed and "seed" in ARGUMENTS.get(fixed[METHOD], ()):  # without one they draw with seed 0
        where = fixed if ARGS in fixed else settings
        where[ARGS] = {"seed": seed, **(where.get(ARGS) or {})}
    return run.stage(f"{name}_{row}", config, seed, fixed, settings)


def learnt(table: pd.DataFrame, sets: Sequence[str], rows: tuple[str, str]) -> list[str]:
    """The sets in which the first row scores above the second; only there can methods differ.

    With two seeds or more the 95 % interval of the paired difference has to lie above zero.
    """
    learnt_sets = []
    for name in sets:
        values = [by_seed(table, "score", {"row": row, "set": name}) for row in rows]
        compared = difference(*values)
        if (compared.low if compared.n > 1 else compared.mean) > 0:
            learnt_sets.append(name)
    return learnt_sets
