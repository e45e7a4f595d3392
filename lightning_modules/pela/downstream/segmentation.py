"""UPerNet on a pyramid of feature maps: a class for every pixel."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import UperNetConfig
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from lightning_modules.labels import IGNORED
from lightning_modules.pela.downstream.pyramid import Pyramid


class Segmenter(nn.Module):
    """transformers' UPerNet head (arXiv 1807.10221) and its auxiliary FCN head on a pyramid.

    Args:
        pyramid: the backbone, with finest=0.
        num_classes: K.
        channels: channels of the head; the auxiliary head has half as many.
    """

    def __init__(self, pyramid: Pyramid, num_classes: int, channels: int = 512):
        super().__init__()
        config: Any = UperNetConfig(hidden_size=channels, auxiliary_channels=channels // 2)
        config.num_labels = num_classes
        self.pyramid = pyramid
        self.head = UperNetHead(config, pyramid.channels)
        self.auxiliary = UperNetFCNHead(config, pyramid.channels)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits (B, K, H, W) for images (B, 3, H, W); in training also the auxiliary head's."""
        maps = self.pyramid(images)
        size = images.shape[-2:]
        logits = F.interpolate(self.head(maps), size, mode="bilinear")
        if not self.training:
            return logits
        return logits, F.interpolate(self.auxiliary(maps), size, mode="bilinear")


def segmentation_loss(
    outputs: tuple[Tensor, Tensor], labels: Tensor, auxiliary_weight: float
) -> Tensor:
    """Mean cross-entropy over the labelled pixels, plus the auxiliary head's times its weight.

    Args:
        outputs: logits of a `Segmenter` in training mode, (B, K, H, W) each.
        labels: (B, H, W), class indices, -100 for pixels without a label.
        auxiliary_weight: weight of the auxiliary head's loss; 0.4 in UPerNet.

    Returns:
        A scalar; 0 where no pixel is labelled.
    """
    labelled = (labels != IGNORED).sum().clamp(min=1)
    main, auxiliary = (
        F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum") / labelled
        for logits in outputs
    )
    return main + auxiliary_weight * auxiliary


def slide(model: Callable[[Tensor], Tensor], image: Tensor) -> Tensor:
    """Logits of an image of any shape, by mmsegmentation's sliding-window inference.

    The windows are squares of the shorter side S, ⌊2 S / 3⌋ apart, with the last one at the border.
    Logits are averaged where windows overlap.

    Args:
        model: maps squares (B, 3, S, S) to logits (B, K, S, S).
        image: (3, h, w).

    Returns:
        Logits (K, h, w).
    """
    side, longer = sorted(image.shape[-2:])
    axis = -1 if image.shape[-1] == longer else -2
    stride = max(1, 2 * side // 3)
    starts = [min(start, longer - side) for start in range(0, longer - side + stride, stride)]
    squares = torch.stack([image.narrow(axis, start, side) for start in starts])
    outputs = model(squares)
    total = outputs.new_zeros(outputs.shape[1], *image.shape[-2:])
    count = outputs.new_zeros(image.shape[-2:])
    for start, logits in zip(starts, outputs, strict=True):
        total.narrow(axis, start, side).add_(logits)
        count.narrow(axis, start, side).add_(1)
    return total / count


def largest_class(logits: Tensor, size: Sequence[int], at_once: int = 16) -> Tensor:
    """The class of the largest logit of each pixel, after bilinear resizing.

    Only a few classes are resized at once: all of 150, at the 12 million pixels of a photograph,
    would take 7 GB.

    Args:
        logits: (K, h, w).
        size: H and W.
        at_once: number of classes that are resized together.

    Returns:
        Classes (H, W); of equal logits the first.
    """
    best, classes = None, torch.zeros(tuple(size), dtype=torch.int64, device=logits.device)
    for start in range(0, len(logits), at_once):
        some = F.interpolate(logits[None, start : start + at_once], tuple(size), mode="bilinear")[0]
        largest, place = some.max(0)
        if best is None:
            best, classes = largest, place
        else:
            classes = torch.where(largest > best, place + start, classes)
            best = torch.maximum(largest, best)
    return classes
