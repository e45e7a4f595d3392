"""An image classifier, dense or low-rank, that learns from labels alone."""

from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_modules.backbones import build_vision, shard
from lightning_modules.labels import IGNORED
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.pela.backbone_module import BackboneModule
from lightning_modules.pela.checkpoint import start_from
from lightning_modules.pela.factorize import factorize, plan_uniform
from lightning_modules.weights import load_weights


class Classifier(BackboneModule):
    """Cross-entropy on labels, also soft ones (mixup); the base class of PELA and its baselines.

    By itself it trains a dense model or a low-rank one without a teacher, and fine-tunes either.

    Args:
        decay_vectors: decay biases and norms too.
        **kwargs: see `BackboneModule`.
    """

    def __init__(self, decay_vectors: bool = False, **kwargs: Any):
        super().__init__(**kwargs)
        self.waits_for_checkpoint = False
        classes = self.settings.num_classes
        self.accuracy = MulticlassAccuracy(classes, average="micro", ignore_index=IGNORED)
        self.loss = MeanMetric()

    def configure_model(self) -> None:
        """Build the model once, on the process's device, and shard it where the strategy asks."""
        if self.model is not None:
            return
        h = self.settings
        model = build_vision(h.architecture, h.num_classes, h.model_args or {}, self.pretrained)
        self._fill(model)
        self.prepare(model)
        if self.device_mesh is not None:
            shard(model, self.device_mesh)
        self.model = model

    def prepare(self, model: nn.Module) -> None:
        """Change the model after its weights have been loaded; a baseline's subclass may do so."""

    def _fill(self, model: nn.Module) -> None:
        """Load a dense model's weights, and factorise it where ratio or ranks say so."""
        h = self.settings
        if self.init_from is not None:
            low_rank, _ = start_from(model, self.init_from, h.ratio, h.ranks)
            if low_rank:
                self.hparams["ranks"] = low_rank
                return
        self.waits_for_checkpoint = bool(h.ranks) and self.init_from is None and not self.pretrained
        ranks = h.ranks
        if ranks is None and h.ratio is not None:
            ranks = plan_uniform(model, h.ratio, h.skip)
        if ranks is not None:
            method = "empty" if self.waits_for_checkpoint else "svd"
            factorize(model, ranks=ranks, method=method)  # type: ignore[arg-type]
        self.hparams["ranks"] = ranks

    def on_train_start(self) -> None:
        """Refuse to train uninitialised weights.

        Raises:
            ValueError: if model.ranks came without weights.
        """
        if self.waits_for_checkpoint:
            raise ValueError(
                "model.ranks came without weights: give model.init_from, or model.ratio for a "
                "start from random weights"
            )

    def dense_original(self, source: str | None, model_args: dict[str, Any] | None) -> nn.Module:
        """The teacher: a dense model with the weights of `source`, else of init_from or the hub.

        Raises:
            ValueError: if no weights are given, or a tensor is missing, unexpected or of another
                shape.
            FileNotFoundError: if there is no file `source`.
        """
        h = self.settings
        source = source or self.init_from
        if source is None and not self.pretrained:
            raise ValueError(
                "the teacher has no weights: give model.teacher_from or model.init_from, or set "
                "model.pretrained"
            )
        arguments = h.model_args if model_args is None else model_args
        from_hub = self.pretrained and source is None
        teacher = build_vision(h.architecture, h.num_classes, arguments or {}, from_hub)
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
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The cross-entropy of a batch of images (B, 3, H, W) with its targets."""
        images, targets = batch
        loss = F.cross_entropy(self(images).float(), targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def score(self, batch: tuple[Tensor, Tensor]) -> None:
        """Add a batch to accuracy and loss."""
        images, targets = batch
        logits = self(images).float()
        valid = (targets != IGNORED).sum()
        if valid:  # not a batch of padding alone
            self.accuracy.update(logits, targets)
            self.loss.update(F.cross_entropy(logits, targets), valid)

    def report(self, stage: str) -> None:
        """Log `stage/accuracy` and `stage/loss` over the full set."""
        self.log(f"{stage}/accuracy", self.accuracy.compute(), prog_bar=True)
        self.log(f"{stage}/loss", self.loss.compute())
        self.accuracy.reset()
        self.loss.reset()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, num_classes)."""
        return self(batch[0])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over the trainable parameters, with its schedule."""
        h = self.settings
        groups = parameter_groups(self.model, h.weight_decay, h.decay_vectors)
        optimizer = build_optimizer("adamw", groups, h.lr, tuple(h.betas))
        return with_schedule(optimizer, h.schedule, h.warmup_steps, training_steps(self.trainer))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model before its tensors are loaded.

        Raises:
            ValueError: naming the hyperparameter that differs.
        """
        super().on_load_checkpoint(checkpoint)
        self.waits_for_checkpoint = False
