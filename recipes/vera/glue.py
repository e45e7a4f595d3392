"""GLUE: VeRA against the usual ways to fine-tune, over several seeds (Tables 2, 8, Fig. 4).

Each task is trained with each method; its score is that of the best evaluation of a run on the
development set, as the paper has it, and the table gives the median over seeds. Besides, the gain
over the head alone for each thousand parameters (Appendix B).

    python -m recipes.vera.glue                              generated tasks, a minute on a CPU
    make weights && python -m recipes.vera.glue --preset small --seeds 3
                                                             $RECIPES_DATA/glue and MiniLM
    python -m recipes.vera.glue --preset paper --seeds 5     RoBERTa-base

Your own sentences: `python -m recipes fit -c recipes/vera/text.yaml --data.train train.csv`.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib import pyplot as plt

from recipes.legacy import Experiment, from_command_line
from recipes.messages import console
from recipes.report import markdown_table, median_range, save_plot, show_table, write_report

NAMES = {
    "head": "head only",
    "bitfit": "BitFit",
    "lora": "LoRA",
    "lora_fa": "LoRA-FA",
    "adapter_h": "Adapter-H",
    "adapter_l": "Adapter-L",
    "adapter_p": "Adapter-P",
    "adapter_d": "Adapter-D",
    "vera": "VeRA",
    "full": "full",
}
TASKS = ("SST-2", "MRPC", "CoLA", "QNLI", "RTE", "STS-B")
TABLE_2 = {  # median of 5 seeds, in the order of TASKS
    "RoBERTa-base, full": (94.8, 90.2, 63.6, 92.8, 78.7, 91.2),
    "RoBERTa-base, LoRA 0.3M": (95.1, 89.7, 63.4, 93.3, 86.6, 91.5),
    "RoBERTa-base, VeRA 0.043M": (94.6, 89.5, 65.6, 91.8, 78.7, 90.7),
    "RoBERTa-large, LoRA 0.8M": (96.2, 90.2, 68.2, 94.8, 85.2, 92.3),
    "RoBERTa-large, VeRA 0.061M": (96.1, 90.9, 68.0, 94.4, 85.9, 91.7),
}

# of one seed: method → task → score, tuned, heads, seconds
Scores = dict[str, dict[str, dict[str, float]]]


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line("vera.glue", __file__, "glue", __doc__ or "", argv)
    grid = read_grid(experiment, "glue_grid")
    results: list[Scores] = []
    for seed in range(experiment.seeds):
        results.append({method: {} for method in grid["methods"]})
        for task in grid["tasks"]:
            for method in grid["methods"]:
                results[-1][method][task] = train(experiment, grid, method, task, seed)
        report(experiment, grid, results)
    return experiment


def read_grid(experiment: Experiment, name: str) -> dict[str, Any]:
    """What the experiment varies at this preset: a YAML file beside the stage's."""
    return experiment.grid(name)


def train(
    experiment: Experiment, grid: dict[str, Any], method: str, task: str, seed: int
) -> dict[str, float]:
    """Train one task with one method, and take its best evaluation."""
    settings = dict(grid["tasks"][task])
    own = settings.pop(method, {})
    for other in grid["methods"]:
        settings.pop(other, None)
    overrides = {
        "model.method": method,
        "data.task": task,
        **grid["methods"][method],
        **settings,
        **own,
    }
    result = experiment.stage(f"{task}_{method}", "glue", seed, overrides)
    return {
        "score": max(result.history[f"val/{grid['metrics'][task]}"]),
        "tuned": result.metrics["tuned"],
        "heads": result.metrics["heads"],
        "seconds": result.seconds,
    }


def gains(results: Sequence[Scores], method: str) -> list[float]:
    """Appendix B by seed: 100 · score / head's score for each 1,000 parameters, mean of tasks.

    A task in which the head reaches nothing (CoLA's correlation may be 0) is left out.
    """
    values = []
    for scores in results:
        ratios = [
            100 * found["score"] / scores["head"][task]["score"] / (found["tuned"] / 1000)
            for task, found in scores[method].items()
            if scores["head"][task]["score"] > 0
        ]
        if ratios:
            values.append(statistics.fmean(ratios))
    return values


def report(experiment: Experiment, grid: dict[str, Any], results: Sequence[Scores]) -> None:
    """Write report.md, metrics.json and the plot, and show the table."""
    tasks = list(grid["tasks"])
    header = ["method", "tuned parameters", *tasks, "mean", "gain per 1K"]
    rows = []
    for method, found in results[0].items():
        means = [statistics.fmean(s["score"] for s in r[method].values()) for r in results]
        gain = gains(results, method) if method != "head" else []
        rows.append(
            [
                NAMES[method],
                f"{found[tasks[0]]['tuned']:,.0f}",
                *(median_range([r[method][task]["score"] for r in results], 100) for task in tasks),
                median_range(means, 100),
                median_range(gain, 1, 3) if gain else "",
            ]
        )
    show_table(f"GLUE ({experiment.preset})", header, rows)
    plot(experiment, results)
    metrics = ", ".join(f"{task} {grid['metrics'][task]}" for task in tasks)
    text = [
        f"# VeRA and its rivals on GLUE, preset {experiment.preset}",
        experiment.provenance(len(results)),
        "Development sets, the best evaluation of each run; median over seeds and, in brackets, "
        f"the lowest and highest ({metrics}), in %. Tuned parameters are those beside the heads, "
        f"which every method trains too ({results[0]['head'][tasks[0]]['heads']:,.0f} of "
        f"{tasks[0]}). Gain per 1K is Appendix B's: 100 · score / score of the head alone, for "
        "each thousand tuned parameters; mean of the tasks.",
        markdown_table(header, rows),
        "![Score against tuned parameters](glue.png)",
        "**The paper's Table 2**, median of five seeds:",
        markdown_table(
            ["", *TASKS, "mean"],
            [
                [name, *map(str, values), f"{statistics.fmean(values):.1f}"]
                for name, values in TABLE_2.items()
            ],
        ),
        "LoRA's row of RoBERTa-base starts MRPC, RTE and STS-B from an MNLI model; the others do "
        "not. The scale differs unless the preset is `paper`: compare how the methods stand to "
        "each other, not the numbers.",
    ]
    metrics_file = {"provenance": experiment.provenance(len(results)), "seeds": results}
    write_report(experiment.out, text, metrics_file)


def plot(
    experiment: Experiment,
    results: Sequence[Scores],
    key: str = "score",
    name: str = "glue",
    mean: bool = False,
) -> None:
    """A score against tuned parameters, one panel for each task; a dotted line is the head's.

    Args:
        experiment: where to.
        results: by seed.
        key: which score, a share of one.
        name: of the file.
        mean: of the seeds, with their standard deviation; else their median, with their range.
    """
    tasks = list(next(iter(results[0].values())))
    figure, axes = plt.subplots(1, len(tasks), figsize=(3.2 * len(tasks) + 1.5, 3.6), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for method in results[0]:
            values = [100 * r[method][task][key] for r in results]
            centre = statistics.fmean(values) if mean else statistics.median(values)
            if method == "head":
                axis.axhline(centre, color="grey", ls=":", label=NAMES[method])
                continue
            spread = [[centre - min(values)], [max(values) - centre]]
            if mean:
                sd = statistics.stdev(values) if len(values) > 1 else 0.0
                spread = [[sd], [sd]]
            tuned = results[0][method][task]["tuned"]
            axis.errorbar(tuned, centre, spread, fmt="o", capsize=3, label=NAMES[method])
        axis.set(title=task, xscale="log", xlabel="tuned parameters")
    axes[0][0].set_ylabel(f"{key}, %")
    axes[0][-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize="small")
    save_plot(figure, experiment.out / f"{name}.png")


if __name__ == "__main__":
    console(main)
