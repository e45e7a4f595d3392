"""Ten images of each class: VeRA, LoRA, full fine-tuning and the head alone on ViTs (Section 4.4).

A ViT that was pre-trained on other classes is fine-tuned for ten epochs, its head with a learning
rate of its own, and scored once, after the last. Seeds change which images are drawn, their order
and the head's start; all of them begin with the same pre-trained model: the hub's, or where the
preset has none, one trained here first.

    python -m recipes.vera.images                            digits 0-4, then 5-9: seconds
    python -m recipes.vera.images --preset small --seeds 3   tiny-imagenet, then other classes
    python -m recipes.vera.images --preset paper --seeds 5 --data.root /data
                                                             ViT-B and ViT-L, four data sets
"""

from collections.abc import Sequence
from typing import Any

from recipes.legacy import Experiment, StageResult, from_command_line
from recipes.messages import console
from recipes.report import markdown_table, mean_sd, show_table, write_report
from recipes.vera.glue import NAMES, plot, read_grid

SETS = ("CIFAR-100", "Food-101", "Flowers-102", "RESISC45")
PAPER = {  # accuracy, %, in the order of SETS
    "ViT-B, head only": (77.7, 86.1, 98.4, 67.2),
    "ViT-B, full": (86.5, 90.8, 98.9, 78.9),
    "ViT-B, LoRA": (85.9, 89.9, 98.8, 77.7),
    "ViT-B, VeRA": (84.8, 89.0, 99.0, 77.0),
    "ViT-L, head only": (79.4, 76.5, 98.9, 67.8),
    "ViT-L, full": (86.8, 78.7, 98.8, 79.0),
    "ViT-L, LoRA": (87.0, 79.5, 99.1, 78.3),
    "ViT-L, VeRA": (87.5, 79.2, 99.2, 78.6),
}

# of one seed: method → data set → accuracy, tuned, heads, seconds
Scores = dict[str, dict[str, dict[str, float]]]


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line("vera.images", __file__, "images", __doc__ or "", argv)
    grid = read_grid(experiment, "images_grid")
    start = None
    if grid["pretrain"] is not None:
        start = experiment.stage("pretrain", "images", 0, grid["pretrain"])
    results: list[Scores] = []
    for seed in range(experiment.seeds):
        results.append({method: {} for method in grid["methods"]})
        for name in grid["sets"]:
            for method in grid["methods"]:
                results[-1][method][name] = train(experiment, grid, method, name, seed, start)
        report(experiment, results, start)
    return experiment


def train(
    experiment: Experiment,
    grid: dict[str, Any],
    method: str,
    name: str,
    seed: int,
    start: StageResult | None,
) -> dict[str, float]:
    """Fine-tune on one data set with one method, and take the last accuracy."""
    settings = dict(grid["sets"][name])
    own = {other: settings.pop(other, {}) for other in grid["methods"]}[method]
    overrides = {**settings, "model.method": method, **grid["methods"][method], **own}
    if start is not None:
        overrides["model.init_from"] = start.checkpoint
    result = experiment.stage(f"{name}_{method}", "images", seed, overrides)
    return {
        "accuracy": result.metrics["val/accuracy"],
        "tuned": result.metrics["tuned"],
        "heads": result.metrics["heads"],
        "seconds": result.seconds,
    }


def report(experiment: Experiment, results: Sequence[Scores], start: StageResult | None) -> None:
    """Write report.md, metrics.json and the plot, and show the table."""
    sets = list(next(iter(results[0].values())))
    header = ["method", "tuned parameters", *sets]
    rows = []
    for method, found in results[0].items():
        counts = dict.fromkeys(f"{scores['tuned']:,.0f}" for scores in found.values())
        accuracies = [mean_sd([r[method][name]["accuracy"] for r in results], 100) for name in sets]
        rows.append([NAMES[method], " / ".join(counts), *accuracies])
    show_table(f"Ten images of each class ({experiment.preset}): accuracy, %", header, rows)
    plot(experiment, results, "accuracy", "images", mean=True)
    begin = "Every run begins with the hub's weights."
    if start is not None:
        begin = (
            f"Every run begins with the same ViT, trained here in {start.seconds:.0f} s to an "
            f"accuracy of {100 * start.metrics['val/accuracy']:.1f} % on its own classes."
        )
    text = [
        f"# VeRA and its rivals on images, preset {experiment.preset}",
        experiment.provenance(len(results)),
        "Accuracy in % after the last epoch, mean ± standard deviation over seeds. Tuned "
        "parameters are those beside the head, which every method trains too. Ten training images "
        f"of each class. {begin} LoRA adapts timm's fused qkv as a whole, which at equal rank is "
        "as many parameters as queries and values by themselves.",
        markdown_table(header, rows),
        "![Accuracy against tuned parameters](images.png)",
        "**The paper's numbers**, ViTs pre-trained on ImageNet-21k:",
        markdown_table(["", *SETS], [[name, *map(str, values)] for name, values in PAPER.items()]),
        "The scale differs unless the preset is `paper`: compare how the methods stand to each "
        "other, not the numbers.",
    ]
    metrics = {"provenance": experiment.provenance(len(results)), "seeds": results}
    write_report(experiment.out, text, metrics)


if __name__ == "__main__":
    console(main)
