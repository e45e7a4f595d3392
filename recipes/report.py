"""Tables, files and plots that an experiment leaves behind."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a report must not need a screen

from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table


def mean_sd(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """ "71.3 ± 0.4" over seeds; the mean alone for one seed."""
    mean = statistics.fmean(values) * scale
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {statistics.stdev(values) * scale:.{digits}f}"


def median_range(values: Sequence[float], scale: float = 1.0, digits: int = 1) -> str:
    """ "71.3 (70.9–71.8)": the median over seeds and what they span; one seed's value alone."""
    median = f"{statistics.median(values) * scale:.{digits}f}"
    if len(values) == 1:
        return median
    low, high = (f"{chosen(values) * scale:.{digits}f}" for chosen in (min, max))
    return f"{median} ({low}–{high})"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in the terminal."""
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def write_json(path: Path, content: Any) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_report(out: Path, paragraphs: Sequence[str], metrics: Any) -> None:
    """Write report.md and metrics.json, and say where the report is."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text("\n\n".join(paragraphs) + "\n")
    write_json(out / "metrics.json", metrics)
    print(f"report: {out / 'report.md'}")


def save_plot(figure: "plt.Figure", path: Path) -> None:
    """Write a figure as PNG and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
