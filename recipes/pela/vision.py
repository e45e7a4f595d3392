"""PELA on image classification: compress once, repair against the original, use as a drop-in.

For each model of the preset: the dense one (trained first where no weights are given), its direct
low-rank approximation, and the repair with L_fd, with L_rwp and with both, beside as much training
with L_base alone (Table 7). For the first model also the ratios of Fig. 4, ranks and factors
chosen otherwise, the rivals, the cost of a step (Table 8), and fine-tuning on other images with
the memory saved spent on the batch (PELA+, Table 9). Ends in report.md, metrics.json and plots.

    python -m recipes.pela.vision                                digits, a minute or two on a CPU
    python -m recipes.pela.vision --preset small --seeds 3       tiny-imagenet of $RECIPES_DATA
    python -m recipes.pela.vision --preset paper --data.root /data     /data/imagenet, DeiT and Swin
"""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from datamodules.images import ImageData
from lightning_modules.pela.checkpoint import load as load_folder
from lightning_modules.pela.checkpoint import save
from lightning_modules.pela.tome import add_tome
from recipes.legacy import Experiment, StageResult, from_command_line, presets
from recipes.messages import console
from recipes.pela.compressed import build, load, score, similarity, size, step_cost, whiten
from recipes.pela.tables import report

MODELS = ("deit_b", "deit3_l", "swin_b")
SWEEP = (1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # Fig. 4
TABLE = (3.0,)  # Table 7 at these ratios, too, for the first model
BETA = 1.0  # where the release has L_rwp off (DeiT): what it has for Swin
LORA_RANK = 8


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line("pela.vision", __file__, MODELS[0], __doc__ or "", argv)
    results: list[dict[str, Any]] = []
    for seed in range(experiment.seeds):
        results.append({})
        for name in MODELS:
            if experiment.preset in presets(experiment.folder, name):
                results[-1][name] = Study(experiment, name, seed).run(whole=name == MODELS[0])
        report(experiment, results)
    return experiment


class Study:
    """One model at one seed.

    Args:
        experiment: the run.
        name: of the model's stage, one of MODELS.
        seed: of all its stages.
    """

    def __init__(self, experiment: Experiment, name: str, seed: int):
        self.experiment, self.name, self.seed = experiment, name, seed
        self.config = experiment.parsed(name)
        self.settings = self.config.model.init_args
        self.data: ImageData = experiment.datamodule(name, seed)
        self.weights = self.dense_weights()
        self.dense = self.build(ratio=None)

    def run(self, whole: bool) -> dict[str, Any]:
        """All results; without `whole` Table 7 at the model's own ratio and Fig. 2 only."""
        own = self.settings.ratio
        ratios = sorted({own, *TABLE, *SWEEP}) if whole else [own]
        sweep = {ratio: self.extremes(ratio) for ratio in ratios}
        tables = (own, *TABLE) if whole else (own,)
        results: dict[str, Any] = {
            "architecture": self.settings.architecture,
            "ratio": own,
            "chance": 1 / self.data.num_classes,
            "dense": self.score(self.dense, "dense"),
            "table": {f"{ratio:g}": {**sweep[ratio], **self.parts(ratio)} for ratio in tables},
            "similarity": self.similarities(own),
        }
        if whole:
            results["sweep"] = {f"{ratio:g}": found for ratio, found in sweep.items()}
            results["allocation"] = {"uniform": sweep[own], **self.allocations(own)}
            results["rivals"] = self.rivals(own)
            results["cost"] = self.costs(own)
            results["finetune"] = self.finetune(own)
        return results

    def dense_weights(self) -> Path:
        """The dense model's weights: those that are given, the hub's, or trained now."""
        h = self.settings
        if h.init_from is not None:
            return Path(h.init_from)
        if h.pretrained:
            file = self.experiment.out / f"{self.name}-hub.safetensors"
            if not file.is_file():
                model = build(self.config, self.data.num_classes, ratio=None).model
                assert model is not None
                file.parent.mkdir(parents=True, exist_ok=True)
                save_file(model.state_dict(), file)
            return file
        changes = {
            "model.init_args.architecture": h.architecture,
            "model.init_args.model_args": h.model_args,
        }
        return self.experiment.stage(f"{self.name}-dense", "dense", self.seed, changes).checkpoint

    def build(self, **changes: Any) -> nn.Module:
        """A model from the dense weights."""
        return self.module(**changes).model

    def module(self, **changes: Any) -> Any:
        """A module at its start, from the dense weights."""
        start = {"init_from": str(self.weights), "pretrained": False, **changes}
        return build(self.config, self.data.num_classes, **start)

    def stage(self, label: str, teacher: bool = True, **changes: Any) -> StageResult:
        """Train from the dense weights with some of the model's arguments changed."""
        arguments = {"init_from": self.weights, "pretrained": False, **changes}
        overrides = {f"model.init_args.{key}": value for key, value in arguments.items()}
        if not teacher:
            overrides |= {
                "trainer.callbacks": None,
                "model.init_args.alpha": 0.0,
                "model.init_args.beta": 0.0,
            }
        return self.experiment.stage(f"{self.name}-{label}", self.name, self.seed, overrides)

    def score(self, model: nn.Module, label: str) -> dict[str, Any]:
        """Size and accuracy on the validation images."""
        return score(model, self.data, f"{self.name} {label}")

    def trained(self, label: str, teacher: bool = True, **changes: Any) -> dict[str, Any]:
        """Train and score."""
        module = load(self.stage(label, teacher, **changes).checkpoint)
        return self.score(module.model, label)  # type: ignore[arg-type]

    def both(self, ratio: float, **changes: Any) -> dict[str, Any]:
        """The arguments of the repair with L_fd and L_rwp."""
        return {"ratio": ratio, "beta": self.settings.beta or BETA, **changes}

    def repaired(self, ratio: float) -> nn.Module:
        """The low-rank model after the repair with both losses; it also goes to a folder."""
        stage = self.stage(f"k{ratio:g}-both", **self.both(ratio))
        module = load(stage.checkpoint)
        assert module.model is not None
        arguments = {**(self.settings.model_args or {}), "num_classes": self.data.num_classes}
        folder = stage.checkpoint.parents[1] / "low_rank"
        save(module.model, folder, self.settings.architecture, arguments)
        return module.model

    def extremes(self, ratio: float) -> dict[str, Any]:
        """Direct and fully repaired."""
        return {
            "direct": self.score(self.build(ratio=ratio), f"κ {ratio:g} direct"),
            "both": self.score(self.repaired(ratio), f"κ {ratio:g} both"),
        }

    def parts(self, ratio: float) -> dict[str, Any]:
        """The other rows of Table 7, and the control."""
        label, whole = f"k{ratio:g}", self.both(ratio)
        return {
            "control": self.trained(f"{label}-control", teacher=False, ratio=ratio),
            "fd": self.trained(f"{label}-fd", **{**whole, "beta": 0.0}),
            "rwp": self.trained(f"{label}-rwp", **{**whole, "alpha": 0.0}),
        }

    def similarities(self, ratio: float) -> dict[str, list[float]]:
        """Fig. 2: how alike images look to each block before, after and repaired."""
        models = {
            "dense": self.dense,
            "direct": self.build(ratio=ratio),
            "both": self.repaired(ratio),
        }
        return {
            name: similarity(model, self.data.val_dataloader(), f"{self.name} {name}")
            for name, model in models.items()
        }

    def allocations(self, ratio: float) -> dict[str, Any]:
        """Ranks from the singular values, and factors that fit the data, at equal parameters."""
        label = f"k{ratio:g}"
        folder = self.experiment.out / f"seed{self.seed}" / f"{self.name}-{label}-whitened-start"
        file = folder / "model.safetensors"
        if not file.is_file() or file.stat().st_mtime < self.weights.stat().st_mtime:
            whiten(self.build(ratio=None), ratio, self.settings.skip, self.data, folder)
        low_rank = {"ratio": None, "init_from": file, "teacher_from": self.weights}
        direct = load_folder(folder, self.build(ratio=None))
        return {
            "energy": {
                "direct": self.score(self.build(ratio=ratio, allocation="energy"), "energy direct"),
                "both": self.trained(f"{label}-energy", **self.both(ratio, allocation="energy")),
            },
            "whitened": {
                "direct": self.score(direct, "whitened direct"),
                "both": self.trained(f"{label}-whitened", **{**self.both(ratio), **low_rank}),
            },
        }

    def rivals(self, ratio: float) -> dict[str, Any]:
        """Other distillations of the same student; other ways to spend the budget."""
        merged = self.matching_tokens(ratio)
        dense: dict[str, Any] = {"teacher": False, "ratio": None}
        lora = self.trained("lora", **dense, lora_rank=LORA_RANK)
        return {
            "tinybert": self.trained("tinybert", ratio=ratio, beta=0.0, distillation="tinybert"),
            "maskalign": self.trained("maskalign", ratio=ratio, beta=0.0, distillation="maskalign"),
            "tome_direct": self.score(add_tome(self.build(ratio=None), merged), "ToMe direct"),
            "tome": self.trained("tome", **dense, merged_tokens=merged),
            # its factors are added to the weights after training
            "lora": {**lora, **size(self.dense, self.data)},
            "dense": self.trained("dense-continued", **dense),
        }

    def matching_tokens(self, ratio: float) -> int:
        """The least r of ToMe whose multiply-adds are at most those of the ratio."""
        target = size(self.build(ratio=ratio), self.data)["macs"]
        r, macs = 0, size(self.dense, self.data)["macs"]
        while macs > target:
            fewer = size(add_tome(self.build(ratio=None), r + 1), self.data)["macs"]
            if fewer >= macs:
                break  # every block merges all that it can
            r, macs = r + 1, fewer
        return r

    def costs(self, ratio: float) -> dict[str, dict[str, float]]:
        """Memory and time of a step of ordinary training, of the repair, and of fine-tuning."""
        plain = {"alpha": 0.0, "beta": 0.0}
        return {
            "dense": step_cost(self.module(ratio=None, **plain), self.data),
            "repair": step_cost(self.module(**self.both(ratio)), self.data),
            "low_rank": step_cost(self.module(ratio=ratio, **plain), self.data),
        }

    def finetune(self, ratio: float) -> dict[str, Any]:
        """The dense and the compressed model on other images; PELA+ with a batch of equal memory.

        PELA+ makes as many updates as the others, as under the paper's fixed number of iterations.
        """
        config = self.experiment.parsed("finetune")
        data: ImageData = self.experiment.datamodule("finetune", self.seed)
        compressed = self.stage(f"k{ratio:g}-both", **self.both(ratio)).checkpoint
        batch, epochs = config.data.init_args.batch_size, config.trainer.max_epochs
        plain = {"alpha": 0.0, "beta": 0.0, "ratio": None}
        dense, low_rank = (
            step_cost(build(config, data.num_classes, **plain, init_from=str(start)), data)
            for start in (self.weights, compressed)
        )
        per_image = (low_rank["peak"] - low_rank["fixed"]) / low_rank["batch"]
        # an even number, as mixup wants it
        larger = int((dense["peak"] - low_rank["fixed"]) / per_image) // 2 * 2
        rows = {
            "dense": (self.weights, batch, epochs),
            "pela": (compressed, batch, epochs),
        }
        if larger > batch:
            rows["pela_plus"] = (compressed, larger, round(epochs * larger / batch))
        results = {}
        for row, (start, size_of_batch, length) in rows.items():
            overrides = {
                "model.init_args.init_from": start,
                "data.init_args.batch_size": size_of_batch,
                "trainer.max_epochs": length,
                "trainer.check_val_every_n_epoch": length,
            }
            stage = self.experiment.stage(f"finetune-{row}", "finetune", self.seed, overrides)
            module = load(stage.checkpoint)
            assert module.model is not None
            results[row] = {"batch": size_of_batch, **score(module.model, data, f"finetune {row}")}
        return results


if __name__ == "__main__":
    console(main)
