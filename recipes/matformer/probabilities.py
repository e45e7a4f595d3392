"""How often to train which granularity: the five rows of Table 6, each a MatViT.

In the paper, drawing XL more often improves XL at the cost of S, and the other way round. The row
of equal probabilities is the MatViT of recipes.matformer.matvit; it is trained here if that
experiment has not been run.

    python -m recipes.matformer.probabilities --jobs 2           handwritten numbers, on a CPU
    python -m recipes.matformer.probabilities --preset small     tiny-imagenet of $RECIPES_DATA
    python -m recipes.matformer.probabilities --preset paper --data.root /data/imagenet
"""

from collections.abc import Sequence
from functools import partial

import pandas as pd

from lightning_modules.matformer.nest import GRANULARITIES
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Run
from recipes.matformer import matvit
from recipes.matformer.matvit_measures import measure_chance, measure_nested
from recipes.matformer.matvit_report import said_chance
from recipes.messages import console
from recipes.nodes import Stage
from recipes.plots import plt, save_plot
from recipes.provenance import provenance
from recipes.results import by_seed
from recipes.runner import run_experiment
from recipes.tables import Column, Table, tabulate

# probabilities of S, M, L, XL → the paper's validation log-perplexity of S, M, L, XL (850M MatLM)
TABLE_6: dict[tuple[float, ...], Sequence[float]] = {
    (0.44, 0.31, 0.15, 0.10): (2.963, 2.925, 2.899, 2.877),
    (0.31, 0.27, 0.22, 0.20): (2.977, 2.929, 2.890, 2.857),
    (0.25, 0.25, 0.25, 0.25): (2.970, 2.934, 2.886, 2.846),
    (0.20, 0.22, 0.24, 0.34): (3.000, 2.939, 2.885, 2.836),
    (0.17, 0.20, 0.22, 0.41): (3.010, 2.943, 2.884, 2.829),
}
INDEPENDENT = (3.017, 2.971, 2.910, 2.840)  # the paper's baselines, one for each size
UNIFORM = (0.25, 0.25, 0.25, 0.25)


def name(row: Sequence[float]) -> str:
    """A row's name, such as ".44/.31/.15/.10"."""
    return "/".join(f"{p:.2f}".removeprefix("0") for p in row)


def declare(run: Run) -> None:
    """Declare the training and the scores of every row."""
    chosen = run.rows(map(name, TABLE_6))
    for seed in run.seeds:
        for row in TABLE_6:
            if name(row) in chosen:
                model = {"model": training(run, row, seed)}
                settings = {"row": name(row), "between": 0}
                run.measure(f"score {folder(row)}", seed, measure_nested, model, settings)
        run.measure("chance", seed, measure_chance, model)


def training(run: Run, row: Sequence[float], seed: int) -> Stage:
    """Declare the training of MatViT with these probabilities of S, M, L and XL."""
    if row == UNIFORM:
        return matvit.nested(run.sibling("matformer.matvit"), "matvit", seed)
    sampler = matvit.sampler(probabilities=list(row))
    return matvit.training(run, folder(row), seed, {"trainer.callbacks": [sampler]})


def folder(row: Sequence[float]) -> str:
    """The name of a row's stage."""
    return "p" + "_".join(f"{100 * p:.0f}" for p in row)


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Accuracy and loss of each size under each row of probabilities."""
    rows = [name(row) for row in TABLE_6 if name(row) in set(table["row"])]
    heading = "p_S/p_M/p_L/p_XL"
    accuracy = tabulate(table, rows, columns("accuracy", 100, 1), heading=heading)
    accuracy.show(f"Sampling ({run.preset}): validation accuracy, %")
    loss = tabulate(table, rows, columns("loss", 1, 3), heading=heading)
    paper = {name(row): [f"{value:.3f}" for value in values] for row, values in TABLE_6.items()}
    beside = Table(
        [*loss.header, *(f"paper {size}" for size in GRANULARITIES)],
        [
            *([*cells, *paper[cells[0]]] for cells in loss.rows),
            ["independent", *[""] * len(GRANULARITIES), *(f"{v:.3f}" for v in INDEPENDENT)],
        ],
        loss.notes,
    )
    text = [
        f"# Sampling probabilities (Table 6), preset {run.preset}",
        provenance(run, table),
        f"Validation accuracy in %, mean ± standard deviation over seeds.{said_chance(table)}",
        accuracy.markdown(),
        "Validation loss in nats, beside the paper's validation log-perplexity of an 850M language "
        "model. Task and scale differ: compare how a row changes from size to size.",
        beside.markdown(),
    ]
    if name(UNIFORM) in rows:
        plot(table, run)
        text.append("![loss of each size, less that of equal probabilities](probabilities.png)")
    return text


def columns(metric: str, scale: float, digits: int) -> list[Column]:
    """A column for each size."""
    return [
        Column(size, metric, {"set": size}, scale=scale, digits=digits) for size in GRANULARITIES
    ]


def plot(table: pd.DataFrame, run: Run) -> None:
    """Loss of each size less its loss under equal probabilities, beside the paper's."""
    ours: dict[tuple[float, ...], Sequence[float]] = {
        row: [
            by_seed(table, "loss", {"row": name(row), "set": size}).mean() for size in GRANULARITIES
        ]
        for row in TABLE_6
        if name(row) in set(table["row"])
    }
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    titles = (f"ours, preset {run.preset}", "paper (850M MatLM)")
    for axis, losses_of, title in zip(axes, (ours, TABLE_6), titles, strict=True):
        for row, losses in losses_of.items():
            change = [a - b for a, b in zip(losses, losses_of[UNIFORM], strict=True)]
            axis.plot(GRANULARITIES, change, "o-", label=name(row))
        axis.set_title(title)
        axis.set_ylabel("loss less that of equal probabilities")
        axis.grid(alpha=0.3)
    axes[1].legend(title="S/M/L/XL")
    save_plot(figure, run.out / "probabilities.png")


CLAIMS = [
    Claim(
        name=f"favouring {size} improves it",
        paper="MatFormer",
        sentence=f"{size} drawn more often has a lower loss than under equal probabilities.",
        where="Table 6",
        number=number,
        test=Comparison("loss", name(UNIFORM), name(row), where={"set": size}, digits=4),
        gate=matvit.size_matters(name(UNIFORM)),
    )
    for size, number, row in (
        ("S", "2.963 against 2.970", (0.44, 0.31, 0.15, 0.10)),
        ("XL", "2.829 against 2.846", (0.17, 0.20, 0.22, 0.41)),
    )
]
EXPERIMENT = Experiment(
    "matformer.probabilities", __file__, "matvit", __doc__ or "", declare, report,
    measured_on=matvit.MEASURED_ON,
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
