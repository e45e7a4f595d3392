"""Pre-training and fine-tuning, each with a plain or a nested model: the grid of Table 7.

ViT → ViT pre-trains and fine-tunes an independent model at each size. ViT → MatViT nests a plain
pre-trained XL, its neurons in their original order, and fine-tunes it, as in the paper. ViT, sorted
→ MatViT, which is not in the paper, first sorts the neurons by importance (finetune.yaml says how
to do either with any timm ViT). MatViT → ViT fine-tunes the XL of a nested pre-training as a plain
model, MatViT → MatViT keeps it nested. In both stages a plain model trains for a quarter of the
nested model's epochs, as in recipes.matformer.matvit.

    python -m recipes.matformer.finetune_grid --jobs 2         digits 0-4, then 0-9: minutes
    python -m recipes.matformer.finetune_grid --preset small   tiny-imagenet, then CIFAR-10
    python -m recipes.matformer.finetune_grid --preset paper --data.root /data
                                                               /data/imagenet21k, /data/imagenet
"""

from collections.abc import Mapping
from functools import partial

import pandas as pd
from safetensors.torch import save_file

from lightning_modules.matformer.nest import GRANULARITIES
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.matformer import matvit
from recipes.matformer.convergence import measure_training
from recipes.matformer.matvit_measures import measure_alone, measure_chance, measure_nested
from recipes.matformer.matvit_report import CHANCE, said_chance, size_costs
from recipes.matformer.starts import sort
from recipes.messages import console
from recipes.nodes import Artifact, Node
from recipes.plots import scatter
from recipes.provenance import provenance
from recipes.results import Row
from recipes.runner import run_experiment
from recipes.tables import Column, Table, tabulate

ROWS = {
    "vit_vit": "ViT → ViT",
    "vit_matvit": "ViT → MatViT",
    "sorted_matvit": "ViT, sorted → MatViT",
    "matvit_vit": "MatViT → ViT",
    "matvit_matvit": "MatViT → MatViT",
}
TABLE_7 = {  # the paper's ImageNet-1K top-1, % (S, M, L, XL of L/16)
    "vit_vit": ("84.42", "85.02", "85.12", "85.26"),
    "vit_matvit": ("82.10", "82.79", "84.27", "85.57"),
    "sorted_matvit": ("", "", "", ""),
    "matvit_vit": ("", "", "", "85.58"),
    "matvit_matvit": ("84.41", "85.02", "85.40", "85.61"),
}
SORTED = "sorted.safetensors"


def declare(run: Run) -> None:
    """Declare the pre-training, fine-tuning and scores of every row."""
    rows = run.rows(ROWS)
    for seed in run.seeds:
        for row in rows:
            pretraining, finetuning = row.split("_")
            start: Mapping[str, Node | Artifact]
            if pretraining == "matvit":
                start = {"XL": run.stage("pretrain_matvit", "pretrain", seed)}
            else:
                only = "" if row == "vit_vit" else "XL"
                start = plain = matvit.independents(run, "pretrain", seed, "pretrain", only=only)
                run.measure("training of pretrain", seed, measure_training, {"XL": plain["XL"]},
                            {**matvit.MONITORED, "row": "pretrain"})  # fmt: skip
                if pretraining == "sorted":
                    start = {"XL": run.measure("sorted", seed, write_sorted, {**plain}) / SORTED}
            if finetuning == "matvit":
                weights = {"model.init_from": start["XL"]}
                models = {"model": run.stage(f"finetune_{row}", "finetune", seed, varied=weights)}
                run.measure(f"score {row}", seed, measure_nested, models, {"row": row})
                continue
            only = "" if len(start) > 1 else "XL"
            models = matvit.independents(run, "finetune", seed, f"finetune_{row}", start, only)
            run.measure(f"score {row}", seed, measure_alone, models, {"row": row})
            run.measure(f"training of {row}", seed, measure_training, models,
                        {**matvit.MONITORED, "row": row})  # fmt: skip
        run.measure("chance", seed, measure_chance, models)


def write_sorted(m: Measuring) -> list[Row]:
    """Write a plain model's weights with the neurons in order of importance on training images."""
    data, model = m.datamodule("XL"), m.model("XL")
    sort(model, data.train_dataloader())
    save_file(model.state_dict(), m.folder / SORTED)
    return []


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Accuracy of each row and size beside the paper's."""
    titles = {row: title for row, title in ROWS.items() if row in set(table["row"])}
    columns = [Column(size, "accuracy", {"set": size}, scale=100) for size in GRANULARITIES]
    main = tabulate(table, titles, columns, heading="pre-train → fine-tune")
    main.show(f"Fine-tuning ({run.preset}): validation accuracy, %")
    paper = {ROWS[row]: values for row, values in TABLE_7.items()}
    beside = Table(
        [*main.header, *(f"paper {size}" for size in GRANULARITIES)],
        [[*cells, *paper[cells[0]]] for cells in main.rows],
        main.notes,
    )
    costs = {"parameters": "parameters (without classifier)"}
    joined = ["vit_matvit", "sorted_matvit", "matvit_matvit"]
    scatter(table, run.out / "finetune_grid.png", "accuracy", costs,
            titles={**titles, **CHANCE}, joined=joined, baselines=list(CHANCE),
            scale=100, ylabel="validation accuracy, %")  # fmt: skip
    costs_of = next(iter(titles), "vit_vit")
    sizes = tabulate(table, list(GRANULARITIES), size_costs(costs_of), index="set")
    return [
        f"# Pre-training and fine-tuning, plain or nested (Table 7), preset {run.preset}",
        provenance(run, table),
        "Validation accuracy in % after fine-tuning, mean ± standard deviation over seeds, beside "
        "the paper's (L/16, ImageNet-21K → ImageNet-1K, 131M / 156M / 206M / 306M). The scale "
        "differs unless the preset is `paper`: compare how rows and sizes stand to each other, not "
        f"the numbers.{said_chance(table)}",
        beside.markdown(),
        "![accuracy against parameters](finetune_grid.png)",
        "Parameters and multiply-adds without the classifier:",
        sizes.markdown(),
    ]


SIZE_MATTERS = matvit.size_matters("vit_vit")
LEARNT = [matvit.learnt("XL", row) for row in ("pretrain", "vit_vit")]
CLAIMS = [
    Claim(
        name="nested pre-training keeps XL",
        paper="MatFormer",
        sentence="A plain XL fine-tuned from a nested pre-training is at most half a point below "
        "one fine-tuned from a plain pre-training.",
        where="Table 7",
        number="85.58 against 85.26 %",
        test=Comparison(
            "accuracy", "matvit_vit", "vit_vit", where={"set": "XL"}, threshold=-0.005, scale=100
        ),
        gate=[SIZE_MATTERS, *LEARNT],
    ),
    Claim(
        name="nested pre-training helps small sizes",
        paper="MatFormer",
        sentence="With nested fine-tuning, S is more accurate from a nested pre-training than from "
        "a plain one.",
        where="Table 7",
        number="84.41 against 82.10 %",
        test=Comparison("accuracy", "matvit_matvit", "vit_matvit", where={"set": "S"}, scale=100),
        gate=[SIZE_MATTERS, LEARNT[0]],
    ),
]
EXPERIMENT = Experiment(
    "matformer.finetune_grid", __file__, "finetune", __doc__ or "", declare, report
)

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
