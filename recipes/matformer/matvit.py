"""MatViT: train a nested vision Transformer and compare it with separately trained ones.

Trains MatViT with sampled granularities (the paper) and four independent ViTs; also, as baselines,
joint training of all granularities, on the same batch with the sum of their losses (the released
code) or on a quarter of the batch each (DynaBERT), and a random granularity for each layer (OFA).
Then scores every granularity, the Mix'n'Match sizes between them and the baselines.

    python -m recipes.matformer.matvit --jobs 2                      numbers on a CPU, ten minutes
    python -m recipes.matformer.matvit --preset small --seeds 3      tiny-imagenet of $RECIPES_DATA
    python -m recipes.matformer.matvit --preset paper --data.root /data/imagenet
    python -m recipes.matformer.matvit --rows matvit,independent     the paper's main comparison

MatViT trains for 4X epochs, the `max_epochs` of the YAML file, and each independent model for X
epochs (Appendix B.3). Where the YAML file names pre-trained weights, as at `small`, the neurons are
first sorted by importance; an independent model starts from the slice that MatViT's size uses, and
a further row nests the neurons in their original order. `--rows …,scratch` adds an XL trained from
random weights. matvit_grid.yaml lists the learning rates that each training chooses from.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from lightning_modules.backbones import build_vision
from lightning_modules.matformer.nest import GRANULARITIES
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Run
from recipes.matformer.convergence import INDEPENDENT, measure_training
from recipes.matformer.matvit_measures import (
    measure_alone,
    measure_chance,
    measure_nested,
    measure_orders,
)
from recipes.matformer.matvit_report import ROWS, report
from recipes.matformer.starts import starts
from recipes.matformer.trials import Derived, tuned
from recipes.messages import console
from recipes.nodes import Artifact, Node, Stage
from recipes.runner import run_experiment

SAMPLER = "callbacks.granularity.GranularitySampling"
COUNT = len(GRANULARITIES)
CURVE, MONITORED = "training of independent", {"metric": "val/accuracy"}


def declare(run: Run) -> None:
    """Declare the training and the scores of every row, for each seed."""
    pretrained = run.parsed("matvit").model.init_args.init_from is not None
    known = [row for row in ROWS if pretrained or row not in ("unsorted", "scratch")]
    rows = run.rows(known, [row for row in known if row != "scratch"])
    for seed in run.seeds:
        for row in rows:
            models: dict[str, Node]
            if row in ("independent", "scratch"):
                alone = row == "independent"
                models = {**(independents(run, "matvit", seed) if alone else scratch(run, seed))}
                run.measure(f"score {row}", seed, measure_alone, models, {"row": row})
            else:
                models = {"model": nested(run, row, seed)}
                run.measure(f"score {row}", seed, measure_nested, models, {"row": row})
            if row == "independent":
                run.measure(CURVE, seed, measure_training, models, MONITORED)
            if row == "matvit":
                run.measure("orders", seed, measure_orders, models)
        run.measure("chance", seed, measure_chance, models)


def nested(run: Run, row: str, seed: int) -> Stage:
    """Declare the training of a nested row: any of ROWS but `independent` and `scratch`."""
    varied: dict[str, dict[str, Any]] = {
        "matvit": {},
        "joint": {"model.joint": "sum"},
        "dynabert": {"model.joint": "mean", "model.split_batch": True},
        "per_layer": {"trainer.callbacks": [sampler(per_layer=True)]},
        "unsorted": {"model.init_from": run.parsed("matvit").model.init_args.init_from},
    }
    derived: dict[str, Derived] = {
        # every image goes through all granularities: X epochs, with as many updates as an
        # independent model
        "joint": quarter(),
        # a step for every four batches: 4X epochs, again with as many updates
        "dynabert": {
            "trainer.accumulate_grad_batches": lambda s: s.trainer.accumulate_grad_batches * COUNT,
            "trainer.max_steps": steps,
        },
    }
    # the independent models differ in their feed-forward layers, so nothing else may be nested
    return training(run, row, seed, {"model.part": "ffn", **varied[row]}, derived.get(row, {}))


def training(
    run: Run,
    name: str,
    seed: int,
    varied: dict[str, Any],
    derived: Derived | None = None,
    size: str = "XL",
    trials_of: str = "trials",
) -> Stage:
    """Declare a training with the settings that its trials choose, if the preset has trials.

    Args:
        run: receives the stages.
        name: of the stage.
        seed: of the stage; that of the trials is 0.
        varied: settings in which it differs from matvit.yaml.
        derived: see `Stage`.
        size: whose slice of the pre-trained weights it starts from, if there are any.
        trials_of: the entry of matvit_grid.yaml that lists the settings of its trials.
    """
    grid, rules = run.grid("matvit_grid"), derived or {}

    def varied_at(seed: int) -> dict[str, Any]:
        part, fractions = varied.get("model.part", "ffn"), varied.get("model.fractions")
        files = starts(run, seed, part, fractions)
        return {**({"model.init_from": files[size]} if files else {}), **varied}

    def half(settings: Any) -> int:
        whole = rules.get("trainer.max_epochs", lambda s: s.trainer.max_epochs)(settings)
        return max(1, whole // 2)

    halved = {**rules, "trainer.max_epochs": half, "trainer.check_val_every_n_epoch": half}
    halved.pop("trainer.val_check_interval", None)  # trials are scored at their end
    plain = "model.fractions" in varied and varied["model.fractions"] is None
    metrics = ["val/accuracy"] if plain else [f"val/accuracy_{one}" for one in GRANULARITIES]
    candidates, limits = grid[trials_of], grid["trial"]
    chosen = tuned(run, name, "matvit", varied_at(0), candidates, limits, halved, metrics)
    return run.stage(name, "matvit", seed, varied_at(seed), chosen, rules)


def sampler(**settings: Any) -> dict[str, Any]:
    """An entry of `trainer.callbacks`: GranularitySampling with these arguments."""
    return {"class_path": SAMPLER, "init_args": settings}


def quarter() -> Derived:
    """Derived settings of a training for X epochs, where the YAML file has 4X."""
    return {
        "trainer.max_epochs": epochs,
        "trainer.max_steps": steps,
        "trainer.check_val_every_n_epoch": interval,
    }


def epochs(settings: Any) -> int:
    """X, a quarter of the YAML file's epochs.

    Raises:
        ValueError: if it is not a whole number.
    """
    total = settings.trainer.max_epochs
    if total % COUNT:
        raise ValueError(
            f"trainer.max_epochs {total} must be a multiple of {COUNT}: an independent model "
            "trains for a quarter of it"
        )
    return total // COUNT


def steps(settings: Any) -> int:
    """A quarter of the limit on steps; -1, no limit, stays.

    Raises:
        ValueError: if it is a limit below four.
    """
    limit = settings.trainer.max_steps
    if 0 <= limit < COUNT:
        raise ValueError(
            f"trainer.max_steps is {limit}, expected {COUNT} or more: an independent model makes a "
            "quarter of them"
        )
    return limit if limit < 0 else limit // COUNT


def by_quarters() -> Derived:
    """Derived settings of validations of which one ends each quarter of X epochs."""

    def every(settings: Any) -> int | None:
        given = interval(settings)
        return given if given is None else min(given, max(1, epochs(settings) // COUNT))

    def within(settings: Any) -> Any:
        given = settings.trainer.val_check_interval
        if settings.trainer.check_val_every_n_epoch is None:
            return given
        return {1: 1 / 4, 2: 1 / 2, 3: 1 / 4}.get(epochs(settings), given)

    return {"trainer.check_val_every_n_epoch": every, "trainer.val_check_interval": within}


def interval(settings: Any) -> int | None:
    """Epochs between validations: a quarter of the YAML file's, at least 1; None stays."""
    given = settings.trainer.check_val_every_n_epoch
    return given if given is None else max(1, given // COUNT)


def independents(
    run: Run,
    config: str,
    seed: int,
    prefix: str = "independent",
    start: Mapping[str, Node | Artifact] | None = None,
    only: str = "",
) -> dict[str, Stage]:
    """Declare the trainings of plain models of the four sizes, for X epochs each.

    Args:
        run: receives the stages.
        config: the YAML file of the nested model whose sizes are trained.
        seed: of the stages.
        prefix: of the stages' names.
        start: for each size, the stage or file whose weights it starts from; None: random weights.
        only: the one size to train; all four if empty.
    """
    stages = {}
    for place, size in enumerate(GRANULARITIES):
        if only not in ("", size):
            continue
        name, plain = f"{prefix}_{size}", {"model.fractions": None}
        derived = {**quarter(), **by_quarters(), "model.model_args": narrow(place)}
        if config == "matvit":
            stages[size] = training(run, name, seed, plain, derived, size)
        else:
            varied = {**plain, **({"model.init_from": start[size]} if start else {})}
            stages[size] = run.stage(name, config, seed, varied, derived=derived)
    return stages


def scratch(run: Run, seed: int) -> dict[str, Stage]:
    """Declare the training of a plain XL for X epochs from random weights."""
    varied = {"model.fractions": None, "model.init_from": None}
    derived = {**quarter(), **by_quarters()}
    return {"XL": training(run, "scratch", seed, varied, derived, trials_of="scratch")}


def narrow(place: int) -> Callable[[Any], dict[str, Any]]:
    """A function from a stage's settings to the `model_args` of a plain model of one size.

    Args:
        place: of the size in S, M, L, XL, whose feed-forward fractions are 1/8, 1/4, 1/2 and 1.
    """

    def arguments(settings: Any) -> dict[str, Any]:
        model = settings.model.init_args
        given = model.model_args or {}
        ratio = hidden_ratio(model.architecture, json.dumps(given)) * 2.0 ** (place - COUNT + 1)
        return {**given, "mlp_ratio": ratio}

    return arguments


@cache  # every stage of every seed asks, and the model has to be built for it
def hidden_ratio(architecture: str, model_args: str) -> float:
    """Width of the feed-forward layers relative to the model's (timm's `mlp_ratio`).

    Args:
        architecture: name of a model of timm.
        model_args: its arguments, as JSON.
    """
    given = json.loads(model_args)
    if "mlp_ratio" in given:
        return given["mlp_ratio"]
    with torch.device("meta"):
        parts = build_vision(architecture, 0, given).modules()
    layer: Any = next(part.fc2 for part in parts if hasattr(part, "fc2"))
    return layer.in_features / layer.out_features


def size_matters(row: str) -> Comparison:
    """The condition for judging claims on images: a row's XL is more accurate than its S."""
    large, small = ({"row": row, "set": size} for size in ("XL", "S"))
    # `where` names the sets, so that this is one gate and not one for each set
    return Comparison(
        "accuracy", large, small, where={"set": ["S", "XL"]}, scale=100, digits=1,
        says=f"XL of the row {row!r} is more accurate than its S",
    )  # fmt: skip


def learnt(size: str, row: str = INDEPENDENT) -> Comparison:
    """A row's model of a size, trained alone, gains less than three points in its last quarter."""
    before, after = ({"row": row, "x": quarter} for quarter in (3.0, 4.0))
    where = {"set": size}
    return Comparison(
        "val_accuracy", before, after, -0.03, where, scale=100, digits=1,
        says=f"{size} of the row {row!r} gains less than three points of validation accuracy in "
        "the last quarter of its training",
    )  # fmt: skip


# A search takes the size of least predicted loss. If the predictor errs by more than it explains,
# that is the size on which it errs most, and a better size says nothing against searching.
SEARCH_PREDICTS = Comparison(
    "predictor_explained", "search", None, 0.5, where={"set": ""}, scale=100, digits=0, unit="%",
    says="the search's predictor explains more than half of the variance of losses that it was "
    "not fitted to",
)  # fmt: skip


def on_par(row: str, size: str) -> Comparison:
    """A row's size is at most half a point less accurate than the independent model."""
    nested, alone = ({"row": one, "set": size} for one in (row, "independent"))
    return Comparison("accuracy", nested, alone, threshold=-0.005, scale=100, digits=1)


def in_order(worse: str, better: str) -> Comparison:
    """A row of `measure_orders` has a higher loss than another, on the mean of the sizes."""
    return Comparison("loss", worse, better, where={"stage": "orders"}, mean_over="set", digits=4)


SIZE_MATTERS = size_matters("independent")
FOUR = {"set": list(GRANULARITIES)}
CLAIMS = [
    Claim(
        name=f"MatViT {size} ≥ independent {size}",
        paper="MatFormer",
        sentence=f"MatViT's {size} is at most half a point less accurate than an independent ViT "
        "of its size.",
        where="Section 4.2, Fig. 4",
        number="B/16: on par or better, by up to 0.35 points",
        test=on_par("matvit", size),
        gate=[SIZE_MATTERS, learnt(size)],
    )
    for size in GRANULARITIES
] + [
    Claim(
        name="ViT → MatViT keeps XL",
        paper="MatFormer",
        sentence="With the neurons of a pre-trained ViT nested in their original order, XL is at "
        "most half a point less accurate than the ViT fine-tuned alone.",
        where="Table 7, ViT → MatViT",
        number="85.57 against 85.26 %",
        test=on_par("unsorted", "XL"),
        gate=[SIZE_MATTERS, learnt("XL")],
    ),
    Claim(
        name="sorting first",
        paper="MatFormer",
        sentence="Sorting a pre-trained model's neurons by importance before nesting raises the "
        "accuracy of S.",
        where="not in the paper, which nests them in their original order (Table 7)",
        number="–",
        test=Comparison(
            "accuracy", "matvit", "unsorted", where={"set": "S"}, scale=100, digits=1
        ),
        gate=SIZE_MATTERS,
    ),
    Claim(
        name="sampled > DynaBERT",
        paper="MatFormer",
        sentence="At equal data, sampling one granularity at each step has a lower mean loss than "
        "training each on a quarter of the batch (DynaBERT).",
        where="Appendix B.4",
        number="0.01 log-perplexity at 850M",
        test=Comparison("loss", "dynabert", "matvit", where=FOUR, mean_over="set", digits=4),
        gate=SIZE_MATTERS,
    ),
    Claim(
        name="sampled > per layer at S and XL",
        paper="MatFormer",
        sentence="A random granularity for each layer (OFA) has a higher loss at S and at XL.",
        where="Appendix B.4",
        number="a bell-shaped curve of losses",
        test=[
            Comparison("loss", "per_layer", "matvit", where={"set": size}, digits=4)
            for size in ("S", "XL")
        ],
        gate=SIZE_MATTERS,
    ),
    Claim(
        name="Mix'n'Match between",
        paper="MatFormer",
        sentence="The accuracy of Mix'n'Match sizes is on average at most half a point below the "
        "line between the trained sizes.",
        where="Section 4.2, Fig. 4",
        number="a curve",
        test=Comparison("above the line", "matvit", None, -0.005, scale=100, digits=1),
        gate=SIZE_MATTERS,
    ),
    Claim(
        name="least slope > S and XL only",
        paper="MatFormer",
        sentence="Layers of neighbouring granularities have a lower loss than layers of S and XL "
        "only, with no more parameters.",
        where="Section 3.3",
        number="not given",
        test=in_order("ends", "least_slope"),
        gate=SIZE_MATTERS,
    ),
    Claim(
        name="increasing order",
        paper="MatFormer",
        sentence="Granularities that rise with depth have a lower loss than the same falling with "
        "depth.",
        where="Appendix D.1 (language models)",
        number="not given",
        test=in_order("decrease", "increase"),
        gate=SIZE_MATTERS,
    ),
    Claim(
        name="Mix'n'Match > search",
        paper="MatFormer",
        sentence="Mix'n'Match has a lower loss than evolutionary search within the same budget.",
        where="Appendix D.1, Table 5",
        number="2.926 against 2.932 (245M)",
        test=in_order("search", "increase"),
        gate=[SIZE_MATTERS, SEARCH_PREDICTS],
    ),
    Claim(
        name="MatViT S agrees with XL",
        paper="MatFormer",
        sentence="MatViT's S predicts the same class as its XL more often than an independent S "
        "agrees with an independent XL.",
        where="Section 3.4, Fig. 2c (language models)",
        number="a curve",
        test=Comparison(
            "agreement", {"row": "matvit", "set": "S"}, {"row": "independent", "set": "S"},
            scale=100, digits=1,
        ),
        gate=[SIZE_MATTERS, learnt("S"), learnt("XL")],
    ),
]  # fmt: skip
MEASURED_ON = {"small": "the first nine blocks of DINOv2's ViT-S/14, 50 classes of Tiny-ImageNet"}
EXPERIMENT = Experiment(
    "matformer.matvit", __file__, "matvit", __doc__ or "", declare, report,
    measured_on=MEASURED_ON,
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
