"""Training an elastic language model (MatLM)."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from lightning_modules.backbones import build_text, match_tokenizer, shard
from lightning_modules.labels import IGNORED
from lightning_modules.matformer.consistency import (
    SubmodelMetrics,
    logits_in_pieces,
    score_tokens,
)
from lightning_modules.matformer.elastic_module import ElasticModule
from lightning_modules.matformer.idle_tail import freeze_idle_tail
from lightning_modules.matformer.nest import Granularity, nest, nesting_of, set_granularity
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.weights import load_dense


class MatLM(ElasticModule):
    """A nested decoder of transformers; with `fractions: null`, the plain baseline.

    One step minimises the next-token loss of the granularity that is set (MatFormer, arXiv
    2310.07707, Eq. 2). The callback GranularitySampling sets it. The module adds that callback
    itself; one in trainer.callbacks, for example with other probabilities, replaces it. With
    `distill` = λ the loss is

        (1 - λ) · cross-entropy + λ · KL(teacher ‖ submodel)

    where the teacher is the frozen original model, from the callback FrozenTeacher.

    Batches are dicts with `input_ids` and `labels` (B, L); labels[:, 1:] are predicted from
    input_ids[:, :-1], and labels of -100 are ignored.

    Args:
        architecture: a hub name, a folder with config.json, or a model type such as "starcoder2".
        model_args: values of its configuration.
        pretrained: start from the weights of that name or folder. Not saved in checkpoints.
        init_from: start from the weights of a checkpoint, state_dict or safetensors file. Not
            saved in checkpoints.
        config: the complete configuration, which a checkpoint carries so that it loads without
            `architecture`'s files; made from `architecture` and `model_args` when null.
        fractions: share of the hidden neurons ("ffn"), groups of heads ("heads") or blocks
            ("depth") at each granularity; null for a plain model.
        joint: null trains the granularity that is drawn. "mean" or "sum" puts every batch through
            all granularities and takes the mean or sum of their losses.
        split_batch: with `joint`, split the batch into one piece for each granularity instead of
            giving each the full batch (DynaBERT's training as Appendix B.4 describes it).
        distill: λ above, from 0 to 1.
        teacher_from: name or folder of the teacher; `architecture` when null. Not saved in
            checkpoints.
        idle_tail: what AdamW does to the slices that a step did not use: "frozen" leaves them
            unchanged, "moving" lets momentum and weight decay act on them.
        eval_granularities: submodels to validate besides the uniform ones, each a list with one
            granularity index per layer.
        lr: peak learning rate.
        betas: of AdamW.
        weight_decay: decoupled, per unit of learning rate; not on norms, biases and embeddings.
        warmup_steps: optimizer steps, or a share of all if below 1.
        schedule: "cosine_warmup_with_min_lr", "linear", "constant_with_warmup", …
        schedule_args: of transformers' get_scheduler, such as {min_lr_rate: 0.1}.

    Raises:
        ValueError: for `joint` without fractions, `split_batch` without `joint`, or `distill`
            outside of 0 to 1.
    """

    def __init__(
        self,
        architecture: str = "starcoder2",
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        init_from: str | None = None,
        config: dict[str, Any] | None = None,
        fractions: dict[str, list[float]] | None = None,
        joint: Literal["mean", "sum"] | None = None,
        split_batch: bool = False,
        distill: float = 0.0,
        teacher_from: str | None = None,
        idle_tail: Literal["frozen", "moving"] = "frozen",
        eval_granularities: list[list[int]] | None = None,
        lr: float = 1e-3,
        betas: list[float] = [0.9, 0.95],  # noqa: B006
        weight_decay: float = 0.01,
        warmup_steps: float = 0,
        schedule: str = "cosine",
        schedule_args: dict[str, Any] | None = None,
    ):
        super().__init__(fractions, joint, split_batch)
        if not 0 <= distill <= 1:
            raise ValueError(f"distill is {distill}, expected a share of the loss from 0 to 1")
        # initial weights only: a checkpoint must load without downloading or needing these files
        self.save_hyperparameters(ignore=["init_from", "pretrained", "teacher_from"])
        self.init_from, self.pretrained, self.teacher_from = init_from, pretrained, teacher_from
        self.teacher: Any = None

    def configure_model(self) -> None:
        """Build the model once, on the process's device, and shard it where the strategy asks.

        Raises:
            ValueError: if the data's windows are longer than the model's context, or weights do not
                fit.
        """
        if self.model is not None:
            return
        h = self.settings
        if h.config is None:
            model: Any = build_text(h.architecture, "causal", h.model_args or {}, self.pretrained)
            h.config = json.loads(model.config.to_json_string(use_diff=False))
        else:
            config = AutoConfig.for_model(**h.config)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        match_tokenizer(model, self._trainer, h.architecture if self.pretrained else None)
        data = getattr(self._trainer, "datamodule", None)
        longest = getattr(model.config, "max_position_embeddings", None)
        length = getattr(data, "length", 0)
        if longest is not None and length > longest:
            raise ValueError(
                f"data.length is {length} and the model has {longest} positions: set "
                "data.length to at most that, or max_position_embeddings in model.model_args"
            )
        vocabulary = model.config.vocab_size
        tokens = getattr(data, "vocab_size", vocabulary)
        if not self.pretrained and tokens < vocabulary:
            warnings.warn(
                f"the tokenizer has {tokens} entries and the model embeds {vocabulary}, so the "
                "rest is never used: train the tokenizer on more text, or set vocab_size in "
                "model.model_args and data alike",
                stacklevel=2,
            )
        if self.init_from is not None:
            load_dense(model, self.init_from)
        if h.fractions is not None:
            nest(model, h.fractions)
        if self.device_mesh is not None:
            shard(model, self.device_mesh)
        self.model = model
        self.metrics = SubmodelMetrics(list(self.submodels))

    def build_teacher(self) -> nn.Module:
        """The original model with its pre-trained weights, for the callback FrozenTeacher.

        Raises:
            ValueError: if neither `teacher_from` nor `architecture` has weights.
        """
        h = self.settings
        name = self.teacher_from or h.architecture
        if name in CONFIG_MAPPING and not Path(name).is_dir():
            raise ValueError(
                f"model.distill learns from a pre-trained model, and {name!r} is a model type "
                "without weights: set model.teacher_from to a hub name or a folder"
            )
        return build_text(name, "causal", h.model_args or {}, True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Refuse Lightning's prediction: validation windows are no prompts.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "MatLM predicts no batches, expected prompts to continue: use `python -m recipes "
            "predict --ckpt_path CKPT FILE` without -c, or `python -m recipes generate CKPT`"
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (B, L, V) of the granularity that is set, for tokens (B, L)."""
        return self.model(input_ids, use_cache=False).logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Eq. 2 for the granularity that is set, or all granularities jointly."""
        loss = self.training_loss(batch["input_ids"], batch["labels"])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean next-token loss of labels (B, L) for tokens (B, L).

        Raises:
            ValueError: if `distill` is set and no callback has given the module a teacher.
        """
        share = self.settings.distill
        logits = self(inputs)[:, :-1].flatten(0, 1).float()
        targets = targets[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets)
        if not share:
            return loss
        if self.teacher is None:
            raise ValueError(
                "MatLM has no teacher: add callbacks.frozen_teacher.FrozenTeacher to "
                "trainer.callbacks, or set model.distill to 0"
            )
        with torch.no_grad():
            teacher_logits = (
                self.teacher(inputs, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            )
        divergence = F.kl_div(
            logits.log_softmax(-1),
            teacher_logits.log_softmax(-1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        return (1 - share) * loss + share * divergence[targets != IGNORED].mean()

    def score_submodels(self, batch: dict[str, Tensor]) -> None:
        """Add a batch to the metrics of every submodel."""
        assert self.metrics is not None
        models = {
            label: partial(logits_in_pieces, self.model, partial(self.submodel, chosen))
            for label, chosen in self.submodels.items()
        }
        score_tokens(self.metrics, models, batch, self.model.config.vocab_size)

    @property
    def granularity(self) -> list[int]:
        """The submodel in use, one index per layer; may be set to what `set_granularity` takes."""
        return [layer.granularity for layer in nesting_of(self.model).layers]

    @granularity.setter
    def granularity(self, chosen: Granularity) -> None:
        set_granularity(self.model, chosen)

    def averages(self) -> dict[str, dict[str, Tensor]]:
        """The metrics of each submodel, with `perplexity`, the exponential of the mean loss."""
        averages = super().averages()
        return {
            label: {**values, "perplexity": values["loss"].exp()}
            for label, values in averages.items()
        }

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over everything, with its schedule and the policy for idle slices."""
        h = self.settings
        modules = self.model.named_modules()
        embeddings = [f"{name}.weight" for name, m in modules if isinstance(m, nn.Embedding)]
        groups = parameter_groups(self.model, h.weight_decay, never=embeddings)
        optimizer = build_optimizer("adamw", groups, h.lr, tuple(h.betas))
        if h.fractions is not None and h.joint is None and h.idle_tail == "frozen":
            freeze_idle_tail(optimizer, self.model)
        total = training_steps(self.trainer)
        return with_schedule(optimizer, h.schedule, h.warmup_steps, total, h.schedule_args)
