"""Logs the distance of an encoder from its initial weights during training."""

from collections.abc import Mapping
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_modules.self_distillation.tracking import distance
from lightning_modules.weights import fingerprint


class TrackDistance(L.Callback):
    """Logs `train/distance`, ‖θ_init − θ‖₂ of the encoder, every `log_every_n_steps` (Sec. 5.2).

    The module calls `begin` in configure_model, when the model has its initial weights and no
    checkpoint has been loaded. A resumed run builds these weights again. Where they differ from the
    first run's (random ones, or a file that has changed), no distance is logged.

    Attributes:
        start: fingerprint of all initial weights, see `weights.fingerprint`.
        origin: copies of the encoder's initial weights; empty outside of training.
        parameters: the encoder's parameters during training.
    """

    def __init__(self) -> None:
        self.start = ""
        self.origin: dict[str, Tensor] = {}
        self.parameters: Mapping[str, nn.Parameter] = {}

    def begin(self, model: nn.Module, encoder: Mapping[str, nn.Parameter], training: bool) -> None:
        """Record a fingerprint of all initial weights and, for training, a copy of the encoder's.

        Args:
            model: the full model.
            encoder: the parameters to measure, by name.
            training: whether the run is a fit.
        """
        self.start = fingerprint(model.state_dict())
        if training:
            self.origin = {name: one.detach().clone() for name, one in encoder.items()}

    def resume(self, start: str) -> None:
        """Drop the copies if the run that wrote the checkpoint had other initial weights.

        Args:
            start: fingerprint of that run's initial weights.
        """
        if self.start != start:
            self.start, self.origin = start, {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Move the copies to the parameters' devices and shards."""
        self.parameters = pl_module.encoder_parameters() if self.origin else {}
        self.origin = {n: laid_out(then, self.parameters[n]) for n, then in self.origin.items()}

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the distance at the steps that the trainer logs."""
        if self.origin and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log("train/distance", distance(self.parameters, self.origin))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Free the copies' memory."""
        self.origin, self.parameters = {}, {}


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor on a parameter's device and, under FSDP2, sharded like the parameter."""
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)
