"""GLUE: VeRA compared with other fine-tuning methods, over several seeds (Tables 2, 8, Fig. 4).

Each method is trained on each task. At `paper`, the score of a training is its best evaluation on
the development set, and the table has the median over seeds, as in the paper. At `small`, learning
rates are chosen on a held-out tenth of the training set, with as many trials for every method, and
the last checkpoint is scored on the development set. The report also has the gain over the head
alone for each thousand parameters (Appendix B).

    python -m recipes.vera.glue                              generated tasks, a minute on a CPU
    make weights && python -m recipes.vera.glue --preset small --seeds 3
                                                             $RECIPES_DATA/glue and MiniLM
    … --preset small_bge                                     the same with bge-small
    python -m recipes.vera.glue --preset paper --seeds 5     RoBERTa-base; `large`: RoBERTa-large

Your own sentences: `python -m recipes fit -c recipes/vera/text.yaml --data.train train.csv`.
"""

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.methods import measure_majority, measure_score
from recipes.plots import scatter
from recipes.provenance import provenance
from recipes.results import Row, by_seed
from recipes.runner import run_experiment
from recipes.tables import Column, Table, summary, tabulate
from recipes.vera.methods import TITLES, learnt, train

TASKS = ("SST-2", "MRPC", "CoLA", "QNLI", "RTE", "STS-B")
TABLE_2 = {  # median of 5 seeds, in the order of TASKS
    "RoBERTa-base, full": (94.8, 90.2, 63.6, 92.8, 78.7, 91.2),
    "RoBERTa-base, LoRA 0.3M": (95.1, 89.7, 63.4, 93.3, 86.6, 91.5),
    "RoBERTa-base, VeRA 0.043M": (94.6, 89.5, 65.6, 91.8, 78.7, 90.7),
    "RoBERTa-large, LoRA 0.8M": (96.2, 90.2, 68.2, 94.8, 85.2, 92.3),
    "RoBERTa-large, VeRA 0.061M": (96.1, 90.9, 68.0, 94.4, 85.9, 91.7),
}
VARIED = ("data.task",)


def declare(run: Run) -> None:
    """Declare the training and score of every method on every task, and of the majority class."""
    grid = run.grid("glue_grid")
    for seed in run.seeds:
        for task in grid["sets"]:
            scoring = {"set": task, "metric": grid["metrics"][task], "part": grid["part"]}
            metric = f"val/{grid['metrics'][task]}"
            scores = {}
            for row in run.rows(grid["rows"]):
                stage = train(run, "glue", grid, row, task, seed, VARIED, metric)
                nodes, settings = {"stage": stage}, {**scoring, "row": row}
                name = f"{task}_{row}.score"
                scores[row] = run.measure(name, seed, measure_score, nodes, settings)
            run.measure(f"{task}_majority", seed, measure_majority, nodes, scoring)
            for row in scores.keys() - {"head", "full", "scratch"} if "head" in scores else ():
                both = {"score": scores[row], "head": scores["head"]}
                settings = {"row": row, "set": task}
                run.measure(f"{task}_{row}.gain", seed, measure_gain, both, settings)


def measure_gain(m: Measuring) -> Iterator[Row]:
    """What a method gains over the head alone for each thousand tuned parameters (Appendix B).

    The printed formula, 100 · (score / head's score) / thousands, needs a head that scores above 0;
    the points gained are 100 · (score − head's score) / thousands.
    """
    scores, head = (m.stages[name].rows.set_index("metric")["value"] for name in ("score", "head"))
    thousands = scores["tuned"] / 1000
    values = {"points per 1K": 100 * (scores["score"] - head["score"]) / thousands}
    if head["score"] > 0:
        values["ratio per 1K"] = 100 * scores["score"] / head["score"] / thousands
    for metric, value in values.items():
        yield Row(metric=metric, value=value, row=m.settings["row"], set=m.settings["set"])


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """The table of all methods, the gains of Appendix B, the plot, and the paper's numbers."""
    grid = run.grid("glue_grid")
    tasks = [task for task in grid["sets"] if task in set(table["set"])]
    top = "full" if "full" in set(table["row"]) else table["row"].iloc[0]
    averaged = learnt(table, tasks, (top, "majority"))
    spread = "range" if grid["part"] == "val" else "sd"
    style: dict[str, Any] = {"scale": 100, "spread": spread}
    over_tasks: dict[str, Any] = {"where": {"set": averaged}, "mean_over": "set"}
    columns = [
        Column("tuned parameters", "tuned", {"set": tasks[0]}, digits=0, spread=""),
        *(Column(task, "score", {"set": task}, **style) for task in tasks),
    ]
    if averaged:
        columns.append(Column("mean", "score", **over_tasks, **style))
        columns += [
            Column(f"− {TITLES[row]}", "score", **over_tasks, scale=100, reference=row)
            for row in ("lora", "full")
            if row in set(table["row"])
        ]
    gains = [
        Column(title, metric, **over_tasks, spread="range", digits=2)
        for title, metric in (("printed formula", "ratio per 1K"), ("points", "points per 1K"))
    ]
    scatter(
        table, run.out / "glue.png", "score", {"tuned": "tuned parameters"}, panel="set",
        titles=TITLES, baselines=["head", "majority"], scale=100, log=True, ylabel="score, %",
        spread=spread,
    )  # fmt: skip
    metrics = ", ".join(f"{task} {grid['metrics'][task]}" for task in tasks)
    shut = [task for task in tasks if task not in averaged]
    protocol = (
        "Development sets, the best evaluation of each run; median over seeds and, in brackets, "
        "lowest and highest"
        if spread == "range"
        else "Development sets, scored once with the last checkpoint; learning rates were chosen "
        "on a held-out part of the training sets. Mean ± standard deviation over seeds"
    )
    heads = summary(by_seed(table, "heads", {"row": top, "set": tasks[0]}), digits=0, spread="")
    return [
        f"# VeRA and the usual ways to fine-tune on GLUE, preset {run.preset}",
        provenance(run, table),
        f"{protocol} ({metrics}), in %. Tuned parameters are those beside the heads, which every "
        f"method trains too ({heads} of {tasks[0]}).",
        tabulate(table, TITLES, columns, heading="method").markdown(),
        f"Not in the mean, because {TITLES[top]} did not score above the majority class: "
        f"{', '.join(shut)}."
        if shut
        else "",
        "![Score against tuned parameters](glue.png)",
        "**Gain for each thousand tuned parameters** (Appendix B), mean of the tasks, median over "
        "seeds. The printed formula, 100 · (score / score of the head alone) / thousands of "
        "parameters, credits a method that gains nothing; beside it stands what is gained, "
        "(score − score of the head alone) / thousands of parameters, in points.",
        tabulate(table, TITLES, gains, heading="method").markdown() if averaged else "",
        "**The paper's Table 2**, median of five seeds:",
        paper_table().markdown(),
        "On MRPC, RTE and STS-B, LoRA on RoBERTa-base starts from a model tuned on MNLI; the other "
        "rows do not. The scale differs unless the preset is `paper` or `large`: compare how the "
        "methods stand to each other, not the numbers.",
    ]


def paper_table() -> Table:
    """The paper's Table 2, with the mean over tasks."""
    return Table(
        ["", *TASKS, "mean"],
        [
            # rounded half up, as the paper's
            [name, *map(str, values), f"{statistics.fmean(values) + 1e-9:.1f}"]
            for name, values in TABLE_2.items()
        ],
    )


LEARNT = Comparison(  # for each task
    "score", "full", "majority", scale=100, digits=1,
    says="full fine-tuning is better than the commonest class or the mean",
)  # fmt: skip
CLAIMS = [
    Claim(
        name="GLUE: VeRA matches LoRA",
        paper="VeRA",
        sentence="VeRA scores at most one point below LoRA, on the mean of the tasks that full "
        "fine-tuning learns.",
        where="Table 2, RoBERTa-large",
        number="87.8 and 87.8",
        test=Comparison(
            "score", "vera", "lora", threshold=-0.01, mean_over="set", scale=100, digits=1
        ),
        gate=LEARNT,
    ),
    Claim(
        name="GLUE: with fewer parameters",
        paper="VeRA",
        sentence="VeRA tunes fewer parameters than LoRA.",
        where="Table 2, RoBERTa-large",
        number="0.061M and 0.8M",
        test=Comparison("tuned", "lora", "vera", mean_over="set", exact=True, digits=0),
    ),
    Claim(
        name="GLUE: VeRA matches full fine-tuning",
        paper="VeRA",
        sentence="VeRA scores at most one point below full fine-tuning, on the mean of the tasks "
        "that full fine-tuning learns.",
        where="Table 2, RoBERTa-base",
        number="85.2 and 85.2",
        test=Comparison(
            "score", "vera", "full", threshold=-0.01, mean_over="set", scale=100, digits=1
        ),
        gate=LEARNT,
    ),
    Claim(
        name="GLUE: VeRA gains most for each parameter",
        paper="VeRA",
        sentence="Per thousand tuned parameters, VeRA gains more points over the head alone than "
        "LoRA.",
        where="Appendix B",
        number="a figure",
        test=Comparison("points per 1K", "vera", "lora", mean_over="set"),
        gate=LEARNT,
    ),
]

EXPERIMENT = Experiment(
    "vera.glue", __file__, "glue", __doc__ or "", declare, report,
    measured_on={"small": "MiniLM (22.7M parameters), {sets}"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
