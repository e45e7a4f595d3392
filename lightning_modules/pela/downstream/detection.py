"""Deformable DETR on a pyramid of feature maps: boxes with classes.

The paper detects with mmdetection's Mask and Cascade R-CNN. Deformable DETR (arXiv 2010.04159)
works with the same backbones and feature maps and needs no compiled operators; `mask_rcnn.py` has
Mask R-CNN.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection, TimmBackboneConfig

from lightning_modules.pela.downstream.pyramid import Pyramid, shrunk

# transformers builds the model with this small backbone, which is then replaced
STAND_IN = TimmBackboneConfig(backbone="test_resnet", out_indices=[1, 2, 3])  # type: ignore[call-arg]
PRIOR = 0.01  # initial probability of a class


class _MaskedPyramid(nn.Module):
    """A pyramid with the interface of transformers' backbone: each map comes with its mask."""

    def __init__(self, pyramid: Pyramid):
        super().__init__()
        self.pyramid = pyramid

    def forward(self, images: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        seen = mask.bool()
        maps = self.pyramid(images, seen)
        return [(features, shrunk(seen, features.shape[-2:])) for features in maps]


class Detector(nn.Module):
    """transformers' Deformable DETR with a pyramid instead of its convolutional backbone.

    It uses the maps of stride 8, 16 and 32, and a fourth that it computes from the last.

    Args:
        pyramid: the backbone, with finest=1.
        num_classes: K.
        settings: further arguments of DeformableDetrConfig (num_queries, encoder_layers, …).
    """

    def __init__(self, pyramid: Pyramid, num_classes: int, settings: dict[str, Any] | None = None):
        super().__init__()
        arguments = {"auxiliary_loss": True, **(settings or {}), "num_labels": num_classes}
        config = DeformableDetrConfig(backbone_config=STAND_IN, **arguments)
        self.detr = DeformableDetrForObjectDetection(config)
        inner: Any = self.detr.model
        inner.backbone = _MaskedPyramid(pyramid)
        *projections, extra = inner.input_proj
        for projection, channels in zip(projections, pyramid.channels, strict=True):
            projection[0] = nn.Conv2d(channels, config.d_model, kernel_size=1)
        extra[0] = nn.Conv2d(channels, config.d_model, kernel_size=3, stride=2, padding=1)
        self._initialise_heads()

    @torch.no_grad()
    def _initialise_heads(self) -> None:
        """Deformable DETR's initialisation of the heads, which transformers leaves out."""
        heads: Any = self.detr
        for classify in heads.class_embed:
            classify.bias.fill_(-math.log(1 / PRIOR - 1))
        for locate in heads.bbox_embed:
            last = locate.layers[-1]
            last.weight.zero_()
            last.bias.copy_(torch.tensor([0.0, 0.0, -2.0, -2.0]))

    def forward(
        self,
        images: Tensor,
        seen: Tensor | None = None,
        targets: list[dict[str, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Class logits (B, Q, K), boxes (B, Q, 4) and, with targets, the loss.

        Boxes are (centre x, centre y, width, height) as shares of the image's sides. Padding is
        masked in all attention. The loss is DETR's: focal, L1 and generalised IoU after bipartite
        matching, of every decoder layer.

        Args:
            images: (B, 3, H, W).
            seen: (B, 2), the height and width of each image without its padding at the right and
                at the bottom; None for images without padding.
            targets: for each image "class_labels" (n,) and "boxes" (n, 4); at least one box in
                the batch.
        """
        mask = None if seen is None else pixel_mask(seen, images.shape[-2:])
        outputs = self.detr(pixel_values=images, pixel_mask=mask, labels=targets)
        return outputs.logits, outputs.pred_boxes, outputs.loss


def pixel_mask(seen: Tensor, size: Sequence[int]) -> Tensor:
    """A mask (B, H, W), true for pixels of the image, from its height and width (B, 2)."""
    rows, columns = (torch.arange(side, device=seen.device) for side in size)
    return (rows[:, None] < seen[:, 0, None, None]) & (columns < seen[:, 1, None, None])


def postprocess(logits: Tensor, boxes: Tensor, sizes: Tensor, most: int = 100) -> list[dict]:
    """The best boxes of each image in pixels, for torchmetrics' MeanAveragePrecision.

    Args:
        logits: (B, Q, K).
        boxes: (B, Q, 4), see `Detector`.
        sizes: (B, 2), height and width of the images in pixels.
        most: number of boxes to keep for an image, over all pairs of query and class.

    Returns:
        For each image "scores" (most,), "labels" (most,) and "boxes" (most, 4) as corners
        (x1, y1, x2, y2) in pixels.
    """
    scores, pairs = logits.sigmoid().flatten(1).topk(min(most, logits[0].numel()))
    queries, labels = pairs // logits.shape[-1], pairs % logits.shape[-1]
    centre, size = boxes.split(2, dim=-1)
    corners = torch.cat([centre - size / 2, centre + size / 2], dim=-1)
    corners = corners.gather(1, queries[..., None].expand(-1, -1, 4)) * corner_scale(sizes)
    parts = zip(scores, labels, corners, strict=True)
    return [{"scores": s, "labels": k, "boxes": c} for s, k, c in parts]


def corner_scale(sizes: Tensor) -> Tensor:
    """Factors (B, 1, 4) from shares (x1, y1, x2, y2) to pixels, by heights and widths (B, 2)."""
    return sizes.flip(1).repeat(1, 2)[:, None]
