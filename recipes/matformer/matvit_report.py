"""The report of matformer.matvit, with the columns and sentences that other reports share."""

from typing import Any

import pandas as pd

from lightning_modules.matformer.mix_and_match import ORDERS
from recipes.experiment import Run
from recipes.matformer.submodels import SEARCH_PAIRS
from recipes.plots import scatter
from recipes.provenance import provenance
from recipes.results import by_seed, select, unique
from recipes.tables import Column, tabulate

ROWS = {
    "matvit": "MatViT (sampled)",
    "independent": "independent ViTs",
    "joint": "joint, same batch",
    "dynabert": "joint, a quarter each (DynaBERT)",
    "per_layer": "per layer (OFA)",
    "unsorted": "MatViT, neurons not sorted",
    "scratch": "ViT from scratch",
}
CHANCE = {"chance": "chance"}
PAIRS = (("matvit", "independent"), ("matvit", "unsorted"), ("independent", "scratch"))


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Accuracy, agreement, divergence, and the orders of Mix'n'Match."""
    methods = {row: title for row, title in ROWS.items() if row in set(table["row"])}
    sizes = size_columns(table, methods)
    scored = {"stage": ["chance", *(f"score {row}" for row in methods)]}
    costs_of = next(iter(methods), "matvit")
    columns = [*size_costs(costs_of), *compared(methods)]
    main = tabulate(table, sizes, columns, index="set", heading="size")
    main.show(f"MatViT ({run.preset}): validation accuracy, %")
    costs = {"parameters": "parameters (without classifier)", "macs": "multiply-adds"}
    joined = [row for row in methods if row != "independent"]
    plot = run.out / "accuracy.png"
    scatter(table, plot, "accuracy", costs, where=scored, titles={**methods, **CHANCE},
            joined=joined, baselines=list(CHANCE), scale=100,
            ylabel="validation accuracy, %")  # fmt: skip
    several = {row: title for row, title in methods.items() if row != "scratch"}  # sizes
    agreement = compared(several, "agreement")
    divergence = compared(several, "kl", scale=1, digits=3)
    alone = " The ViT from scratch is an XL trained for X epochs from random weights."
    text = [
        f"# MatViT, preset {run.preset}",
        provenance(run, table),
        "Validation accuracy in %, mean ± standard deviation over seeds; parameters and "
        "multiply-adds without the classifier. Labels with `*` are Mix'n'Match sizes: `M*3+L*3` "
        "is three layers of M, then three of L. Each independent model trained for X epochs; "
        "MatViT, DynaBERT and the per-layer row for 4X epochs; joint training for X epochs with "
        f"every image through all granularities.{alone if 'scratch' in methods else ''}"
        f"{said_chance(table)}",
        main.markdown(),
        "![accuracy against parameters and multiply-adds](accuracy.png)",
        "## Agreement with the largest model of the same training",
        "Share of equal predictions, %:",
        tabulate(table, sizes, agreement, index="set", heading="size").markdown(),
        "KL(largest ‖ submodel), nats:",
        tabulate(table, sizes, divergence, index="set", heading="size").markdown(),
    ]
    return [*text, *report_orders(table)] if "orders" in set(table["stage"]) else text


def said_chance(table: pd.DataFrame) -> str:
    """A sentence on the accuracy of drawing a class at random; "" if it was not measured."""
    values = by_seed(table, "accuracy", {"row": "chance"})
    return f" Chance, one class drawn of all, is {100 * values.mean():.1f} %." * bool(len(values))


def size_columns(table: pd.DataFrame, methods: dict[str, str]) -> list[str]:
    """The labels of all scored sizes, the smallest first."""
    scored = select(table, {"row": list(methods), "metric": "macs"})
    return list(unique(scored.sort_values("value", kind="stable"), "set"))


def size_costs(row: str | list[str] = "matvit") -> list[Column]:
    """Columns of each size's parameters and multiply-adds."""
    return [
        Column("parameters", "parameters", {"row": row}, digits=0, spread=""),
        Column("multiply-adds, M", "macs", {"row": row}, scale=1e-6, digits=2, spread=""),
    ]


def compared(
    methods: dict[str, str], metric: str = "accuracy", scale: float = 100, digits: int = 1
) -> list[Column]:
    """A column for each method, then paired differences between some of them."""
    style: dict[str, Any] = {"scale": scale, "digits": digits}
    columns = [Column(title, metric, {"row": row}, **style) for row, title in methods.items()]
    for row, reference in PAIRS:
        if row in methods and reference in methods:
            title = f"{methods[row]} − {methods[reference]}"
            columns.append(
                Column(title, metric, {"row": row}, reference={"row": reference}, **style)
            )
    return columns


def report_orders(table: pd.DataFrame) -> list[str]:
    """Paragraphs that compare Mix'n'Match with other orders and with the search."""
    orders = select(table, {"stage": "orders"})
    mixes = list(unique(select(orders, {"row": "increase"}), "set"))
    ends = list(unique(select(orders, {"row": "ends"}), "set"))
    error, variance = (
        select(orders, {"metric": f"predictor_{name}"})["value"].mean()
        for name in ("mse", "variance")
    )
    both = {"least_slope": "least slope", "ends": "S and XL only"}
    return [
        "## Mix'n'Match beside other orders and beside search",
        "Loss of MatViT (sampled) on half of the validation images. The four orders place the same "
        "layers differently; Mix'n'Match is `increase`. The search's predictor learned from up to "
        f"{SEARCH_PAIRS} configurations on the other half; its held-out mean squared error is "
        f"{error:.2g}, where always predicting the mean has {variance:.2g}.",
        tabulate(
            orders,
            mixes,
            [Column(row, "loss", {"row": row}, digits=4) for row in (*ORDERS, "search")],
            index="set",
            heading="Mix'n'Match",
        ).markdown(),
        "Least slope against none at all (Section 3.3): Mix'n'Match within the parameters that a "
        "model of S and XL layers has, so that it is never the larger of the two.",
        tabulate(
            orders,
            ends,
            [
                *(Column(title, "loss", {"row": row}, digits=4) for row, title in both.items()),
                *(
                    Column(f"{title}: parameters", "cost", {"row": row}, digits=0, spread="")
                    for row, title in both.items()
                ),
            ],
            index="set",
            heading="S and XL",
        ).markdown(),
    ]
