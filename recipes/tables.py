"""Tables of a report: each column is declared; recipes/results.py has an example."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table as RichTable

from recipes.results import Where, by_seed, difference, select, title_of, unique

COLLAPSED = "classes_predicted"  # a metric; 1 where a classifier answers everything alike


@dataclass(frozen=True)
class Column:
    """One column of a report's table.

    Attributes:
        title: its heading.
        metric: whose numbers stand in it.
        where: which lines, such as {"set": "RTE"}; see `by_seed`.
        mean_over: see `by_seed`.
        scale: what values are multiplied by: 100 for percent.
        digits: after the point; with 0, thousands are separated.
        spread: "sd": mean ± standard deviation; "range": median (lowest–highest); "": the mean.
        reference: a row: the cells are then the paired differences to it, with their interval.
    """

    title: str
    metric: str
    where: Where = field(default_factory=dict)
    mean_over: str = ""
    scale: float = 1.0
    digits: int = 1
    spread: str = "sd"
    reference: str = ""


@dataclass
class Table:
    """Header, rows of cells, and notes below.

    Attributes:
        words: sentences, aligned to the left; else numbers behind a column of names.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    words: bool = False

    def markdown(self) -> str:
        """For a report or a card."""
        rule = ["---"] + ["---" if self.words else "---:"] * (len(self.header) - 1)
        lines = ["| " + " | ".join(row) + " |" for row in [self.header, rule, *self.rows]]
        return "\n\n".join(["\n".join(lines), *self.notes])

    def show(self, title: str) -> None:
        """In the terminal."""
        table = RichTable(title=title, title_justify="left", caption="\n".join(self.notes))
        for place, name in enumerate(self.header):
            table.add_column(name, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*row)
        Console().print(table)


def summary(
    values: Iterable[float], scale: float = 1.0, digits: int = 1, spread: str = "sd"
) -> str:
    """ "71.3 ± 0.4", or "71.3 (70.9–71.8)" with spread "range"; one seed's value alone."""
    scaled = [value * scale for value in values]
    if not scaled:
        return ""
    form = f",.{digits}f"
    centre = statistics.median(scaled) if spread == "range" else statistics.fmean(scaled)
    if len(scaled) == 1 or not spread:
        return f"{centre:{form}}"
    if spread == "range":
        return f"{centre:{form}} ({min(scaled):{form}}–{max(scaled):{form}})"
    return f"{centre:{form}} ± {statistics.stdev(scaled):{form}}"


def tabulate(
    table: pd.DataFrame,
    rows: Mapping[Any, str] | Sequence[Any] | None,
    columns: Sequence[Column],
    index: str = "row",
    heading: str = "",
) -> Table:
    """A report's table.

    Args:
        table: the tidy table.
        rows: values of `index` and their titles, in order; by default all.
        columns: of the report's table. Rows and columns without any number are left out.
        index: which column of the tidy table makes the rows: "row", "set", "x", …
        heading: over the rows' titles.

    Returns:
        the table with notes: the number of seeds (a cell with fewer names its own), and which
        cells come from a classifier whose predictions collapsed to one class (†).
    """
    if rows is None:
        metrics = [column.metric for column in columns]
        rows = list(unique(select(table, {"metric": metrics}).dropna(subset=[index]), index))
    titles = rows if isinstance(rows, Mapping) else {row: title_of(row) for row in rows}
    values = {
        (row, place): by_seed(table, column.metric, {**column.where, index: row}, column.mean_over)
        for row in titles
        for place, column in enumerate(columns)
    }
    most = max((len(one) for one in values.values()), default=0)
    kept = [
        (place, column)
        for place, column in enumerate(columns)
        if any(len(values[row, place]) for row in titles)
    ]
    lines, collapsed = [], False
    for row, title in titles.items():
        if not any(len(values[row, place]) for place in range(len(columns))):
            continue
        cells = [title]
        for place, column in kept:
            if column.reference:
                base = {**column.where, index: column.reference}
                compared = difference(
                    values[row, place], by_seed(table, column.metric, base, column.mean_over)
                )
                n = compared.n
                text = "" if row == column.reference else compared.text(column.scale, column.digits)
            else:
                n = len(values[row, place])
                text = summary(values[row, place], column.scale, column.digits, column.spread)
                if text and _collapsed(table, {**column.where, index: row}, column):
                    text, collapsed = f"{text} †", True
            cells.append(f"{text} (n = {n})" if text and n < most else text)
        lines.append(cells)
    notes = [f"n = {most} seed{'s' if most != 1 else ''}" + " each" * (most > 1) + "."]
    if any(column.reference for _, column in kept):
        notes[0] += " Differences are paired by seed; in brackets their 95 % interval."
    if collapsed:
        notes.append("† predictions collapsed to one class in at least one seed.")
    return Table([heading, *(column.title for _, column in kept)], lines, notes)


def _collapsed(table: pd.DataFrame, where: Where, column: Column) -> bool:
    """Whether a cell's classifier predicted one class only; counts and costs are not marked."""
    if column.metric == COLLAPSED or not column.spread or not column.digits:
        return False
    known = {name: value for name, value in where.items() if name in ("row", "set", "stage")}
    return bool((select(table, {**known, "metric": COLLAPSED})["value"] == 1).any())
