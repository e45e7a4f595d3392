"""Trains semantic segmentation on a dense or low-rank backbone."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from lightning_modules.labels import IGNORED
from lightning_modules.pela.downstream.module import Downstream
from lightning_modules.pela.downstream.pyramid import Pyramid
from lightning_modules.pela.downstream.segmentation import (
    Segmenter,
    largest_class,
    segmentation_loss,
    slide,
)


class Segmentation(Downstream):
    """UPerNet on a dense or low-rank backbone; `val/miou` is over the full set and all processes.

    Predictions are scored at the labels' original size, non-square images by `slide`.

    Args:
        channels: channels of the UPerNet head.
        auxiliary_weight: weight of the auxiliary head's loss.
        **kwargs: see `Downstream`.
    """

    def __init__(self, channels: int = 512, auxiliary_weight: float = 0.4, **kwargs: Any):
        super().__init__(**kwargs)
        classes = self.settings.num_classes
        # torchmetrics.segmentation.MeanIoU averages over images; mmseg's mIoU sums pixels first
        self.miou = MulticlassJaccardIndex(classes, ignore_index=IGNORED)
        self.accuracy = MulticlassAccuracy(classes, average="micro", ignore_index=IGNORED)

    def build(self, backbone: nn.Module) -> Segmenter:
        """UPerNet."""
        return Segmenter(Pyramid(backbone), self.settings.num_classes, self.settings.channels)

    def configure_model(self) -> None:
        """Build the model, see `Downstream`.

        Raises:
            ValueError: for trainer.sync_batchnorm with a strategy that ignores it.
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
        """Give all processes the batch-norm statistics of process 0, which checkpoints hold.

        Each process has running statistics of its own; without this they would score different
        models.
        """
        if self.trainer.world_size > 1:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def forward(self, images: Tensor) -> Any:
        """Logits (B, K, H, W) for images (B, 3, H, W); in training also the auxiliary head's."""
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The cross-entropy of both heads."""
        images, labels = batch
        loss = segmentation_loss(self(images), labels, self.settings.auxiliary_weight)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def score(self, batch: tuple[list[Tensor], list[Tensor]]) -> None:
        """Add a batch to the confusion matrix, each image at the size of its labels."""
        for classes, labels in zip(self.predict_step(batch, 0), batch[1], strict=True):
            self.miou.update(classes, labels)
            self.accuracy.update(classes, labels)

    def report(self, stage: str) -> None:
        """Log `stage/miou`, over the classes that occur, and `stage/pixel_accuracy`."""
        self.log(f"{stage}/miou", self.miou.compute(), prog_bar=True)
        self.log(f"{stage}/pixel_accuracy", self.accuracy.compute())
        self.miou.reset()
        self.accuracy.reset()

    def predict_step(
        self, batch: tuple[list[Tensor], list[Tensor]], batch_idx: int
    ) -> list[Tensor]:
        """The class of every pixel of each image, (H, W) at the size of its labels."""
        return [
            largest_class(slide(self, image).float(), labels.shape)
            for image, labels in zip(*batch, strict=True)
        ]
