"""The scaling law of language models, fitted to the losses in the tidy table.

MatFormer (arXiv 2310.07707), Section 4.1 and Table 3: Loss(N, D) = a · (N·D)^b + c, with N the
parameters without embeddings and D the tokens of the training.

A run of recipes.matformer.matlm varies N alone, by widths. Runs that differ in N and D, such as the
presets of Table 4's five sizes, are fitted together by

    python -m recipes.matformer.scaling runs/matformer-matlm/78M runs/matformer-matlm/180M …
"""

import argparse
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.optimize import OptimizeWarning, curve_fit

from recipes.messages import console
from recipes.plots import plt, save_plot
from recipes.results import by_seed, read, write_atomically
from recipes.tables import Table

TITLES = {"matlm": "MatLM (sampled)", "independent": "independent"}
PAPER = {"matlm": (21.60, -0.13, 1.33), "independent": (14.08, -0.10, 0.89)}  # Table 3


@dataclass(frozen=True)
class Fit:
    """a, b and c with their standard errors, and the root mean squared error of the fit."""

    values: tuple[float, float, float]
    errors: tuple[float, float, float]
    rmse: float

    def predict(self, compute: NDArray[np.float64]) -> NDArray[np.float64]:
        """The losses that the law predicts at these N·D."""
        return law(compute, *self.values)


def law(compute: NDArray[np.float64], a: float, b: float, c: float) -> NDArray[np.float64]:
    """a · (N·D)^b + c."""
    return a * compute**b + c


def fit(compute: NDArray[np.float64], losses: NDArray[np.float64]) -> Fit:
    """Fit a, b and c by least squares.

    N·D is first divided by its geometric mean: a is the first term at N·D = 1, far outside the
    data, where the optimiser could not separate it from b. Afterwards a and its standard error are
    converted back.

    Args:
        compute: N·D of each model.
        losses: validation loss of each model.

    Raises:
        ValueError: there are fewer than four models or three values of N·D, or they do not follow
            such a law.
    """
    if len(losses) < 4:
        raise ValueError(f"{len(losses)} models: expected four or more to fit three parameters")
    if len(set(compute)) < 3:
        raise ValueError(f"{len(set(compute))} values of N·D: expected three or more")
    centre = float(np.exp(np.log(compute).mean()))
    start = (max(float(np.ptp(losses)), 1e-3), -0.1, max(float(losses.min()) - 0.1, 0.0))
    bounds = ([0, -2, 0], [np.inf, 0, np.inf])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", OptimizeWarning)  # the covariance has no finite estimate
            estimates, covariance = curve_fit(
                law, compute / centre, losses, start, bounds=bounds, maxfev=20_000
            )
    except (RuntimeError, OptimizeWarning) as error:
        raise ValueError(f"the losses follow no such law ({error})") from error
    scaled, b, c = (float(value) for value in estimates)
    a = scaled * centre**-b
    # a depends on both: da = centre^-b · d(scaled) - a · ln(centre) · db
    gradient = np.array([centre**-b, -a * np.log(centre), 0.0])
    error_a = float(np.sqrt(gradient @ covariance @ gradient))
    _, error_b, error_c = np.sqrt(np.diag(covariance))
    rmse = float(np.sqrt(np.mean((law(compute, a, b, c) - losses) ** 2)))
    return Fit((a, b, c), (error_a, float(error_b), float(error_c)), rmse)


def points(table: pd.DataFrame, row: str) -> pd.DataFrame:
    """N·D and loss of every granularity of a method, one line for each preset and seed.

    Mix'n'Match sizes, which are not trained, are left out. Tables of several presets may be joined.
    """
    needed = ["loss", "non_embedding", "tokens"]
    lines = table[(table["row"] == row) & table["metric"].isin(needed)]
    lines = lines[~lines["set"].str.contains("*", regex=False)]
    index = ["preset", "seed", "set"]
    wide = lines.pivot_table(index=index, columns="metric", values="value")
    wide = wide.reindex(columns=needed).dropna()  # a table may lack the row
    # a training at full width is in the table twice: as a main row, and as a width
    wide["compute"] = wide["non_embedding"] * wide["tokens"]
    return wide.reset_index().drop_duplicates(["preset", "seed", "compute", "loss"])


def fit_report(table: pd.DataFrame, out: Path) -> list[str]:
    """The law fitted to each method's models, a plot in `out`, and the paper's values (Table 3)."""
    figure, axis = plt.subplots(figsize=(6, 4.2))
    rows = []
    for place, (row, title) in enumerate(TITLES.items()):
        models = points(table, row)
        compute, losses = models["compute"].to_numpy(float), models["loss"].to_numpy(float)
        axis.plot(compute, losses, "o", color=f"C{place}", label=title)
        try:
            law_of_row = fit(compute, losses)
        except ValueError as error:
            rows.append([title, str(error), "", "", "", ""])
            continue
        line = np.geomspace(compute.min(), compute.max(), 100)
        axis.plot(line, law_of_row.predict(line), color=f"C{place}")
        cells = [
            f"{value:.3g} ± {error:.2g}"
            for value, error in zip(law_of_row.values, law_of_row.errors, strict=True)
        ]
        paper = " / ".join(f"{value:g}" for value in PAPER[row])
        rows.append([title, str(len(models)), *cells, f"{law_of_row.rmse:.2g}", paper])
    axis.set(xscale="log", xlabel="N·D", ylabel="validation loss, nats a token")
    axis.tick_params(axis="x", which="both", rotation=30)
    axis.legend()
    save_plot(figure, out / "scaling.png")
    header = ["", "models", "a", "b", "c", "error of the fit", "paper's a / b / c"]
    return [
        "## Scaling law",
        "Loss = a · (N·D)^b + c by least squares, ± standard error; N are the parameters without "
        "embeddings, D the tokens of the training that the model is from. All four granularities "
        "of MatLM are points. Within a run a method's trainings differ in width alone, with the "
        "same D; the paper's five sizes (Table 4) differ in both.",
        Table(header, rows).markdown(),
        "![loss against N·D](scaling.png)",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Fit the law to the tables of several runs; write scaling.md and scaling.png.

    Raises:
        FileNotFoundError: if a folder has no table.
        ValueError: if a table is of another experiment, or scored on another text.
    """
    parser = argparse.ArgumentParser(
        prog="python -m recipes.matformer.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = "of a run of recipes.matformer.matlm, with its results.csv"
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help=what)
    parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="default: here")
    argv = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(argv)
    tables: dict[Path, pd.DataFrame] = {}
    for folder in options.folders:
        table = read(folder).assign(preset=str(folder))  # runs of one preset may differ in tokens
        if other := set(table["experiment"]) - {"matformer.matlm"}:
            raise ValueError(f"{folder} is of {', '.join(other)}: expected runs of matformer.matlm")
        tables[folder] = table
    _require_one_text(tables)
    command = shlex.join(["python", "-m", "recipes.matformer.scaling", *argv])
    lines = [f"`{command}`", *fit_report(pd.concat(tables.values()), options.out)]
    text = "\n\n".join(lines) + "\n"
    write_atomically(options.out / "scaling.md", text)
    print(text)


def _require_one_text(tables: dict[Path, pd.DataFrame]) -> None:
    """Refuse runs whose loss without context differs: they were not scored on the same text."""
    losses = {}
    for folder, table in tables.items():
        values = by_seed(table, "loss", {"row": "unigram"})
        if len(values):
            losses[folder] = round(values.mean(), 4)
    if len(set(losses.values())) > 1:
        listed = ", ".join(f"{loss} in {folder}" for folder, loss in losses.items())
        raise ValueError(
            f"the loss without context, which depends on the data alone, is {listed}: expected "
            "runs on the same text and tokens, since one law holds only for these"
        )


if __name__ == "__main__":
    console(main, resume="")
