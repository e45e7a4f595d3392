"""How often to train which granularity: the five rows of Table 6, each a MatViT.

Favouring XL improves it at the cost of S, and the other way round. The row of equal probabilities
is recipes.matformer.matvit's own training, used again if it is there.

    python -m recipes.matformer.probabilities                    digits, a minute or two on a CPU
    python -m recipes.matformer.probabilities --preset small     tiny-imagenet of $RECIPES_DATA
    python -m recipes.matformer.probabilities --preset paper --data.root /data/imagenet
"""

import statistics
from collections.abc import Sequence

from matplotlib import pyplot as plt

from lightning_modules.matformer.nest import GRANULARITIES
from recipes.legacy import Experiment, StageResult, from_command_line
from recipes.matformer.matvit import Scores, sampling
from recipes.matformer.submodels import ladder, load, score, submodel
from recipes.messages import console
from recipes.report import markdown_table, mean_sd, save_plot, show_table, write_report

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


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line(
        "matformer.probabilities", __file__, "matvit", __doc__ or "", argv
    )
    results: list[dict[str, Scores]] = []
    for seed in range(experiment.seeds):
        data = experiment.datamodule("matvit", seed)
        scores: dict[str, Scores] = {}
        for row in TABLE_6:
            model = load(train(experiment, seed, row).checkpoint)
            sizes = [submodel(model, data.image_size, mix) for mix in ladder(model, between=0)]
            scores[name(row)] = score(sizes, data.val_dataloader(), sizes[-1], name(row))
        results.append(scores)
        report(experiment, results)
    return experiment


def train(experiment: Experiment, seed: int, row: Sequence[float]) -> StageResult:
    """MatViT with these probabilities of its granularities."""
    if row == UNIFORM:
        return experiment.sibling("matformer.matvit").stage(
            "matvit", "matvit", seed, sampling(seed)
        )
    folder = "p" + "_".join(f"{100 * p:.0f}" for p in row)
    return experiment.stage(folder, "matvit", seed, sampling(seed, probabilities=list(row)))


def name(row: Sequence[float]) -> str:
    """Such as ".44/.31/.15/.10"."""
    return "/".join(f"{p:.2f}".removeprefix("0") for p in row)


def report(experiment: Experiment, results: Sequence[dict[str, Scores]]) -> None:
    """Write report.md, metrics.json and the plot, and show the main table."""
    cells: dict[str, list[list[str]]] = {"accuracy": [], "loss": []}
    for row, paper in TABLE_6.items():
        for metric, scale, digits in (("accuracy", 100, 1), ("loss", 1, 3)):
            found = [
                mean_sd([r[name(row)][size][metric] for r in results], scale, digits)
                for size in GRANULARITIES
            ]
            cells[metric].append([name(row), *found])
        cells["loss"][-1] += [f"{value:.3f}" for value in paper]
    independent = ["independent", *[""] * 4, *(f"{value:.3f}" for value in INDEPENDENT)]
    header = ["p_S/p_M/p_L/p_XL", *GRANULARITIES]
    plot(experiment, results)
    show_table(f"Sampling ({experiment.preset}): validation accuracy, %", header, cells["accuracy"])
    text = [
        f"# Sampling probabilities (Table 6), preset {experiment.preset}",
        experiment.provenance(len(results)),
        "Validation accuracy in %, mean ± standard deviation over seeds:",
        markdown_table(header, cells["accuracy"]),
        "Validation loss in nats, beside the paper's validation log-perplexity of an 850M language "
        "model. Task and scale differ: compare how a row changes from size to size.",
        markdown_table(
            [*header, *(f"paper {size}" for size in GRANULARITIES)], [*cells["loss"], independent]
        ),
        "![loss of each size, less that of equal probabilities](probabilities.png)",
    ]
    metrics = {"provenance": experiment.provenance(len(results)), "seeds": results}
    write_report(experiment.out, text, metrics)


def plot(experiment: Experiment, results: Sequence[dict[str, Scores]]) -> None:
    """Loss of each size less its loss under equal probabilities, beside the paper's."""
    ours: dict[tuple[float, ...], Sequence[float]] = {
        row: [
            statistics.fmean(r[name(row)][size]["loss"] for r in results) for size in GRANULARITIES
        ]
        for row in TABLE_6
    }
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    titles = (f"ours, preset {experiment.preset}", "paper (850M MatLM)")
    for axis, table, title in zip(axes, (ours, TABLE_6), titles, strict=True):
        for row, losses in table.items():
            change = [a - b for a, b in zip(losses, table[UNIFORM], strict=True)]
            axis.plot(GRANULARITIES, change, "o-", label=name(row))
        axis.set_title(title)
        axis.set_ylabel("loss less that of equal probabilities")
        axis.grid(alpha=0.3)
    axes[1].legend(title="S/M/L/XL")
    save_plot(figure, experiment.out / "probabilities.png")


if __name__ == "__main__":
    console(main)
