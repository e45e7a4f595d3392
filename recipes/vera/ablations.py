"""What VeRA needs: its rank, both vectors, its initialisations, shared matrices.

The rank sweep of Section 4.5 (Fig. 2) against LoRA's, and Tables 6 and 7 of Section 4.6, on GLUE
tasks. A run is one of recipes.vera.glue: its score is that of its best evaluation, and the tables
give the median over seeds. Every rank and every variant trains with the learning rates of its
method; none is tuned for itself.

    python -m recipes.vera.ablations                            a generated task: seconds
    make weights && python -m recipes.vera.ablations --preset small --seeds 3
                                                                SST-2 and MiniLM
    python -m recipes.vera.ablations --preset paper --seeds 5   RoBERTa-large
"""

import statistics
from collections.abc import Sequence
from typing import Any

from matplotlib import pyplot as plt

from recipes.legacy import Experiment, from_command_line
from recipes.messages import console
from recipes.report import markdown_table, median_range, save_plot, show_table, write_report
from recipes.vera.glue import NAMES, read_grid, train

FAMILIES = ("vera", "lora")
VARIANTS: dict[str, dict[str, Any]] = {
    "only_d": {"model.train": ["d"]},
    "only_b": {"model.train": ["b"]},
    "kaiming_normal": {"model.init": "kaiming_normal"},
    "uniform": {"model.init": "uniform"},
    "d_1e-7": {"model.d_init": 1e-7},
    "d_1.0": {"model.d_init": 1.0},
    "unique": {"model.shared": False},
}
TITLES = {
    "default": "default",
    "only_d": "only d",
    "only_b": "only b",
    "kaiming_normal": "A, B Kaiming normal",
    "uniform": "A, B uniform in [0, 0.1]",
    "d_1e-7": "d starts at 1e-7",
    "d_1.0": "d starts at 1.0",
    "unique": "A, B of each layer's own",
}
TABLE_6 = {  # RoBERTa-large: MRPC, RTE
    "default": (90.5, 85.8),
    "only_d": (89.7, 67.0),
    "only_b": (81.6, 64.3),
    "kaiming_normal": (90.0, 82.6),
    "uniform": (68.9, 53.1),
    "d_1e-7": (90.8, 84.7),
    "d_1.0": (70.3, 60.3),
}
TABLE_7 = {  # RoBERTa-large: MRPC, RTE, CoLA, STS-B
    "shared": (90.0, 84.6, 67.7, 91.5),
    "unique": (90.7, 84.6, 68.3, 91.5),
}

# of one seed: task → row, such as "vera_r64" or "only_d" → score, tuned, heads, seconds
Scores = dict[str, dict[str, dict[str, float]]]


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line("vera.ablations", __file__, "glue", __doc__ or "", argv)
    grid = read_grid(experiment, "ablations_grid")
    plan = glue_grid(grid)
    results: list[Scores] = []
    for seed in range(experiment.seeds):
        results.append({})
        for task in grid["tasks"]:
            results[-1][task] = {
                row: train(experiment, plan, row, task, seed) for row in rows_of(grid, task)
            }
        report(experiment, grid, results)
    return experiment


def sweep(grid: dict[str, Any], family: str) -> dict[str, int]:
    """The ranks of a method's sweep, by row."""
    return {f"{family}_r{rank}": rank for rank in grid["ranks"][family]}


def rows_of(grid: dict[str, Any], task: str) -> list[str]:
    """What is trained on a task, each once: VeRA's default is a rank of the sweep too."""
    rows = []
    if task in grid["ranks"]["tasks"]:
        rows += [row for family in FAMILIES for row in sweep(grid, family)]
    if variants := grid["variants"].get(task):
        rows += [f"vera_r{grid['rank']}", *variants]
    return list(dict.fromkeys(rows))


def glue_grid(grid: dict[str, Any]) -> dict[str, Any]:
    """The grid for `glue.train`: every row is a method of its own, with its method's settings."""
    ranks = [grid["rank"], *grid["ranks"]["vera"]]
    methods = {f"vera_r{r}": {"model.method": "vera", "model.rank": r} for r in ranks}
    for row, rank in sweep(grid, "lora").items():
        methods[row] = {"model.method": "lora", "model.rank": rank}
    for row, changes in VARIANTS.items():
        methods[row] = {"model.method": "vera", "model.rank": grid["rank"], **changes}
    tasks = {}
    for task, settings in grid["tasks"].items():
        of_all = {key: value for key, value in settings.items() if key not in FAMILIES}
        of_rows = {row: settings.get(m["model.method"], {}) for row, m in methods.items()}
        tasks[task] = {**grid["common"], **of_all, **of_rows}
    return {"metrics": grid["metrics"], "methods": methods, "tasks": tasks}


def report(experiment: Experiment, grid: dict[str, Any], results: Sequence[Scores]) -> None:
    """Write report.md, metrics.json and the plot, and show the tables."""

    def score(task: str, row: str) -> str:
        values = [r[task][row]["score"] for r in results if row in r[task]]
        return median_range(values, 100) if values else ""

    swept, varied = grid["ranks"]["tasks"], list(grid["variants"])
    rank_header = ["method", "rank", "tuned parameters", *swept]
    rank_rows = [
        [
            NAMES[family],
            str(rank),
            f"{results[0][swept[0]][row]['tuned']:,.0f}",
            *(score(task, row) for task in swept),
        ]
        for family in FAMILIES
        for row, rank in sweep(grid, family).items()
    ]
    default = f"vera_r{grid['rank']}"
    rows = {"default": default} | {name: name for name in VARIANTS}
    header = ["variant", "tuned parameters", *varied, "paper, MRPC", "paper, RTE"]
    variant_rows = []
    for name, row in rows.items():
        found = [results[0][task][row] for task in varied if row in results[0][task]]
        if found:
            paper = map(str, TABLE_6.get(name, ("", "")))
            scores = [score(task, row) for task in varied]
            variant_rows.append([TITLES[name], f"{found[0]['tuned']:,.0f}", *scores, *paper])
    show_table(f"Ranks ({experiment.preset})", rank_header, rank_rows)
    show_table(f"Variants of VeRA ({experiment.preset})", header, variant_rows)
    plot(experiment, grid, results)
    metrics = ", ".join(f"{task} {grid['metrics'][task]}" for task in grid["tasks"])
    text = [
        f"# Ranks and variants of VeRA, preset {experiment.preset}",
        experiment.provenance(len(results)),
        "Development sets, the best evaluation of each run; median over seeds and, in brackets, "
        f"the lowest and highest ({metrics}), in %. Tuned parameters are those beside the heads. "
        "All rows of a method have its learning rates, and none its own.",
        "**Ranks** (Section 4.5, Fig. 2, which has no numbers; the paper's are RTE and "
        "RoBERTa-large):",
        markdown_table(rank_header, rank_rows),
        "![Score against tuned parameters](ranks.png)",
        f"**Variants** of VeRA at rank {grid['rank']} (Table 6, RoBERTa-large, rank 256). The "
        "default draws A and B Kaiming uniform, shares them and starts d at 0.1. Only d leaves b "
        "at 1 and starts d at 0, only b leaves d at 0.1, so that both start from the base.",
        markdown_table(header, variant_rows),
        "**The paper's Table 7**, shared matrices against those of each layer's own:",
        markdown_table(
            ["", "MRPC", "RTE", "CoLA", "STS-B"],
            [[name, *map(str, values)] for name, values in TABLE_7.items()],
        ),
        "The scale differs unless the preset is `paper`: compare how the rows stand to each other, "
        "not the numbers.",
    ]
    content = {"provenance": experiment.provenance(len(results)), "seeds": results}
    write_report(experiment.out, text, content)


def plot(experiment: Experiment, grid: dict[str, Any], results: Sequence[Scores]) -> None:
    """Score against tuned parameters for the ranks of both methods, one panel for each task."""
    tasks = grid["ranks"]["tasks"]
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.5 * len(tasks), 4), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for family in FAMILIES:
            rows = sweep(grid, family)
            tuned = [results[0][task][row]["tuned"] for row in rows]
            values = [[100 * r[task][row]["score"] for r in results] for row in rows]
            (line,) = axis.plot(
                tuned, [statistics.median(v) for v in values], "o-", label=NAMES[family]
            )
            axis.fill_between(
                tuned,
                list(map(min, values)),
                list(map(max, values)),
                alpha=0.15,
                fc=line.get_color(),
            )
            for x, v, rank in zip(tuned, values, rows.values(), strict=True):
                place = (x, statistics.median(v))
                axis.annotate(f"r {rank}", place, (0, 6), textcoords="offset points", fontsize=7)
        axis.set(title=task, xscale="log", xlabel="tuned parameters", ylabel="score, %")
        axis.legend()
    save_plot(figure, experiment.out / "ranks.png")


if __name__ == "__main__":
    console(main)
