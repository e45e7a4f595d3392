"""Repairing a low-rank image classifier against its dense original, and fine-tuning it after."""

import math
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_modules.backbones import build_vision, shard
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.pela.checkpoint import start_from
from lightning_modules.pela.energy import plan_energy
from lightning_modules.pela.factorize import factorize, plan_uniform
from lightning_modules.pela.features import Features
from lightning_modules.pela.losses import feature_distillation, weight_perturbation
from lightning_modules.pela.rivals import maskalign, tinybert
from lightning_modules.pela.tome import add_tome
from lightning_modules.tuning import tune
from lightning_modules.weights import load_weights, refuse_another_model


class PELA(L.LightningModule):
    """A low-rank image classifier that learns from labels and from its dense original.

        L = L_base + α · L_fd + β · L_rwp        (arXiv 2310.10700, Eq. 7)

    L_base is the cross-entropy, also on soft targets (mixup). With α or β above 0 the teacher is
    needed, which the callback FrozenTeacher gives. With both 0 it is plain training, such as the
    fine-tuning of the low-rank model on other images; with `ratio: null` of the dense one.

    Args:
        num_classes: outputs of the head.
        architecture: timm name of the model.
        model_args: further arguments of timm.create_model.
        pretrained: start from the hub's weights. Like init_from not part of the checkpoint.
        init_from: start from these weights: dense (a checkpoint, state_dict or safetensors file),
            or low-rank (a checkpoint of this module, or what pela.checkpoint has saved).
        teacher_from: the teacher's weights; null when init_from or the hub gives dense ones.
        ratio: κ, which leaves 1/κ of each layer; null leaves the weights as they come, dense or
            low-rank.
        skip: layers to leave dense beside pela.layers.SKIP.
        allocation: "uniform", κ for every layer (the paper); "energy", ranks from the singular
            values under the same budget.
        ranks: rank of each layer by name, instead of ratio and allocation. The module fills it in
            with what it found, so that its checkpoints load by themselves.
        alpha: α, weight of the distillation.
        beta: β, weight of L_rwp.
        distillation: what α weighs: "pela", L_fd (Eq. 4); "tinybert" or "maskalign", a rival.
        features: whose outputs L_fd compares: "blocks", "stages" or "pooled".
        setting: form of L_fd and L_rwp, "paper" or "released"; see pela.losses.
        p: norm of L_rwp, at least 1 or .inf.
        epsilon: radius ε of L_rwp.
        lora_rank: train LoRA of this rank on qkv, and the head, only; 0 for everything (a rival).
        merged_tokens: tokens that ToMe merges in each block; 0 for none (a rival).
        optimizer: "adamw" or "sgd".
        lr: peak learning rate.
        betas: of AdamW.
        momentum: of SGD.
        weight_decay: decoupled, per unit of learning rate (AdamW); L2 (SGD).
        decay_vectors: decay biases and norms too.
        warmup_steps: optimizer steps.
        schedule: "cosine", "linear", "constant_with_warmup", …
    """

    def __init__(
        self,
        num_classes: int,
        architecture: str = "deit_base_patch16_224",
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        init_from: str | None = None,
        teacher_from: str | None = None,
        ratio: float | None = 2.0,
        skip: list[str] = [],  # noqa: B006  (jsonargparse)
        allocation: Literal["uniform", "energy"] = "uniform",
        ranks: dict[str, int] | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        distillation: Literal["pela", "tinybert", "maskalign"] = "pela",
        features: Literal["blocks", "stages", "pooled"] = "blocks",
        setting: Literal["paper", "released"] = "released",
        p: float = math.inf,
        epsilon: float = 0.0,
        lora_rank: int = 0,
        merged_tokens: int = 0,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        lr: float = 6.25e-5,
        betas: list[float] = [0.9, 0.999],  # noqa: B006
        momentum: float = 0.9,
        weight_decay: float = 0.05,
        decay_vectors: bool = False,
        warmup_steps: int = 0,
        schedule: str = "cosine",
    ):
        super().__init__()
        # where a run began is not what it is: loading it again must not download or need old files
        self.save_hyperparameters(ignore=["init_from", "teacher_from", "pretrained"])
        self.init_from, self.teacher_from, self.pretrained = init_from, teacher_from, pretrained
        self.model: nn.Module | None = None
        self.teacher: nn.Module | None = None
        self.accuracy = MulticlassAccuracy(num_classes, average="micro", ignore_index=-100)
        self.loss = MeanMetric()

    @property
    def settings(self) -> Any:
        """The arguments of __init__."""
        return self.hparams

    def configure_model(self) -> None:
        """Build the student once, on the process's device, and shard it where the strategy asks."""
        if self.model is not None:
            return
        h = self.settings
        model = build_vision(h.architecture, h.num_classes, h.model_args or {}, self.pretrained)
        self._fill(model)
        if h.merged_tokens:
            add_tome(model, h.merged_tokens)
        if h.lora_rank:
            if h.ranks:
                raise ValueError(
                    f"lora_rank {h.lora_rank} is for the dense model: set model.ratio to null and "
                    "start from dense weights"
                )
            tune(model, "lora", heads=["head"], rank=h.lora_rank, targets=["qkv"])
        if self.device_mesh is not None:
            shard(model, self.device_mesh["data_parallel"])
        self.model = model

    def _fill(self, model: nn.Module) -> None:
        """Give a dense model its weights and its ranks."""
        h = self.settings
        if self.init_from is not None:
            found, _ = start_from(model, self.init_from, h.ratio)
            if found:
                self.hparams["ranks"] = found
                return
        ranks = h.ranks
        if ranks is None and h.ratio is not None:
            plan = plan_energy if h.allocation == "energy" else plan_uniform
            ranks = plan(model, h.ratio, h.skip)
        if ranks is not None:
            # random weights, of a new model or one that a checkpoint is about to fill, can be
            # cut the quick way
            trained = self.pretrained or self.init_from is not None
            factorize(model, ranks=ranks, method="svd" if trained else "randomized")
        self.hparams["ranks"] = ranks

    def build_teacher(self) -> nn.Module:
        """The dense original, for the callback FrozenTeacher.

        Raises:
            ValueError: if its weights are not said, or do not fit it to the last tensor.
        """
        h = self.settings
        source = self.teacher_from or self.init_from
        if source is None and not self.pretrained:
            raise ValueError(
                "the teacher has no weights: give model.teacher_from or model.init_from, or set "
                "model.pretrained"
            )
        teacher = build_vision(
            h.architecture, h.num_classes, h.model_args or {}, self.pretrained and source is None
        )
        if source is not None:
            report = load_weights(teacher, source)
            if report.missing or report.unexpected or report.reshaped:
                raise ValueError(
                    f"{source} is not the dense original of this {h.architecture} ({report}): give "
                    "its checkpoint as model.teacher_from"
                )
        return teacher

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) for images (B, 3, H, W)."""
        assert self.model is not None
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Eq. 7, with one pass of the student."""
        h, (images, targets) = self.settings, batch
        parts: dict[str, Tensor] = {}
        if h.alpha:
            logits, parts["distillation"] = self._distil(images)
        else:
            logits = self(images)
        parts["base"] = F.cross_entropy(logits.float(), targets)
        loss = parts["base"]
        if h.alpha:
            loss = loss + h.alpha * parts["distillation"]
        if h.beta:
            assert self.model is not None
            parts["perturbation"] = weight_perturbation(
                self.model, self._teacher(), h.p, h.epsilon, h.setting
            )
            loss = loss + h.beta * parts["perturbation"]
        self.log_dict({f"train/{name}": value.detach() for name, value in parts.items()})
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def _distil(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The student's logits and what α weighs."""
        h, student, teacher = self.settings, self.model, self._teacher()
        assert student is not None
        if h.distillation == "tinybert":
            return tinybert(student, teacher, images)
        if h.distillation == "maskalign":
            return maskalign(student, teacher, images)
        with Features(student, h.features) as own, Features(teacher, h.features) as other:
            logits = student(images)
            with torch.no_grad():
                teacher(images)
            return logits, feature_distillation(own.take(), other.take(), setting=h.setting)

    def _teacher(self) -> nn.Module:
        if self.teacher is None:
            raise ValueError(
                "PELA has no teacher: add callbacks.frozen_teacher.FrozenTeacher to "
                "trainer.callbacks, or set model.alpha and model.beta to 0"
            )
        return self.teacher

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the scores."""
        self._score(batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add a batch to the scores."""
        self._score(batch)

    def _score(self, batch: tuple[Tensor, Tensor]) -> None:
        images, targets = batch
        logits = self(images).float()
        valid = (targets != -100).sum()
        if valid:  # else the batch is all padding
            self.accuracy.update(logits, targets)
            self.loss.update(F.cross_entropy(logits, targets), valid)

    def on_validation_epoch_end(self) -> None:
        """Report `val/accuracy` and `val/loss` over the whole set."""
        self._report("val")

    def on_test_epoch_end(self) -> None:
        """Report `test/accuracy` and `test/loss`."""
        self._report("test")

    def _report(self, stage: str) -> None:
        self.log(f"{stage}/accuracy", self.accuracy.compute(), prog_bar=True)
        self.log(f"{stage}/loss", self.loss.compute())
        self.accuracy.reset()
        self.loss.reset()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, num_classes)."""
        return self(batch[0])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over what trains, with its schedule."""
        assert self.model is not None
        h = self.settings
        groups = parameter_groups(self.model, h.weight_decay, h.decay_vectors)
        optimizer = build_optimizer(h.optimizer, groups, h.lr, tuple(h.betas), h.momentum)
        return with_schedule(optimizer, h.schedule, h.warmup_steps, training_steps(self.trainer))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model before its tensors are compared one by one.

        Raises:
            ValueError: naming what differs.
        """
        names = ["architecture", "model_args", "num_classes", "ratio", "allocation", "skip"]
        names += ["lora_rank", "merged_tokens", "ranks"]
        refuse_another_model(checkpoint, self.hparams, names)
