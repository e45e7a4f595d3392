"""The report of recipes.self_distillation.images and text, made from the table of results."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from recipes.experiment import Run
from recipes.plots import curves
from recipes.provenance import provenance
from recipes.results import select, unique
from recipes.tables import Column, Table, tabulate

TITLES = {
    "majority": "largest class",
    "scratch": "from scratch",
    "finetune": "fine-tune only",
    "recadam": "RecAdam",
    "mars": "MARS",
    "r3f": "R3F",
    "supcon": "supervised contrastive pre-training",
    "further": "further pre-training",
    "further_x2": "further pre-training × 2",
    "self_distillation": "self-distillation",
    "rounds_2": "self-distillation, 2 rounds",
    "rounds_3": "self-distillation, 3 rounds",
    "rounds_4": "self-distillation, 4 rounds",
    "match_all": "self-distillation, all tokens",
    "match_cls": "self-distillation, [CLS] alone",
    "without_mae": "w/o L_MAE",
    "predictions": "prediction matching",
    "weights_l2": "weight matching, ℓ2",
    "weights_mars": "weight matching, MARS",
    "lambda_0.5": "λ = 0.5",
    "lambda_0.3": "λ = 0.3",
    "lambda_0.1": "λ = 0.1",
}
ADAPTATIONS = {  # titles of the stages between pre-training and fine-tuning
    **TITLES,
    "distil": TITLES["self_distillation"],
    **{f"distil_{made}": TITLES[f"rounds_{made}"] for made in (2, 3, 4)},
    "contrast": TITLES["supcon"],
}
PERCENT: dict[str, Any] = {"scale": 100}

# A paper's table: caption → (columns, row → cells)
PaperTables = Mapping[str, tuple[Sequence[str], Mapping[str, Sequence[str]]]]


def report(table: pd.DataFrame, run: Run, kind: str, paper: PaperTables, use: str) -> list[str]:
    """Paragraphs of Markdown; plots go into run.out.

    Args:
        table: the tidy table.
        run: of the experiment.
        kind: "images" or "text".
        paper: the paper's own tables.
        use: lines of Python that classify something new with `model` and `data`.
    """
    grid = run.grid("shared_grid", f"{kind}_grid")
    text = [
        f"# Self-distillation for further pre-training, {kind}, preset {run.preset}",
        provenance(run, table),
    ]
    if grid["steps"]:
        text += by_steps(table, run, grid)
    else:
        text += [
            *scores(table, run, grid),
            *sizes(table, run, grid),
            *classifier(table, run, grid, use),
            *analyses(table, run),
            *times(table),
        ]
    text += [*adaptations(table, run), *paper_tables(paper)]
    return text


def scores(table: pd.DataFrame, run: Run, grid: Mapping[str, Any]) -> list[str]:
    """Every row's score on each set, and its paired differences to two of the baselines."""
    which = run.options.select or grid["select"]
    chosen = "best on the validation part" if which == "best" else "after the last step"
    columns = []
    for name, metric in grid["metrics"].items():
        where = {"set": name}
        columns.append(Column(f"{name}, {metric}", metric, where, **PERCENT))
        if len(select(table, {"set": name, "metric": f"new_{metric}"})):
            columns.append(Column(f"{name}, new texts", f"new_{metric}", where, **PERCENT))
        columns += [
            Column(f"− {TITLES[row]}", metric, where, **PERCENT, reference=row)
            for row in ("finetune", "further")
            if len(select(table, {"set": name, "metric": metric, "row": row}))
        ]
    new_texts = " `new texts` are the test texts that are not also in the training part."
    if not any("new texts" in column.title for column in columns):
        new_texts = ""
    shown = tabulate(table, TITLES, columns)
    shown.show(f"self-distillation, {run.preset}, %")
    return [
        f"On the test part, in %, mean ± standard deviation over seeds, of the weights {chosen}. "
        "Every row but `from scratch` starts from the same original weights; rows that share an "
        "adaptation share its training. RecAdam's and MARS's settings are the best of their "
        f"candidates on the validation part of seed 0.{new_texts}",
        shown.markdown(),
    ]


def by_steps(table: pd.DataFrame, run: Run, grid: Mapping[str, Any]) -> list[str]:
    """Fig. 1: the score against the number of adaptation steps; held-out L_MAE beside it."""
    text = ["## Steps of further pre-training (Fig. 1)"]
    for name, metric in grid["metrics"].items():
        part = select(table, {"set": name})
        rows = [row for row in unique(part.dropna(subset=["x"]), "row") if row in TITLES]
        points = select(part, {"metric": metric, "row": rows}).dropna(subset=["x"])
        places = list(unique(points, "x"))
        columns = [
            Column(TITLES[row], metric, {"set": name, "row": row}, **PERCENT)
            for row in rows
            if len(select(part, {"metric": metric, "row": row}).dropna(subset=["x"]))
        ]
        columns += [
            Column(
                f"{ADAPTATIONS[row]}: {part} L_MAE",
                f"{part}_mae",
                {"set": name, "row": row},
                digits=3,
            )
            for row in ("further", "distil")
            for part in ("train", "val")
            if len(select(table, {"set": name, "metric": f"{part}_mae", "row": row}))
        ]
        text += [
            f"**{name}, {metric}, %**",
            tabulate(part, places, columns, "x", "steps").markdown(),
        ]
        plot = f"steps {name}.png"
        curves(
            part,
            run.out / plot,
            metric,
            titles=TITLES,
            xlabel="adaptation steps",
            ylabel=f"{metric}, %",
            **PERCENT,
        )
        text.append(f"![score by adaptation steps]({plot.replace(' ', '%20')})")
    return text


def sizes(table: pd.DataFrame, run: Run, grid: Mapping[str, Any]) -> list[str]:
    """Fig. 3: the score by number of labelled examples."""
    if not grid["by_size"]:
        return []
    label = f"{next(iter(grid['metrics'].values()))}, %"
    curves(
        table,
        run.out / "sizes.png",
        "score_by_size",
        titles=TITLES,
        log=True,
        xlabel="labelled examples",
        ylabel=label,
        **PERCENT,
    )
    return ["## Size of the data (Fig. 3)", "![score by labelled examples](sizes.png)"]


def classifier(table: pd.DataFrame, run: Run, grid: Mapping[str, Any], use: str) -> list[str]:
    """Which row is best on the validation part, and how to use its classifier."""
    if (run.options.select or grid["select"]) != "best":
        return []
    text = ["## The classifier"]
    for name, metric in grid["metrics"].items():
        lines = select(table, {"set": name, "metric": f"val_{metric}", "x": None})
        row = lines.groupby("row")["value"].mean().idxmax()
        best = select(lines, {"row": row})
        seed = int(best.loc[best["value"].idxmax(), "seed"])
        made = run.out / f"seed{seed}" / f"{name} {row} scores" / "split.json"
        text.append(
            f"{name}: {TITLES.get(row, row)} is best on the validation part, with "
            f"{100 * best['value'].mean():.1f} %; of its seeds, {seed}."
        )
        parts = json.loads(made.read_text())["parts"] if made.is_file() else {}
        if parts and parts["test"] == parts["val"]:
            text.append(
                "There is no test part of its own: scores above are those of the validation part, "
                "on which the checkpoints were selected, and flatter them."
            )
        text.append(f"```python\n{USE.format(made=made).strip()}\n{use.strip()}\n```")
    return text


USE = """
import json

import datamodules
from lightning_modules.self_distillation import Finetuning

with open("{made}") as file:
    made = json.load(file)
data = getattr(datamodules, made["data"].split(".")[-1])(**made["settings"])
model = Finetuning.load_from_checkpoint(made["checkpoint"], map_location="cpu").eval()
"""


def analyses(table: pd.DataFrame, run: Run) -> list[str]:
    """Training and test loss (Table 4), their gap, and the distance from θ_init (Fig. 5)."""
    text = [
        "## Generalisation gap and distance (Table 4, Fig. 5)",
        "Test loss less training loss, and ‖θ_init − θ_final‖₂ of the encoder (Section 5.2).",
    ]
    names = [name for name in unique(table, "set") if name]
    for name in names:
        where = {"set": name}
        columns = [
            Column("training loss", "train_loss", where, digits=3),
            Column("test loss", "loss", where, digits=3),
            Column("gap", "gap", where, digits=3),
            Column("distance", "distance", where, digits=3),
            Column("training examples", "train_examples", where, digits=0, spread=""),
            Column("test examples", "test_examples", where, digits=0, spread=""),
        ]
        text += [f"**{name}**", tabulate(table, TITLES, columns).markdown()]
    if len(select(table, {"metric": "distance_by_round"})):
        curves(
            table,
            run.out / "rounds.png",
            "distance_by_round",
            panel="set",
            xlabel="rounds of self-distillation (0: further pre-training)",
            ylabel="‖θ_init − θ‖₂",
        )
        text.append("![distance by round](rounds.png)")
    return text


def adaptations(table: pd.DataFrame, run: Run) -> list[str]:
    """Each adaptation's distance from the original weights, and its training and held-out L_MAE."""
    rows = adapted(table, "adaptation_distance")
    if not rows:
        return []
    text = [
        "## Adaptations",
        "L_MAE on the training part is the mean of the last tenth of training. `begins with the "
        "original` is 1 if the first weights were bit for bit the original ones.",
    ]
    for name in unique(select(table, {"metric": "adaptation_distance"}), "set"):
        where = {"set": name}
        columns = [
            Column("begins with the original", "begins_with_original", where, digits=0, spread=""),
            Column("updates", "updates", where, digits=0, spread=""),
            Column("distance", "adaptation_distance", where, digits=3),
            Column("training L_MAE", "train_mae", where, digits=3),
            Column("held-out L_MAE", "val_mae", where, digits=3),
        ]
        text += [f"**{name}**", tabulate(table, rows, columns).markdown()]
    if len(select(table, {"metric": "val_mae_by_steps"})):
        curves(
            table,
            run.out / "mae.png",
            "val_mae_by_steps",
            panel="set",
            titles=ADAPTATIONS,
            xlabel="steps of the adaptation",
            ylabel="L_MAE on the validation part",
        )
        text.append("![held-out L_MAE while adapting](mae.png)")
    return text


def adapted(table: pd.DataFrame, metric: str) -> dict[str, str]:
    """The adaptations that have a metric, with their titles."""
    rows = unique(select(table, {"metric": metric, "x": None}), "row")
    return {row: ADAPTATIONS.get(row, row) for row in rows}


def times(table: pd.DataFrame) -> list[str]:
    """Seconds of training (Appendix B); empty if every one was disturbed by other programs."""
    columns = [Column("fine-tuning", "seconds", mean_over="set", digits=1)]
    adapting = [Column("adaptation", "adaptation_seconds", mean_over="set", digits=1)]
    rows = adapted(table, "adaptation_seconds")
    if not rows:
        return []
    return [
        "## Time",
        "Seconds of training (Appendix B). The paper, CUB on one RTX 3090: 32 min of fine-tuning, "
        "1 h 30 more with further pre-training, another 5 h 13 with distillation.",
        tabulate(table, rows, adapting).markdown(),
        tabulate(table, TITLES, columns).markdown(),
    ]


def paper_tables(paper: PaperTables) -> list[str]:
    """The paper's own numbers."""
    text = ["## The paper"]
    for caption, (columns, rows) in paper.items():
        lines = [[TITLES.get(row, row), *cells] for row, cells in rows.items()]
        text += [f"**{caption}**", Table(["", *columns], lines).markdown()]
    text.append(
        "The scale differs unless the preset is `paper`: compare how the rows stand to each other, "
        "not the numbers."
    )
    return text
