"""Training an elastic vision Transformer (MatViT)."""

from typing import Any, Literal

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lightning_modules.backbones import build_vision, shard
from lightning_modules.matformer.consistency import SubmodelMetrics, classification_loss
from lightning_modules.matformer.elastic_module import ElasticModule
from lightning_modules.matformer.idle_tail import freeze_idle_tail
from lightning_modules.matformer.nest import granularity, nest
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.weights import load_dense


class MatViT(ElasticModule):
    """A nested image classifier; with `fractions: null`, the plain model it is compared with.

    One step optimises L(M_i(x), y) for the granularity i that is set (MatFormer, arXiv
    2310.07707, Eq. 2). The callback GranularitySampling sets it. The module adds that callback
    itself; one in trainer.callbacks, for example with other probabilities, replaces it.

    Args:
        num_classes: outputs of the head.
        architecture: timm name of the model.
        model_args: further arguments of timm.create_model.
        pretrained: start from the architecture's pre-trained weights. Not saved in checkpoints.
        init_from: start from the weights of a checkpoint, state_dict or safetensors file. Not
            saved in checkpoints.
        fractions: share of the hidden neurons (heads, blocks) at each granularity; null for a
            plain model.
        part: what is nested: "ffn", "heads" or "depth".
        joint: null trains the granularity that is drawn. "mean" or "sum" puts every batch through
            all granularities and takes the mean or sum of their losses.
        split_batch: with `joint`, split the batch into one piece for each granularity instead of
            giving each the full batch (DynaBERT's training as Appendix B.4 describes it).
        idle_tail: what the optimizer does to the slices that a step did not use: "frozen" leaves
            them unchanged, "moving" lets momentum and weight decay act on them.
        loss: "softmax" or "sigmoid" cross-entropy.
        head_bias: initial bias of the classifier, whose weights then start at zero; null leaves
            timm's initialisation.
        eval_granularities: submodels to validate besides the uniform ones, each a list with one
            granularity index per layer.
        optimizer: "adamw" or "sgd".
        lr: peak learning rate.
        betas: of AdamW.
        momentum: of SGD.
        weight_decay: decoupled, per unit of learning rate (AdamW); L2 (SGD).
        decay_vectors: decay biases and norms too.
        warmup_steps: optimizer steps, or a share of all if below 1.
        schedule: "cosine", "linear", "constant_with_warmup", …
        granularity: the submodel that predicts: a name, or one index per layer; null for the
            largest. Not saved in checkpoints; the attribute may be set later.

    Raises:
        ValueError: for `joint` without fractions, or `split_batch` without `joint`.
    """

    monitored = "accuracy"
    identity = ("architecture", "model_args", "num_classes", "fractions", "part")

    def __init__(
        self,
        num_classes: int,
        architecture: str = "vit_base_patch16_224",
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        init_from: str | None = None,
        fractions: list[float] | None = [0.125, 0.25, 0.5, 1.0],  # noqa: B006  (jsonargparse)
        part: Literal["ffn", "heads", "depth"] = "ffn",
        joint: Literal["mean", "sum"] | None = None,
        split_batch: bool = False,
        idle_tail: Literal["frozen", "moving"] = "frozen",
        loss: Literal["softmax", "sigmoid"] = "softmax",
        head_bias: float | None = None,
        eval_granularities: list[list[int]] | None = None,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        lr: float = 1e-3,
        betas: list[float] = [0.9, 0.999],  # noqa: B006
        momentum: float = 0.9,
        weight_decay: float = 0.1,
        decay_vectors: bool = False,
        warmup_steps: float = 0,
        schedule: str = "cosine",
        granularity: list[int] | str | None = None,
    ):
        super().__init__(fractions, joint, split_batch)
        # initial weights only: a checkpoint must load without downloading or needing these files
        self.save_hyperparameters(ignore=["init_from", "pretrained", "granularity"])
        self.init_from, self.pretrained = init_from, pretrained
        self.granularity = granularity

    def configure_model(self) -> None:
        """Build the model once, on the process's device, and shard it where the strategy asks."""
        if self.model is not None:
            return
        h = self.settings
        model = build_vision(h.architecture, h.num_classes, h.model_args or {}, self.pretrained)
        if h.head_bias is not None:
            classifier = model.get_classifier()  # type: ignore[operator]
            nn.init.zeros_(classifier.weight)
            nn.init.constant_(classifier.bias, h.head_bias)
        if self.init_from is not None:
            load_dense(model, self.init_from)
        if h.fractions is not None:
            nest(model, h.fractions, h.part)
        if self.device_mesh is not None:
            shard(model, self.device_mesh)
        self.model = model
        self.metrics = SubmodelMetrics(list(self.submodels))

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of the granularity that is set, for images (B, 3, H, W)."""
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Eq. 2 for the granularity that is set, or all granularities jointly."""
        images, targets = batch
        loss = self.training_loss(images, targets)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch at the granularity that is set."""
        return classification_loss(self(inputs), targets, self.settings.loss)

    def score_submodels(self, batch: tuple[Tensor, Tensor]) -> None:
        """Add a batch to the metrics of every submodel."""
        assert self.metrics is not None
        images, targets = batch
        reference = None
        for label, chosen in self.submodels.items():
            logits = self.submodel(chosen, images)
            reference = logits if reference is None else reference
            self.metrics.update(label, logits, targets, reference)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, num_classes) of `granularity`."""
        if self.settings.fractions is None:
            return self(batch[0])
        chosen = len(self.settings.fractions) - 1 if self.granularity is None else self.granularity
        with granularity(self.model, chosen):
            return self(batch[0])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over everything, with its schedule and the policy for idle slices."""
        h = self.settings
        groups = parameter_groups(self.model, h.weight_decay, h.decay_vectors)
        optimizer = build_optimizer(h.optimizer, groups, h.lr, tuple(h.betas), h.momentum)
        if h.fractions is not None and h.joint is None and h.idle_tail == "frozen":
            freeze_idle_tail(optimizer, self.model)
        total = training_steps(self.trainer)
        return with_schedule(optimizer, h.schedule, h.warmup_steps, total)
