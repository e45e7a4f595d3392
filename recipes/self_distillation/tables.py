"""The report of recipes.self_distillation.images and text."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import pyplot as plt

from recipes.legacy import Experiment
from recipes.report import (
    markdown_table,
    mean_sd,
    save_plot,
    show_table,
    write_report,
)

NAMES = {
    "finetune": "fine-tune only",
    "recadam": "RecAdam",
    "mars": "MARS",
    "r3f": "R3F",
    "supcon": "supervised contrastive",
    "further": "further pre-training",
    "further_x2": "further pre-training × 2",
    "self_distillation": "self-distillation",
    "rounds_2": "self-distillation, 2 rounds",
    "rounds_3": "self-distillation, 3 rounds",
    "rounds_4": "self-distillation, 4 rounds",
    "match_all": "self-distillation, all tokens",
    "without_mae": "w/o L_MAE",
    "predictions": "prediction matching",
    "weights_l2": "weight matching, ℓ2",
    "weights_mars": "weight matching, MARS",
    "lambda_0.5": "λ = 0.5",
    "lambda_0.3": "λ = 0.3",
    "lambda_0.1": "λ = 0.1",
}
SIZES = ("data.per_class", "data.limit")
ROUNDS = ("further", "self_distillation", "rounds_2", "rounds_3", "rounds_4")
USE = """
import json

import datamodules
from lightning_modules.self_distillation import {module}

with open("{split}") as file:
    made = json.load(file)
data = getattr(datamodules, made["data"].split(".")[-1])(**made["settings"])
model = {module}.load_from_checkpoint("{checkpoint}", map_location="cpu").eval()
"""

# of the paper: caption → (columns, row → values)
Tables = dict[str, tuple[list[str], dict[str, Sequence[float]]]]
# of one seed: set → "rows" → row → scores, and "adaptations" → name → what became of it
Results = dict[str, dict[str, dict[str, Any]]]


@dataclass
class Report:
    """What of a `Study` its report needs.

    Attributes:
        experiment: the run.
        title: of the report.
        grid: what was run; see adaptation.py.
        rows: those of the grid that were.
        select: "last" or "best": which checkpoint was scored.
        original: fingerprint of the weights that everything began with.
        paper: its tables.
        classifier: name of the LightningModule that classifies.
        use: lines of Python that follow USE, and classify something new.
    """

    experiment: Experiment
    title: str
    grid: dict[str, Any]
    rows: list[str]
    select: str
    original: str
    paper: Tables
    classifier: str
    use: str

    def write(self, results: Sequence[Results]) -> None:
        """Write report.md, metrics.json and the plot, and show the table."""
        experiment, sets = self.experiment, list(self.grid["sets"])
        metric = self.grid["metrics"]
        columns = {
            (name, part): f"{name}, {metric[name]}" + ("" if part == "test" else ", new texts")
            for name in sets
            for part in results[0][name]["rows"][self.rows[0]]
            if part in ("test", "new")
        }
        header = ["", *columns.values()]
        table = [
            [
                NAMES.get(row, row),
                *(
                    mean_sd([r[name]["rows"][row][part][metric[name]] for r in results], 100)
                    for name, part in columns
                ),
            ]
            for row in self.rows
        ]
        show_table(f"{self.title} ({experiment.preset}), %", header, table)
        both = any(part == "new" for _, part in columns)
        which = "best on the validation part" if self.select == "best" else "after the last step"
        text = [
            f"# {self.title}, preset {experiment.preset}",
            experiment.provenance(len(results)),
            f"On the test part, in %, mean ± standard deviation over seeds, of the weights {which}"
            ". Every row begins with the same original weights; rows that share an "
            "adaptation share its training."
            + both
            * " `new texts` are the test part without what stands in training too.",
            markdown_table(header, table),
            *(f"{name}: {results[0][name]['data']['remark']}" for name in sets),
            *self.classifiers(results),
            *self.curves(results),
            "## Splits",
            "Examples of each part, and a SHA-256 of which ones, in order. The files "
            "`seed<n>/<set> split.json` have it in full, and name the examples of parts that were "
            "drawn by the seed.",
            self.splits(results),
            "## Generalisation gap and distance",
            "Test loss less training loss, and ‖θ_init − θ_final‖₂ of the encoder (Section 5.2).",
            *self.analyses(results),
            "![distance by round, and generalisation gap](analyses.png)",
            "## Adaptations",
            f"SHA-256 of the original weights: `{self.original[:16]}…`. Each adaptation's own "
            "first weights are compared with it; `val/mae` is L_MAE on the validation part.",
            *self.adaptations(results),
            "## Time",
            "Seconds of training, mean over seeds (Appendix B): all adaptations that a row needs, "
            "and its fine-tuning. The paper, CUB on one RTX 3090: 32 min of fine-tuning, 1 h 30 "
            "more with further pre-training, another 5 h 13 with distillation.",
            *self.times(results),
            "## The paper",
            *(
                f"**{caption}**\n\n"
                + markdown_table(
                    ["", *columns],
                    [[NAMES.get(r, r), *map(str, values)] for r, values in rows.items()],
                )
                for caption, (columns, rows) in self.paper.items()
            ),
            "The scale differs unless the preset is `paper`: compare how the rows stand to each "
            "other, not the numbers.",
        ]
        self.plot(results)
        provenance = experiment.provenance(len(results))
        metrics = {"provenance": provenance, "original": self.original, "seeds": results}
        write_report(experiment.out, text, metrics)

    def classifiers(self, results: Sequence[Results]) -> list[str]:
        """Which row is best on the validation part, and how to use its classifier."""
        if self.select != "best":
            return []
        text = ["## The classifier"]
        for name, metric in self.grid["metrics"].items():
            scores = {
                row: [found[name]["rows"][row]["val"][metric] for found in results]
                for row in self.rows
            }
            row = max(self.rows, key=lambda one: statistics.fmean(scores[one]))
            seed = max(range(len(results)), key=lambda one: scores[row][one])
            checkpoint = results[seed][name]["rows"][row]["checkpoint"]
            split = results[seed][name]["data"]["splits"][name]
            text.append(
                f"{name}: {NAMES.get(row, row)} is best on the validation part, with "
                f"{mean_sd(scores[row], 100)}; of its seeds, {seed}: `{checkpoint}`."
            )
            if split["test"] == split["val"]:
                text.append(
                    "There is no test part of its own: scores above are those of the validation "
                    "part, on which the checkpoints were selected, and flatter them."
                )
            lines = USE.format(
                module=self.classifier,
                split=results[seed][name]["data"]["file"],
                checkpoint=checkpoint,
            )
            text.append(f"```python\n{lines.strip()}\n{self.use.strip()}\n```")
        return text

    def curves(self, results: Sequence[Results]) -> list[str]:
        """Fig. 3, where the sets are one that differs in its size only: score by size, plotted."""
        kinds = [
            {key: value for key, value in one.items() if key not in SIZES}
            for one in self.grid["sets"].values()
        ]
        if len(kinds) == 1 or kinds[1:] != kinds[:-1]:
            return []
        figure, axis = plt.subplots(figsize=(6, 4.2))
        for row in self.rows:
            points = []
            for name, metric in self.grid["metrics"].items():
                size = results[0][name]["data"]["splits"][name]["train"]["examples"]
                found = [100 * one[name]["rows"][row]["test"][metric] for one in results]
                spread = statistics.stdev(found) if len(found) > 1 else 0.0
                points.append((size, statistics.fmean(found), spread))
            sizes, means, spreads = zip(*sorted(points), strict=True)
            axis.errorbar(sizes, means, spreads, marker="o", capsize=2, label=NAMES.get(row, row))
        (metric,) = set(self.grid["metrics"].values())
        axis.set(xscale="log", xlabel="labelled examples", ylabel=f"{metric}, %")
        axis.legend(fontsize="small")
        save_plot(figure, self.experiment.out / "sizes.png")
        return ["## Size of the data", "![score by number of labelled examples](sizes.png)"]

    def splits(self, results: Sequence[Results]) -> str:
        """A table of all sets and seeds."""
        rows = [
            [
                title,
                str(seed),
                *(
                    f"{parts[part]['examples']} · `{parts[part]['sha256'][:12]}`"
                    if part in parts
                    else ""
                    for part in ("train", "val", "test")
                ),
            ]
            for seed, found in enumerate(results)
            for one in found.values()
            for title, parts in one["data"]["splits"].items()
        ]
        return markdown_table(["", "seed", "training", "validation", "test"], rows)

    def analyses(self, results: Sequence[Results]) -> list[str]:
        """A table for each set."""
        header = ["", "training loss", "test loss", "gap", "distance"]
        return [
            f"**{name}**\n\n"
            + markdown_table(
                header,
                [
                    [
                        NAMES.get(row, row),
                        *(
                            mean_sd([pick(r[name]["rows"][row]) for r in results], 1, 3)
                            for pick in (
                                lambda found: found["train"]["loss"],
                                lambda found: found["test"]["loss"],
                                lambda found: found["gap"],
                                lambda found: found["distance"],
                            )
                        ),
                    ]
                    for row in self.rows
                ],
            )
            for name in self.grid["sets"]
        ]

    def adaptations(self, results: Sequence[Results]) -> list[str]:
        """A table for each set."""
        header = ["", "teacher", "begins with the original", "distance", "val/mae"]
        tables = []
        for name in self.grid["sets"]:
            rows = []
            for stage in results[0][name]["adaptations"]:
                found = [r[name]["adaptations"][stage] for r in results]
                same = all(one["start"] == self.original for one in found)
                rows.append(
                    [
                        stage,
                        self.grid["adaptations"][stage].get("teacher", ""),
                        "yes" if same else "no",
                        mean_sd([one["distance"] for one in found], 1, 3),
                        mean_sd([one["mae"] for one in found], 1, 3) if found[0]["mae"] else "",
                    ]
                )
            tables.append(f"**{name}**\n\n" + markdown_table(header, rows))
        return tables

    def times(self, results: Sequence[Results]) -> list[str]:
        """A table of all sets together."""
        rows = []
        for row in self.rows:
            found = [r[name]["rows"][row]["seconds"] for r in results for name in r]
            means = [
                statistics.fmean(one[part] for one in found)
                for part in ("adaptation", "fine-tuning")
            ]
            rows.append([NAMES.get(row, row), *(f"{value:.1f}" for value in [*means, sum(means)])])
        return [markdown_table(["", "adaptation", "fine-tuning", "together"], rows)]

    def plot(self, results: Sequence[Results]) -> None:
        """Fig. 5: distance after each round's adaptation and fine-tuning; and every row's gap."""
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
        rounds = [row for row in ROUNDS if row in self.rows]
        for name in self.grid["sets"]:
            places = [ROUNDS.index(row) for row in rounds]
            adapted, tuned = [], []
            for row in rounds:
                stage = self.grid["rows"][row]["from"]
                adapted.append([r[name]["adaptations"][stage]["distance"] for r in results])
                tuned.append([r[name]["rows"][row]["distance"] for r in results])
            (line,) = left.plot(places, list(map(statistics.fmean, tuned)), "o-", label=name)
            left.plot(
                places,
                list(map(statistics.fmean, adapted)),
                "s--",
                color=line.get_color(),
                label=f"{name}, before fine-tuning",
            )
            gaps = [
                statistics.fmean(r[name]["rows"][row]["gap"] for r in results) for row in self.rows
            ]
            right.plot(gaps, range(len(self.rows)), "o", label=name)
        left.set(
            xlabel="rounds of self-distillation (0: further pre-training)",
            ylabel="‖θ_init − θ‖₂",
            xticks=[ROUNDS.index(row) for row in rounds],
        )
        right.set_yticks(range(len(self.rows)), [NAMES.get(row, row) for row in self.rows])
        right.invert_yaxis()
        right.set_xlabel("test loss − training loss")
        if rounds:
            left.legend(fontsize="small")
        right.legend(fontsize="small")
        save_plot(figure, self.experiment.out / "analyses.png")
