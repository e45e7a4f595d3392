"""Training an elastic language model (MatLM)."""

import json
from functools import partial
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_modules.backbones import build_text, shard
from lightning_modules.matformer.consistency import SubmodelMetrics, score_tokens
from lightning_modules.matformer.idle_tail import freeze_idle_tail
from lightning_modules.matformer.joint import joint_losses
from lightning_modules.matformer.nest import nest, nesting_of, set_granularity
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.weights import load_weights, refuse_another_model

class MatLM(L.LightningModule):
    """A nested decoder of transformers; with `fractions: null`, the plain model beside it.

    One step minimises the next-token loss of the granularity that is set (MatFormer, arXiv
    2310.07707, Eq. 2). The callback GranularitySampling sets it; without that callback and without
    `joint`, the largest is trained. With `distill` = λ the loss is

        (1 - λ) · cross-entropy + λ · KL(teacher ‖ submodel)

    where the teacher is the frozen original, which the callback FrozenTeacher gives.

    Batches are dicts with `input_ids` and `labels` (B, L); labels[:, 1:] are predicted from
    input_ids[:, :-1], and -100 is left out.

    Args:
        architecture: a hub name, a folder with config.json, or a model type such as "starcoder2".
        model_args: values of its configuration.
        pretrained: start from the weights of that name or folder. Not part of the checkpoint.
        init_from: start from the weights of a checkpoint, state_dict or safetensors file. Likewise.
        config: the whole configuration, as the checkpoint keeps it; made of the two above if null.
        fractions: share of the hidden neurons ("ffn"), groups of heads ("heads") or blocks
            ("depth") at each granularity; null for a plain model.
        joint: null trains the granularity that is set. "mean" or "sum" puts every batch through
            all granularities and takes the mean or sum of their losses.
        split_batch: with `joint`, cut the batch into one piece for each granularity instead of
            giving all of it to each (DynaBERT's training as Appendix B.4 describes it).
        distill: λ above.
        teacher_from: name or folder of the teacher; `architecture` when null.
        idle_tail: what AdamW does to the slices a step did not use: "frozen" leaves them as they
            were, "moving" lets momentum and weight decay act on them.
        eval_granularities: submodels to validate besides the uniform ones: lists with one index
            per layer.
        lr: peak learning rate.
        betas: of AdamW.
        weight_decay: decoupled; norms, biases and embeddings are spared.
        warmup_steps: optimizer steps, or a share of all if below 1.
        schedule: "cosine_warmup_with_min_lr", "linear", "constant_with_warmup", …
        schedule_args: of transformers' get_scheduler, such as {min_lr_rate: 0.1}.
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
        super().__init__()
        if split_batch and joint is None:
            raise ValueError("split_batch needs joint: 'mean' or 'sum'; there is nothing to split")
        if joint is not None and fractions is None:
            raise ValueError(f"joint: {joint} needs fractions; a plain model has one granularity")
        if not 0 <= distill <= 1:
            raise ValueError(f"distill is {distill}, expected a share of the loss from 0 to 1")
        # where a run began is not what it is: loading it again must not download or need old files
        self.save_hyperparameters(ignore=["init_from", "pretrained", "teacher_from"])
        self.init_from, self.pretrained, self.teacher_from = init_from, pretrained, teacher_from
        self.model: Any = None
        self.teacher: Any = None
        self.metrics: SubmodelMetrics | None = None

    @property
    def settings(self) -> Any:
        """The arguments of __init__."""
        return self.hparams

    def configure_model(self) -> None:
        """Build the model once, on the process's device, and shard it where the strategy asks."""
        if self.model is not None:
            return
        h = self.settings
        if h.config is None:
            model: Any = build_text(h.architecture, "causal", h.model_args or {}, self.pretrained)
            h.config = json.loads(model.config.to_json_string(use_diff=False))
        else:
            config = AutoConfig.for_model(**h.config)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._match_tokenizer(model)
        if self.init_from is not None:
            load_weights(model, self.init_from)
        if h.fractions is not None:
            nest(model, h.fractions)
        if self.device_mesh is not None:
            shard(model, self.device_mesh["data_parallel"])
        self.model = model
        self.metrics = SubmodelMetrics(list(self.submodels))

    def _match_tokenizer(self, model: Any) -> None:
        data = getattr(self._trainer, "datamodule", None) if self._trainer else None
        tokens = getattr(data, "vocab_size", None)
        if tokens is not None and tokens > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokens} tokens and the model embeds "
                f"{model.config.vocab_size}: set data.tokenizer to the model's own, or vocab_size "
                "in model.model_args and data alike"
            )

    def build_teacher(self) -> nn.Module:
        """The original with its weights, for the callback FrozenTeacher."""
        h = self.settings
        return build_text(self.teacher_from or h.architecture, "causal", h.model_args or {}, True)

    @property
    def submodels(self) -> dict[str, list[int] | None]:
        """What validation scores, by label; the largest comes first and is the reference."""
        if self.settings.fractions is None:
            return {"all": None}
        nesting = nesting_of(self.model)
        uniform = [nesting.resolve(name) for name in reversed(nesting.names)]
        extra = [nesting.resolve(mix) for mix in self.settings.eval_granularities or []]
        return {nesting.label(chosen): chosen for chosen in uniform + extra}

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (B, L, V) of the granularity that is set, for tokens (B, L)."""
        return self.model(input_ids, use_cache=False).logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Eq. 2 for the granularity that is set, or all granularities jointly."""
        ids, labels = batch["input_ids"], batch["labels"]
        if self.settings.joint is None:
            loss = self._loss(ids, labels)
        else:
            loss = self._joint_loss(ids, labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def _joint_loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        count = len(nesting_of(self.model).names)
        pieces = [(ids, labels)] * count
        if self.settings.split_batch:
            if len(ids) < count:
                raise ValueError(
                    f"a batch of {len(ids)} cannot be split over {count} granularities: "
                    f"set data.batch_size to at least {count}"
                )
            # not chunk, which may return fewer pieces than it is asked for
            pieces = list(zip(ids.tensor_split(count), labels.tensor_split(count), strict=True))
        total = torch.stack(joint_losses(self.model, lambda i: self._loss(*pieces[i]))).sum()
        return total / count if self.settings.joint == "mean" else total

    def _loss(self, ids: Tensor, labels: Tensor) -> Tensor:
        share = self.settings.distill
        logits = self(ids)[:, :-1].flatten(0, 1).float()
        targets = labels[:, 1:].flatten()
        loss = F.cross_entropy(logits, targets)
        if not share:
            return loss
        if self.teacher is None:
            raise ValueError(
                "MatLM has no teacher: add callbacks.frozen_teacher.FrozenTeacher to "
                "trainer.callbacks, or set model.distill to 0"
            )
        with torch.no_grad():
            taught = self.teacher(ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        divergence = F.kl_div(
            logits.log_softmax(-1), taught.log_softmax(-1), reduction="none", log_target=True
        ).sum(-1)
        return (1 - share) * loss + share * divergence[targets != -100].mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Score every submodel on the same tokens."""
        self._score(batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Score every submodel on the same tokens."""
        self._score(batch)

    def _score(self, batch: dict[str, Tensor]) -> None:
        assert self.metrics is not None
        models = {label: partial(self._logits, chosen) for label, chosen in self.submodels.items()}
        score_tokens(self.metrics, models, batch, self.model.config.vocab_size)
        if self.settings.fractions is not None:
            set_granularity(self.model, nesting_of(self.model).names[-1])

    def _logits(self, chosen: list[int] | None, ids: Tensor) -> Tensor:
        if chosen is not None:
            set_granularity(self.model, chosen)
        return self(ids)

    def on_validation_epoch_end(self) -> None:
        """Report `val/loss_XL`, `val/perplexity_XL`, …, and `val/loss`, the largest one's."""
        self._report("val")

    def on_test_epoch_end(self) -> None:
        """Report `test/loss_XL` and the rest."""
        self._report("test")

    def _report(self, stage: str) -> None:
        assert self.metrics is not None
        for place, (label, values) in enumerate(self.metrics.compute().items()):
            suffix = "" if label == "all" else f"_{label}"
            values["perplexity"] = values["loss"].exp()
            if suffix and place == 0:  # the same name for any granularities, to be monitored
                self.log(f"{stage}/loss", values["loss"])
            for name, value in values.items():
                shown = name == "loss" and "*" not in label
                self.log(f"{stage}/{name}{suffix}", value, prog_bar=shown)
        self.metrics.reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over everything, with its schedule and the policy for idle slices."""
        h = self.settings
        modules = self.model.named_modules()
        embeddings = [f"{name}.weight" for name, m in modules if isinstance(m, nn.Embedding)]
        groups = parameter_groups(self.model, h.weight_decay, never=embeddings)
        optimizer = build_optimizer("adamw", groups, h.lr, tuple(h.betas))
        if h.fractions is not None and h.idle_tail == "frozen":
            freeze_idle_tail(optimizer, self.model)
        total = training_steps(self.trainer)
        return with_schedule(optimizer, h.schedule, h.warmup_steps, total, h.schedule_args)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the tokenizer, so that the checkpoint can write text by itself."""
        tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            checkpoint["tokenizer"] = {
                "json": backend.to_str(),
                "eos_token": tokenizer.eos_token,
                "pad_token": tokenizer.pad_token,
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model before its tensors are compared one by one.

        Raises:
            ValueError: naming what differs.
        """
        names = ("architecture", "model_args", "fractions")
        refuse_another_model(checkpoint, self.hparams, names)
