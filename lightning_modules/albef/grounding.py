"""Visual grounding: finds the part of an image that a phrase describes, by Grad-CAM.

ALBEF, arXiv 2107.07651, Section 5.4. The heat map is the cross-attention of each token to each
patch, times the positive part of the matching score's gradient with respect to it.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_convert, box_iou

from lightning_modules.albef.model import RetrievalModel

AREA_POWER = 0.5  # a box's score is its sum of heat over its area to this power, as in ALBEF's code


def grad_cam(
    model: RetrievalModel, images: Tensor, ids: Tensor, mask: Tensor, block: int
) -> Tensor:
    """Heat maps over the patches, for pairs of images and texts.

        cam = mean over heads and tokens of  A · max(∂s/∂A, 0)

    with A the cross-attention and s the logit of a match.

    Args:
        model: its parameters get no gradients.
        images: (B, 3, H, W).
        ids: tokens (B, L).
        mask: 1 for tokens, 0 for padding (B, L).
        block: the layer whose cross-attention is used, counted from the first text layer; 8 in the
            paper.

    Returns:
        (B, rows, columns) of patches.

    Raises:
        ValueError: if that layer has no cross-attention.
    """
    layers, first = model.bert.layers, model.bert.text_layers
    if not first <= block < len(layers):
        raise ValueError(
            f"block is {block}, expected a fusion layer, {first} to {len(layers) - 1}: the layers "
            "below have no cross-attention"
        )
    attention: Any = layers[block].crossattention.self
    original, weights = attention.config, []
    attention.config = copy.copy(original)
    attention.config._attn_implementation = "eager"  # fused kernels do not return the attention
    handle = attention.register_forward_hook(lambda _, __, output: weights.append(output[1]))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            images, ids, mask = images.clone(), ids.clone(), mask.clone()
            states = model.encode_image(images).detach().requires_grad_()
            fused = model.fuse(model.encode_text(ids, mask), mask, states)
            score = model.match(fused)[:, 1].sum()
            [gradient] = torch.autograd.grad(score, weights)
    finally:
        attention.config = original
        handle.remove()
    vision: Any = model.visual_encoder
    heat = weights[0].detach().float() * gradient.float().clamp(min=0)
    heat = heat[..., vision.num_prefix_tokens :].mean(1) * mask[:, :, None]
    heat = heat.sum(1) / mask.sum(1, keepdim=True)
    return heat.unflatten(1, vision.patch_embed.grid_size)


def choose_box(heat: Tensor, size: tuple[int, int], boxes: Tensor) -> int:
    """The box with the most heat relative to its size.

    Args:
        heat: (rows, columns) of patches.
        size: (height, width) of the image, in pixels.
        boxes: (K, 4) as x, y, width, height, in pixels of the image.

    Returns:
        The box's index.
    """
    pixels = F.interpolate(heat[None, None], size=tuple(size), mode="bicubic")[0, 0]
    scores = []
    for x, y, width, height in boxes.tolist():
        inside = pixels[int(y) : int(y + height), int(x) : int(x + width)]
        scores.append(inside.sum().item() / max(width * height, 1) ** AREA_POWER)
    return max(range(len(scores)), key=scores.__getitem__)


def overlap(one: Tensor, other: Tensor) -> float:
    """Intersection over union of two boxes (4,) as x, y, width, height."""
    corners = [box_convert(box[None].float(), "xywh", "xyxy") for box in (one, other)]
    return box_iou(*corners).item()
