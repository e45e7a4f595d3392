"""The report of matformer.matlm."""

from typing import Any

import pandas as pd

from lightning_modules.matformer.mix_and_match import ORDERS
from recipes import plots
from recipes.experiment import Run
from recipes.matformer.convergence import INDEPENDENT, LEARNT
from recipes.matformer.language import said_unigram, scored_text
from recipes.matformer.matlm_measures import APART
from recipes.matformer.scaling import fit_report
from recipes.provenance import provenance
from recipes.results import by_seed, select
from recipes.tables import Column, tabulate

NESTED = {
    "matlm": "MatLM (sampled)",
    "joint": "joint (DynaBERT)",
    "per_layer": "per layer (OFA)",
    "heads": "MatLM-Attn (heads)",
}
PROBABILITIES = {  # Table 6, of S / M / L / XL
    "p .44/.31/.15/.10": [0.44, 0.31, 0.15, 0.10],
    "p .31/.27/.22/.20": [0.31, 0.27, 0.22, 0.20],
    "p .20/.22/.24/.34": [0.20, 0.22, 0.24, 0.34],
    "p .17/.20/.22/.41": [0.17, 0.20, 0.22, 0.41],
}
FEWER_HEADS = "independent heads"  # the row of models trained alone with as many heads
DECODING = "decoding"  # a row that times speculative decoding (Table 2)
METRICS = {"loss": "loss", "agreement": "equal greedy tokens, %", "kl": "KL(XL ‖ submodel), nats"}


def _by_size(main: pd.DataFrame, titles: dict[str, str], run: Run) -> list[str]:
    """A table for each metric, and a plot of the loss."""
    paragraphs = []
    for metric, title in METRICS.items():
        scale = 100 if title.endswith("%") else 1
        style: dict[str, Any] = {"scale": scale, "digits": 1 if scale == 100 else 4}
        columns = [Column(name, metric, {"row": row}, **style) for row, name in titles.items()]
        difference = f"{NESTED['matlm']} − {INDEPENDENT}"
        reference = {"row": INDEPENDENT}
        columns.append(Column(difference, metric, {"row": "matlm"}, reference=reference, **style))
        paragraphs += [f"## {title}", tabulate(main, None, columns, index="set").markdown()]
    plots.scatter(
        main,
        run.out / "loss.png",
        "loss",
        {"non_embedding": "parameters without embeddings"},
        titles=titles,
        joined=[row for row in titles if row not in (INDEPENDENT, FEWER_HEADS)],
        ylabel="validation loss, nats a token",
    )
    return [*paragraphs, "![loss against parameters](loss.png)"]


def said_cost(table: pd.DataFrame) -> str:
    """A sentence on the cost of all granularities together; "" if it was not measured."""
    cost = by_seed(table, "cost of all sizes", {"row": "matlm"})
    return (
        f" A step through all four of MatLM's granularities costs {cost.mean():.2f} times as much "
        "as one through XL (multiply-adds of the linear layers)."
    ) * bool(len(cost))


def _learning(table: pd.DataFrame) -> list[str]:
    """A table of how far the training of each independent model has come."""
    alone = select(table, {"row": [INDEPENDENT, FEWER_HEADS]})
    alone = alone[~alone["set"].str.contains(" d")]
    columns = []
    for row in (INDEPENDENT, FEWER_HEADS):
        last, before = {"row": row, "x": 4.0}, {"row": row, "x": 3.0}
        columns += [
            Column(f"{row}: tokens a parameter", "tokens a parameter", {"row": row}),
            Column("loss at its end", "val_loss", last, digits=3),
            Column("change in the last quarter", "val_loss", last, reference=before, digits=3),
        ]
    shown = tabulate(pd.concat([alone, tokens_a_parameter(alone)]), None, columns, index="set")
    return [
        "## How far the independent models have learnt",
        "Tokens are those of the training, parameters those without embeddings; compute-optimal "
        "training takes about 20 tokens a parameter (Hoffmann et al., arXiv 2203.15556). The loss "
        "is that of the training's own validations, on the first windows of the text. Claims that "
        f"compare with these models are judged only if it falls by less than {LEARNT} nats in the "
        "last quarter.",
        shown.markdown(),
    ] * bool(shown.rows)


def tokens_a_parameter(table: pd.DataFrame) -> pd.DataFrame:
    """The tokens that each model was trained on, divided by its parameters without embeddings."""
    model = ["seed", "set", "row"]
    tokens, sizes = (select(table, {"metric": one}) for one in ("tokens", "non_embedding"))
    both = tokens.merge(sizes[[*model, "value"]], on=model, suffixes=("", " of the size"))
    ratio = both["value"] / both.pop("value of the size")
    return both.assign(metric="tokens a parameter", value=ratio)


def _drafting(table: pd.DataFrame) -> list[str]:
    """A table of speculative decoding: accepted tokens, and times where they were measured."""
    rows = {
        "matlm": "MatLM, S drafts with XL's cache",
        APART: "MatLM, S drafts with a cache of its own",
        INDEPENDENT: "an independent XL, an independent S drafts",
    }
    columns = [
        Column("accepted tokens, %", "acceptance", scale=100),
        Column("times as fast as XL alone", "speed-up", digits=2),
    ]
    text = "S drafts, XL verifies (Table 2): the share of tokens that XL accepts, four at a time."
    if len(saved := by_seed(table, "time saved by S", {"row": "matlm"})):
        text += (
            " Timed one text at a time, with the draft length that is best for the acceptance, in "
            f"turn with XL alone. To write with MatLM's S alone takes {saved.mean():.0%} less time "
            "than with its XL alone."
        )
    else:
        text += f" No times: they take the row `{DECODING}`, and the machine to itself."
    shown = tabulate(table, rows, columns)
    return ["## Speculative decoding", text, shown.markdown()] * bool(shown.rows)


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Losses by size, consistency, orders and the scaling law."""
    others = (INDEPENDENT, FEWER_HEADS, *PROBABILITIES)
    titles = {**NESTED, **{name: name for name in others}}
    main = select(table, {"metric": [*METRICS, "non_embedding"]})
    main = main[~main["set"].str.contains(" d")]
    data = run.parsed("matlm").data.init_args
    paragraphs = [
        f"# MatLM, preset {run.preset}",
        provenance(run, table),
        f"Validation loss in nats a token, on {scored_text(table, data)}. Labels with `*` are "
        "Mix'n'Match sizes: `M*3+L*3` is three layers of M, then three of L. Nested trainings saw "
        "4X tokens, each independent model X; the joint training makes a quarter of the updates "
        "with batches four times as large."
        f"{said_cost(table)}{said_unigram(table)}",
    ]
    if shown := [row for row in titles if (main["row"] == row).any()]:
        paragraphs += _by_size(main, {row: titles[row] for row in shown}, run)
    paragraphs += [*_learning(table), *_drafting(table)]
    if len(orders := select(table, {"metric": "loss at budget"})):
        names = [*ORDERS, "search"]
        columns = [Column(name, "loss at budget", {"row": name}, digits=4) for name in names]
        errors = select(table, {"row": "search", "set": ""}).groupby("metric")["value"].mean()
        slopes = {"least_slope": "least slope", "ends": "S and XL only"}
        beside = [
            *(Column(t, "loss by slope", {"row": r}, digits=4) for r, t in slopes.items()),
            *(
                Column(f"{t}: hidden neurons", "hidden neurons", {"row": r}, digits=0, spread="")
                for r, t in slopes.items()
            ),
        ]
        sloped = select(table, {"row": list(slopes)})
        paragraphs += [
            "## Mix'n'Match beside other orders and beside search",
            "Loss on every other window of the validation text. Mix'n'Match is `increase`; layers "
            "that are all alike have no other order. The search learned from the other windows; "
            "the held-out mean squared error of its predictor is "
            f"{errors['predictor_mse']:.2g}, that of always predicting the mean "
            f"{errors['predictor_mse of the mean']:.2g}.",
            tabulate(orders, None, columns, index="set").markdown(),
            "Least slope against none at all (Section 3.3): Mix'n'Match within the hidden neurons "
            "of a model of S and XL layers, so that it is never the larger of the two.",
            tabulate(sloped, None, beside, index="set", heading="S and XL").markdown(),
        ]
    widths = table["set"].str.contains(" d").any()
    return paragraphs + (fit_report(table, run.out) if widths else [])
