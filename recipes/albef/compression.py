"""ALBEF compressed by PELA: pre-train, compress, repair, and fine-tune on four tasks.

The dense ALBEF is pre-trained. Its low-rank approximations are repaired against it with L_fd and
L_rwp (PELA), with TinyBERT's or MaskAlign's distillation, with the base loss alone, or not at all.
Each is then fine-tuned on retrieval, SNLI-VE, VQA and grounding, as are the dense model, LoRA, and
token merging (ToMe) with as many multiply-adds in the image encoder. The report has tables of
scores, the pictures retrieved for some sentences, and heat maps.

    python -m recipes.albef.compression                              shapes, two minutes on a CPU
    make weights && python -m recipes.albef.compression --preset small --seeds 3    Flickr8k
    python -m recipes.albef.compression --preset paper --data.root /data

To use the released ALBEF instead of pre-training, load it and make one step at learning rate 0,
which leaves its weights unchanged:

    python -m recipes.albef.compression --preset paper --data.root /data \\
        --pretrain.model.init_from ALBEF.pth --pretrain.model.lr 0 --pretrain.trainer.max_steps 1

recipes/albef/use.py applies the trained models to your own pictures.
"""

import functools
import json
from functools import partial
from typing import Any

import pandas as pd
import torch

from lightning_modules.albef import build, skipped
from lightning_modules.counting import count_macs
from lightning_modules.pela import factorize
from lightning_modules.pela.tome import matching_tokens
from recipes.albef import measures
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Run, Stage
from recipes.messages import console
from recipes.provenance import provenance
from recipes.results import select
from recipes.runner import run_experiment
from recipes.tables import Column, tabulate

REPAIRED: dict[str, dict[str, Any]] = {
    "pela": {"model.distillation": "pela"},
    # the baselines distil features, as L_fd does, but have nothing like L_rwp
    "tinybert": {"model.distillation": "tinybert", "model.rwp_weight": 0.0},
    "maskalign": {"model.distillation": "maskalign", "model.rwp_weight": 0.0},
    "base": {"model.fd_weight": 0.0, "model.rwp_weight": 0.0},
}
TITLES = {
    "dense": "dense",
    "scratch": "without pre-training",
    "frozen": "contrast on frozen encoders",
    "lora": "LoRA",
    "direct": "direct low rank",
    "base": "low rank, base loss alone",
    "tinybert": "low rank, TinyBERT",
    "maskalign": "low rank, MaskAlign",
    "tome": "ToMe, as many multiply-adds in the image encoder",
    "pela": "PELA",
}
RECALLS = [f"{way}_r{k}" for way in ("t2i", "i2t") for k in (1, 5, 10)]
ZERO_SHOT = "before fine-tuning"
SIGNS = {"alpha": "α", "beta": "β"}
TERMS = ("base", "distillation", "perturbation")
OTHER_TASKS = {"entailment": "SNLI-VE", "vqa": "VQA", "grounding": "RefCOCO+"}


def declare(run: Run) -> None:
    """Declare the pre-training, and every row at each of its ratios."""
    grid = run.grid("compression_grid")
    rows = run.rows(TITLES, grid["rows"])
    tuning = Tuning(run, grid["trials"])
    for seed in run.seeds:
        start: dict[str, Any] = {}
        if grid["frozen_first"] or "frozen" in rows:
            frozen = contrast_on_frozen_encoders(run, grid, seed)
            if "frozen" in rows:
                scoring = {"row": "frozen", "set": "retrieval"}
                name = "score_retrieval_frozen"
                run.measure(name, seed, measures.score, {"model": frozen}, scoring)
            if grid["frozen_first"]:
                start = {"model.init_from": frozen}
        dense = run.stage("pretrain", "pretrain", seed, start)
        for name, config in ((ZERO_SHOT, "pretrain"), ("retrieval", "retrieval")):
            data = run.parsed(config).data
            settings = {"set": name, "data": data.class_path, "arguments": data.init_args.as_dict()}
            run.measure(f"chance_{config}", seed, measures.chance, settings=settings)
        if "scratch" in rows:
            without_pretraining(run, tuning, seed)
        for row in (one for one in rows if one not in ("frozen", "scratch")):
            for ratio in ratios_of(grid, row):
                fine_tuned(run, grid, tuning, seed, dense, row, ratio)


class Tuning:
    """Chooses the settings of rows by trials, scored on the validation part.

    The trials of a row are declared once, at the first call of `of`, with seed 0 and the row's
    first ratio. All its seeds and ratios use their result.
    """

    def __init__(self, run: Run, trials: dict[str, Any]) -> None:
        self.run, self.trials = run, trials
        self.best: dict[tuple[str, str], dict[str, Any]] = {}

    def of(self, config: str, row: str, varied: dict[str, Any]) -> dict[str, Any]:
        """The best trial's settings for a row's stage; {} where the preset has no trials of it.

        Args:
            config: the stage's YAML file.
            row: one of TITLES.
            varied: settings in which the row's stage differs from the file, for the trials.
        """
        candidates = self.trials.get(config, {}).get(row, [])
        if candidates and (config, row) not in self.best:
            shared = self.trials["settings"]
            name, metric = f"{config}_{row}", "val/r_mean"
            best = self.run.best_candidate(name, config, candidates, metric, varied, shared)
            self.best[config, row] = dict(best)
        return self.best.get((config, row), {})


def contrast_on_frozen_encoders(run: Run, grid: dict[str, Any], seed: int) -> Stage:
    """Declare a training of the contrastive heads alone, on the pre-trained encoders."""
    varied = {"model.tuning": "head", "model.k": 0, **encoders_of(run)}
    return run.stage("retrieval_frozen", "retrieval", seed, varied, grid["frozen"])


def without_pretraining(run: Run, tuning: Tuning, seed: int) -> None:
    """Declare retrieval that begins with the encoders' own weights, and its scores."""
    varied = encoders_of(run)
    best = tuning.of("retrieval", "scratch", varied)
    stage = run.stage("retrieval_scratch", "retrieval", seed, varied, best)
    scoring = {"row": "scratch", "set": "retrieval"}
    run.measure("score_retrieval_scratch", seed, measures.score, {"model": stage}, scoring)


def encoders_of(run: Run) -> dict[str, Any]:
    """The settings that give a stage the encoders with which pre-training begins."""
    weights = run.parsed("pretrain").model.init_args
    return {"model.vision_from": weights.vision_from, "model.text_from": weights.text_from}


def ratios_of(grid: dict[str, Any], row: str) -> list[float | None]:
    """The ratios κ at which a row is run; [None] for rows that are not compressed."""
    if row in ("dense", "scratch", "frozen", "lora"):
        return [None]
    return [float(ratio) for ratio, rows in grid["ratios"].items() if row in rows]


def fine_tuned(
    run: Run,
    grid: dict[str, Any],
    tuning: Tuning,
    seed: int,
    dense: Stage,
    row: str,
    ratio: float | None,
) -> None:
    """Declare one row's stages, from the dense model to its scores on every task."""
    label = row if ratio is None else f"{row}_k{ratio:g}"
    start = dense
    changes: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    varied: dict[str, Any]
    scoring: dict[str, Any]
    if row in REPAIRED:
        varied = {"model.init_from": dense, "model.ratio": ratio, **REPAIRED[row]}
        best = tuning.of("repair", row, varied)
        start = run.stage(f"repair_{label}", "repair", seed, varied, best)
    elif row == "direct":
        changes = {"model.ratio": ratio}
    elif row == "lora":
        changes, settings = {"model.tuning": "lora"}, grid["lora"]
    if row not in ("lora", "tome"):
        scoring = {"row": label, "set": ZERO_SHOT, "ratio": changes.get("model.ratio")}
        run.measure(f"score_{label}", seed, measures.score, {"model": start}, scoring)
    for task in (name for name, rows in grid["tasks"].items() if row in rows):
        varied = {"model.init_from": start, **changes}
        if row == "tome":
            assert ratio is not None
            parsed = run.parsed(task)
            sizes, side = parsed.model.init_args.sizes, parsed.data.init_args.image_size
            varied["model.merged_tokens"] = merged_tokens(json.dumps(sizes or {}), side, ratio)
        best = {**settings, **tuning.of(task, row, varied)}
        stage = run.stage(f"{task}_{label}", task, seed, varied, best)
        scoring = {"row": label, "set": task, "pictures": row in ("dense", "pela")}
        run.measure(f"score_{task}_{label}", seed, measures.score, {"model": stage}, scoring)


@functools.cache  # it takes seconds, and all seeds and most tasks ask the same
def merged_tokens(sizes: str, side: int, ratio: float) -> int:
    """Tokens that ToMe merges in each block, for the multiply-adds of a low-rank image encoder.

    Args:
        sizes: arguments of albef.build, as JSON.
        side: of the images, in pixels.
        ratio: κ of the low-rank encoder.
    """
    with torch.device("meta"):
        dense, low_rank = (build("retrieval", **json.loads(sizes)) for _ in range(2))
    factorize(low_rank, ratio, skip=skipped(low_rank), method="empty")
    target = count_macs(low_rank.visual_encoder, (1, 3, side, side))
    return matching_tokens(dense.visual_encoder, target, side)


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Tables of each task, and the pictures."""
    grid = run.grid("compression_grid")
    titles = {"chance": "chance"}
    for row, title in TITLES.items():
        for ratio in ratios_of(grid, row):
            if ratio is None:
                titles[row] = title
            else:
                titles[f"{row}_k{ratio:g}"] = f"{title}, κ {ratio:g}"
    text = [
        f"# ALBEF compressed by PELA, preset {run.preset}",
        provenance(run, table),
        losses(run),
    ]
    percent: dict[str, Any] = {"scale": 100}
    for name in (ZERO_SHOT, *grid["tasks"]):
        if not len(select(table, {"set": name})):
            continue
        where = {"set": name}
        ranking = name in (ZERO_SHOT, "retrieval")
        metric = "r_mean" if ranking else "accuracy"
        columns = [
            Column("parameters", "parameters", where, digits=0, spread=""),
            Column("multiply-adds", "macs", where, digits=0, spread=""),
        ]
        if ranking:
            columns += [Column(_recall(one), one, where, **percent) for one in RECALLS]
            if run.parsed("retrieval").model.init_args.k:  # else matching re-ranks nothing
                columns += [Column("similarity alone, mean", "itc_r_mean", where, **percent)]
        columns += [Column("mean" if ranking else metric, metric, where, **percent)]
        if len(select(table, {"set": name, "row": "dense", "metric": metric})):
            columns += [Column("− dense", metric, where, reference="dense", **percent)]
        settings = [
            Column("lr", "lr", where, digits=6, spread=""),
            *(Column(sign, metric, where, digits=0) for metric, sign in SIGNS.items()),
            *(Column(f"share of {one}", f"share_{one}", where, digits=3) for one in TERMS),
        ]
        text += [f"## {name.capitalize()}", tabulate(table, titles, columns).markdown()]
        text += ["Trained with:", tabulate(table, titles, settings).markdown()]
        pictures = sorted(run.out.glob(f"seed0/score_{name}_*/*.png"))
        text += [f"![{one.parent.name}]({one.relative_to(run.out)})" for one in pictures]
    return text


def losses(run: Run) -> str:
    """The paragraph on scores, losses and settings of the repair."""
    h = run.parsed("repair").model.init_args
    return (
        f"Scores are of the test part, in %; the mean is over all six recalls. L_rwp: p {h.p:g}, "
        f"ε {h.epsilon:g}, {h.setting} form. Parameters are the model's, without the momentum "
        "copy; LoRA's are the merged model's. Multiply-adds, which older runs have not counted, "
        "are of one image and one text of the greatest length, without the heads. Where the preset "
        "has trials, lr, α and β were chosen on the validation part with seed 0 at the row's first "
        "κ. A term's share is the norm of its gradient over the sum of the terms' norms."
    )


def _recall(name: str) -> str:
    way, _, k = name.partition("_r")
    return f"{'image' if way == 't2i' else 'text'} R@{k}"


def _compare(
    a: str, b: str, threshold: float = 0.0, where: str = "retrieval", says: str = ""
) -> Comparison:
    return Comparison("r_mean", a, b, threshold, {"set": where}, scale=100, says=says)


def _gates(ratio: str) -> tuple[Comparison, ...]:
    """Conditions for judging: the encoders have learnt, and there is something to repair.

    Dense is five points of mean recall above frozen encoders, and five points above low rank
    without repair before fine-tuning.
    """
    return (
        _compare("dense", "frozen", 0.05,
                 says="the dense model is five points better than with frozen encoders"),
        _compare("dense", f"direct_k{ratio}", 0.05, ZERO_SHOT,
                 says=f"before fine-tuning, low rank at κ {ratio} without repair is five points "
                 "worse than the dense model"),
    )  # fmt: skip


CLAIMS = [
    Claim(
        name="ALBEF at κ 3",
        paper="PELA",
        sentence="ALBEF at κ 3, its linear layers at a third of their parameters, loses at most "
        "one point of the mean recall in retrieval.",
        where="Section 4.3, Flickr30k",
        number="most degradation limited to one point",
        test=_compare("pela_k3", "dense", -0.01),
        gate=_gates("3"),
    ),
    Claim(
        name="ALBEF: PELA near LoRA on retrieval",
        paper="PELA",
        sentence="PELA at κ 3 is at most one point of the mean recall in retrieval behind LoRA, "
        "which compresses nothing.",
        where="Section 4.3",
        number="slightly behind LoRA on retrieval only",
        test=_compare("pela_k3", "lora", -0.01),
        gate=_gates("3"),
    ),
    *(
        Claim(
            name=f"ALBEF, {title}: {name}",
            paper="PELA",
            sentence=sentence.format(title),
            where="Section 4.3",
            number=number,
            test=Comparison("accuracy", "pela_k3", row, threshold, {"set": task}, scale=100),
            gate=_gates("3"),
            preset="paper",
        )
        for task, title in OTHER_TASKS.items()
        for name, row, threshold, sentence, number in (
            (
                "near dense",
                "dense",
                -0.01,
                "ALBEF at κ 3 loses at most one point of the accuracy on {}.",
                "most degradation limited to one point",
            ),
            (
                "PELA > LoRA",
                "lora",
                0.0,
                "PELA at κ 3 is better on {} than LoRA, which compresses nothing.",
                "behind LoRA on retrieval only",
            ),
            (
                "PELA > TinyBERT",
                "tinybert_k3",
                0.0,
                "PELA at κ 3 is better on {} than TinyBERT's distillation of the same student.",
                "not at hand",
            ),
            (
                "PELA > MaskAlign",
                "maskalign_k3",
                0.0,
                "PELA at κ 3 is better on {} than MaskAlign's distillation of the same student.",
                "not at hand",
            ),
            (
                "PELA > ToMe",
                "tome_k3",
                0.0,
                "PELA at κ 3 is better on {} than token merging (ToMe) with as many multiply-adds "
                "in the image encoder.",
                "not at hand",
            ),
        )
        if (task, row) != ("grounding", "tome_k3")  # the paper leaves it out there
    ),
    *(
        Claim(
            name=f"ALBEF, κ {ratio}: {name}",
            paper="PELA",
            sentence=f"At κ {ratio}, {sentence}.",
            where=where,
            number=number,
            test=_compare(f"pela_k{ratio}", f"{row}_k{ratio}"),
            gate=_gates(ratio),
        )
        for ratio in ("1.5", "3")
        for name, row, sentence, where, number in (
            (
                "repair > direct",
                "direct",
                "low rank with the intermediate stage is better on retrieval than without",
                "Table 7 (on images)",
                "81 % → 61 % without repair",
            ),
            (
                "L_fd and L_rwp > base loss",
                "base",
                "L_fd and L_rwp together are better on retrieval than as much training with the "
                "base loss alone",
                "Table 7 (on images)",
                "not at hand",
            ),
            (
                "PELA > TinyBERT",
                "tinybert",
                "PELA is better on retrieval than TinyBERT's distillation of the same student",
                "Section 4.3",
                "not at hand",
            ),
            (
                "PELA > MaskAlign",
                "maskalign",
                "PELA is better on retrieval than MaskAlign's distillation of the same student",
                "Section 4.3",
                "not at hand",
            ),
            (
                "PELA > ToMe",
                "tome",
                "PELA is better on retrieval than token merging (ToMe) with as many multiply-adds "
                "in the image encoder",
                "Section 4.3",
                "not at hand",
            ),
        )
    ),
]

EXPERIMENT = Experiment(
    name="albef.compression",
    file=__file__,
    config="pretrain",
    description=__doc__ or "",
    declare=declare,
    report=report,
    measured_on={"small": "an ALBEF pre-trained here on Flickr8k, and retrieval there"},
)

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
