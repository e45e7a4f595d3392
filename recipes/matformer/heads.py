"""Nesting attention heads instead of feed-forward neurons (Appendix F.2).

A MatViT whose granularities use the first 1/4, 1/2, 3/4 and all of every attention's heads, beside
the feed-forward one, which is recipes.matformer.matvit's own training, used again if it is there.

    python -m recipes.matformer.heads                            digits, half a minute on a CPU
    python -m recipes.matformer.heads --preset small --seeds 3   tiny-imagenet of $RECIPES_DATA
    python -m recipes.matformer.heads --preset paper --data.root /data/imagenet
"""

from collections.abc import Sequence

from lightning_modules.matformer.nest import GRANULARITIES
from recipes.legacy import Experiment, from_command_line
from recipes.matformer.matvit import BETWEEN, Scores, plot_accuracy, sampling
from recipes.matformer.submodels import ladder, load, score, submodel
from recipes.messages import console
from recipes.report import markdown_table, mean_sd, show_table, write_report

PARTS = {"ffn": "feed-forward nested", "heads": "heads nested"}
FRACTIONS = [0.25, 0.5, 0.75, 1.0]  # of the heads


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line("matformer.heads", __file__, "matvit", __doc__ or "", argv)
    results: list[dict[str, Scores]] = []
    for seed in range(experiment.seeds):
        data = experiment.datamodule("matvit", seed)
        heads = {"model.init_args.part": "heads", "model.init_args.fractions": FRACTIONS}
        stages = {
            "ffn": experiment.sibling("matformer.matvit").stage(
                "matvit", "matvit", seed, sampling(seed)
            ),
            "heads": experiment.stage("heads", "matvit", seed, {**sampling(seed), **heads}),
        }
        scores: dict[str, Scores] = {}
        for part, stage in stages.items():
            model = load(stage.checkpoint)
            sizes = [submodel(model, data.image_size, mix) for mix in ladder(model, BETWEEN)]
            scores[part] = score(sizes, data.val_dataloader(), sizes[-1], PARTS[part])
        results.append(scores)
        report(experiment, results)
    return experiment


def report(experiment: Experiment, results: Sequence[dict[str, Scores]]) -> None:
    """Write report.md, metrics.json and the plot, and show the table."""
    header = ["size"]
    for title in PARTS.values():
        header += [f"{title}: parameters", "multiply-adds", "accuracy, %"]
    rows = []
    for label in GRANULARITIES:
        row = [label]
        for part in PARTS:
            found = [r[part][label] for r in results]
            row += [f"{found[0]['parameters']:,}", f"{found[0]['macs'] / 1e6:,.2f} M"]
            row.append(mean_sd([f["accuracy"] for f in found], 100))
        rows.append(row)
    plot_accuracy(experiment, results, PARTS)
    show_table(f"Heads ({experiment.preset}): validation accuracy, %", header, rows)
    text = [
        f"# Nested attention heads, preset {experiment.preset}",
        experiment.provenance(len(results)),
        "Validation accuracy in %, mean ± standard deviation over seeds; parameters and "
        "multiply-adds without the classifier. S, M, L, XL are 1/8, 1/4, 1/2 and all of the hidden "
        "neurons, or 1/4, 1/2, 3/4 and all of the heads. The plot shows the Mix'n'Match sizes "
        "between them too.",
        markdown_table(header, rows),
        "![accuracy against parameters and multiply-adds](accuracy.png)",
        "Appendix F.2 nests the heads of language models (MatLM-Attn), so no number of the paper "
        "stands here.",
    ]
    metrics = {"provenance": experiment.provenance(len(results)), "seeds": results}
    write_report(experiment.out, text, metrics)


if __name__ == "__main__":
    console(main)
