"""The base class for fine-tuning a dense or low-rank backbone for segmentation and detection."""

from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn

from lightning_modules.backbones import shard
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.pela.backbone_module import BackboneModule
from lightning_modules.pela.downstream.pyramid import Pyramid, build_backbone


class Downstream(BackboneModule):
    """Builds the backbone and the optimizer of a downstream task.

    Args:
        backbone_lr: the backbone's learning rate, as a multiple of lr.
        **kwargs: see `BackboneModule`; biases and norms do not decay.
    """

    def __init__(self, backbone_lr: float = 1.0, **kwargs: Any):
        super().__init__(**kwargs)

    def build(self, backbone: nn.Module) -> nn.Module:
        """The task's model around a backbone; a subclass implements it."""
        raise NotImplementedError

    def counted(self) -> nn.Module:
        """The module whose multiply-adds are reported: the full model by default."""
        return self.model

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
            shard(model, self.device_mesh)
        self.model = model

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with its schedule, and another learning rate for the backbone."""
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
