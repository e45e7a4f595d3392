"""A timm model, dense or low-rank, as a backbone with feature maps of four sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.layers import LayerNorm2d
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.backbones import build_vision
from lightning_modules.pela.checkpoint import start_from
from lightning_modules.pela.factorize import factorize, plan_uniform
from lightning_modules.pela.layers import low_rank_layers, plan_of

LEVELS = 4


def build_backbone(
    architecture: str,
    model_args: dict[str, Any],
    pretrained: bool = False,
    init_from: str | None = None,
    ratio: float | None = None,
    skip: Sequence[str] = (),
    ranks: Mapping[str, int] | None = None,
) -> tuple[nn.Module, dict[str, int] | None]:
    """A timm model without its head, dense or low-rank.

    Args:
        architecture: timm name.
        model_args: further arguments of timm.create_model.
        pretrained: start from the architecture's pre-trained weights.
        init_from: weights as `load_weights` takes them; those of a low-rank model (a checkpoint of
            PELA or an exported folder) give a low-rank backbone of the same ranks.
        ratio: κ, to factorise dense weights directly, without repair; None for no factorisation.
        skip: layers that ratio leaves dense.
        ranks: a plan, instead of ratio and skip.

    Returns:
        The model and its plan, None for a dense model.

    Raises:
        FileNotFoundError: if there is no file init_from.
        ValueError: if init_from is low-rank and a ratio or other ranks are given, or if it does
            not fit the model.
    """
    model = build_vision(architecture, 0, model_args, pretrained)
    if init_from is not None:
        _, report = start_from(model, init_from, ratio, ranks)
        absent = report.missing + report.reshaped
        if absent:
            raise ValueError(
                f"init_from {init_from} does not fit {architecture}: {absent[0]}; give the "
                "architecture and model_args that it was made with"
            )
    if not low_rank_layers(model):
        if ranks is None and ratio is not None:
            ranks = plan_uniform(model, ratio, skip)
        if ranks is not None:
            factorize(model, ranks=ranks)
    return model, plan_of(model) if low_rank_layers(model) else None


class Pyramid(nn.Module):
    """A backbone that returns feature maps of four levels, with strides of 4, 8, 16 and 32 pixels.

    A hierarchical model (Swin) gives one map for each stage. A plain ViT gives the outputs of four
    equally spaced blocks, whose stride is the patch size, 16 pixels. As in BEiT's and MAE's
    segmentation, two transposed convolutions, one, none and a max pooling change the four strides
    to those above. Each map is layer-normalised first.

    Args:
        backbone: a timm model; its head and final norm are removed.
        finest: first level to return, 0 to 3; layers that only finer levels need are not built.

    Raises:
        ValueError: if the model cannot return intermediate outputs or has fewer than four.
    """

    def __init__(self, backbone: nn.Module, finest: int = 0):
        super().__init__()
        info: Any = getattr(backbone, "feature_info", None)
        if not hasattr(backbone, "forward_intermediates") or not info or len(info) < LEVELS:
            raise ValueError(
                f"{type(backbone).__name__} has no {LEVELS} feature maps: give a timm ViT, Swin or "
                "another model with forward_intermediates and at least as many blocks or stages"
            )
        levels = range(finest, LEVELS)
        self.indices = [len(info) * (level + 1) // LEVELS - 1 for level in levels]
        backbone.prune_intermediate_layers(self.indices, prune_norm=True, prune_head=True)  # type: ignore[operator]
        self.backbone: Any = backbone
        chosen = [info[index] for index in self.indices]
        self.channels: list[int] = [level["num_chs"] for level in chosen]
        self.norms = nn.ModuleList(LayerNorm2d(channels) for channels in self.channels)
        equal_strides = len({level["reduction"] for level in chosen}) == 1
        self.resize = nn.ModuleList(
            _resize(level, self.channels[0]) if equal_strides else nn.Identity() for level in levels
        )

    def forward(self, images: Tensor, seen: Tensor | None = None) -> list[Tensor]:
        """Maps (B, C_k, H / s_k, W / s_k), finest first.

        Args:
            images: (B, 3, H, W).
            seen: (B, H, W), true where there is no padding; None for images without padding. The
                maps are 0 in the padding, and the patches of a plain ViT do not attend to it
                (Swin's windows do, as in other implementations).
        """
        masked: dict[str, Any] = {}
        if seen is not None and isinstance(self.backbone, VisionTransformer):
            masked["attn_mask"] = self._attended(seen)
        maps = self.backbone.forward_intermediates(
            images, indices=self.indices, intermediates_only=True, output_fmt="NCHW", **masked
        )
        levels = zip(self.norms, self.resize, maps, strict=True)
        return [
            without_padding(resize(without_padding(norm(features), seen)), seen)
            for norm, resize, features in levels
        ]

    def _attended(self, seen: Tensor) -> Tensor:
        """A ViT's attention mask, (B, 1, 1, tokens), true for tokens without padding."""
        grid = self.backbone.patch_embed.dynamic_feat_size(seen.shape[-2:])
        prefix = seen.new_ones(len(seen), self.backbone.num_prefix_tokens)
        return torch.cat([prefix, shrunk(seen, grid).flatten(1)], dim=1)[:, None, None]


def shrunk(seen: Tensor, size: Sequence[int]) -> Tensor:
    """A mask (B, H, W) resized to a map's (h, w), by the nearest pixel."""
    return F.interpolate(seen[:, None].float(), size=tuple(size))[:, 0].bool()


def without_padding(features: Tensor, seen: Tensor | None) -> Tensor:
    """A map (B, C, h, w) with 0 in the padding, where the mask (B, H, W) is false."""
    if seen is None:
        return features
    return features.masked_fill(~shrunk(seen, features.shape[-2:])[:, None], 0)


def _resize(level: int, channels: int) -> nn.Module:
    """The layer that changes a plain ViT's map from the patch stride to a level's stride."""

    def twice() -> nn.Module:
        return nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2)

    return (
        nn.Sequential(twice(), LayerNorm2d(channels), nn.GELU(), twice()),
        twice(),
        nn.Identity(),
        nn.MaxPool2d(2),
    )[level]
