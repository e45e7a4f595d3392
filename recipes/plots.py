"""Plots of the tidy table (recipes/results.py), with the spread over seeds."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from recipes.results import Where, by_seed, select, title_of, unique
from recipes.tables import COLLAPSED

matplotlib.use("Agg")  # a report must not need a screen

from matplotlib import pyplot as plt

# twenty colours, the ten stronger ones first, in the order of the series that a figure shows
COLORS = [matplotlib.colormaps["tab20"](place) for place in (*range(0, 20, 2), *range(1, 20, 2))]
GRAYS = ["black", "gray", "silver"]  # of baselines


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
    spread: str = "sd",
) -> None:
    """Plot a metric against costs, a series for each row, with error bars over seeds.

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
        spread: "sd": means ± one standard deviation; "range": medians, from lowest to highest.
    """
    lines = select(table, {"x": None, **(where or {})})
    note = _note(lines, metric, "bars", spread)
    with _figure(lines, metric, costs, panel, path, ylabel, log, note) as panels:
        for axis, cost, part in panels:
            for name, title, color in _series(part, lines, metric, titles, baselines):
                points = []
                for _, point in select(part, {"row": name}).groupby("set", sort=False):
                    height, width = by_seed(point, metric) * scale, by_seed(point, cost)
                    if not len(height):
                        continue
                    centre, below, above = _spread(height, spread)
                    if name in baselines:
                        axis.axhline(centre, color=color, linestyle=":", label=title)
                    elif len(width):
                        points.append((width.mean(), centre, below, above))
                if points:
                    x, y, *error = zip(*sorted(points), strict=True)
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
        mean, deviation, _ = _spread(one)
        axis.errorbar(mean, place, xerr=deviation, fmt="|", color=COLORS[0], capsize=3)
    for row in measured.keys() & set(baselines):
        axis.axvline(measured[row].mean(), color="gray", linestyle=":", label=titles[row])
        axis.legend(fontsize="small", loc="lower right")
    if not measured:
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
    axis.set_yticks(range(len(ranked)), [titles[row] + _costs(table, row, costs) for row in ranked])
    axis.set_xlabel(xlabel or metric)
    axis.grid(alpha=0.3)
    save_plot(figure, path, _note(table, metric, "dots: seeds; bars", "sd"))


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
    spread: str = "sd",
) -> None:
    """Plot a metric against `x`, with bands over seeds.

    The arguments are those of `scatter`; `baselines` are series whose numbers have no x. `marks`
    are up to two metrics, places on the horizontal axis, with their titles: each has a broken
    vertical line at its median over seeds, in the colour of its series.
    """
    lines = select(table, where or {})
    note = _note(lines, metric, "bands", spread)
    with _figure(lines, metric, {"": xlabel}, panel, path, ylabel, log, note) as panels:
        for axis, _, part in panels:
            for name, title, color in _series(part, lines, metric, titles, baselines):
                points = select(part, {"row": name, "metric": metric})
                if name in baselines:
                    height, *_ = _spread(by_seed(points, metric) * scale, spread)
                    axis.axhline(height, color=color, linestyle=":", label=title)
                    continue
                places = unique(points.dropna(subset=["x"]), "x")
                if not log and all(float(place).is_integer() for place in places):
                    # rounds, or steps, whose numbers are long
                    axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
                spreads = [
                    _spread(by_seed(points, metric, {"x": x}) * scale, spread) for x in places
                ]
                centres = [centre for centre, _, _ in spreads]
                axis.plot(places, centres, "o-", color=color, label=title)
                low = [centre - below for centre, below, _ in spreads]
                high = [centre + above for centre, _, above in spreads]
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
    dot: str = "one seed",
    remarks: Mapping[str, str] | None = None,
) -> None:
    """Plot a metric by groups, in each of which the series stand side by side.

    Every value is a pale dot, beside the others of its series, with a cross on it if the table says
    that the classifier predicted one class only; a bar is the dots' mean, with one standard
    deviation on each side.

    Args:
        names: titles of the groups; `x` in the table is a group's place among them.
        table, path, metric, panel, titles, scale, ylabel: see `scatter`. Here a series may have
            several values of a seed in a group.
        dot: what a dot is, for the note below.
        remarks: value of `panel` → what is said below that panel.
    """
    seeds = select(table, {"metric": metric})["seed"].nunique()
    note = (
        f"{seeds} seed{'s' if seeds != 1 else ''}; a dot: {dot}; "
        "bars: mean of the dots ± one standard deviation"
    )
    with _figure(table, metric, {"": ""}, panel, path, ylabel, False, note) as panels:
        for axis, _, part in panels:
            axis.set_xlabel((remarks or {}).get(axis.get_title(), ""), fontsize="small")
            drawn = list(_series(part, table, metric, titles))
            for number, (name, title, color) in enumerate(drawn):
                lines = select(part, {"row": name, "metric": metric})
                shift, width = 0.8 * ((number + 0.5) / len(drawn) - 0.5), 0.6 / len(drawn)
                # side by side in their order: those that collapse to one class have one score
                group = lines.groupby("x")["x"]
                beside = (group.cumcount() + 0.5) / group.transform("size") - 0.5
                x, y = lines["x"] + shift + width * beside, lines["value"] * scale
                axis.plot(x, y, "o", color=color, alpha=0.3)
                if (collapsed := _collapsed(lines, part)).any():
                    cross = {"color": "black", "label": "collapsed to one class"}
                    axis.plot(x[collapsed], y[collapsed], "x", **cross)
                values = {x: one["value"] * scale for x, one in lines.groupby("x")}
                means, error, _ = zip(*map(_spread, values.values()), strict=True)
                places = [x + shift for x in values]
                axis.errorbar(places, means, error, fmt="_", capsize=3, color=color, label=title)
            turned = {"rotation": 30, "ha": "right"} if len(names) > 4 else {}
            axis.set_xticks(range(len(names)), names, **turned)
            axis.set_xlim(-0.5, len(names) - 0.5)


def _collapsed(lines: pd.DataFrame, table: pd.DataFrame) -> np.ndarray:
    """Whether each of these scores is of a classifier that predicted one class only."""
    measured = ["seed", "set", "row", "x", "stage"]
    one_class = select(table, {"metric": COLLAPSED, "value": 1})
    known = pd.MultiIndex.from_frame(one_class[measured])
    return pd.MultiIndex.from_frame(lines[measured]).isin(known)


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
    note: str,
) -> Iterator[list[tuple[Any, str, pd.DataFrame]]]:
    """Yield a figure's panels as (axis, cost metric, lines of the table); then save the figure."""
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
    save_plot(figure, path, note)


def _note(lines: pd.DataFrame, metric: str, shows: str, spread: str) -> str:
    """What a plot of a metric shows: of how many seeds, and what its bars or bands are.

    Args:
        lines: of the tidy table.
        metric: the plotted metric.
        shows: "bars" or "bands".
        spread: see `scatter`.
    """
    seeds = select(lines, {"metric": metric})["seed"].nunique()
    if seeds < 2:
        return "one seed"
    if spread == "range":
        return f"medians of {seeds} seeds; {shows}: from the lowest to the highest"
    return f"means of {seeds} seeds; {shows}: ± one standard deviation"


def _series(
    part: pd.DataFrame,
    lines: pd.DataFrame,
    metric: str,
    titles: Mapping[str, str] | None,
    baselines: Sequence[str] = (),
) -> Iterator[tuple[Any, str, Any]]:
    """Value, title and colour of each series that a panel has.

    A series "MiniLM, full fine-tuning" has the colour of "MiniLM"; other baselines are grey.

    Args:
        part: the panel's lines of the table.
        lines: those of all panels, so that a series has the same colour in each.
        metric, titles, baselines: see `scatter`.
    """
    in_panel, in_figure = (set(select(one, {"metric": metric})["row"]) for one in (part, lines))
    if not titles:
        titles = {row: title_of(row) for row in unique(select(lines, {"metric": metric}), "row")}
    shown = [row for row in titles if row in in_figure]
    owners = {row: str(row).partition(", ")[0] for row in shown}
    owners = {row: owner if owner in shown else row for row, owner in owners.items()}
    colors, grays = itertools.cycle(COLORS), itertools.cycle(GRAYS)
    color_of = {
        row: next(grays if row in baselines else colors) for row in shown if owners[row] == row
    }
    for row in shown:
        if row in in_panel:
            yield row, titles[row], color_of[owners[row]]


def _spread(values: pd.Series, spread: str = "sd") -> tuple[float, float, float]:
    """The centre of values over seeds, and how far their spread reaches below and above it.

    One standard deviation around the mean, or with "range" from lowest to highest around the
    median; 0 for one value.
    """
    if spread == "range":
        centre = values.median()
        return centre, centre - values.min(), values.max() - centre
    deviation = float(values.std()) if len(values) > 1 else 0.0
    return values.mean(), deviation, deviation
