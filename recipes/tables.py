"""Tables of a report: each column is declared; recipes/results.py has an example."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from recipes.results import Where, by_seed, difference, select, title_of, unique

COLLAPSED = "classes_predicted"  # a metric: 1 if a classifier predicted one class only


@dataclass(frozen=True)
class Column:
    """One column of a report's table.

    Attributes:
        title: the heading.
        metric: the metric that it shows.
        where: conditions on lines of the tidy table, such as {"set": "RTE"}; see `by_seed`.
        mean_over: see `by_seed`.
        scale: factor by which values are multiplied: 100 for percent.
        digits: number of decimals. With 0 (counts, not scores) no cell is marked † as collapsed.
        spread: "sd": mean ± standard deviation; "range": median (lowest–highest); "": the mean.
        reference: cells are then paired differences to it, with 95 % interval: a value of the
            table's index (a row), or conditions in place of the column's, such as {"row": "full"}
            where the table's index is the set.
    """

    title: str
    metric: str
    where: Where = field(default_factory=dict)
    mean_over: str = ""
    scale: float = 1.0
    digits: int = 1
    spread: str = "sd"
    reference: str | Where = ""


@dataclass
class Table:
    """Header, rows of cells, and notes below.

    Attributes:
        words: the cells are text, aligned left; otherwise all but the first column are numbers.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    words: bool = False

    def markdown(self) -> str:
        """The table as Markdown."""
        rule = ["---"] + ["---" if self.words else "---:"] * (len(self.header) - 1)
        lines = ["| " + " | ".join(row) + " |" for row in [self.header, rule, *self.rows]]
        return "\n\n".join(["\n".join(lines), *self.notes])

    def show(self, title: str) -> None:
        """Print the table to the terminal."""
        # texts, not markup: a user's sentence may hold square brackets
        table = RichTable(
            title=Text(title), title_justify="left", caption=Text("\n".join(self.notes))
        )
        for place, name in enumerate(self.header):
            table.add_column(Text(name), justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*map(Text, row))
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
    """Make a report's table from the tidy table.

    Args:
        table: the tidy table.
        rows: values of `index` and their titles, in order; by default all.
        columns: the columns. Rows and columns without any number are left out.
        index: the column of the tidy table whose values are the rows: "row", "set", "x", …
        heading: heading of the first column.

    Returns:
        The table with notes: the number of seeds (a cell with fewer names its own), and which
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
    seeds = max((len(one) for one in values.values()), default=0)
    shown_columns = [
        (place, column)
        for place, column in enumerate(columns)
        if any(len(values[row, place]) for row in titles)
    ]
    lines, collapsed = [], False
    for row, title in titles.items():
        if not any(len(values[row, place]) for place in range(len(columns))):
            continue
        cells = [title]
        for place, column in shown_columns:
            if column.reference:
                other = column.reference
                other = {index: other} if isinstance(other, str) else other
                base = {**column.where, index: row, **other}
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
            cells.append(f"{text} (n = {n})" if text and n < seeds else text)
        lines.append(cells)
    notes = [f"n = {seeds} seed{'s' if seeds != 1 else ''}" + " each" * (seeds > 1) + "."]
    if any(column.reference for _, column in shown_columns):
        notes[0] += " Differences are paired by seed; in brackets their 95 % interval."
    if collapsed:
        notes.append("† predictions collapsed to one class in at least one seed.")
    return Table([heading, *(column.title for _, column in shown_columns)], lines, notes)


def _collapsed(table: pd.DataFrame, where: Where, column: Column) -> bool:
    """Whether a cell's classifier predicted one class only; counts and costs are not marked."""
    if column.metric == COLLAPSED or not column.spread or not column.digits:
        return False
    known = {name: value for name, value in where.items() if name in ("row", "set", "stage")}
    return bool((select(table, {**known, "metric": COLLAPSED})["value"] == 1).any())
