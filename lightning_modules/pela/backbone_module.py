"""The base class of PELA's LightningModules: a timm model, dense or low-rank, and its training."""

from typing import Any

import lightning as L

from lightning_modules.evaluation import Evaluation
from lightning_modules.weights import refuse_another_model

MODEL = ("architecture", "model_args", "num_classes", "ratio", "skip", "ranks")


class BackboneModule(Evaluation, L.LightningModule):
    """A timm model, dense or low-rank, with its settings for weights and optimisation.

    Args:
        num_classes: number of classes of the task.
        architecture: timm name of the model, or of the backbone.
        model_args: further arguments of timm.create_model, such as the task's img_size.
        pretrained: start from the architecture's pre-trained weights. Not saved in checkpoints.
        init_from: start from these weights: dense (a checkpoint, state_dict or safetensors file),
            or low-rank (a checkpoint of PELA, or an exported folder), which stay low-rank. Not
            saved in checkpoints.
        ratio: κ, which leaves 1/κ of each layer's parameters; null for no factorisation.
        skip: layers to leave dense in addition to pela.layers.SKIP.
        ranks: rank of each layer by name, instead of ratio. The module sets it to the ranks it has,
            so that checkpoints carry them. Without weights the layers are empty until a checkpoint
            is loaded.
        lr: peak learning rate of AdamW.
        betas: of AdamW.
        weight_decay: decoupled, per unit of learning rate.
        warmup_steps: optimizer steps, or a share of all if below 1.
        schedule: "cosine", "linear", "polynomial", "constant_with_warmup", …
    """

    def __init__(
        self,
        num_classes: int,
        architecture: str = "deit_base_patch16_224",
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        init_from: str | None = None,
        ratio: float | None = None,
        skip: list[str] = [],  # noqa: B006  (jsonargparse)
        ranks: dict[str, int] | None = None,
        lr: float = 6.25e-5,
        betas: list[float] = [0.9, 0.999],  # noqa: B006
        weight_decay: float = 0.05,
        warmup_steps: float = 0,
        schedule: str = "cosine",
    ):
        super().__init__()
        # initial weights only: a checkpoint must load without downloading or needing these files
        self.save_hyperparameters(ignore=["init_from", "teacher_from", "pretrained"])
        self.init_from, self.pretrained = init_from, pretrained
        self.model: Any = None

    @property
    def settings(self) -> Any:
        """The arguments of __init__."""
        return self.hparams

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model before its tensors are loaded.

        Raises:
            ValueError: naming the hyperparameter that differs.
        """
        refuse_another_model(checkpoint, self.hparams, self.model_names())

    def model_names(self) -> tuple[str, ...]:
        """The hyperparameters in which a checkpoint must equal the run that loads it."""
        return MODEL
