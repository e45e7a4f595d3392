"""How far a model has gone from the weights it began with, while it trains."""

from collections.abc import Mapping
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_modules.self_distillation.tracking import distance, fingerprint


class TrackDistance(L.Callback):
    """Logs `train/distance`, ‖θ_init − θ‖₂ of the encoder, every `log_every_n_steps` (Sec. 5.2).

    The module calls `begin` in configure_model, where the weights are those it starts from and no
    checkpoint has been read yet. A resumed run builds these weights once more; where that gives
    others (random ones, or a file that has changed), it logs no distance.

    Attributes:
        start: fingerprint of all weights that the run began with, see `tracking.fingerprint`.
        origin: the encoder's weights then; empty outside of training.
    """

    def __init__(self) -> None:
        self.start = ""
        self.origin: dict[str, Tensor] = {}
        self.parameters: Mapping[str, nn.Parameter] = {}

    def begin(self, model: nn.Module, encoder: Mapping[str, nn.Parameter], training: bool) -> None:
        """Note the weights that a run begins with, and where training is ahead, copy them.

        Args:
            model: all of it.
            encoder: the parameters to measure, by name.
            training: whether the run is a fit.
        """
        self.start = fingerprint(model.state_dict())
        if training:
            self.origin = {name: one.detach().clone() for name, one in encoder.items()}

    def resume(self, start: str) -> None:
        """Compare with what a checkpoint's run began with, and keep no other weights than those."""
        if self.start != start:
            self.start, self.origin = start, {}

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Bring the copies to where the weights are."""
        self.parameters = pl_module.encoder_parameters() if self.origin else {}
        self.origin = {n: laid_out(then, self.parameters[n]) for n, then in self.origin.items()}

    def on_train_batch_end(
        self, trainer: Any, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the distance where the loggers write."""
        if self.origin and trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log("train/distance", distance(self.parameters, self.origin))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the copies go."""
        self.origin, self.parameters = {}, {}


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor on a parameter's device and, under FSDP2, sharded as it is."""
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)
