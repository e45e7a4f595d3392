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
    """A timm model without its head, with its weights, dense or low-rank.

    Args:
        architecture: timm name.
        model_args: further arguments of timm.create_model.
        pretrained: dense weights from the hub.
        init_from: weights as `load_weights` takes them; those of a low-rank model (a checkpoint of
            PELA or a folder that was exported) make a low-rank backbone of the same ranks.
        ratio: κ, to factorise dense weights directly, without repair; None leaves them.
        skip: layers that this leaves dense.
        ranks: a plan, instead of ratio and skip.

    Returns:
        The model and its plan, None for a dense one.

    Raises:
        FileNotFoundError: if init_from is not there.
        ValueError: if init_from is low-rank and a ratio is given, or does not fit the model.
    """
    model = build_vision(architecture, 0, model_args, pretrained)
    if init_from is not None:
        _, report = start_from(model, init_from, ratio)
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
    """Images in, feature maps of four levels out: a value for each 4, 8, 16 and 32 pixels.

    A hierarchical model (Swin) gives one map for each stage. A plain ViT gives the outputs of four
    blocks at equal distances, all of one size; two transposed convolutions, one, none and a
    pooling bring them to a quarter, half, one and two patches a step, as in BEiT's and MAE's
    segmentation (with patches of 16 pixels). Each map is layer-normalised first.

    Args:
        backbone: a timm model; its head and the norm that it would need are removed.
        finest: first level to give, 0 to 3; what only finer ones would need is not made.

    Raises:
        ValueError: if the model does not give its layers' outputs or has fewer than four.
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
        plain = len({level["reduction"] for level in chosen}) == 1
        self.resize = nn.ModuleList(
            _resize(level, self.channels[0]) if plain else nn.Identity() for level in levels
        )

    def forward(self, images: Tensor, seen: Tensor | None = None) -> list[Tensor]:
        """Maps (B, C_k, H / s_k, W / s_k), finest first.

        Args:
            images: (B, 3, H, W).
            seen: (B, H, W), true where there is no padding. The patches of a plain ViT then do not
                attend to padding (Swin's windows do, as elsewhere), and the maps are 0 there.
        """
        masked: dict[str, Any] = {}
        if seen is not None and isinstance(self.backbone, VisionTransformer):
            masked["attn_mask"] = self._attended(seen)
        maps = self.backbone.forward_intermediates(
            images, indices=self.indices, intermediates_only=True, output_fmt="NCHW", **masked
        )
        levels = zip(self.norms, self.resize, maps, strict=True)
        return [cut(resize(cut(norm(features), seen)), seen) for norm, resize, features in levels]

    def _attended(self, seen: Tensor) -> Tensor:
        """Which tokens of a ViT may be attended to, (B, 1, 1, tokens)."""
        grid = self.backbone.patch_embed.dynamic_feat_size(seen.shape[-2:])
        prefix = seen.new_ones(len(seen), self.backbone.num_prefix_tokens)
        return torch.cat([prefix, shrunk(seen, grid).flatten(1)], dim=1)[:, None, None]


def shrunk(seen: Tensor, size: Sequence[int]) -> Tensor:
    """A mask (B, H, W) at a map's size, by the nearest pixel."""
    return F.interpolate(seen[:, None].float(), size=tuple(size))[:, 0].bool()


def cut(features: Tensor, seen: Tensor | None) -> Tensor:
    """A map (B, C, h, w) with 0 where there is padding."""
    if seen is None:
        return features
    return features.masked_fill(~shrunk(seen, features.shape[-2:])[:, None], 0)


def _resize(level: int, channels: int) -> nn.Module:
    """From one patch a step to what a level has."""

    def twice() -> nn.Module:
        return nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2)

    return (
        nn.Sequential(twice(), LayerNorm2d(channels), nn.GELU(), twice()),
        twice(),
        nn.Identity(),
        nn.MaxPool2d(2),
    )[level]
