"""Do tuning methods differ less in larger models? (Section 4, Fig. 2)

Trains four parameter-efficient methods and full fine-tuning on models of growing size. For each
model, task and seed it measures the standard deviation between the four methods' scores, in points.
Where the grid has several learning rates, every method has as many trials, full fine-tuning
included; in published runs but that of MiniLM, bge-small and SmolLM2 it had only one.

    python -m recipes.apet.scales                  generated sentences, on a CPU
    make weights && python -m recipes.apet.scales --preset small --seeds 3 --jobs 2
    python -m recipes.apet.scales --preset paper --seeds 3     BERT, BLOOM and T5
"""

import statistics
from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd

from recipes.apet.cells import (
    GRID,
    MEASURED_ON,
    METHODS,
    PAIRS,
    PET,
    cells,
    chosen,
    fits,
    gain,
    gates,
    learnt,
    majority,
    options,
    points,
    pretrain,
    score,
    tasks_for,
    uncollapsed,
)
from recipes.claims import NOT_JUDGED, SUPPORTED, Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.plots import groups
from recipes.provenance import provenance
from recipes.results import Row, select
from recipes.runner import run_experiment
from recipes.tables import COLLAPSED, Column, Table, tabulate

FIG_2 = {  # standard deviation between methods, mean over tasks: smallest to largest model
    "BERT small, base, large": "5.08, 3.63, 2.65",
    "BLOOM 560M, 7.1B": "3.46, 2.50",
    "T5 small, XXL": "2.75, 1.72",
}


def declare(run: Run) -> None:
    """Declare every method's training on every model and task, and the methods' deviation."""
    grid = run.grid(GRID)
    rows = run.rows(grid["methods"])
    for seed in run.seeds:
        for model in chosen(run, "models", grid["models"]):
            if grid["models"][model].get("pretrain"):
                nodes = {"stage": pretrain(run, grid, model)}
                run.measure(f"pretrain {model} loss", 0, measure_pretraining, nodes, {"row": model})
            for task in tasks_for(run, grid, model):
                by_row = {cell.row: cell for cell in cells(grid, [model], [task], rows, seed)}
                scores = {row: score(run, grid, cell) for row, cell in by_row.items()}
                if "full" in by_row:
                    gain(run, grid, by_row["full"])  # needs no method's trials
                else:
                    majority(run, grid, by_row[rows[0]])
                if scores.keys() >= set(PET):
                    pet = {row: scores[row] for row in PET}
                    name, settings = f"{task} {model} deviation", {"set": task, "row": model}
                    run.measure(name, seed, measure_deviation, pet, settings)


def measure_deviation(m: Measuring) -> Iterator[Row]:
    """The standard deviation between the four methods' scores, in points.

    `uncollapsed` is 1 if each of them predicts more than one class, else 0: a training that failed
    says nothing about its method.
    """
    deviation = statistics.stdev(points(m.stages).values())
    for metric, value in (("deviation", deviation), ("uncollapsed", uncollapsed(m.stages))):
        yield Row(row=m.settings["row"], set=m.settings["set"], metric=metric, value=value)


def measure_pretraining(m: Measuring) -> Iterator[Row]:
    """The masked-LM loss on held-out text after pre-training, in nats."""
    yield Row(
        row=m.settings["row"], metric="pretraining", value=m.stages["stage"].metrics["val/mae"]
    )


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """The deviation by model, every score, and the paper's numbers."""
    grid = run.grid(GRID)
    models, tasks = chosen(run, "models", grid["models"]), chosen(run, "tasks", grid["tasks"])
    missing = [METHODS[row] for row in PET if row not in set(table["row"])]
    if missing:
        text = f"No standard deviation between methods: {', '.join(missing)} not trained."
    else:
        text = (
            "**Standard deviation between Prompt, BitFit, LoRA and Adapter**, in points. The "
            f"column `− {models[0]}` is the difference to the smallest model, paired by seed, with "
            "its 95 % interval."
        )
    deviation = [
        *(Column(task, "deviation", {"set": task}, digits=2) for task in tasks),
        Column("mean", "deviation", mean_over="set", digits=2),
    ]
    if len(models) > 1:
        smallest = Column(
            f"− {models[0]}", "deviation", mean_over="set", reference=models[0], digits=2
        )
        deviation.append(smallest)
    if (table["metric"] == "pretraining").any():
        deviation.append(Column("masked-LM loss", "pretraining", digits=2, spread=""))
    parts = [
        f"# Tuning methods and scale, preset {run.preset}",
        provenance(run, table),
        text,
        tabulate(table, models, deviation, heading="model").markdown(),
    ]
    for task in tasks:
        columns = [
            Column(model, "score", {"set": f"{task}, {model}"}, scale=100)
            for model in models
            if fits(grid, model, task)
        ]
        shown = tabulate(table, METHODS, columns, heading="method")
        parts += [f"**{task}**, {grid['metrics'][task]} in %:", shown.markdown()]
    groups(
        by_model(table, tasks, models), run.out / "scales.png", "score", models, panel="set",
        titles=METHODS, scale=100, ylabel="score, %", remarks=shut_gates(table, tasks, models),
    )  # fmt: skip
    return [
        *parts,
        "![Score by model and method](scales.png)",
        "A dot is one seed, with a cross where its predictions collapsed to one class; bars are "
        "mean ± standard deviation over seeds.",
        "**The paper's Fig. 2**: the same deviation, mean over its tasks.",
        Table(
            ["models", "deviation, smallest to largest"], [list(r) for r in FIG_2.items()]
        ).markdown(),
    ]


def by_model(table: pd.DataFrame, tasks: Sequence[str], models: Sequence[str]) -> pd.DataFrame:
    """The scores for the plot: `set` is the task, and `x` the model's place among `models`.

    With them come the numbers of classes that they predict.
    """
    return pd.concat(
        select(table, {"metric": ["score", COLLAPSED], "set": f"{task}, {model}"}).assign(
            set=task, x=float(place)
        )
        for task in tasks
        for place, model in enumerate(models)
    )


def shut_gates(table: pd.DataFrame, tasks: Sequence[str], models: Sequence[str]) -> dict[str, str]:
    """Task → which models have not learnt it in full fine-tuning, so that methods cannot differ."""
    remarks = {}
    for task in tasks:
        scored = select(table, {"set": task})
        asked = {model: learnt(model) for model in models}
        shut = [
            model
            for model, gate in asked.items()
            if gate.verdict(gate.difference(scored)) not in (SUPPORTED, NOT_JUDGED)
        ]
        if shut:
            remarks[task] = (
                f"gate shut: full fine-tuning of {', '.join(shut)}\n"
                "is not reliably five points above the majority class"
            )
    return remarks


def falls(small: str, large: str, preset: str) -> Claim:
    """The claim that the deviation is smaller in the larger model."""
    return Claim(
        name=f"deviation falls: {small} → {large}",
        paper="APET",
        sentence="The standard deviation between tuning methods is smaller in "
        f"{large} than in {small}.",
        where="Section 4, Fig. 2",
        number="BERT 5.08 → 2.65, BLOOM 3.46 → 2.50, T5 2.75 → 1.72",
        test=Comparison("deviation", small, large, mean_over="set"),
        gate=gates((small, large), "uncollapsed", "no training has collapsed"),
        preset=preset,
    )


CLAIMS = [
    falls(*pair, preset) for pair, preset in {**PAIRS, ("MiniLM", "SmolLM2"): "small"}.items()
]
WIDTHS_ON = "BERTs of {models} pre-trained here on wikitext2, {sets}"
EXPERIMENT = Experiment(
    "apet.scales", __file__, "encoder", __doc__ or "", declare, report, options,
    measured_on={**MEASURED_ON, "small_widths": WIDTHS_ON},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
