"""Fine-tuning a dense or low-rank backbone for segmentation and detection, the same way."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
from torchmetrics.detection import MeanAveragePrecision

from lightning_modules.backbones import shard
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.pela.downstream.detection import Detector, postprocess
from lightning_modules.pela.downstream.pyramid import Pyramid, build_backbone
from lightning_modules.pela.downstream.segmentation import Segmenter, segmentation_loss
from lightning_modules.weights import refuse_another_model


class Downstream(L.LightningModule):
    """What both tasks share: the backbone, its optimizer, and what a checkpoint belongs to.

    Args:
        num_classes: of the task.
        architecture: timm name of the backbone: a ViT, Swin or another with feature maps.
        model_args: further arguments of timm.create_model; img_size is the task's.
        pretrained: start from the hub's weights. Like init_from not part of the checkpoint.
        init_from: the backbone's weights: dense, or low-rank (a checkpoint of PELA, or a
            folder that was exported), which then stays low-rank.
        ratio: κ, to factorise dense weights directly, without repair; null leaves the weights as
            they come.
        skip: layers that this leaves dense.
        ranks: rank of each layer by name, instead of ratio. The module fills it in with what it
            found, so that its checkpoints load by themselves.
        lr: peak learning rate of AdamW.
        backbone_lr: the backbone's, as a share of lr.
        betas: of AdamW.
        weight_decay: decoupled, per unit of learning rate; not of biases and norms.
        warmup_steps: optimizer steps.
        schedule: "polynomial" (linear decay), "cosine", …
    """

    def __init__(
        self,
        num_classes: int,
        architecture: str = "deit_base_patch16_224",
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        init_from: str | None = None,
        ratio: float | None = None,
        skip: list[str] = [],  # noqa: B006  (jsonargparse)
        ranks: dict[str, int] | None = None,
        lr: float = 1e-4,
        backbone_lr: float = 1.0,
        betas: list[float] = [0.9, 0.999],  # noqa: B006
        weight_decay: float = 0.05,
        warmup_steps: int = 0,
        schedule: str = "polynomial",
    ):
        super().__init__()
        # where a run began is not what it is: loading it again must not download or need old files
        self.save_hyperparameters(ignore=["init_from", "pretrained"])
        self.init_from, self.pretrained = init_from, pretrained
        self.model: Any = None

    def build(self, backbone: nn.Module) -> nn.Module:
        """The task's model."""
        raise NotImplementedError

    def score(self, batch: Any) -> None:
        """Add a batch to the task's metrics."""
        raise NotImplementedError

    def report(self, stage: str) -> None:
        """Log the task's metrics over all batches, and begin anew."""
        raise NotImplementedError

    @property
    def settings(self) -> Any:
        """The arguments of __init__."""
        return self.hparams

    def configure_model(self) -> None:
        """Build the model once, on the process's device, and shard it where the strategy asks."""
        if self.model is not None:
            return
        h = self.settings
        backbone, self.hparams["ranks"] = build_backbone(
            h.architecture,
            h.model_args or {},
            self.pretrained,
            self.init_from,
            h.ratio,
            h.skip,
            h.ranks,
        )
        model = self.build(backbone)
        if self.device_mesh is not None:
            shard(model, self.device_mesh["data_parallel"])
        self.model = model

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Score a batch."""
        self.score(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Score a batch."""
        self.score(batch)

    def on_validation_epoch_end(self) -> None:
        """Report what validation found."""
        self.report("val")

    def on_test_epoch_end(self) -> None:
        """Report what the test found."""
        self.report("test")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with its schedule; the backbone may learn at another rate."""
        h = self.settings
        [backbone] = [m.backbone for m in self.model.modules() if isinstance(m, Pyramid)]
        groups = parameter_groups(backbone, h.weight_decay)
        inside = {parameter for group in groups for parameter in group["params"]}
        for group in groups:
            group["lr"] = h.lr * h.backbone_lr
        for group in parameter_groups(self.model, h.weight_decay):
            group["params"] = [p for p in group["params"] if p not in inside]
            groups.append(group)
        optimizer = build_optimizer("adamw", groups, h.lr, tuple(h.betas))
        return with_schedule(optimizer, h.schedule, h.warmup_steps, training_steps(self.trainer))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model before its tensors are compared one by one.

        Raises:
            ValueError: naming what differs.
        """
        names = ("architecture", "model_args", "num_classes", "ratio", "ranks")
        refuse_another_model(checkpoint, self.hparams, names)


class Segmentation(Downstream):
    """UPerNet on a dense or low-rank backbone; `val/miou` is over the whole set and all ranks.

    Args:
        channels: of the UPerNet head.
        auxiliary_weight: of the auxiliary head's loss.
        **kwargs: see `Downstream`.
    """

    def __init__(self, channels: int = 512, auxiliary_weight: float = 0.4, **kwargs: Any):
        super().__init__(**kwargs)
        classes = self.settings.num_classes
        # torchmetrics.segmentation.MeanIoU would average over images; the field's sums them first
        self.miou = MulticlassJaccardIndex(classes, ignore_index=-100)
        self.accuracy = MulticlassAccuracy(classes, average="micro", ignore_index=-100)

    def build(self, backbone: nn.Module) -> Segmenter:
        """UPerNet."""
        return Segmenter(Pyramid(backbone), self.settings.num_classes, self.settings.channels)

    def configure_model(self) -> None:
        """Build the model, see `Downstream`.

        Raises:
            ValueError: if batch normalisation is to be synchronised and would not be.
        """
        if self.device_mesh is not None:
            strategy: Any = self.trainer.strategy
            if strategy._layer_sync is not None:
                raise ValueError(
                    "trainer.sync_batchnorm is true, which Lightning's ModelParallelStrategy "
                    "leaves out: set trainer.strategy to ddp, or trainer.sync_batchnorm to false"
                )
        super().configure_model()

    def on_validation_start(self) -> None:
        """Score one model on all processes, that of the checkpoint.

        Each has its own running statistics of batch normalisation, and those of process 0 count.
        """
        if self.trainer.world_size > 1:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def forward(self, images: Tensor) -> Any:
        """Logits (B, K, H, W) for images (B, 3, H, W); in training the auxiliary head's too."""
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of both heads."""
        images, labels = batch
        loss = segmentation_loss(self(images), labels, self.settings.auxiliary_weight)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def score(self, batch: tuple[Tensor, Tensor]) -> None:
        """Add a batch to the confusion matrix."""
        images, labels = batch
        found = self(images).argmax(1)
        self.miou.update(found, labels)
        self.accuracy.update(found, labels)

    def report(self, stage: str) -> None:
        """Log `val/miou`, over the classes that occur, and `val/pixel_accuracy`."""
        self.log(f"{stage}/miou", self.miou.compute(), prog_bar=True)
        self.log(f"{stage}/pixel_accuracy", self.accuracy.compute())
        self.miou.reset()
        self.accuracy.reset()

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The class of every pixel, (B, H, W)."""
        return self(batch[0]).argmax(1)


class Detection(Downstream):
    """Deformable DETR on a dense or low-rank backbone; `val/map` is COCO's, over all ranks.

    Args:
        detr: further arguments of transformers' DeformableDetrConfig.
        **kwargs: see `Downstream`.
    """

    def __init__(self, detr: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.scores = MeanAveragePrecision(backend="pycocotools")

    def build(self, backbone: nn.Module) -> Detector:
        """Deformable DETR."""
        return Detector(Pyramid(backbone, finest=1), self.settings.num_classes, self.settings.detr)

    def forward(self, images: Tensor) -> Any:
        """Class logits (B, Q, K), boxes (B, Q, 4) and None, see `Detector`."""
        return self.model(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """DETR's loss after bipartite matching, per box of all processes' batches."""
        images, targets, _ = batch
        *_, loss = self.model(images, targets)
        # transformers divides by this process's own boxes, so that where there are few, each
        # would weigh more
        boxes = loss.new_tensor(sum(len(target["class_labels"]) for target in targets))
        everywhere: Any = self.all_gather(boxes)
        loss = loss * boxes.clamp(min=1) / everywhere.mean().clamp(min=1)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(images))
        return loss

    def score(self, batch: Any) -> None:
        """Add a batch's boxes to the scores, in pixels of the original images."""
        _, targets, places = batch
        found, truths = self._boxes(batch), [target["truth"] for target in targets]
        for i, place in enumerate(places.tolist()):
            if place == -100:  # as an empty image: torchmetrics needs equally many on every rank
                for side in (found, truths):
                    side[i] = {name: values[:0] for name, values in side[i].items()}
        self.scores.update(found, truths)

    def report(self, stage: str) -> None:
        """Log `val/map` (IoU .50 to .95), `val/map_50`, `val/map_75` and those by size."""
        values = self.scores.compute()
        for name in ("map", "map_50", "map_75", "map_small", "map_medium", "map_large"):
            self.log(f"{stage}/{name}", values[name].float(), prog_bar=name == "map")
        self.scores.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> list[dict]:
        """Scores, labels and boxes of each image, see `postprocess`."""
        return self._boxes(batch)

    def _boxes(self, batch: Any) -> list[dict]:
        images, targets, _ = batch
        logits, boxes, _ = self(images)
        sides = torch.stack([target["side"] for target in targets])
        return postprocess(logits.float(), boxes.float(), sides)
