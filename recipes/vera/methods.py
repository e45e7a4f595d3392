"""What VeRA's experiments share: the settings of a row on a set, and the choice of learning rates.

An experiment's grid (`<experiment>_grid.yaml`) names its rows, the methods that are compared, and
its sets, the tasks or data sets that they train on:

    rows:
      vera: {model.rank: 256, model.lr: 2.0e-2}
    sets:
      RTE: {data.task: RTE, trainer.max_epochs: 20, vera: {model.lr: 1.0e-2}}
    tuning:  # optional: learning rates to choose among, as many trials for every row or method
      settings: {}  # of the trials, so that they are judged on data that no report scores
      trials: {vera: {model.lr: [5.0e-3, 2.0e-2]}}
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

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


def settings_of(grid: Mapping[str, Any], row: str, name: str) -> dict[str, Any]:
    """All settings of a row on a set, each source overriding those before.

    The grid's `common`, the set's settings for all rows, the row's own, and the set's settings for
    this row (or for its method).
    """
    of_row, of_set = grid["rows"][row], grid["sets"][name]
    method = of_row.get(METHOD, row)
    of_all = {key: value for key, value in of_set.items() if "." in key or key == "data"}
    special = of_set.get(row, of_set.get(method, {}))
    return {**grid.get("common", {}), **of_all, **of_row, **special, METHOD: method}


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
        run: the experiment's.
        config: the stage's YAML file.
        grid: the experiment's.
        row: one of its rows.
        name: one of its sets.
        seed: of the training; trials have seed 0.
        varied: the settings that make a row and a set what they are; no flag may change them.
        metric: by which trials are judged, on their validation part.
        mode: "max" or "min".
    """
    settings = settings_of(grid, row, name)
    fixed = {key: settings.pop(key) for key in (METHOD, *varied) if key in settings}
    tuning = grid.get("tuning", {})
    trials_of = tuning.get("trials", {})
    of_method = trials_of.get(fixed[METHOD], {})  # for a variant, unless it has a value of its own
    of_variant = {key: ones for key, ones in of_method.items() if key not in grid["rows"][row]}
    for key, values in trials_of.get(row, of_variant).items():
        before = {**settings, **tuning.get("settings", {})}
        before.pop(key, None)
        label = key.rpartition(".")[2]
        trials = [
            run.stage(f"{name}_{row}_{label}{value:g}", config, 0, {**fixed, key: value}, before)
            for value in values
        ]
        settings |= run.best(trials, metric, [key], mode)
    return run.stage(f"{name}_{row}", config, seed, fixed, settings)


def learnt(table: pd.DataFrame, sets: Sequence[str], rows: tuple[str, str]) -> list[str]:
    """The sets in which the first row scores above the second, so that methods can differ there.

    With two seeds or more the 95 % interval of the paired difference has to lie above zero.
    """
    open_sets = []
    for name in sets:
        values = [by_seed(table, "score", {"row": row, "set": name}) for row in rows]
        compared = difference(*values)
        if (compared.low if compared.n > 1 else compared.mean) > 0:
            open_sets.append(name)
    return open_sets
