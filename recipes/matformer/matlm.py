"""MatLM: one elastic language model beside the models it replaces.

Trains, at equal tokens, MatLM with sampled granularities (the paper), four independent decoders,
joint training of all granularities (DynaBERT) and a random granularity per layer (OFA); further
rows draw granularities with other probabilities (Table 6) or nest attention heads (Appendix F.2).
Then it scores every granularity and the Mix'n'Match sizes between them, compares Mix'n'Match with
other orders, least slope and search, and fits the scaling law over widths.

    python -m recipes.matformer.matlm                              installed Python, about a minute
    python -m recipes.matformer.matlm --preset small --seeds 3 --jobs 2
    python -m recipes.matformer.matlm --preset 78M --data.source files --data.train 'text/*.jsonl'
"""

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from torch.utils.data import Subset

from datamodules.loading import build_loader
from lightning_modules.matformer import arrange
from lightning_modules.matformer.mix_and_match import Order
from lightning_modules.matformer.nest import GRANULARITIES, nesting_of
from lightning_modules.matformer.search import evolve, fit_predictor, sample_configurations
from lightning_modules.matformer.speculative import SpeculationRecord, speculative_generate
from recipes import plots
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run, Stage
from recipes.matformer.language import device, load, plain, rows_of, score, sizes, submodels
from recipes.matformer.scaling import fit_report
from recipes.matformer.submodels import ladder
from recipes.messages import console
from recipes.results import Row, provenance, select
from recipes.runner import run_experiment
from recipes.tables import Column, tabulate

NESTED = {
    "matlm": "MatLM (sampled)",
    "joint": "joint (DynaBERT)",
    "per_layer": "per layer (OFA)",
    "heads": "MatLM-Attn (heads)",
}
INDEPENDENT = "independent"
PROBABILITIES = {  # Table 6, of S / M / L / XL
    "p .44/.31/.15/.10": [0.44, 0.31, 0.15, 0.10],
    "p .31/.27/.22/.20": [0.31, 0.27, 0.22, 0.20],
    "p .20/.22/.24/.34": [0.20, 0.22, 0.24, 0.34],
    "p .17/.20/.22/.41": [0.17, 0.20, 0.22, 0.41],
}
HEADS = [0.25, 0.5, 0.75, 1.0]  # Appendix F.2
BETWEEN = 3  # Mix'n'Match sizes between neighbouring granularities
SEARCH_PAIRS = 60  # random (configuration, loss) pairs that the search learns from
# Table 5: the share of layers that are one granularity larger than the rest
BUDGETS = {"M": (1, 0.0), "M 3/4 + L 1/4": (1, 0.25), "M 5/16 + L 11/16": (1, 0.6875),
           "L 1/2 + XL 1/2": (2, 0.5)}  # fmt: skip
ORDERS: tuple[Order, ...] = get_args(Order)
SIZES = ["S", "M", "L", "XL"]
XL_BEATS_S = Comparison(
    "loss", {"row": INDEPENDENT, "set": "S"}, {"row": INDEPENDENT, "set": "XL"}, 0.02, digits=3
)
METRICS = {"loss": "loss", "agreement": "equal greedy tokens, %", "kl": "KL(XL ‖ submodel), nats"}


def _claim(name: str, sentence: str, where: str, number: str, *tests: Comparison) -> Claim:
    return Claim(name, "MatFormer", sentence, where, number, tests, XL_BEATS_S)


def _loss(a: tuple[str, str], b: tuple[str, str], threshold: float = 0.0) -> Comparison:
    first, second = ({"row": row, "set": size} for row, size in (a, b))
    return Comparison("loss", first, second, threshold, digits=3)


def _mean(a: str, b: str, metric: str = "loss", where: Any = None) -> Comparison:
    return Comparison(metric, a, b, where=where or {"set": SIZES}, mean_over="set", digits=4)


CLAIMS = [
    _claim(
        "XL as good", "MatLM's XL is as good as an XL trained alone (loses at most 0.01 nats).",
        "Table 6, 850M", "2.846 against 2.840", _loss((INDEPENDENT, "XL"), ("matlm", "XL"), -0.01),
    ),
    _claim(
        "small sizes better", "MatLM's S, M and L are better than models trained alone.",
        "Table 6, 850M", "2.970 / 2.934 / 2.886 against 3.017 / 2.971 / 2.910",
        *(_loss((INDEPENDENT, size), ("matlm", size)) for size in ("S", "M", "L")),
    ),
    _claim(
        "Mix'n'Match between", "Mix'n'Match sizes lie on the line between the trained ones "
        "(at most 0.01 nats above it).", "Figure 2", "",
        Comparison("below the line", "matlm", None, -0.01, digits=4),
    ),
    _claim(
        "consistency", "Submodels agree with XL more often than models trained alone do.",
        "Section 3.4, Figure 2c", "",
        Comparison("agreement", {"row": "matlm", "set": "S"}, {"row": INDEPENDENT, "set": "S"},
                   scale=100),
        Comparison("kl", {"row": INDEPENDENT, "set": "S"}, {"row": "matlm", "set": "S"}, digits=4),
    ),
    _claim(
        "sampling beats DynaBERT", "At equal tokens, sampling is better than joint training with "
        "a quarter of the updates.", "Appendix B.4", "0.01 nats", _mean("joint", "matlm"),
    ),
    _claim(
        "OFA is bell-shaped", "A random granularity per layer is worse near S and XL.",
        "Appendix B.4", "", _loss(("per_layer", "S"), ("matlm", "S")),
        _loss(("per_layer", "XL"), ("matlm", "XL")),
    ),
    _claim(
        "least slope", "Neighbouring granularities are better than S and XL at like size.",
        "Section 3.3", "", Comparison("loss at budget", "steep", "increase", mean_over="set",
                                      digits=4),
    ),
    _claim(
        "increasing order", "Granularities that rise with depth are better than falling ones.",
        "Appendix D.1", "", Comparison("loss at budget", "decrease", "increase", mean_over="set",
                                       where={"set": list(BUDGETS)[1:]}, digits=4),
    ),
    _claim(
        "no search needed", "Mix'n'Match is better than evolutionary search.", "Table 5",
        "2.931 / 2.926 / 2.900 / 2.865 against 2.944 / 2.932 / 2.910 / 2.874",
        Comparison("loss at budget", "search", "increase", mean_over="set", digits=4),
    ),
    _claim(
        "probabilities", "Drawing XL more often makes it better and S worse.", "Table 6",
        "XL 2.829 against 2.846, S 3.010 against 2.970",
        _loss(("matlm", "XL"), ("p .17/.20/.22/.41", "XL")),
        _loss(("p .17/.20/.22/.41", "S"), ("matlm", "S")),
    ),
    _claim(
        "drafts", "S drafts for its own XL with more tokens accepted than an S trained alone for "
        "an XL trained alone.", "Table 2", "",
        Comparison("acceptance", "matlm", INDEPENDENT, scale=100),
    ),
]  # fmt: skip


def declare(run: Run) -> None:
    """Train every row, then look at them."""
    main = [*NESTED, INDEPENDENT, *PROBABILITIES]
    rows = run.rows([*main, "widths"], ROWS.get(run.preset, main))
    for seed in run.seeds:
        stages = {row: nested(run, row, seed) for row in rows if row in (*NESTED, *PROBABILITIES)}
        alone = {}
        if INDEPENDENT in rows:
            for index, name in enumerate(GRANULARITIES):
                alone[name] = independent(run, seed, f"independent_{name}", index)
        for row, stage in stages.items():
            run.measure(f"sizes of {row}", seed, measure_sizes, {"model": stage}, {"row": row})
        if alone:
            run.measure("sizes of independent", seed, measure_independent, alone)
        drafting = {"model": stages["matlm"]} if "matlm" in stages else {}
        drafting |= {name: alone[name] for name in ("S", "XL") if alone}
        if drafting:
            run.measure("drafts", seed, measure_drafts, drafting)
        if "matlm" in stages:
            orders = {"pairs": SEARCH_PAIRS if run.preset != "tiny" else 12}
            run.measure("orders", seed, measure_orders, {"model": stages["matlm"]}, orders)
        if "widths" in rows:
            declare_widths(run, seed)


# What a preset trains without --rows; others train all but the widths.
ROWS = {
    "tiny": ["matlm", "joint", "per_layer", INDEPENDENT],
    "small": [*NESTED, INDEPENDENT, *PROBABILITIES, "widths"],
}
WIDTHS = (1 / 4, 1 / 2, 3 / 4, 1)  # of the preset's hidden size, for the scaling law


def nested(run: Run, row: str, seed: int, **settings: Any) -> Stage:
    """A nested training on 4X tokens."""
    quarter = {
        "trainer.max_steps": lambda c: c.trainer.max_steps // 4,
        "model.warmup_steps": lambda c: c.model.init_args.warmup_steps // 4,
        "data.batch_size": lambda c: c.data.init_args.batch_size * 4,
    }
    varied: dict[str, Any] = {"model.joint": None}
    if row == "joint":  # four batches a step, one for each granularity (Appendix B.4)
        varied = {"model.joint": "mean", "model.split_batch": True}
    elif row == "per_layer":
        varied |= {"trainer.callbacks": sampler(per_layer=True)}
    elif row in PROBABILITIES:
        varied |= {"trainer.callbacks": sampler(probabilities=PROBABILITIES[row])}
    elif row == "heads":
        varied |= {"model.fractions": {"heads": HEADS}}
    name = row.replace("/", "_").replace(" ", "")
    derived = quarter if row == "joint" else {}
    return run.stage(name, "matlm", seed, {**varied, **settings}, derived=derived)


def sampler(**settings: Any) -> list[dict[str, Any]]:
    """trainer.callbacks with another way of drawing granularities."""
    return [
        {"class_path": "callbacks.granularity.GranularitySampling", "init_args": dict(settings)}
    ]


def independent(run: Run, seed: int, name: str, index: int, scale: float = 1.0) -> Stage:
    """A plain decoder of one granularity's width, on X tokens (Appendix B.3)."""

    def model_args(c: Any) -> dict[str, Any]:
        fraction = c.model.init_args.fractions["ffn"][index]
        arguments = c.model.init_args.model_args
        return {**arguments, "intermediate_size": round(arguments["intermediate_size"] * fraction)}

    return run.stage(
        name,
        "matlm",
        seed,
        {"model.joint": None},
        derived={
            "model.model_args": lambda c: scaled(model_args(c), scale),
            "model.fractions": lambda c: None,
            "trainer.max_steps": lambda c: c.trainer.max_steps // 4,
            "model.warmup_steps": lambda c: c.model.init_args.warmup_steps // 4,
        },
    )


def scaled(arguments: dict[str, Any], scale: float) -> dict[str, Any]:
    """A decoder's configuration with another width and the same number of heads."""
    heads = 2 * arguments["num_attention_heads"]  # a head needs an even size, for its rotations
    width = max(heads, round(arguments["hidden_size"] * scale / heads) * heads)
    ratio = width / arguments["hidden_size"]
    inner = round(arguments["intermediate_size"] * ratio)
    return {**arguments, "hidden_size": width, "intermediate_size": inner}


def declare_widths(run: Run, seed: int) -> None:
    """MatLM and an independent XL at several widths, for the scaling law."""
    arguments = run.parsed("matlm").model.init_args.model_args
    for scale in WIDTHS:
        smaller = scaled(arguments, scale)
        name = f"d{smaller['hidden_size']}"
        # the full width is the main rows' own training
        varied = {} if scale == 1 else {"model.model_args": smaller}
        stage = nested(run, "matlm" if scale == 1 else f"matlm_{name}", seed, **varied)
        settings = {"row": "matlm", "between": 0, "suffix": f" {name}"}
        run.measure(f"width {name}", seed, measure_sizes, {"model": stage}, settings)
        alone = independent(
            run, seed, f"independent_XL{'' if scale == 1 else '_' + name}", 3, scale
        )
        settings = {"suffix": f" {name}"}
        run.measure(f"width {name} alone", seed, measure_independent, {"XL": alone}, settings)


def measure_sizes(m: Measuring) -> Iterator[Row]:
    """Every granularity and the Mix'n'Match sizes between them, compared with the largest."""
    model, data = load(m.stages["model"].checkpoint), m.datamodule("model")
    suffix = m.settings.get("suffix", "")
    chosen = ladder(model, m.settings.get("between", BETWEEN))[::-1]
    nesting = nesting_of(model)
    scores = score(submodels(model, chosen), data.val_dataloader(), model.config.vocab_size)
    costs = {
        nesting.label(mix): {**sizes(model, mix), "tokens": tokens(m, "model")} for mix in chosen
    }
    row = m.settings["row"]
    yield from rows_of(row, *(_named(part, suffix) for part in (scores, costs)))
    if below := [_below(scores, costs, label, nesting.names) for label in scores if "*" in label]:
        yield Row(row, "below the line", sum(below) / len(below))


def _below(
    scores: dict[str, Any], costs: dict[str, Any], label: str, uniform: Sequence[str]
) -> float:
    """How far a size's loss lies below the line through the trained sizes around it, in nats."""
    at, losses = zip(
        *((costs[name]["non_embedding"], scores[name]["loss"]) for name in uniform), strict=True
    )
    return float(np.interp(costs[label]["non_embedding"], at, losses)) - scores[label]["loss"]


def measure_independent(m: Measuring) -> Iterator[Row]:
    """The independent models, compared with the largest of them."""
    models = {name: load(m.stages[name].checkpoint) for name in reversed(list(m.stages))}
    data = m.datamodule(next(iter(models)))
    vocabulary = next(iter(models.values())).config.vocab_size
    scores = score({n: plain(x) for n, x in models.items()}, data.val_dataloader(), vocabulary)
    costs = {n: {**sizes(x, None), "tokens": tokens(m, n)} for n, x in models.items()}
    suffix = m.settings.get("suffix", "")
    yield from rows_of(INDEPENDENT, *(_named(part, suffix) for part in (scores, costs)))


def _named(values: dict[str, Any], suffix: str) -> dict[str, Any]:
    return {f"{label}{suffix}": value for label, value in values.items()}


def tokens(m: Measuring, name: str) -> int:
    """Tokens that a stage trained on."""
    settings = m.stages[name].settings
    batch = settings.data.init_args.batch_size * settings.trainer.accumulate_grad_batches
    return settings.trainer.max_steps * batch * settings.data.init_args.length


@torch.no_grad()
def measure_drafts(m: Measuring) -> Iterator[Row]:
    """How many drafted tokens XL accepts: of its own S, and of an S trained alone (Table 2)."""
    pairs: dict[str, tuple[Any, Any]] = {}
    if "model" in m.stages:
        pairs["matlm"] = (load(m.stages["model"].checkpoint), "S")
    if "XL" in m.stages:
        pairs[INDEPENDENT] = tuple(load(m.stages[name].checkpoint) for name in ("XL", "S"))
    data = m.datamodule(next(iter(m.stages)))
    windows = data.samples("val")
    prompts = torch.stack([windows[i]["input_ids"] for i in range(min(16, len(windows)))])
    prompts = prompts[:, : data.length // 2].to(device())
    for row, (verifier, draft) in pairs.items():
        for share in (True, False) if row == "matlm" else (False,):
            record = SpeculationRecord()
            settings = {"max_new_tokens": data.length // 4, "eos_token_id": [], "record": record}
            speculative_generate(verifier, prompts, draft, share_cache=share, **settings)
            name = row if share == (row == "matlm") else f"{row}, caches apart"
            yield Row(name, "acceptance", record.acceptance)


def measure_orders(m: Measuring) -> Iterator[Row]:
    """Mix'n'Match beside other orders of the same layers, least slope, and evolutionary search.

    Section 3.3, Appendix D.1, at Table 5's budgets. The search learns from losses on every other
    window of the validation text; all are compared on the remaining windows.
    """
    model, data = load(m.stages["model"].checkpoint), m.datamodule("model")
    windows = data.samples("val")
    learn, judge = (
        build_loader(
            Subset(windows, range(part, len(windows), 2)), data.eval_batch_size, training=False
        )
        for part in (0, 1)
    )
    nesting, vocabulary = nesting_of(model), model.config.vocab_size
    layers, widths = len(nesting.layers), nesting.layers[0].widths
    largest = [len(widths) - 1] * layers
    pairs = sample_configurations(layers, len(widths), m.settings["pairs"], m.seed)
    seen = score(submodels(model, [largest, *pairs]), learn, vocabulary)
    losses = [seen[nesting.label(mix)]["loss"] for mix in pairs]
    predictor = fit_predictor(pairs, losses, m.seed)
    yield Row("search", "predictor_mse", predictor.mse)
    yield Row("search", "predictor_mse of the mean", predictor.baseline_mse)
    for title, (level, share) in BUDGETS.items():
        raised = round(layers * share)
        mix = [level] * (layers - raised) + [level + 1] * raised
        budget = sum(widths[index] for index in mix)
        chosen: dict[str, list[int]] = {order: arrange(mix, order) for order in ORDERS}
        chosen["steep"] = steep(widths, layers, budget)
        chosen["search"] = evolve(predictor, [widths] * layers, budget, seed=m.seed)
        configurations = {tuple(one): None for one in ([largest, *chosen.values()])}
        scores = score(submodels(model, configurations), judge, vocabulary)
        for name, configuration in chosen.items():
            label = nesting.label(configuration)
            yield Row(name, "loss at budget", scores[label]["loss"], set=title)
            cost = sum(widths[index] for index in configuration)
            yield Row(name, "hidden neurons", cost, set=title)


def steep(widths: tuple[int, ...], layers: int, budget: int) -> list[int]:
    """The largest slope within a budget: layers of S, then layers of XL."""
    raised = (budget - layers * widths[0]) // (widths[-1] - widths[0])
    return [0] * (layers - raised) + [len(widths) - 1] * raised


def _by_size(main: pd.DataFrame, titles: dict[str, str], run: Run) -> list[str]:
    """A table for each metric, and a plot of the loss."""
    paragraphs = []
    for metric, title in METRICS.items():
        scale = 100 if title.endswith("%") else 1
        columns = [
            Column(name, metric, {"row": row}, scale=scale, digits=1 if scale == 100 else 4)
            for row, name in titles.items()
        ]
        paragraphs += [f"## {title}", tabulate(main, None, columns, index="set").markdown()]
    plots.scatter(
        main,
        run.out / "loss.png",
        "loss",
        {"non_embedding": "parameters without embeddings"},
        titles=titles,
        joined=[row for row in titles if row != INDEPENDENT],
        ylabel="validation loss, nats a token",
    )
    return [*paragraphs, "![loss against parameters](loss.png)"]


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Losses by size, consistency, orders and the scaling law."""
    titles = {**NESTED, INDEPENDENT: INDEPENDENT, **{name: name for name in PROBABILITIES}}
    main = select(table, {"metric": [*METRICS, "non_embedding"]})
    main = main[~main["set"].str.contains(" d")]
    paragraphs = [
        f"# MatLM, preset {run.preset}",
        provenance(run.command, table),
        "Validation loss in nats a token, every token of the text scored once. Labels with `*` are "
        "Mix'n'Match sizes: `M*3+L*3` is three layers of M, then three of L. Nested trainings saw "
        "4X tokens, each independent model X; the joint training makes a quarter of the updates "
        "with batches four times as large.",
    ]
    if shown := [row for row in titles if (main["row"] == row).any()]:
        paragraphs += _by_size(main, {row: titles[row] for row in shown}, run)
    if len(orders := select(table, {"metric": "loss at budget"})):
        names = [*ORDERS, "steep", "search"]
        columns = [Column(name, "loss at budget", {"row": name}, digits=4) for name in names]
        errors = select(table, {"row": "search", "set": ""}).groupby("metric")["value"].mean()
        paragraphs += [
            "## Mix'n'Match beside other orders, least slope and search",
            "Loss on every other window of the validation text. Mix'n'Match is `increase`; `steep` "
            "is S … S, XL … XL within the same budget of hidden neurons. The search learned from "
            "the other windows; the held-out mean squared error of its predictor is "
            f"{errors['predictor_mse']:.2g}, that of predicting the mean "
            f"{errors['predictor_mse of the mean']:.2g}.",
            tabulate(orders, None, columns, index="set").markdown(),
        ]
    return paragraphs + fit_report(table, run, {"matlm": NESTED["matlm"], INDEPENDENT: INDEPENDENT})


EXPERIMENT = Experiment("matformer.matlm", __file__, "matlm", __doc__ or "", declare, report)


def main(argv: list[str] | None = None) -> Run:
    """Run the experiment."""
    return run_experiment(EXPERIMENT, argv)


if __name__ == "__main__":
    console(main)
