"""torchvision's Mask R-CNN on a pyramid of feature maps: boxes with classes and masks.

Mask R-CNN is arXiv 1703.06870, its feature pyramid arXiv 1612.03144. It needs torchvision's
compiled operators, and so a torchvision that was built for the installed torch.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.boxes import clip_boxes_to_image, remove_small_boxes
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from lightning_modules.pela.downstream.detection import corner_scale
from lightning_modules.pela.downstream.pyramid import Pyramid


class TopDown(nn.Module):
    """A feature pyramid network: a pyramid's four maps and a fifth, with equally many channels.

    Args:
        pyramid: the backbone's maps, with finest=0.
        channels: of the maps that the heads read.
    """

    def __init__(self, pyramid: Pyramid, channels: int = 256):
        super().__init__()
        self.pyramid, self.out_channels = pyramid, channels
        self.fpn = FeaturePyramidNetwork(pyramid.channels, channels, LastLevelMaxPool())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Maps (B, channels, H / s, W / s) by level for images (B, 3, H, W)."""
        maps = self.pyramid(images)
        return self.fpn(OrderedDict((str(level), one) for level, one in enumerate(maps)))


class MaskDetector(nn.Module):
    """torchvision's Mask R-CNN for batches of square images with padding.

    The DataModule resizes and normalises. Regions are proposed and detected within the image, not
    in the padding of its square.

    Args:
        pyramid: the backbone, with finest=0.
        num_classes: K, background not counted.
        settings: further arguments of torchvision's MaskRCNN (box_detections_per_img, …).
    """

    def __init__(self, pyramid: Pyramid, num_classes: int, settings: dict[str, Any] | None = None):
        super().__init__()
        self.rcnn = MaskRCNN(TopDown(pyramid), num_classes + 1, **(settings or {}))

    def forward(
        self, images: Tensor, seen: Tensor, targets: list[dict[str, Tensor]] | None = None
    ) -> Any:
        """Losses by name in training mode, otherwise the detections in each image.

        Args:
            images: (B, 3, S, S).
            seen: (B, 2), height and width of each image within its square.
            targets: in training, for each image "class_labels" (n,), "boxes" (n, 4) as shares of
                the image's sides, (centre x, centre y, width, height), and "masks" (n, S, S).

        Returns:
            In training a dict of scalars. Otherwise for each image "boxes" (n, 4), corners in
            pixels of the square, "labels" (n,) from 1, "scores" (n,) and "masks" (n, 1, 28, 28),
            probabilities within the box.
        """
        sides = [(int(height), int(width)) for height, width in seen]
        truths = None if targets is None else regions(targets, seen)
        maps = self.rcnn.backbone(images)
        proposals, losses = self.rcnn.rpn(ImageList(images, sides), maps, truths)
        # the size of the square, because torchvision infers a map's stride from it
        squares = [tuple(images.shape[-2:])] * len(images)
        detections, head_losses = self.rcnn.roi_heads(maps, proposals, squares, truths)
        if self.training:
            return {**losses, **head_losses}
        return [_within(one, side) for one, side in zip(detections, sides, strict=True)]


def regions(targets: list[dict[str, Tensor]], seen: Tensor) -> list[dict[str, Tensor]]:
    """Targets as torchvision takes them: corners in pixels, classes from 1."""
    converted = []
    for target, scale in zip(targets, corner_scale(seen), strict=True):
        centre, size = target["boxes"].split(2, dim=1)
        corners = torch.cat([centre - size / 2, centre + size / 2], dim=1) * scale
        labels, masks = target["class_labels"] + 1, target["masks"].to(torch.uint8)
        converted.append({"boxes": corners, "labels": labels, "masks": masks})
    return converted


def in_pixels(
    detections: list[dict[str, Tensor]], seen: Tensor, sizes: Tensor
) -> list[dict[str, Tensor]]:
    """Detections at the images' original sizes, for torchmetrics' MeanAveragePrecision.

    Args:
        detections: from `MaskDetector`.
        seen: (B, 2), height and width of each image within its square.
        sizes: (B, 2), height and width of the originals in pixels.

    Returns:
        For each image "scores", "labels" from 0, "boxes" and "masks" (n, height, width), bool.
    """
    scaled = []
    for detection, scale, size in zip(detections, corner_scale(sizes / seen), sizes, strict=True):
        boxes = detection["boxes"] * scale
        masks = paste_masks_in_image(detection["masks"].float(), boxes, tuple(size.tolist()))
        scaled.append(
            {
                "scores": detection["scores"],
                "labels": detection["labels"] - 1,
                "boxes": boxes,
                "masks": masks[:, 0] > 0.5,
            }
        )
    return scaled


def _within(detections: dict[str, Tensor], side: tuple[int, int]) -> dict[str, Tensor]:
    """Clip boxes to the image, and drop those in its padding, which are left without an area."""
    boxes = clip_boxes_to_image(detections["boxes"], side)
    kept = remove_small_boxes(boxes, 1.0)
    return {name: values[kept] for name, values in {**detections, "boxes": boxes}.items()}
