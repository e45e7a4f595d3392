"""Pre-train plain or nested, fine-tune plain or nested: the grid of Table 7.

ViT → ViT pre-trains and fine-tunes an independent model at each size. ViT → MatViT makes a
pre-trained plain XL elastic by fine-tuning alone (finetune.yaml says how to do that with any timm
ViT). MatViT → ViT fine-tunes the XL of a nested pre-training as a plain model, MatViT → MatViT
keeps it nested. At both stages the four plain models together see as many images as the nested
one, as in recipes.matformer.matvit.

    python -m recipes.matformer.finetune_grid                  digits 0-4, then 0-9: a minute
    python -m recipes.matformer.finetune_grid --preset small   tiny-imagenet, then CIFAR-10
    python -m recipes.matformer.finetune_grid --preset paper --data.root /data
                                                               /data/imagenet21k, /data/imagenet
"""

import statistics
from collections.abc import Sequence

from matplotlib import pyplot as plt

from lightning_modules.matformer.nest import GRANULARITIES
from recipes.legacy import Experiment, StageResult, from_command_line
from recipes.matformer.matvit import BETWEEN, Scores, independent, sampling
from recipes.matformer.submodels import ladder, load, plot_sizes, score, submodel
from recipes.messages import console
from recipes.report import markdown_table, mean_sd, save_plot, show_table, write_report

PLAIN = "ViT → ViT"
TABLE_7 = {  # the paper's ImageNet-1K top-1, % (S, M, L, XL of L/16)
    PLAIN: ("84.42", "85.02", "85.12", "85.26"),
    "ViT → MatViT": ("82.10", "82.79", "84.27", "85.57"),
    "MatViT → ViT": ("", "", "", "85.58"),
    "MatViT → MatViT": ("84.41", "85.02", "85.40", "85.61"),
}


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line(
        "matformer.finetune_grid", __file__, "finetune", __doc__ or "", argv
    )
    results: list[dict[str, Scores]] = []
    for seed in range(experiment.seeds):
        results.append(evaluate(experiment, seed, train(experiment, seed)))
        report(experiment, results)
    return experiment


def train(experiment: Experiment, seed: int) -> dict[str, dict[str, StageResult]]:
    """All stages of one seed; for each row of the table its fine-tuned models.

    A nested model is under "nested", plain ones are under their sizes.
    """
    pretraining = experiment.parsed("pretrain")
    finetuning = experiment.parsed("finetune")
    shares = dict(zip(GRANULARITIES, finetuning.model.init_args.fractions, strict=True))
    nested = experiment.stage("pretrain_matvit", "pretrain", seed, sampling(seed))
    plain = {
        size: experiment.stage(
            f"pretrain_{size}", "pretrain", seed, independent(pretraining, share)
        )
        for size, share in shares.items()
    }

    def finetune(name: str, start: StageResult, size: str = "") -> StageResult:
        """Nested, or plain of the given size."""
        changes = independent(finetuning, shares[size]) if size else sampling(seed)
        init = {"model.init_args.init_from": start.checkpoint}
        return experiment.stage(f"finetune_{name}", "finetune", seed, {**changes, **init})

    return {
        PLAIN: {size: finetune(f"vit_vit_{size}", plain[size], size) for size in GRANULARITIES},
        "ViT → MatViT": {"nested": finetune("vit_matvit", plain["XL"])},
        "MatViT → ViT": {"XL": finetune("matvit_vit", nested, "XL")},
        "MatViT → MatViT": {"nested": finetune("matvit_matvit", nested)},
    }


def evaluate(
    experiment: Experiment, seed: int, stages: dict[str, dict[str, StageResult]]
) -> dict[str, Scores]:
    """Score every size of every row on the validation set."""
    data = experiment.datamodule("finetune", seed)
    scores: dict[str, Scores] = {}
    for row, found in stages.items():
        models = {name: load(stage.checkpoint) for name, stage in found.items()}
        if "nested" in models:
            nested = models["nested"]
            sizes = [submodel(nested, data.image_size, mix) for mix in ladder(nested, BETWEEN)]
        else:
            sizes = [
                submodel(model, data.image_size, None, label=size) for size, model in models.items()
            ]
        scores[row] = score(sizes, data.val_dataloader(), sizes[-1], row)
    return scores


def report(experiment: Experiment, results: Sequence[dict[str, Scores]]) -> None:
    """Write report.md, metrics.json and the plot, and show the table."""
    header = ["pre-train → fine-tune", *GRANULARITIES, *(f"paper {size}" for size in GRANULARITIES)]
    rows = []
    for row, paper in TABLE_7.items():
        cells = []
        for size in GRANULARITIES:
            found = [r[row][size]["accuracy"] for r in results if size in r[row]]
            cells.append(mean_sd(found, 100) if found else "")
        rows.append([row, *cells, *paper])
    sizes = ", ".join(f"{size} {results[0][PLAIN][size]['parameters']:,}" for size in GRANULARITIES)
    plot(experiment, results)
    show_table(
        f"Fine-tuning ({experiment.preset}): validation accuracy, %",
        header[:5],
        [row[:5] for row in rows],
    )
    text = [
        f"# Pre-training and fine-tuning, plain or nested (Table 7), preset {experiment.preset}",
        experiment.provenance(len(results)),
        "Validation accuracy in % after fine-tuning, mean ± standard deviation over seeds, beside "
        "the paper's (L/16, ImageNet-21K → ImageNet-1K, 131M / 156M / 206M / 306M). Parameters "
        f"here, without the classifier: {sizes}. The scale differs unless the preset is `paper`: "
        "compare how rows and sizes stand to each other, not the numbers.",
        markdown_table(header, rows),
        "![accuracy against parameters](finetune_grid.png)",
        "At both stages a nested training sees 4X images and each plain one X, the rule of "
        "Appendix B.3; a plain model that would still improve is therefore behind for lack of "
        "steps.",
    ]
    metrics = {"provenance": experiment.provenance(len(results)), "seeds": results}
    write_report(experiment.out, text, metrics)


def plot(experiment: Experiment, results: Sequence[dict[str, Scores]]) -> None:
    """Accuracy against parameters, one line for each row of the table."""
    figure, axis = plt.subplots(figsize=(9, 4.5))
    curves = {
        row: {
            label: (
                found["parameters"] / 1e6,
                100 * statistics.fmean(r[row][label]["accuracy"] for r in results),
            )
            for label, found in sizes.items()
        }
        for row, sizes in results[0].items()
    }
    plot_sizes(axis, curves, separate=PLAIN)
    axis.set_xlabel("parameters, millions (without classifier)")
    axis.set_ylabel("validation accuracy, %")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    save_plot(figure, experiment.out / "finetune_grid.png")


if __name__ == "__main__":
    console(main)
