"""What the stages share: where a run starts, its optimizer, how far it has gone."""

from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_modules.backbones import shard
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.self_distillation.tracking import distance, fingerprint
from lightning_modules.weights import refuse_another_model

IGNORED = -100  # label of a sample that only fills up the last evaluation round
NO_MASKED_MODEL = (
    "give a checkpoint of masked language modelling with this architecture, or fit a new head to "
    "it first with model.train decoder"
)


class Stage(L.LightningModule):
    """What all stages share: weights to start from, an optimizer and a schedule.

    Its checkpoint is the next stage's `init_from`. It also has `start`, the fingerprint of the
    weights that the stage began with (see `tracking.fingerprint`).

    `train/distance` is how far the encoder has gone from there, every `log_every_n_steps`. A
    resumed run builds the weights it began with once more; where that gives others (random ones,
    or a file that has changed), it logs no distance.

    Args:
        architecture: name of the model.
        model_args: further arguments of the model or values of its configuration.
        pretrained: start from the weights of that name. Like init_from not part of the checkpoint.
        init_from: start from the weights of a checkpoint, state_dict or safetensors file, and
            not from those of a name.
        lr: peak learning rate.
        betas: of Adam.
        weight_decay: decoupled, per unit of learning rate.
        decay_vectors: decay biases and norms too.
        warmup: of the learning rate: optimizer steps, or a share of all steps if below 1.
        schedule: "linear", "cosine", "constant_with_warmup", …
    """

    identity: tuple[str, ...] = ("architecture", "model_args")  # what a checkpoint must agree on

    def __init__(
        self,
        architecture: str,
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        init_from: str | None = None,
        lr: float = 1.5e-4,
        betas: list[float] = [0.9, 0.999],  # noqa: B006  (jsonargparse)
        weight_decay: float = 0.01,
        decay_vectors: bool = False,
        warmup: float = 0.0,
        schedule: str = "linear",
    ):
        super().__init__()
        # where a run began is not what it is: loading it again must not download or need old files
        self.save_hyperparameters(ignore=["init_from", "pretrained", "teacher_from"])
        self.init_from, self.pretrained = init_from, pretrained
        self.model: Any = None
        self.start = ""
        self.origin: dict[str, Tensor] = {}  # the encoder's weights then, while training

    @property
    def settings(self) -> Any:
        """The arguments of __init__."""
        return self.hparams

    def build(self, pretrained: bool) -> nn.Module:
        """The model, random or with the weights of its name."""
        raise NotImplementedError

    def load(self, model: nn.Module, source: str) -> None:
        """Fill it from a file, or raise ValueError."""
        raise NotImplementedError

    def prepare(self, model: nn.Module) -> None:
        """Change what trains."""

    def encoder_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that all stages share."""
        raise NotImplementedError

    def configure_model(self) -> None:
        """Build the model once, and shard it where the strategy asks."""
        if self.model is not None:
            return
        model = self.build(self.pretrained and self.init_from is None)
        if self.init_from is not None:
            self.load(model, self.init_from)
        self.start = fingerprint(model.state_dict())
        self.prepare(model)
        self.model = model
        if self._trainer is not None and self.trainer.state.fn == "fit":
            parameters = self.encoder_parameters()
            self.origin = {name: one.detach().clone() for name, one in parameters.items()}
        if self.device_mesh is not None:
            shard(model, self.device_mesh["data_parallel"])
            if hasattr(model, "encode"):
                register_fsdp_forward_method(model, "encode")

    def build_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """AdamW, unless a stage says otherwise."""
        h = self.settings
        return build_optimizer("adamw", groups, h.lr, tuple(h.betas))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over what trains, with its schedule."""
        h = self.settings
        groups = parameter_groups(self.model, h.weight_decay, h.decay_vectors)
        optimizer = self.build_optimizer(groups)
        return with_schedule(optimizer, h.schedule, h.warmup, training_steps(self.trainer))

    def on_train_start(self) -> None:
        """Bring what `train/distance` is measured from to where the weights are."""
        parameters = self.encoder_parameters() if self.origin else {}
        self.origin = {n: laid_out(then, parameters[n]) for n, then in self.origin.items()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report `train/distance` where the loggers write."""
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self.origin and self.trainer.global_step % every == 0:
            self.log("train/distance", distance(self.encoder_parameters(), self.origin))

    def on_train_end(self) -> None:
        """Let the copy of the weights go."""
        self.origin = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write down what the stage began with."""
        checkpoint["start"] = self.start

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model before its tensors are compared one by one.

        Raises:
            ValueError: naming what differs.
        """
        refuse_another_model(checkpoint, self.hparams, self.identity)
        if self.start != checkpoint["start"]:
            self.start, self.origin = checkpoint["start"], {}


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor on a parameter's device and, under FSDP2, sharded as it is."""
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)
