"""Nesting attention heads instead of feed-forward neurons (Appendix F.2).

A MatViT whose granularities use the first 1/4, 1/2, 3/4 and all heads of every attention, beside
the MatViT with nested feed-forward networks of recipes.matformer.matvit, which is trained here if
that experiment has not been run.

    python -m recipes.matformer.heads --jobs 2                   handwritten numbers, on a CPU
    python -m recipes.matformer.heads --preset small --seeds 3   tiny-imagenet of $RECIPES_DATA
    python -m recipes.matformer.heads --preset paper --data.root /data/imagenet
"""

import math
from functools import partial
from typing import Any

import pandas as pd
import torch

from lightning_modules.backbones import build_vision
from lightning_modules.matformer.nest import GRANULARITIES
from recipes.experiment import Experiment, Run
from recipes.matformer import matvit
from recipes.matformer.matvit_measures import measure_chance, measure_nested
from recipes.matformer.matvit_report import CHANCE, said_chance, size_costs
from recipes.messages import console
from recipes.plots import scatter
from recipes.provenance import provenance
from recipes.runner import run_experiment
from recipes.tables import Column, tabulate

PARTS = {"ffn": "feed-forward nested", "heads": "heads nested"}
FRACTIONS = [0.25, 0.5, 0.75, 1.0]  # of the heads, rounded up to whole heads


def declare(run: Run) -> None:
    """Declare the training and the scores of both models."""
    model = run.parsed("matvit").model.init_args
    count = heads_of(model.architecture, model.model_args or {})
    whole = [math.ceil(fraction * count) / count for fraction in FRACTIONS]
    for seed in run.seeds:
        heads = {"model.part": "heads", "model.fractions": whole}
        models = {
            "ffn": matvit.nested(run.sibling("matformer.matvit"), "matvit", seed),
            "heads": matvit.training(run, "heads", seed, heads),
        }
        for part, model in models.items():
            name = f"score {part}"
            run.measure(name, seed, measure_nested, {"model": model}, {"row": part})
        run.measure("chance", seed, measure_chance, {"model": models["heads"]})


def heads_of(architecture: str, model_args: dict[str, Any]) -> int:
    """The number of a ViT's attention heads."""
    with torch.device("meta"):
        parts = build_vision(architecture, 0, model_args).modules()
    layer: Any = next(part for part in parts if hasattr(part, "num_heads"))
    return layer.num_heads


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Accuracy against size, for both."""
    columns = [
        column
        for part, title in PARTS.items()
        for column in (
            *size_costs(part),
            Column(f"{title}: accuracy, %", "accuracy", {"row": part}, scale=100),
        )
    ]
    main = tabulate(table, list(GRANULARITIES), columns, index="set", heading="size")
    main.show(f"Heads ({run.preset}): validation accuracy, %")
    costs = {"parameters": "parameters (without classifier)", "macs": "multiply-adds"}
    scatter(table, run.out / "accuracy.png", "accuracy", costs,
            titles={**PARTS, **CHANCE}, joined=list(PARTS), baselines=list(CHANCE),
            scale=100, ylabel="validation accuracy, %")  # fmt: skip
    return [
        f"# Nested attention heads, preset {run.preset}",
        provenance(run, table),
        "Validation accuracy in %, mean ± standard deviation over seeds; parameters and "
        "multiply-adds without the classifier. S, M, L, XL are 1/8, 1/4, 1/2 and all of the hidden "
        "neurons, or 1/4, 1/2, 3/4 and all of the heads, rounded up to whole heads. The plot shows "
        f"the Mix'n'Match sizes between them too.{said_chance(table)}",
        main.markdown(),
        "![accuracy against parameters and multiply-adds](accuracy.png)",
        "Appendix F.2 nests the heads of language models (MatLM-Attn), so there is no number of "
        "the paper to compare with.",
    ]


EXPERIMENT = Experiment(
    "matformer.heads", __file__, "matvit", __doc__ or "", declare, report,
    measured_on=matvit.MEASURED_ON,
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
