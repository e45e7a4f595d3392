"""Trains object detection on a dense or low-rank backbone: Deformable DETR and Mask R-CNN."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchmetrics.detection import MeanAveragePrecision
from torchvision.extension import _has_ops

from lightning_modules.labels import IGNORED
from lightning_modules.pela.downstream.detection import Detector, postprocess
from lightning_modules.pela.downstream.mask_rcnn import MaskDetector, in_pixels
from lightning_modules.pela.downstream.module import Downstream
from lightning_modules.pela.downstream.pyramid import Pyramid

NAMES = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large")


class CocoDetection(Downstream):
    """The base class of both detectors: COCO's scores, over all processes."""

    scored: ClassVar[Any] = "bbox"  # torchmetrics' iou_type
    reported: ClassVar[dict[str, str]] = {"": ""}  # torchmetrics' prefixes → logged prefixes

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.scores = MeanAveragePrecision(backend="pycocotools", iou_type=self.scored)

    def detect(self, batch: Any) -> list[dict]:
        """The detections in each image of a batch, in pixels of the originals."""
        raise NotImplementedError

    def score(self, batch: Any) -> None:
        """Add a batch's detections to the scores."""
        _, targets, indices = batch
        detections, truths = self.detect(batch), [target["truth"] for target in targets]
        for i, index in enumerate(indices.tolist()):
            # padding of the last batch is scored as an image without boxes, because torchmetrics
            # needs equally many images on every rank
            if index == IGNORED:
                for side in (detections, truths):
                    side[i] = {name: values[:0] for name, values in side[i].items()}
        self.scores.update(detections, truths)

    def report(self, stage: str) -> None:
        """Log `stage/map` (IoU .50 to .95), `stage/map_50`, `stage/map_75` and those by size."""
        values = self.scores.compute()
        for kind, prefix in self.reported.items():
            for name in NAMES:
                value = values[f"{kind}{name}"].float()
                self.log(f"{stage}/{prefix}{name}", value, prog_bar=prefix + name == "map")
        self.scores.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> list[dict]:
        """The detections in each image, see `detect`."""
        return self.detect(batch)


class Detection(CocoDetection):
    """Deformable DETR on a dense or low-rank backbone; `val/map` is COCO's mean AP.

    Args:
        detr: further arguments of transformers' DeformableDetrConfig.
        **kwargs: see `Downstream`.
    """

    def __init__(self, detr: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(**kwargs)

    def build(self, backbone: nn.Module) -> Detector:
        """Deformable DETR."""
        return Detector(Pyramid(backbone, finest=1), self.settings.num_classes, self.settings.detr)

    def forward(self, images: Tensor) -> Any:
        """Class logits (B, Q, K), boxes (B, Q, 4) and None, for images without padding."""
        return self.model(images)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """DETR's loss after bipartite matching, normalised by the boxes of all processes."""
        images, targets, _ = batch
        *_, loss = self.model(images, stacked(targets, "seen"), targets)
        # transformers divides by the boxes of this process's batch, which would give boxes more
        # weight on processes that have few
        boxes = loss.new_tensor(sum(len(target["class_labels"]) for target in targets))
        everywhere: Any = self.all_gather(boxes)
        loss = loss * boxes.clamp(min=1) / everywhere.mean().clamp(min=1)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(images))
        return loss

    def detect(self, batch: Any) -> list[dict]:
        """Scores, labels and boxes, see `postprocess`."""
        images, targets, _ = batch
        logits, boxes, _ = self.model(images, stacked(targets, "seen"))
        return postprocess(logits.float(), boxes.float(), stacked(targets, "size"))


class MaskDetection(CocoDetection):
    """Mask R-CNN, one of the paper's detectors; `val/map` is of boxes, `val/mask_map` of masks.

    It needs torchvision's compiled operators, and a DataModule with masks.

    Args:
        rcnn: further arguments of torchvision's MaskRCNN.
        **kwargs: see `Downstream`.
    """

    scored = ("bbox", "segm")
    reported: ClassVar[dict[str, str]] = {"bbox_": "", "segm_": "mask_"}

    def __init__(self, rcnn: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(**kwargs)

    def build(self, backbone: nn.Module) -> MaskDetector:
        """Mask R-CNN."""
        return MaskDetector(Pyramid(backbone), self.settings.num_classes, self.settings.rcnn)

    def counted(self) -> nn.Module:
        """Backbone and feature pyramid; the heads' cost depends on the number of regions."""
        return self.model.rcnn.backbone

    def on_fit_start(self) -> None:
        """Refuse to start without torchvision's operators or without masks.

        Raises:
            ValueError: naming what is missing.
        """
        if not _has_ops():
            raise ValueError(
                "Mask R-CNN needs torchvision's compiled operators, which do not load with this "
                "torch: install the torchvision built for it, or set model to "
                "lightning_modules.pela.downstream.Detection (Deformable DETR)"
            )
        if not getattr(self.trainer.datamodule, "masks", True):  # type: ignore[attr-defined]
            raise ValueError("Mask R-CNN learns from masks: set --data.masks true")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The sum of the losses of region proposals, boxes, classes and masks."""
        images, targets, _ = batch
        losses = self.model(images, stacked(targets, "seen"), targets)
        loss = torch.stack(list(losses.values())).sum()
        names = {f"train/{name.removeprefix('loss_')}": x.detach() for name, x in losses.items()}
        self.log_dict(names, batch_size=len(images))
        self.log("train/loss", loss, prog_bar=True, batch_size=len(images))
        return loss

    def detect(self, batch: Any) -> list[dict]:
        """Scores, labels, boxes and masks, see `in_pixels`."""
        images, targets, _ = batch
        seen = stacked(targets, "seen")
        return in_pixels(self.model(images, seen), seen, stacked(targets, "size"))


def stacked(targets: list[dict[str, Any]], name: str) -> Tensor:
    """One entry of every image's target, stacked: (B, …)."""
    return torch.stack([target[name] for target in targets])
