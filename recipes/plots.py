"""Plots of the tidy table (recipes/results.py), with the spread over seeds."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from recipes.results import Where, by_seed, select, title_of, unique

matplotlib.use("Agg")  # a report must not need a screen

from matplotlib import pyplot as plt

# twenty colours, the ten stronger ones first; a series' position among all titles selects one
COLORS = [matplotlib.colormaps["tab20"](place) for place in (*range(0, 20, 2), *range(1, 20, 2))]


def scatter(
    table: pd.DataFrame,
    path: Path,
    metric: str,
    costs: Mapping[str, str],
    *,
    panel: str = "",
    where: Where | None = None,
    titles: Mapping[str, str] | None = None,
    joined: Sequence[str] = (),
    baselines: Sequence[str] = (),
    scale: float = 1.0,
    log: bool = False,
    ylabel: str = "",
) -> None:
    """Plot a metric against costs, a series for each row; error bars: one standard deviation.

    Args:
        table: the tidy table.
        path: the PNG file.
        metric: the metric on the vertical axis.
        costs: cost metrics of the same rows and sets → axis labels; one panel each.
        panel: column of the table; each of its values has a panel.
        where: conditions that select lines of the table.
        titles: series → title, in order; other series are left out. By default all.
        joined: series whose points, by increasing cost, are joined by a line.
        baselines: series drawn as a dotted horizontal line, such as a baseline without costs.
        scale: factor by which the metric is multiplied.
        log: whether costs are on a logarithmic axis.
        ylabel: label of the vertical axis; by default the metric.
    """
    lines = select(table, {"x": None, **(where or {})})
    with _figure(lines, metric, costs, panel, path, ylabel, log) as panels:
        for axis, cost, part in panels:
            for name, title, color in _series(part, metric, titles):
                points = []
                for _, point in select(part, {"row": name}).groupby("set", sort=False):
                    height, width = by_seed(point, metric) * scale, by_seed(point, cost)
                    if name in baselines and len(height):
                        axis.axhline(height.mean(), color=color, linestyle=":", label=title)
                    elif len(height) and len(width):
                        points.append((width.mean(), height.mean(), _deviation(height)))
                if points:
                    x, y, error = zip(*sorted(points), strict=True)
                    style = "o-" if name in joined else "o"
                    axis.errorbar(x, y, error, fmt=style, capsize=3, color=color, label=title)
            if not log and axis.get_xlim()[1] >= 10_000:  # 500 k rather than 500000
                axis.xaxis.set_major_formatter(EngFormatter())


def ranking(
    table: pd.DataFrame,
    path: Path,
    metric: str,
    titles: Mapping[str, str],
    *,
    costs: Mapping[str, str],
    baselines: Sequence[str] = (),
    scale: float = 1.0,
    xlabel: str = "",
) -> None:
    """Plot a metric of rows below one another, the best on top.

    Every seed is a pale dot; a bar is their mean, with one standard deviation on each side.

    Args:
        table: the tidy table, of one set.
        path: the PNG file.
        metric: the metric on the horizontal axis.
        titles: row → title; other rows are left out.
        costs: cost metrics of the same rows → units, which stand behind a row's title.
        baselines: rows drawn as a dotted vertical line.
        scale: factor by which the metric is multiplied.
        xlabel: label of the horizontal axis; by default the metric.
    """
    values = {row: by_seed(table, metric, {"row": row}) * scale for row in titles}
    measured = {row: one for row, one in values.items() if len(one)}
    ranked = [row for row in measured if row not in baselines]
    ranked.sort(key=lambda row: measured[row].mean())
    figure, axis = plt.subplots(figsize=(10.5, 1.2 + 0.32 * max(len(ranked), 4)))
    for place, row in enumerate(ranked):
        one = measured[row]
        axis.plot(one, [place] * len(one), "o", color=COLORS[0], alpha=0.3)
        axis.errorbar(one.mean(), place, xerr=_deviation(one), fmt="|", color=COLORS[0], capsize=3)
    for row in measured.keys() & set(baselines):
        axis.axvline(measured[row].mean(), color="gray", linestyle=":", label=titles[row])
        axis.legend(fontsize="small", loc="lower right")
    if not measured:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
    axis.set_yticks(range(len(ranked)), [titles[row] + _costs(table, row, costs) for row in ranked])
    axis.set_xlabel(xlabel or metric)
    axis.grid(alpha=0.3)
    save_plot(figure, path, _note(table, metric, "dots: seeds; bars"))


def _costs(table: pd.DataFrame, row: str, costs: Mapping[str, str]) -> str:
    """What follows a row's title on the axis: its mean costs, such as " · 8.3 M parameters".

    Args:
        table: tidy.
        row: the row.
        costs: unit of each metric to show, such as {"parameters": "parameters"}.
    """
    text = ""
    for metric, unit in costs.items():
        if len(values := by_seed(table, metric, {"row": row})):
            text += f" · {EngFormatter(places=1)(values.mean())} {unit}"
    return text


def curves(
    table: pd.DataFrame,
    path: Path,
    metric: str,
    *,
    panel: str = "",
    where: Where | None = None,
    titles: Mapping[str, str] | None = None,
    baselines: Sequence[str] = (),
    marks: Mapping[str, str] | None = None,
    scale: float = 1.0,
    log: bool = False,
    xlabel: str = "",
    ylabel: str = "",
) -> None:
    """Plot a metric against `x`; the band is one standard deviation over seeds on each side.

    The arguments are those of `scatter`; `baselines` are series whose numbers have no x. `marks`
    are up to two metrics, places on the horizontal axis, with their titles: each has a broken
    vertical line at its median over seeds, in the colour of its series.
    """
    lines = select(table, where or {})
    with _figure(lines, metric, {"": xlabel}, panel, path, ylabel, log, "bands") as panels:
        for axis, _, part in panels:
            for name, title, color in _series(part, metric, titles):
                points = select(part, {"row": name, "metric": metric})
                if name in baselines:
                    height = by_seed(points, metric).mean() * scale
                    axis.axhline(height, color=color, linestyle=":", label=title)
                    continue
                places = unique(points.dropna(subset=["x"]), "x")
                if not log and all(float(place).is_integer() for place in places):
                    axis.xaxis.set_major_locator(MaxNLocator(integer=True))  # rounds, steps
                values = [by_seed(points, metric, {"x": x}) * scale for x in places]
                means = [value.mean() for value in values]
                axis.plot(places, means, "o-", color=color, label=title)
                low, high = (
                    [value.mean() + sign * _deviation(value) for value in values]
                    for sign in (-1, 1)
                )
                axis.fill_between(places, low, high, alpha=0.15, color=color)
                marked = zip(("--", "-."), (marks or {}).items(), strict=False)
                for style, (mark, meaning) in marked:
                    at = by_seed(select(part, {"row": name}), mark).median()
                    if at == at:  # not NaN: some seed has it
                        label = f"{title}: {meaning}"
                        # so that lines at the same place all show
                        axis.axvline(at, color=color, linestyle=style, label=label, alpha=0.6)


def groups(
    table: pd.DataFrame,
    path: Path,
    metric: str,
    names: Sequence[str],
    *,
    panel: str = "",
    titles: Mapping[str, str] | None = None,
    scale: float = 1.0,
    ylabel: str = "",
) -> None:
    """Plot a metric by groups, in each of which the series stand side by side.

    Every value is a pale dot; a bar is their mean, with one standard deviation on each side.

    Args:
        names: titles of the groups; `x` in the table is a group's place among them.
        table, path, metric, panel, titles, scale, ylabel: see `scatter`. Here a series may have
            several values of a seed in a group.
    """
    spread = "dots: values; bars"
    with _figure(table, metric, {"": ""}, panel, path, ylabel, False, spread) as panels:
        for axis, _, part in panels:
            drawn = list(_series(part, metric, titles))
            for number, (name, title, color) in enumerate(drawn):
                lines = select(part, {"row": name, "metric": metric})
                shift = 0.8 * ((number + 0.5) / len(drawn) - 0.5)
                axis.plot(lines["x"] + shift, lines["value"] * scale, "o", color=color, alpha=0.3)
                values = {x: one["value"] * scale for x, one in lines.groupby("x")}
                means = [one.mean() for one in values.values()]
                error = [_deviation(one) for one in values.values()]
                places = [x + shift for x in values]
                axis.errorbar(places, means, error, fmt="_", capsize=3, color=color, label=title)
            turned = {"rotation": 30, "ha": "right"} if len(names) > 4 else {}
            axis.set_xticks(range(len(names)), names, **turned)
            axis.set_xlim(-0.5, len(names) - 0.5)


def save_plot(figure: "plt.Figure", path: Path, note: str = "") -> None:
    """Write a figure as PNG, with a small note below it, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.text(0.01, 0.01, note, fontsize="x-small", color="gray")
    figure.tight_layout(rect=(0, 0.04 if note else 0, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


@contextmanager
def _figure(
    lines: pd.DataFrame,
    metric: str,
    costs: Mapping[str, str],
    panel: str,
    path: Path,
    ylabel: str,
    log: bool,
    spread: str = "bars",
) -> Iterator[list[tuple[Any, str, pd.DataFrame]]]:
    """Yield a figure's panels as (axis, cost metric, lines of the table); then save the figure.

    `spread` is how the figure shows the deviation over seeds, for the note below it.
    """
    shown = select(lines, {"metric": metric})
    values = list(unique(shown, panel)) if panel and len(shown) else [None]
    figure, axes = plt.subplots(
        1, count := len(values) * len(costs), figsize=(3.6 * count + 2, 3.8), squeeze=False
    )
    wanted = [(value, *cost) for value in values for cost in costs.items()]
    panels = []
    for axis, (value, cost, label) in zip(axes[0], wanted, strict=True):
        part = lines if value is None else select(lines, {panel: value})
        axis.set(title=value or "", xlabel=label, xscale="log" if log else "linear")
        axis.grid(alpha=0.3)
        panels.append((axis, cost, part))
    yield panels
    for axis, _, _ in panels if log else ():
        low, high = axis.get_xlim()
        if high / low < 300:  # matplotlib would label every multiple of a power, one over the other
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
            axis.xaxis.set_minor_formatter(NullFormatter())
    axes[0][0].set_ylabel(ylabel or metric)
    shown_series = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if shown_series:  # of all panels: the last one may lack some
        axes[0][-1].legend(
            shown_series.values(), shown_series.keys(),
            loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize="small",
        )  # fmt: skip
    else:  # as after a run with --only, whose report is written all the same
        axes[0][-1].text(0.5, 0.5, "not measured", ha="center", transform=axes[0][-1].transAxes)
    save_plot(figure, path, _note(lines, metric, spread))


def _note(lines: pd.DataFrame, metric: str, spread: str) -> str:
    """What a plot of a metric shows: of how many seeds, and what its bars or bands are."""
    seeds = select(lines, {"metric": metric})["seed"].nunique()
    return (
        f"means of {seeds} seeds; {spread}: ± one standard deviation" if seeds > 1 else "one seed"
    )


def _series(
    lines: pd.DataFrame, metric: str, titles: Mapping[str, str] | None
) -> Iterator[tuple[Any, str, Any]]:
    """Value, title and colour of each series that these lines have.

    A series "MiniLM, full fine-tuning" has the colour of "MiniLM".
    """
    present = list(unique(select(lines, {"metric": metric}), "row"))
    chosen = titles or {value: title_of(value) for value in present}
    colors = dict(zip(chosen, itertools.cycle(COLORS), strict=False))
    for value, title in chosen.items():
        if value in present:
            owner = str(value).partition(", ")[0]
            yield value, title, colors.get(owner, colors[value])


def _deviation(values: pd.Series) -> float:
    """Standard deviation over seeds; 0 for one."""
    return float(values.std()) if len(values) > 1 else 0.0
