"""The tidy table that every experiment writes, and the comparisons made from it.

results.csv has one number per line and the columns `experiment, preset, seed, set, row, metric, x,
value, stage`: `set` is the data it was measured on, `row` what is compared (a method, a size),
`x` the position on a curve (steps, a ratio; else empty), `stage` the node that measured it. A
report is a function of that table, so that it can be written again without training:

    table = read("runs/vera-glue/small")
    rows = {"head": "head only", "vera": "VeRA", "lora": "LoRA"}
    percent = {"scale": 100, "spread": "range"}
    glue = tabulate(table, rows, [                                # recipes/tables.py
        Column("tuned parameters", "tuned", {"set": "RTE"}, digits=0),
        *(Column(task, "score", {"set": task}, **percent) for task in ("RTE", "MRPC")),
        Column("mean", "score", mean_over="set", **percent),
        Column("− LoRA", "score", mean_over="set", scale=100, reference="lora"),
    ])
    scatter(table, out / "glue.png", "score", {"tuned": "tuned parameters"}, panel="set",
            titles=rows, baselines=["head"], log=True, scale=100, ylabel="score, %")  # plots.py
    write_report(out, ["# GLUE", provenance(run, table), glue.markdown(), "![](glue.png)"])

The difference between two rows is paired by seed, since runs with the same seed share data and
initial weights, and has the 95 % interval of Student's t distribution, since seeds are few.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

KEY = ["experiment", "preset", "seed", "set", "row", "metric", "x"]  # each number has one line
COLUMNS = [*KEY, "value", "stage"]

Where = Mapping[str, Any]  # column → the value, or the list of values, that lines must have


@dataclass(frozen=True)
class Row:
    """One measured number, before the experiment, preset, seed and stage are added.

    A value of None is left out of the table.
    """

    row: str
    metric: str
    value: float | None
    set: str = ""
    x: float | None = None


def tidy(
    rows: Iterable[Row], experiment: str, preset: str, seed: int, stage: str = ""
) -> pd.DataFrame:
    """The measured numbers of one stage as lines of the table."""
    lines = [
        (experiment, preset, seed, one.set, one.row, one.metric, one.x, one.value, stage)
        for one in rows
        if one.value is not None
    ]
    return _typed(pd.DataFrame(lines, columns=COLUMNS))


def read(path: str | Path) -> pd.DataFrame:
    """The table of a results.csv, or of the folder that holds one.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it has other columns.
    """
    path = Path(path)
    file = path / "results.csv" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: an experiment writes it as it measures")
    table = pd.read_csv(file, keep_default_na=False, dtype=str)
    if list(table.columns) != COLUMNS:
        raise ValueError(f"{file} has the columns {list(table.columns)}, expected {COLUMNS}")
    return _typed(table)


def write(path: str | Path, table: pd.DataFrame) -> None:
    """Write results.csv atomically, so that a killed run leaves the old or the new file.

    Lines are sorted by seed; within a seed they keep their order.

    Raises:
        ValueError: if two lines have the same KEY.
    """
    table = _typed(table)
    duplicates = table[table.duplicated(KEY)]
    if len(duplicates):
        line = dict(duplicates.iloc[0][KEY])
        raise ValueError(f"two lines of the table hold the same number: {line}; expected one")
    table = table.sort_values(["experiment", "preset", "seed"], kind="stable")
    write_atomically(Path(path), table.to_csv(index=False))


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically: others read the old or the new text, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    """The table with integer seeds, float x and value, and "" for missing text."""
    typed = table[COLUMNS].reset_index(drop=True)
    for name in ("x", "value"):
        typed[name] = [math.nan if value in ("", None) else float(value) for value in typed[name]]
    for name in ("experiment", "preset", "set", "row", "metric", "stage"):
        typed[name] = typed[name].fillna("").astype(str).astype(object)
    typed["seed"] = typed["seed"].astype(int)
    return typed


def select(table: pd.DataFrame, where: Where) -> pd.DataFrame:
    """The lines with these values; None selects empty ones: with {"x": None}, no curve points.

    Raises:
        ValueError: for a column that the table does not have.
    """
    # the lines are taken once, at the end: to copy them for each condition takes most of the time
    places = np.arange(len(table))
    for name, wanted in where.items():
        if name not in COLUMNS:
            raise ValueError(f"the table has no column {name!r}: expected one of {COLUMNS}")
        column = table[name].array[places]
        values = wanted if isinstance(wanted, list | tuple | set) else [wanted]
        places = places[column.isna() if wanted is None else column.isin(values)]
    return table.iloc[places]


def by_seed(
    table: pd.DataFrame, metric: str, where: Where | None = None, mean_over: str = ""
) -> pd.Series:
    """One metric's values, indexed by seed.

    Args:
        table: the tidy table.
        metric: its name there.
        where: further conditions, such as {"row": "vera", "set": "RTE"}. Points of a curve are
            left out unless it names `x`.
        mean_over: a column, usually "set"; each seed's values are averaged over it. A seed that
            lacks a set which any row has is left out, since its mean would not be comparable.

    Raises:
        ValueError: if a seed has several values that `mean_over` does not average.
    """
    conditions = {"metric": metric, "x": None, **(where or {})}
    lines = select(table, conditions)
    repeated = lines[["seed", mean_over] if mean_over else "seed"].duplicated(keep=False)
    if repeated.any():
        several = lines[repeated]
        differing = [n for n in KEY[1:] if several[n].nunique(dropna=False) > 1 and n != "seed"]
        raise ValueError(
            f"{metric!r} of {dict(where or {})} has several values of seed "
            f"{several['seed'].iloc[0]}, which differ in {', '.join(differing)}: expected one; "
            "name it, or take their mean with mean_over"
        )
    if not mean_over:
        return pd.Series(lines["value"].array, lines["seed"].array, name="value").sort_index()
    of_any_row = {name: value for name, value in conditions.items() if name != "row"}
    all_values = select(table, of_any_row)[mean_over].unique()
    # a measured value that is no number, of a diverged run, differs from one that is missing
    lines = lines.assign(value=lines["value"].fillna(math.inf))
    grid = lines.pivot(index="seed", columns=mean_over, values="value")
    return grid.reindex(columns=all_values).dropna().mean(axis=1)


@dataclass(frozen=True)
class Difference:
    """A paired difference over seeds, with the 95 % interval of its mean (NaN for one seed).

    If a seed's value is not finite, since the run has diverged, the mean is NaN.
    """

    mean: float
    low: float
    high: float
    sd: float
    n: int

    @property
    def diverged(self) -> bool:
        """Whether a seed's value is not finite."""
        return self.n > 0 and math.isnan(self.mean)

    def text(self, scale: float = 1.0, digits: int = 1, interval: bool = True) -> str:
        """ "+1.2 [+0.3, +2.1]"; "+1.2" for one seed or without `interval`; "diverged"."""
        if not self.n:
            return ""
        if self.diverged:
            return "diverged"
        if self.n == 1 or not interval:
            return f"{self.mean * scale:+.{digits}f}"
        low, high = sorted((self.low * scale, self.high * scale))
        return f"{self.mean * scale:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def difference(values: pd.Series, reference: pd.Series | float) -> Difference:
    """Values minus reference, paired by seed: mean ± t(0.975) · sd / √n, n − 1 degrees of freedom.

    Args:
        values: values indexed by seed, as from `by_seed`.
        reference: likewise, or a number. Seeds that only one of the two has are left out.
    """
    if isinstance(reference, pd.Series):
        shared = values.index.intersection(reference.index)
        values, reference = values[shared], reference[shared]
    paired_values = values - reference
    n = len(paired_values)
    if not n or not np.isfinite(paired_values).all():
        return Difference(math.nan, math.nan, math.nan, math.nan, n)
    mean = float(paired_values.mean())
    if n == 1:
        return Difference(mean, math.nan, math.nan, math.nan, 1)
    sd = float(paired_values.std(ddof=1))
    half = float(stats.t.ppf(0.975, n - 1)) * sd / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, sd, n)


def unique(table: pd.DataFrame, column: str) -> Iterable[Any]:
    """A column's distinct values in order of appearance; `x` and `seed` sorted."""
    values = table[column].unique()
    return sorted(values) if column in ("x", "seed") else list(values)


def title_of(value: Any) -> str:
    """A value as a heading; numbers without superfluous digits."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def write_report(out: Path, paragraphs: Sequence[str]) -> Path:
    """Write report.md atomically, in UTF-8, and print where it is."""
    report = out / "report.md"
    write_atomically(report, "\n\n".join(one for one in paragraphs if one) + "\n")
    print(f"report: {report}")
    return report
