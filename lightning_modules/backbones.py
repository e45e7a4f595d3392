"""Backbones by name, and their sharding over devices."""

import difflib
from typing import Any

import timm
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def build_vision(
    architecture: str, num_classes: int, model_args: dict[str, Any], pretrained: bool = False
) -> nn.Module:
    """A timm model.

    Args:
        architecture: timm name, such as "vit_base_patch16_224".
        num_classes: outputs of the head; 0 leaves the head out.
        model_args: further keyword arguments of timm.create_model (img_size, embed_dim, …).
        pretrained: weights from the hub (needs a network or a filled cache); random otherwise.

    Raises:
        ValueError: if timm has no such model.
    """
    if not timm.is_model(architecture):
        near = difflib.get_close_matches(architecture, timm.list_models(), n=5)
        raise ValueError(
            f"timm has no model {architecture!r}; similar: {', '.join(near) or 'none'} "
            "(timm.list_models() names all)"
        )
    return timm.create_model(
        architecture, pretrained=pretrained, num_classes=num_classes, **model_args
    )


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model's parameters over the devices of a mesh (FSDP2), block by block, in place.

    The blocks are the members of the model's longest list of equal modules: a Transformer's
    layers.
    """
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and len({type(child) for child in module}) == 1
    ]
    for block in max(lists, key=len, default=()):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def feature_vector(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The vector that a timm model's head would classify: the normalised [CLS] token of a ViT.

    Args:
        model: a timm model.
        images: (B, 3, H, W).

    Returns:
        (B, D).
    """
    return model.forward_head(model.forward_features(images), pre_logits=True)  # type: ignore
