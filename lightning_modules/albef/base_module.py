"""The base class of ALBEF's LightningModules."""

from typing import Any, ClassVar, Literal

import lightning as L
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from lightning_modules.albef.bert import Bert
from lightning_modules.albef.checkpoint import load_albef, start_text, start_vision
from lightning_modules.albef.model import ALBEF, Task, build, skipped
from lightning_modules.albef.momentum import Momentum
from lightning_modules.backbones import data_parallel
from lightning_modules.evaluation import Evaluation
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.pela import factorize, low_rank_layers, plan_of
from lightning_modules.pela.checkpoint import require_same_plan
from lightning_modules.pela.tome import add_tome
from lightning_modules.tuning import tune
from lightning_modules.weights import refuse_another_model

LORA_TARGETS = ["query", "value", "qkv"]


class AlbefModule(Evaluation, L.LightningModule):
    """An ALBEF for a task, dense or low-rank, with its momentum model.

    Args:
        sizes: arguments of albef.build (vision, image_size, text, projection, …); null for the
            paper's.
        init_from: start from an ALBEF's weights, dense or low-rank: a released checkpoint, or one
            of these modules'. Not saved in checkpoints.
        vision_from: start the image encoder from a ViT's weights (a file, folder or hub name). Not
            saved in checkpoints.
        text_from: start the text and fusion layers from a BERT (a folder or hub name). Not saved in
            checkpoints.
        ratio: κ of PELA, which leaves 1/κ of each layer's parameters; null for no factorisation.
        ranks: rank of each layer by name, instead of ratio. The module sets it to the ranks it has,
            so that checkpoints carry them.
        tuning: what trains: "full", everything; "lora", LoRA on queries and values and the task's
            heads; "head", those heads alone.
        lora_rank: rank of LoRA.
        merged_tokens: tokens that ToMe merges in each block of the image encoder; 0 for no merging.
        decay: m of the momentum model.
        soft_targets: α, weight of the momentum model's prediction in the targets.
        ramp: increase α linearly from 0 over the first epoch.
        lr: peak learning rate of AdamW.
        weight_decay: decoupled, of matrices.
        warmup_steps: optimizer steps, or a share of all if below 1.
        schedule: a name of transformers' get_scheduler.

    Raises:
        ValueError: if tokens are to be merged where every patch is needed.
    """

    task: ClassVar[Task]
    heads: ClassVar[tuple[str, ...]] = ()  # modules that always train
    all_patches: ClassVar[str] = ""  # why the image encoder may merge no tokens; empty: it may

    def __init__(
        self,
        sizes: dict[str, Any] | None = None,
        init_from: str | None = None,
        vision_from: str | None = None,
        text_from: str | None = None,
        ratio: float | None = None,
        ranks: dict[str, int] | None = None,
        tuning: Literal["full", "lora", "head"] = "full",
        lora_rank: int = 8,
        merged_tokens: int = 0,
        decay: float = 0.995,
        soft_targets: float = 0.4,
        ramp: bool = True,
        lr: float = 1e-4,
        weight_decay: float = 0.02,
        warmup_steps: float = 0,
        schedule: str = "cosine",
    ):
        super().__init__()
        # initial weights only: a checkpoint must load without these files
        self.save_hyperparameters(ignore=["init_from", "vision_from", "text_from", "teacher_from"])
        if merged_tokens and self.all_patches:
            raise ValueError(f"merged_tokens is {merged_tokens}: {self.all_patches}, set it to 0")
        self.init_from, self.vision_from, self.text_from = init_from, vision_from, text_from
        self.model: Any = None
        self.momentum: Any = None

    @property
    def settings(self) -> Any:
        """The arguments of __init__."""
        return self.hparams

    def configure_model(self) -> None:
        """Build model and momentum model once, and shard them where the strategy asks.

        Raises:
            ValueError: for LoRA on a low-rank model, or weights that do not fit.
        """
        if self.model is not None:
            return
        h = self.settings
        model = self.dense()
        self.start(model)
        if h.tuning == "lora" and low_rank_layers(model):
            raise ValueError(
                "tuning lora is for the dense model: set model.ratio to null and start from dense "
                "weights"
            )
        if h.merged_tokens:
            add_tome(model.visual_encoder, h.merged_tokens)
        tune(model, h.tuning, self.heads, h.lora_rank, LORA_TARGETS)
        if isinstance(temperature := getattr(model, "temp", None), nn.Parameter):
            temperature.requires_grad_(True)  # it belongs to the contrastive heads
        momentum = Momentum(model, h.decay)
        if self.device_mesh is not None:
            for sharded in (model, momentum.model):
                shard(sharded, self.device_mesh)  # type: ignore[arg-type]
        self.model, self.momentum = model, momentum

    def dense(self) -> ALBEF:
        """The dense model of these sizes, with random weights."""
        return build(self.task, **(self.settings.sizes or {}))

    def start(self, model: ALBEF) -> None:
        """Load a dense model's initial weights, and factorise it where ratio or ranks say so.

        Raises:
            ValueError: if nothing in a source fits, or low-rank weights come with a ratio.
        """
        h = self.settings
        if self.vision_from is not None:
            start_vision(model, self.vision_from)
        if self.text_from is not None:
            start_text(model, self.text_from)
        if self.init_from is not None:
            load_albef(model, self.init_from)
        if low_rank_layers(model):
            require_same_plan(str(self.init_from), plan_of(model), h.ratio, h.ranks)
        elif h.ranks is not None:
            # without init_from a checkpoint is usually loaded next, so the quicker "randomized" is
            # enough; unlike "empty", it can also be trained if none is loaded
            factorize(model, ranks=h.ranks, method="svd" if self.init_from else "randomized")
        elif h.ratio is not None:
            factorize(model, h.ratio, skip=skipped(model))
        self.hparams["ranks"] = plan_of(model) if low_rank_layers(model) else None

    def on_fit_start(self) -> None:
        """Keep m for an optimizer step: the momentum model is updated with every batch of it.

        Raises:
            ValueError: the weights are of 16 bits, in which the momentum model would stand still,
                or the data's tokens are not those of the model.
        """
        if self.trainer.precision in ("bf16-true", "16-true"):
            raise ValueError(
                f"trainer.precision is {self.trainer.precision}, in which the momentum model's "
                "updates are rounded away: set it to bf16-mixed"
            )
        self._refuse_other_tokens()
        self.momentum.decay = self.settings.decay ** (1 / self.trainer.accumulate_grad_batches)

    def _refuse_other_tokens(self) -> None:
        """Refuse a DataModule with tokens, or longer texts, than the model has embeddings of."""
        data, config = getattr(self.trainer, "datamodule", None), self.model.bert.config
        if data is None:
            return
        if (tokens := len(data.tokenizer)) > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokens} tokens and the model embeds {config.vocab_size}: set "
                "data.tokenizer to the model's own, or vocab_size in model.sizes.text"
            )
        if data.max_length > config.max_position_embeddings:
            raise ValueError(
                f"data.max_length is {data.max_length} and the model has "
                f"{config.max_position_embeddings} positions: set it to no more"
            )

    def alpha(self, batch_idx: int) -> float:
        """α of this step; with `ramp` it rises from 0 over the first epoch."""
        h = self.settings
        if not h.ramp or self.current_epoch > 0:
            return h.soft_targets
        return h.soft_targets * min(1.0, batch_idx / self.trainer.num_training_batches)

    def total_loss(self, losses: dict[str, Tensor]) -> Tensor:
        """Log the parts of a loss by name, and return their sum."""
        total = sum(losses.values())
        assert isinstance(total, Tensor)
        self.log_dict({f"train/{name}": value.detach() for name, value in losses.items()})
        self.log("train/loss", total, prog_bar=True)
        return total

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over the trainable parameters, with its schedule."""
        h = self.settings
        groups = parameter_groups(self.model, h.weight_decay)
        optimizer = build_optimizer("adamw", groups, h.lr)
        return with_schedule(optimizer, h.schedule, h.warmup_steps, training_steps(self.trainer))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model before its tensors are loaded.

        Raises:
            ValueError: naming the hyperparameter that differs.
        """
        names = ["sizes", "ranks", "tuning", "lora_rank", "merged_tokens"]
        refuse_another_model(checkpoint, self.hparams, names)


def shard(model: ALBEF, mesh: DeviceMesh) -> None:
    """Shard an ALBEF's parameters over a strategy's mesh (FSDP2), block by block, in place."""
    devices = data_parallel(mesh)
    berts = [module for module in model.modules() if isinstance(module, Bert)]
    blocks: list[nn.Module] = [*model.visual_encoder.blocks]  # type: ignore[misc]
    for bert in berts:
        blocks.extend(bert.layers)
    for block in blocks:
        fully_shard(block, mesh=devices)
    # reshard the root after each of its methods, because the momentum update reads the shards
    fully_shard(model, mesh=devices, reshard_after_forward=True)
    for name in model.methods:
        register_fsdp_forward_method(model, name)
