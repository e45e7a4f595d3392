"""MatLM: train a nested language model and compare it with separately trained ones.

Trains, at equal tokens, MatLM with sampled granularities (the paper), four independent decoders,
joint training of all granularities (DynaBERT) and a random granularity per layer (OFA); further
rows draw granularities with other probabilities (Table 6) or nest attention heads, beside decoders
trained alone with as many heads (Appendix F.2). With the row `decoding`, and the machine to itself,
it times speculative decoding (Table 2).
Then it scores every granularity and the Mix'n'Match sizes between them, compares Mix'n'Match with
other orders, with search and with layers of S and XL only, and fits the scaling law over widths.

    python -m recipes.matformer.matlm                              installed Python, about a minute
    python -m recipes.matformer.matlm --preset small --seeds 3 --jobs 2
    python -m recipes.matformer.matlm --preset 78M --data.source files --data.train 'text/*.jsonl'
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from lightning_modules.matformer.nest import GRANULARITIES
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Run, Stage
from recipes.matformer.convergence import INDEPENDENT, LEARNT, measure_training
from recipes.matformer.language import measure_unigram
from recipes.matformer.matlm_measures import (
    APART,
    measure_decoding,
    measure_drafts,
    measure_independent,
    measure_orders,
    measure_sizes,
)
from recipes.matformer.matlm_report import (
    DECODING,
    FEWER_HEADS,
    NESTED,
    PROBABILITIES,
    report,
)
from recipes.matformer.matvit import SEARCH_PREDICTS, sampler
from recipes.matformer.starts import nested_settings
from recipes.matformer.submodels import SEARCH_PAIRS
from recipes.matformer.trials import Derived, language_training
from recipes.messages import console
from recipes.runner import run_experiment

HEADS = [0.25, 0.5, 0.75, 1.0]  # Appendix F.2
SIZES = ["S", "M", "L", "XL"]


def size_matters(row: str) -> Comparison:
    """The condition for judging anything: a row's XL has a clearly lower loss than its S."""
    small, large = ({"row": row, "set": size} for size in ("S", "XL"))
    # `where` names the sets, so that this is one gate and not one for each set
    return Comparison(
        "loss", small, large, 0.02, where={"set": ["S", "XL"]}, digits=3,
        says=f"XL of the row {row!r} has a loss at least 0.02 nats below that of its S",
    )  # fmt: skip


def have_learnt(row: str) -> list[Comparison]:
    """The condition for comparing with the models of a row, which are trained alone."""
    before, after = ({"row": row, "x": quarter} for quarter in (3.0, 4.0))
    return [
        Comparison(
            "val_loss", after, before, -LEARNT, where={"set": size}, digits=3,
            says=f"the loss of {size} of the row {row!r} falls by less than {LEARNT} nats in the "
            "last quarter of its training",
        )
        for size in SIZES
    ]  # fmt: skip


def _claim(name: str, sentence: str, where: str, number: str, *tests: Comparison) -> Claim:
    rows = {_row(side) for test in tests for side in (test.a, test.b)}
    alone = next((row for row in (INDEPENDENT, FEWER_HEADS) if row in rows), "")
    gates = [size_matters(alone or INDEPENDENT), *(have_learnt(alone) if alone else [])]
    gates += [SEARCH_PREDICTS] if "search" in rows else []
    gates += [S_IS_FASTER] if "speed-up" in {test.metric for test in tests} else []
    return Claim(name, "MatFormer", sentence, where, number, tests, gates)


def _row(side: Any) -> Any:
    """The row that one side of a Comparison selects."""
    return side["row"] if isinstance(side, dict) else side


def _loss(a: tuple[str, str], b: tuple[str, str], threshold: float = 0.0) -> Comparison:
    first, second = ({"row": row, "set": size} for row, size in (a, b))
    return Comparison("loss", first, second, threshold, digits=3)


def _mean(a: str, b: str) -> Comparison:
    return Comparison("loss", a, b, where={"set": SIZES}, mean_over="set", digits=4)


S_IS_FASTER = Comparison(
    "time saved by S", "matlm", None, 0.25,
    says="writing with MatLM's S alone takes at least a quarter less time than with its XL alone",
)  # fmt: skip
CLAIMS = [
    _claim(
        "XL as good", "The loss of MatLM's XL is at most 0.01 nats above that of an XL trained "
        "alone.", "Table 6, 850M", "2.846 against 2.840",
        _loss((INDEPENDENT, "XL"), ("matlm", "XL"), -0.01),
    ),
    _claim(
        "small sizes better", "MatLM's S, M and L have a lower loss than models trained alone.",
        "Table 6, 850M", "2.970 / 2.934 / 2.886 against 3.017 / 2.971 / 2.910",
        *(_loss((INDEPENDENT, size), ("matlm", size)) for size in ("S", "M", "L")),
    ),
    _claim(
        "Mix'n'Match between", "The loss of Mix'n'Match sizes is on average at most 0.01 nats "
        "above the line between the trained sizes.", "Fig. 2", "a curve",
        Comparison("below the line", "matlm", None, -0.01, digits=4),
    ),
    _claim(
        "consistency", "MatLM's S is closer to its XL than an S trained alone to an XL trained "
        "alone: more equal greedy tokens, a lower KL divergence.",
        "Section 3.4, Fig. 2c", "a curve",
        Comparison("agreement", {"row": "matlm", "set": "S"}, {"row": INDEPENDENT, "set": "S"},
                   scale=100),
        Comparison("kl", {"row": INDEPENDENT, "set": "S"}, {"row": "matlm", "set": "S"}, digits=4),
    ),
    _claim(
        "sampling beats DynaBERT", "At equal tokens, sampling has a lower mean loss than joint "
        "training, which makes a quarter of the updates (DynaBERT).", "Appendix B.4", "0.01 nats",
        _mean("joint", "matlm"),
    ),
    _claim(
        "OFA is bell-shaped", "A random granularity for each layer (OFA) has a higher loss at S "
        "and at XL.", "Appendix B.4", "a bell-shaped curve of losses",
        _loss(("per_layer", "S"), ("matlm", "S")), _loss(("per_layer", "XL"), ("matlm", "XL")),
    ),
    _claim(
        "least slope", "Layers of neighbouring granularities have a lower loss than layers of S "
        "and XL only, with no more hidden neurons.", "Section 3.3", "not given",
        Comparison("loss by slope", "ends", "least_slope", mean_over="set", digits=4),
    ),
    _claim(
        "increasing order", "Granularities that rise with depth have a lower loss than the same "
        "falling with depth.", "Appendix D.1", "not given",
        Comparison("loss at budget", "decrease", "increase", mean_over="set", digits=4),
    ),
    _claim(
        "no search needed", "Mix'n'Match has a lower loss than evolutionary search within the same "
        "budget.", "Table 5",
        "2.931 / 2.926 / 2.900 / 2.865 against 2.944 / 2.932 / 2.910 / 2.874",
        Comparison("loss at budget", "search", "increase", mean_over="set", digits=4),
    ),
    _claim(
        "probabilities", "Drawing XL more often lowers its loss and raises that of S.", "Table 6",
        "XL 2.829 against 2.846, S 3.010 against 2.970",
        _loss(("matlm", "XL"), ("p .17/.20/.22/.41", "XL")),
        _loss(("p .17/.20/.22/.41", "S"), ("matlm", "S")),
    ),
    _claim(
        "heads", "MatLM-Attn, which nests heads, has at each size a loss of at most 0.01 nats "
        "above that of a model trained alone with as many heads.", "Appendix F.2", "not at hand",
        *(_loss((FEWER_HEADS, size), ("heads", size), -0.01) for size in SIZES),
    ),
    Claim(
        "cost of training", "MatFormer", "A training step through all four granularities costs "
        "2.58 times as much as one of XL alone.", "training cost", "2.58",
        [Comparison("cost of all sizes", a, b, -0.005, exact=True, digits=3)
         for a, b in (("matlm", "paper"), ("paper", "matlm"))],
    ),
    Claim(
        "downstream tasks", "MatFormer", "On 25 English tasks with one example each, MatLM's sizes "
        "score as well as models trained alone.", "Section 4.1", "not at hand",
        reason="data and compute: the tasks are downloaded, and a decoder that was trained here "
        "knows Python source; `python -m recipes evaluate CKPT --tasks …` scores any size on them",
    ),
    Claim(
        "scaling law", "MatFormer", "The loss of MatLM follows a · (N·D)^b + c, as that of models "
        "trained alone does.", "Table 3", "21.60, −0.13, 1.33; alone: 14.08, −0.10, 0.89",
        reason="a run varies N alone, and in the two runs on one text together the exponent's "
        "standard error is of its own size (results/matformer/scaling.md): it takes models and "
        "trainings of more different sizes, which `python -m recipes.matformer.scaling` fits "
        "together",
    ),
    _claim(
        "speculative decoding", "With its own S as draft, MatLM's XL is faster than alone, and by "
        "more than an XL trained alone with an S trained alone.", "Table 2",
        "1.14 and 1.11 times as fast against 1.10 and 1.08 (LAMBADA, TriviaQA)",
        Comparison("speed-up", APART, None, 1.0), Comparison("speed-up", APART, INDEPENDENT),
    ),
    _claim(
        "shared cache", "A draft that shares XL's attention cache makes decoding faster than one "
        "with a cache of its own.", "Table 2, Appendix C.1",
        "1.16 and 1.14 against 1.14 and 1.11 times as fast as XL alone",
        Comparison("speed-up", "matlm", APART),
    ),
    _claim(
        "drafts", "XL accepts more of the tokens that its own S drafts than an XL trained alone "
        "accepts from an S trained alone.", "Table 2", "not given",
        Comparison("acceptance", "matlm", INDEPENDENT, scale=100),
    ),
]  # fmt: skip


def declare(run: Run) -> None:
    """Declare the training and the measurements of every row, for each seed."""
    main = [*NESTED, INDEPENDENT, FEWER_HEADS, *PROBABILITIES, DECODING]
    rows = run.rows([*main, "widths"], ROWS.get(run.preset, main))
    _refuse_other_sizes(nested_settings(run, "matlm").model.init_args, rows)
    for seed in run.seeds:
        stages = {row: nested(run, row, seed) for row in rows if row in (*NESTED, *PROBABILITIES)}
        alone, fewer = {}, {}
        if INDEPENDENT in rows:
            for index, name in enumerate(GRANULARITIES):
                alone[name] = independent(run, seed, f"independent_{name}", index)
        if FEWER_HEADS in rows:
            for name, share in zip(SIZES[:-1], HEADS[:-1], strict=True):
                fewer[name] = with_fewer_heads(run, seed, name, share)
            fewer["XL"] = independent(run, seed, "independent_XL", 3)
        for row, stage in stages.items():
            run.measure(f"sizes of {row}", seed, measure_sizes, {"model": stage}, {"row": row})
        for row, models in {INDEPENDENT: alone, FEWER_HEADS: fewer}.items():
            if models:
                run.measure(f"sizes of {row}", seed, measure_independent, models, {"row": row})
                curve = {"metric": "val/loss", "row": row}
                run.measure(f"training of {row}", seed, measure_training, models, curve)
        if trained := {**stages, **alone, **fewer}:
            run.measure("unigram", seed, measure_unigram, dict([next(iter(trained.items()))]))
        draft_models = {"model": stages["matlm"]} if "matlm" in stages else {}
        draft_models |= {name: alone[name] for name in ("S", "XL") if alone}
        if draft_models:
            run.measure("drafts", seed, measure_drafts, draft_models)
        if "matlm" in stages:
            orders = {"pairs": SEARCH_PAIRS if run.preset != "tiny" else 12}
            run.measure("orders", seed, measure_orders, {"model": stages["matlm"]}, orders)
        if DECODING in rows:
            models = {"model": nested(run, "matlm", seed)}
            for index, name in ((0, "S"), (3, "XL")):
                models[name] = independent(run, seed, f"independent_{name}", index)
            run.measure(DECODING, seed, measure_decoding, models)
        if "widths" in rows:
            declare_widths(run, seed)


def _refuse_other_sizes(model: Any, rows: list[str]) -> None:
    """Refuse settings of MatLM that have no S, M, L and XL, or no independent models of them."""
    axes = model.fractions
    if [len(one) for one in axes.values()] != [len(GRANULARITIES)] or "depth" in axes:
        raise ValueError(
            f"model.fractions is {axes}, expected one axis, ffn or heads, with a number for each "
            f"of {', '.join(GRANULARITIES)}: the tables and Table 5's budgets name these"
        )
    if not {INDEPENDENT, FEWER_HEADS, DECODING, "widths"} & set(rows):
        return
    given = set(model.model_args or {})
    if model.architecture in CONFIG_MAPPING:  # transformers ignores names that it does not know
        config = AutoConfig.for_model(model.architecture, bos_token_id=None, eos_token_id=None)
        given = {name for name in given if hasattr(config, name)}
    lacking = [name for name in SCALED if name not in given]
    if lacking:
        raise ValueError(
            f"{model.architecture} takes no {', '.join(lacking)} from model.model_args, by which "
            f"the rows {INDEPENDENT}, {FEWER_HEADS}, {DECODING} and widths are sized: leave them "
            "out with --rows, or set model.architecture to a type such as starcoder2, with all of "
            "them in model_args"
        )


SCALED = ("hidden_size", "num_attention_heads", "intermediate_size")  # of independent models
# Rows that a preset trains without --rows; presets not listed train all but `widths`.
ROWS = {
    "tiny": ["matlm", "joint", "per_layer", INDEPENDENT],
    "small": [*NESTED, INDEPENDENT, FEWER_HEADS, *PROBABILITIES, DECODING, "widths"],
}
WIDTHS = (1 / 4, 1 / 2, 3 / 4, 1)  # of the preset's hidden size, for the scaling law


def nested(run: Run, row: str, seed: int, **settings: Any) -> Stage:
    """Declare the training of a nested row, on 4X tokens."""
    joint = {
        "trainer.max_steps": quarter_of_steps,
        "model.warmup_steps": quarter_of_warmup,
        "trainer.accumulate_grad_batches": lambda c: c.trainer.accumulate_grad_batches * 4,
    }
    varied: dict[str, Any] = {"model.joint": None}
    if row == "joint":  # four batches a step, one for each granularity (Appendix B.4)
        varied = {"model.joint": "mean", "model.split_batch": True}
    elif row == "per_layer":
        varied |= {"trainer.callbacks": [sampler(per_layer=True)]}
    elif row in PROBABILITIES:
        varied |= {"trainer.callbacks": [sampler(probabilities=PROBABILITIES[row])]}
    elif row == "heads":
        varied |= {"model.fractions": {"heads": HEADS}}
    name = row.replace("/", "_").replace(" ", "")
    derived = joint if row == "joint" else {}
    return training(
        run, name, seed, {**varied, **settings}, derived, [f"val/loss_{n}" for n in SIZES]
    )


def training(
    run: Run, name: str, seed: int, varied: dict[str, Any], derived: Derived, metrics: Sequence[str]
) -> Stage:
    """Declare a training of matlm.yaml, see `language_training`; `varied` at every seed."""
    return language_training(run, name, "matlm", seed, lambda seed: varied, derived, metrics)


def quarter_of_steps(c: Any) -> int:
    """Steps of a training on X tokens, where the YAML file has those for 4X.

    Raises:
        ValueError: if there are fewer than four.
    """
    steps = c.trainer.max_steps
    if steps < 4:
        raise ValueError(
            f"trainer.max_steps is {steps}, expected 4 or more: an independent model trains for a "
            "quarter of them (Appendix B.3)"
        )
    return steps // 4


def validation_interval(c: Any) -> int | None:
    """Batches between an independent model's validations, so that each quarter ends in one."""
    given = c.trainer.val_check_interval
    if given is None:
        return None
    quarter = max(1, quarter_of_steps(c) * c.trainer.accumulate_grad_batches // 4)
    return quarter // min(quarter, math.ceil(quarter / given))


def quarter_of_warmup(c: Any) -> float:
    """Warm-up of a training with a quarter of the steps; a share of them (below 1) stays."""
    steps = c.model.init_args.warmup_steps
    return steps if steps < 1 else steps // 4


def independent(run: Run, seed: int, name: str, index: int, scale: float = 1.0) -> Stage:
    """Declare the training of a plain decoder of one size, on X tokens (Appendix B.3).

    Args:
        run: receives the stage.
        seed: of the stage.
        name: of the stage.
        index: of the size in S, M, L, XL.
        scale: factor on the hidden size, for the scaling law.

    Raises:
        ValueError: if model.fractions does not have one number for each size.
    """

    def model_args(c: Any) -> dict[str, Any]:
        fractions = c.model.init_args.fractions.get("ffn", [])
        if len(fractions) != len(GRANULARITIES):
            raise ValueError(
                f"model.fractions has {fractions} for ffn, expected one number for each of "
                f"{', '.join(GRANULARITIES)}: the independent models have these widths"
            )
        fraction = fractions[index]
        arguments = c.model.init_args.model_args
        return {**arguments, "intermediate_size": round(arguments["intermediate_size"] * fraction)}

    derived: Derived = {**ALONE, "model.model_args": lambda c: scaled(model_args(c), scale)}
    return training(run, name, seed, {"model.joint": None}, derived, ["val/loss"])


def with_fewer_heads(run: Run, seed: int, name: str, share: float) -> Stage:
    """Declare the training of a plain decoder with a share of the heads, on X tokens.

    Args:
        run: receives the stage.
        seed: of the stage.
        name: of the size.
        share: of the heads; their size stays.
    """

    def model_args(c: Any) -> dict[str, Any]:
        arguments = c.model.init_args.model_args
        heads = arguments["num_attention_heads"]
        kept = {
            key: round(arguments.get(key, heads) * share)
            for key in ("num_attention_heads", "num_key_value_heads")
        }
        return {**arguments, **kept, "head_dim": arguments["hidden_size"] // heads}

    derived: Derived = {**ALONE, "model.model_args": model_args}
    name = f"independent_heads_{name}"
    return training(run, name, seed, {"model.joint": None}, derived, ["val/loss"])


ALONE: Derived = {  # derived settings of a plain decoder that is trained on X tokens (Appendix B.3)
    "model.fractions": lambda c: None,
    "trainer.max_steps": quarter_of_steps,
    "trainer.val_check_interval": validation_interval,
    "model.warmup_steps": quarter_of_warmup,
}


def scaled(arguments: dict[str, Any], scale: float) -> dict[str, Any]:
    """A decoder's configuration with another width and the same number of heads."""
    heads = 2 * arguments["num_attention_heads"]  # rotary positions need an even head size
    width = max(heads, round(arguments["hidden_size"] * scale / heads) * heads)
    ratio = width / arguments["hidden_size"]
    inner = round(arguments["intermediate_size"] * ratio)
    return {**arguments, "hidden_size": width, "intermediate_size": inner}


def declare_widths(run: Run, seed: int) -> None:
    """Declare MatLM and an independent XL at several hidden sizes, for the scaling law."""
    arguments = run.parsed("matlm").model.init_args.model_args
    for scale in WIDTHS:
        smaller = scaled(arguments, scale)
        name = f"d{smaller['hidden_size']}"
        # at full width the main rows' stages are reused
        varied = {} if scale == 1 else {"model.model_args": smaller}
        stage = nested(run, "matlm" if scale == 1 else f"matlm_{name}", seed, **varied)
        settings = {"row": "matlm", "between": 0, "suffix": f" {name}"}
        run.measure(f"width {name}", seed, measure_sizes, {"model": stage}, settings)
        alone = independent(
            run, seed, f"independent_XL{'' if scale == 1 else '_' + name}", 3, scale
        )
        settings = {"suffix": f" {name}"}
        run.measure(f"width {name} alone", seed, measure_independent, {"XL": alone}, settings)


EXPERIMENT = Experiment(
    "matformer.matlm", __file__, "matlm", __doc__ or "", declare, report,
    measured_on={"small": "decoders below a million parameters, bytes of installed Python source"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
