"""Declares the stages and measurements of recipes.pela.vision for one model and seed."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jsonargparse import Namespace

from lightning_modules.backbones import build_vision
from lightning_modules.pela import factorize
from lightning_modules.pela.tome import matching_tokens
from recipes.experiment import Later, Run, Stage
from recipes.nodes import Artifact
from recipes.pela import measures

Length = Callable[[Namespace], int]  # epochs, from a stage's settings

TABLE_7 = ("control", "fd", "rwp", "both")
BASELINES = ("tinybert", "maskalign", "tome", "lora")  # of Table 1, for every model
FEWER_TOKENS = ("maskalign", "tome")  # baselines that a Swin, which needs every token, cannot have
MODULES = "lightning_modules.pela."


@dataclass(frozen=True)
class Treatment:
    """The training of one row of the tables: LightningModule, settings and initial weights.

    Attributes:
        module: class of the stage's LightningModule.
        settings: in which the row differs from the stage's file, besides its initial weights.
        start: the initial weights. "svd": the dense weights, which the stage factorises; "dense":
            the dense weights as they are; "scratch": random weights, factorised; "sorted": the
            dense weights with the most important neurons first; "pruned": a model of the first of
            these; or a pair (ranks, factors): a low-rank model that `compress` makes with these
            arguments.
        tuned_as: the row whose trials choose this row's settings.
    """

    module: str = "lightning_modules.pela.PELA"
    settings: dict[str, Any] = field(default_factory=dict)
    start: str | tuple[str, str] = "svd"
    tuned_as: str = "both"


TREATMENTS = {
    "control": Treatment(f"{MODULES}Classifier", tuned_as="control"),
    "scratch": Treatment(f"{MODULES}Classifier", start="scratch", tuned_as="scratch"),
    "fd": Treatment(settings={"model.beta": 0.0}, tuned_as="fd"),
    "rwp": Treatment(settings={"model.alpha": 0.0}, tuned_as="rwp"),
    "both": Treatment(),
    "energy": Treatment(start=("energy", "svd")),
    "asvd": Treatment(start=("uniform", "asvd")),
    "whitened": Treatment(start=("uniform", "whitened")),
    "whitened_energy": Treatment(start=("energy", "whitened")),
    "flar": Treatment(start=("feature_error", "whitened")),
    "tinybert": Treatment(
        f"{MODULES}Distillation", {"model.method": "tinybert"}, tuned_as="tinybert"
    ),
    "maskalign": Treatment(
        f"{MODULES}Distillation", {"model.method": "maskalign"}, tuned_as="maskalign"
    ),
    "lillama": Treatment(f"{MODULES}Distillation", {"model.method": "lillama"}, tuned_as="lillama"),
    "pruned": Treatment(settings={"model.beta": 0.0}, start="pruned", tuned_as="pruned"),
    "nested": Treatment("lightning_modules.matformer.MatViT", start="sorted", tuned_as="nested"),
    "tome": Treatment(f"{MODULES}TokenMerging", start="dense", tuned_as="tome"),
    "lora": Treatment(f"{MODULES}LoRA", {"model.lora_rank": 8}, "dense", "lora"),
    "continued": Treatment(f"{MODULES}Classifier", start="dense", tuned_as="continued"),
}


@dataclass
class Study:
    """One model at one seed.

    Attributes:
        run: of the experiment.
        name: of the model's stage file, such as "deit_b".
        seed: of all its stages.
        grid: vision_grid.yaml's values at the run's preset.
        rows: the rows of the tables to train.
    """

    run: Run
    name: str
    seed: int
    grid: dict[str, Any]
    rows: list[str]

    def __post_init__(self) -> None:
        config = self.run.parsed(self.name)
        self.settings = config.model.init_args
        # measures.py builds models and data from these
        self.model_and_data = {"model": config.model.as_dict(), "data": config.data.as_dict()}
        self.weights = self.dense_weights(f"{self.name}-dense")

    def declare(self, ratios: list[float], main: bool) -> None:
        """Declare the model's rows at each ratio, and its other tables.

        Only the main model (the grid's first) has all tables, and all rows at its first ratio.
        """
        left_out = FEWER_TOKENS if "swin" in self.name else ()
        rows = [row for row in self.rows if row not in left_out]
        sets = [self.set_of(ratio) for ratio in ratios]
        self.measure("dense-score", measures.measure_dense, sets=sets, init_from=self.weights)
        for place, ratio in enumerate(ratios):
            compared = (*TABLE_7, "whitened", *(BASELINES if place == 0 else ()))
            for row in rows:
                if row in compared or (main and place == 0):
                    self.row(row, ratio)
            self.measure_untrained("direct", ratio, self.weights)
        ratio = ratios[0]
        both = self.row("both", ratio)
        trained: dict[str, Any] = {"trained": both}
        self.measure("similarity", measures.measure_similarity, trained, ratio=ratio)
        self.run.measure(f"{self.name}-low-rank", self.seed, measures.make_low_rank_folder, trained)
        if main:
            self.sweep()
            beta = float(self.settings.beta or self.grid["beta"])
            self.measure("cost", measures.measure_cost, ratio=ratio, beta=beta)
            self.finetune(both)

    def set_of(self, ratio: float) -> str:
        """The value of the column `set`: the model and a ratio."""
        return f"{self.name} κ {ratio:g}"

    def dense_weights(self, label: str, **settings: Any) -> str | Artifact | Stage:
        """The dense model's weights: from model.init_from, from the hub, or trained here."""
        model = self.settings
        if model.init_from is not None:
            return model.init_from
        if model.pretrained:
            hub = self.run.measure(
                f"{self.name}-hub", 0, measures.make_hub_weights, settings=self.model_and_data
            )
            return hub / "model.safetensors"
        chosen = {**self.tuned_dense, **settings}
        return self.run.stage(
            label, "dense", self.seed, self.architecture(), chosen, trained_for(epochs_of)
        )

    def architecture(self) -> dict[str, Any]:
        """The settings that give dense.yaml this model's architecture."""
        model = self.settings
        return {"model.architecture": model.architecture, "model.model_args": model.model_args}

    @cached_property
    def tuned_dense(self) -> dict[str, Any | Later]:
        """The best settings of the dense model's trials on held-out images, at seed 0."""
        trials = self.grid["trials"].get("dense", [])
        stages = [
            self.run.stage(
                f"{self.name}-trial-dense-{number}",
                "dense",
                0,
                self.architecture(),
                {**trial, **self.grid["trial"]},
                trained_for(half_of),
            )
            for number, trial in enumerate(trials)
        ]
        return dict(self.run.best(stages, "val/accuracy", list(trials[0]))) if trials else {}

    def row(self, row: str, ratio: float) -> Stage | None:
        """Declare a row's training and scores at a ratio; None where the row lacks that ratio."""
        treatment = TREATMENTS[row]
        if treatment.start == "dense" and ratio != self.main_ratio:
            return None
        if row in ("nested", "pruned") and slice_of(ratio, self.grid["fractions"]) is None:
            return None
        label = f"{self.name}-k{ratio:g}-{row}"
        stage = self.stage(label, row, ratio, self.tuned(treatment.tuned_as))
        where: dict[str, Any] = {"row": row, "set": self.set_of(ratio), "x": None}
        if row == "nested":
            where["slice"] = slice_of(ratio, self.grid["fractions"])
            self.run.measure(
                f"{label}-score", self.seed, measures.measure_nested, {"trained": stage}, where
            )
            return stage
        self.run.measure(
            f"{label}-score", self.seed, measures.measure_trained, {"trained": stage}, where
        )
        if row == "tome" or isinstance(treatment.start, tuple) or row == "pruned":
            self.measure_untrained(row, ratio, self.start(row, ratio)["model.init_from"])
        return stage

    @property
    def main_ratio(self) -> float:
        """The first of the model's ratios."""
        return self.grid["models"][self.name][0]

    def stage(
        self,
        label: str,
        row: str,
        ratio: float,
        settings: dict[str, Any],
        length: Length | None = None,
        weights: Any = None,
    ) -> Stage:
        """Declare a training of one row.

        Args:
            label: the stage's name.
            row: one of TREATMENTS.
            ratio: κ.
            settings: chosen by trials, or of a trial.
            length: gives the number of epochs; the file's when None.
            weights: of the dense model; `self.weights` when None.
        """
        treatment = TREATMENTS[row]
        varied = {"model": treatment.module, **self.start(row, ratio, weights)}
        varied |= treatment.settings
        perturbed = treatment.tuned_as in ("rwp", "both") and not self.settings.beta
        if perturbed and "model.beta" not in settings:
            settings = {"model.beta": self.grid["beta"], **settings}
        settings = {key: value for key, value in settings.items() if key not in varied}
        return self.run.stage(
            label, self.name, self.seed, varied, settings, trained_for(length or epochs_of)
        )

    def start(self, row: str, ratio: float, weights: Any = None) -> dict[str, Any]:
        """The settings that give a row its initial weights, and its teacher where it has one."""
        treatment, weights = TREATMENTS[row], weights or self.weights
        varied: dict[str, Any] = {"model.init_from": weights, "model.pretrained": False}
        if row == "nested":
            varied["model.init_from"] = self.sorted_weights(row, ratio, weights)
            return {**varied, "model.fractions": self.grid["fractions"]}
        varied["model.ratio"] = ratio if treatment.start in ("svd", "scratch") else None
        if treatment.start == "scratch":
            varied["model.init_from"] = None
        if row == "tome":
            varied["model.merged_tokens"] = self.merged_tokens(ratio)
        if treatment.start != "dense" and not treatment.module.endswith("Classifier"):
            varied["model.teacher_from"] = weights
        if isinstance(treatment.start, tuple):
            ranks, factors = treatment.start
            low_rank = self.run.measure(
                f"{self.name}-k{ratio:g}-{row}-start",
                self.seed,
                measures.make_start,
                settings={
                    **self.model_and_data, "init_from": weights,
                    "ratio": ratio, "ranks": ranks, "factors": factors,
                },
            )  # fmt: skip
            varied["model.init_from"] = low_rank / "low_rank"
        if row == "pruned":
            varied["model.init_from"] = self.sorted_weights(row, ratio, weights)
            varied["model.teacher_args"] = self.settings.model_args or {}
            varied["model.model_args"] = self.pruned_args(ratio)
        return varied

    def sorted_weights(self, row: str, ratio: float, weights: Any) -> Artifact:
        """The dense model with its most important neurons first, for `pruned` with these alone."""
        trial = weights is not self.weights
        start = self.run.measure(
            f"{self.name}-trial-{row}-start" if trial else f"{self.name}-k{ratio:g}-{row}-start",
            self.seed,
            measures.make_sorted,
            settings={
                "model": self.model_and_data["model"],
                "data": self.trial_data() if trial else self.model_and_data["data"],
                "init_from": weights,
                "fractions": self.grid["fractions"],
                "slice": slice_of(ratio, self.grid["fractions"]) if row == "pruned" else "XL",
            },
        )
        return start / "model.safetensors"

    def trial_data(self) -> dict[str, Any]:
        """The data of trials, whose training part leaves out the held-out images."""
        data = self.model_and_data["data"]
        limits = {
            key.removeprefix("data."): value for key, value in held_out(self.grid["trial"]).items()
        }
        return {**data, "init_args": {**data["init_args"], **limits}}

    def pruned_args(self, ratio: float) -> dict[str, Any]:
        """The model's `model_args` with the feed-forward width of the pruned row."""
        return {**(self.settings.model_args or {}), "mlp_ratio": 4 * fraction_of(ratio)}

    def merged_tokens(self, ratio: float) -> int:
        """Tokens that ToMe merges in each block to get down to low rank's multiply-adds."""
        model, side = self.settings, self.model_and_data["data"]["init_args"]["image_size"]
        arguments = json.dumps(model.model_args or {})
        return _merged_tokens(model.architecture, arguments, tuple(model.skip), side, ratio)

    def tuned(self, row: str) -> dict[str, Any | Later]:
        """The best settings of a row's trials on held-out images, at seed 0 and the main ratio."""
        trials = self.grid["trials"].get(row, [])
        first = next(iter(self.grid["models"]))
        if not trials or self.name != first:
            return dict(self.grid["untried"].get(row, {}))
        study = self if self.seed == 0 else Study(self.run, self.name, 0, self.grid, self.rows)
        limits = self.grid["trial"]
        weights = study.dense_weights(f"{self.name}-trial-dense", **held_out(limits))
        stages = [
            study.stage(
                f"{self.name}-trial-{row}-{number}",
                row,
                self.main_ratio,
                {**trial, **limits},
                half_of,
                weights,
            )
            for number, trial in enumerate(trials)
        ]
        metric = "val/accuracy"
        if row == "nested":
            metric = f"val/accuracy_{slice_of(self.main_ratio, self.grid['fractions'])}"
        return dict(self.run.best(stages, metric, list(trials[0])))

    def measure_untrained(
        self, row: str, ratio: float, init_from: Any, x: float | None = None
    ) -> None:
        """Measure a compressed model before any training."""
        given = self.model_and_data
        if row == "pruned":
            arguments = {**given["model"]["init_args"], "model_args": self.pruned_args(ratio)}
            given = {**given, "model": {**given["model"], "init_args": arguments}}
        self.run.measure(
            f"{self.name}-k{ratio:g}-{row}-before" + ("-sweep" if x else ""),
            self.seed,
            measures.measure_start,
            settings={
                **given,
                "row": row,
                "set": f"{self.name} sweep" if x else self.set_of(ratio),
                "x": x,
                "init_from": init_from,
                "ratio": ratio if row == "direct" else None,
                "merged_tokens": self.merged_tokens(ratio) if row == "tome" else 0,
            },
        )

    def measure(
        self, label: str, function: Any, stages: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        """Declare a measurement that builds its models from the stage's file."""
        given = {**self.model_and_data, "set": self.name, "init_from": self.weights}
        self.run.measure(
            f"{self.name}-{label}", self.seed, function, stages or {}, {**given, **settings}
        )

    def sweep(self) -> None:
        """Declare Fig. 4, with fewer epochs than the main table."""
        share = self.grid["sweep_share"]

        def shorter(s: Namespace) -> int:
            return max(1, round(share * s.trainer.max_epochs))

        for ratio in self.grid["sweep"]:
            label = f"{self.name}-sweep-k{ratio:g}"
            stage = self.stage(label, "both", ratio, self.tuned("both"), shorter)
            where = {"row": "both", "set": f"{self.name} sweep", "x": ratio}
            self.run.measure(
                f"{label}-score", self.seed, measures.measure_trained, {"trained": stage}, where
            )
            self.measure_untrained("direct", ratio, self.weights, x=ratio)

    def finetune(self, compressed: Stage | None) -> None:
        """Declare the fine-tuning of the dense and the compressed model on other images (Table 9).

        PELA+ takes the largest batch that fits in the dense model's memory, and makes as many
        updates as the others, as with the paper's fixed number of iterations.
        """
        config = self.run.parsed("finetune")
        batch, epochs = config.data.init_args.batch_size, config.trainer.max_epochs
        given = {"model": config.model.as_dict(), "data": config.data.as_dict()}
        cost = self.run.measure(
            "finetune-cost",
            self.seed,
            measures.measure_finetuning_cost,
            settings={**given, "dense": self.weights, "low_rank": compressed},
        )
        fitting = self.run.value(cost, read_batch, "the batch that fits", batch)

        def as_many_updates(s: Namespace) -> int:
            return max(1, round(epochs * s.data.init_args.batch_size / batch))

        rows = {
            "dense": (self.weights, {}, epochs_of),
            "pela": (compressed, {}, epochs_of),
            "pela_plus": (compressed, {"data.batch_size": fitting}, as_many_updates),
        }
        for row, (start, varied, length) in rows.items():
            stage = self.run.stage(
                f"finetune-{row}",
                "finetune",
                self.seed,
                {"model.init_from": start, **varied},
                derived=trained_for(length),
            )
            where = {"row": row, "set": "other images", "x": None}
            self.run.measure(
                f"finetune-{row}-score",
                self.seed,
                measures.measure_trained,
                {"trained": stage},
                where,
            )


def fraction_of(ratio: float) -> float:
    """The share f of hidden neurons that leaves 1/κ of a ViT's block.

    Attention has 4 D² weights and the feed-forward network 8 D² f: 4 + 8 f = 12 / κ.
    """
    return 1.5 / ratio - 0.5


def slice_of(ratio: float, fractions: list[float]) -> str | None:
    """The granularity of a nested model with 1/κ of the parameters; None if there is none."""
    wanted = fraction_of(ratio)
    return "SMLX"[fractions.index(wanted)].replace("X", "XL") if wanted in fractions else None


def held_out(limits: dict[str, Any]) -> dict[str, Any]:
    """The trials' data settings; the dense model they start from must not see held-out images."""
    return {key: value for key, value in limits.items() if key.startswith("data.")}


def epochs_of(s: Namespace) -> int:
    """The number of epochs in the stage's file."""
    return s.trainer.max_epochs


def half_of(s: Namespace) -> int:
    """Half of the epochs in the stage's file, and at least one."""
    return max(1, s.trainer.max_epochs // 2)


def trained_for(length: Length) -> dict[str, Length]:
    """Derived settings of a training of this length that validates once, at the end."""
    return {"trainer.max_epochs": length, "trainer.check_val_every_n_epoch": length}


def read_batch(finished: Any) -> int:
    """The batch size that `measure_finetuning_cost` has measured."""
    rows = finished.rows
    return int(rows[rows["metric"] == "fitting_batch"]["value"].iloc[0])


@functools.cache  # it takes seconds, and all seeds and trials ask the same
def _merged_tokens(
    architecture: str, model_args: str, skip: tuple[str, ...], side: int, ratio: float
) -> int:
    """The smallest r with which ToMe takes at most low rank's multiply-adds, for one model.

    Args:
        architecture: timm name.
        model_args: of the architecture, as JSON, because arguments of a cached function must be
            hashable.
        skip: layers that stay dense in the low-rank model.
        side: of the images, in pixels.
        ratio: κ of the low-rank model.
    """
    with torch.device("meta"):
        dense, low_rank = (build_vision(architecture, 10, json.loads(model_args)) for _ in range(2))
    target = measures.size(factorize(low_rank, ratio, skip), side)["macs"]
    return matching_tokens(dense, target, side)
