"""Fine-tuning by VeRA or one of its rivals: sentences, images, and language models."""

from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassMatthewsCorrCoef,
)
from torchmetrics.regression import PearsonCorrCoef, SpearmanCorrCoef

from lightning_modules.backbones import build_text, build_vision, shard
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.tuning import Tuning, trainable, tune
from lightning_modules.vera.vera import Init, add_vera, in_heads
from lightning_modules.weights import load_completely, load_weights, refuse_another_model

IGNORED = -100  # label of what only pads
NOT_MERGED = "give weights of this architecture; merge those of a run with adapters first"


class FineTuning(L.LightningModule):
    """What the three share: the method, its arguments, and an optimizer with two learning rates.

    VeRA (arXiv 2310.11454) trains the classifier in full with a learning rate of its own and has
    no α. Everything else of a subclass is its model, its loss and its scores.

    Args:
        architecture: name of the model; timm's, or transformers' or a folder with config.json.
        model_args: further arguments of the model or values of its configuration.
        pretrained: start from the weights of that name. Like init_from not part of the checkpoint.
        init_from: start from the weights of a checkpoint, state_dict or safetensors file.
        method: "vera", or a rival of `lightning_modules.tuning.tune`.
        heads: modules that are trained in full; null for those on top of the pre-trained model.
        rank: of VeRA or LoRA, or the width of the adapters.
        targets: layers that VeRA or LoRA adapts (see `add_vera`; LoRA takes a fused projection
            whole); null for queries and values.
        d_init: what every entry of VeRA's d starts at.
        projection_seed: VeRA's A and B are drawn from it.
        init: how they are drawn.
        shared: one A and B for all layers (else Table 7's "unique").
        train: VeRA's trained vectors, b and d (or one of them, Table 6).
        alpha: LoRA's scale is alpha / rank; rank when null.
        lr: peak learning rate of all but the heads.
        head_lr: that of the heads; `lr` when null.
        betas: of AdamW.
        weight_decay: decoupled, per unit of learning rate.
        decay_vectors: decay biases, norms and VeRA's vectors too.
        warmup: of the learning rate: optimizer steps, or a share of all steps if below 1.
        schedule: "linear", "cosine", "constant_with_warmup", …
        label_smoothing: of the training loss.
    """

    def __init__(
        self,
        architecture: str,
        model_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        init_from: str | None = None,
        method: Tuning | Literal["vera"] = "vera",
        heads: list[str] | None = None,
        rank: int = 256,
        targets: list[str] | None = None,
        d_init: float = 0.1,
        projection_seed: int = 0,
        init: Init = "kaiming_uniform",
        shared: bool = True,
        train: list[str] = ["b", "d"],  # noqa: B006  (jsonargparse)
        alpha: float | None = None,
        lr: float = 4e-3,
        head_lr: float | None = None,
        betas: list[float] = [0.9, 0.999],  # noqa: B006
        weight_decay: float = 0.0,
        decay_vectors: bool = False,
        warmup: float = 0.06,
        schedule: str = "linear",
        label_smoothing: float = 0.0,
    ):
        super().__init__()
        # where a run began is not what it is: loading it again must not download or need old files
        self.save_hyperparameters(ignore=["init_from", "pretrained"])
        self.init_from, self.pretrained = init_from, pretrained
        self.model: nn.Module | None = None
        self.mean_loss = MeanMetric()
        self.scores = self.build_scores()

    # What a subclass writes.

    def build(self) -> nn.Module:
        """The model before it is adapted."""
        raise NotImplementedError

    def default_targets(self) -> list[str]:
        """The layers that are adapted unless `targets` says others."""
        raise NotImplementedError

    def default_heads(self, model: nn.Module) -> list[str]:
        """The modules on top of the pre-trained model."""
        raise NotImplementedError

    def build_scores(self) -> MetricCollection:
        """What is measured besides the loss, over the whole set."""
        raise NotImplementedError

    def outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (n, C) and targets (n,) of a batch, without what only pads."""
        raise NotImplementedError

    # What all have.

    @property
    def settings(self) -> Any:
        """The arguments of __init__."""
        return self.hparams

    @property
    def heads(self) -> list[str]:
        """The modules that are trained in full."""
        assert self.model is not None
        chosen = self.settings.heads
        return self.default_heads(self.model) if chosen is None else chosen

    def configure_model(self) -> None:
        """Build and adapt the model once, and shard it where the strategy asks."""
        if self.model is not None:
            return
        h = self.settings
        self.model = self.build()
        if self.init_from is not None:
            if self.pretrained:
                load_weights(self.model, self.init_from)
            else:
                load_completely(self.model, self.init_from, NOT_MERGED, optional=self.heads)
        targets = self.default_targets() if h.targets is None else h.targets
        if h.method == "vera":
            add_vera(
                self.model,
                h.rank,
                targets,
                h.d_init,
                h.projection_seed,
                h.init,
                h.shared,
                h.train,
                self.heads,
            )
        else:
            whole = [target.partition(":")[0] for target in targets]  # LoRA knows no slices
            tune(self.model, h.method, self.heads, h.rank, whole, h.alpha)
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        """Write down how many parameters train: `tuned`, and `heads` besides."""
        assert self.model is not None
        sizes: dict[str, float] = {"tuned": 0, "heads": 0}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                sizes["heads" if in_heads(name, self.heads) else "tuned"] += parameter.numel()
        if self.logger is not None:  # not self.log, whose float32 would round them
            self.logger.log_metrics(sizes, self.global_step)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        loss = loss_of(*self.outputs(batch), self.settings.label_smoothing)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the scores."""
        self._add_scores(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the scores."""
        self._add_scores(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The model's logits."""
        raise NotImplementedError

    def on_validation_epoch_end(self) -> None:
        """Report `val/loss`, `val/accuracy`, …."""
        self._report("val")

    def on_test_epoch_end(self) -> None:
        """Report `test/loss`, `test/accuracy`, …."""
        self._report("test")

    def _add_scores(self, batch: Any) -> None:
        logits, targets = self.outputs(batch)
        if not len(targets):  # all of it fills up the last round of several ranks
            return
        self.mean_loss.update(loss_of(logits, targets), len(targets))
        if len(self.scores):
            guesses = logits.argmax(-1) if logits.ndim == 2 else logits.float()
            self.scores.update(guesses, targets)

    def _report(self, stage: str) -> None:
        self.log(f"{stage}/loss", self.mean_loss.compute())
        for name, value in self.scores.compute().items():
            self.log(f"{stage}/{name}", value.float(), prog_bar=True)
        self.mean_loss.reset()
        self.scores.reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW; the heads' parameters have their own learning rate."""
        assert self.model is not None
        h, heads = self.settings, self.heads
        groups = []
        for group in parameter_groups(self.model, h.weight_decay, h.decay_vectors):
            inside = {id(p) for n, p in self.model.named_parameters() if in_heads(n, heads)}
            for lr, is_head in ((h.lr, False), (h.head_lr or h.lr, True)):
                params = [p for p in group["params"] if (id(p) in inside) == is_head]
                if params:
                    groups.append({**group, "params": params, "lr": lr})
        optimizer = build_optimizer("adamw", groups, h.lr, tuple(h.betas))
        return with_schedule(optimizer, h.schedule, h.warmup, training_steps(self.trainer))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model or method.

        Raises:
            ValueError: naming what differs.
        """
        names = ["architecture", "model_args", "num_classes", "method", "rank", "targets", "heads"]
        if self.settings.method == "vera":
            names += ["projection_seed", "init", "shared", "train"]
        refuse_another_model(checkpoint, self.hparams, names)


class TextTuning(FineTuning):
    """A sentence classifier of transformers or, with one class, a regressor (STS-B).

    Args:
        num_classes: outputs of the head; 1 for regression.
        architecture: a hub name, a folder with config.json, or a model type such as "roberta".
        **kwargs: see `FineTuning`.
    """

    def __init__(
        self, num_classes: int, architecture: str = "FacebookAI/roberta-base", **kwargs: Any
    ):
        super().__init__(architecture=architecture, **kwargs)

    def build(self) -> nn.Module:
        """A transformers model for sequence classification."""
        h = self.settings
        arguments = {**(h.model_args or {}), "num_labels": h.num_classes}
        model = build_text(h.architecture, "classification", arguments, self.pretrained)
        match_tokenizer(model, self._trainer)
        return model

    def default_targets(self) -> list[str]:
        """Queries and values (Section 4.1)."""
        return query_and_value(self.model)

    def default_heads(self, model: nn.Module) -> list[str]:
        """The classifier, by whatever name it has."""
        base = model.base_model_prefix
        return [name for name, part in model.named_children() if name != base and has_weights(part)]

    def build_scores(self) -> MetricCollection:
        """Accuracy, F1 and Matthews' correlation; Pearson's and Spearman's for regression."""
        return classification_scores(self.settings.num_classes)

    def outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (n, C), for regression (n,), and labels (n,) of the labelled rows."""
        targets = batch["labels"]
        logits = self.predict_step(batch, 0)
        kept = targets != IGNORED
        return logits[kept], targets[kept]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, C), or scores (B,) of a regressor."""
        assert self.model is not None
        logits = self.model(**text_inputs(batch, self.model)).logits
        return logits.squeeze(-1) if self.settings.num_classes == 1 else logits


class ImageTuning(FineTuning):
    """An image classifier of timm.

    Args:
        num_classes: outputs of the head.
        architecture: timm name.
        **kwargs: see `FineTuning`.
    """

    def __init__(
        self,
        num_classes: int,
        architecture: str = "vit_base_patch16_224.augreg_in21k",
        **kwargs: Any,
    ):
        super().__init__(architecture=architecture, **kwargs)

    def build(self) -> nn.Module:
        """A timm model."""
        h = self.settings
        return build_vision(h.architecture, h.num_classes, h.model_args or {}, self.pretrained)

    def default_targets(self) -> list[str]:
        """Queries and values (Section 4.4), which are two thirds of timm's fused qkv."""
        return query_and_value(self.model)

    def default_heads(self, model: nn.Module) -> list[str]:
        """The classifier."""
        classifier = model.get_classifier()  # type: ignore[operator]
        return [name for name, part in model.named_modules() if part is classifier]

    def build_scores(self) -> MetricCollection:
        """Accuracy, F1 and Matthews' correlation."""
        return classification_scores(self.settings.num_classes)

    def outputs(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (n, C) and labels (n,), or soft targets (n, C), of the labelled images."""
        targets = batch[1]
        kept = targets != IGNORED if targets.ndim == 1 else slice(None)
        return self.predict_step(batch, 0)[kept], targets[kept]

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, C)."""
        assert self.model is not None
        return self.model(batch[0])


class LanguageTuning(FineTuning):
    """A causal language model of transformers, trained on what its labels keep.

    The loss is the mean over the tokens whose label is not -100: the reference of an E2E example,
    the response to an instruction.

    Args:
        architecture: a hub name, a folder with config.json, or a model type such as "gpt2".
        quantize: hold the frozen, pre-trained weights in 4 or 8 bits (QLoRA; CUDA).
        gradient_checkpointing: compute activations twice instead of keeping them.
        **kwargs: see `FineTuning`.
    """

    def __init__(
        self,
        architecture: str = "openai-community/gpt2-medium",
        quantize: Literal["nf4", "int8"] | None = None,
        gradient_checkpointing: bool = False,
        **kwargs: Any,
    ):
        super().__init__(architecture=architecture, **kwargs)
        if quantize:  # see on_save_checkpoint
            self.strict_loading = False

    def build(self) -> nn.Module:
        """A transformers model for causal language modelling."""
        h = self.settings
        model: Any = build_text(
            h.architecture, "causal", h.model_args or {}, self.pretrained, h.quantize
        )
        match_tokenizer(model, self._trainer)
        if h.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def default_targets(self) -> list[str]:
        """Queries and values (Section 4.2)."""
        return query_and_value(self.model)

    def default_heads(self, model: nn.Module) -> list[str]:
        """None: the output layer stays as it is."""
        return []

    def build_scores(self) -> MetricCollection:
        """None beside the loss, a mean over all tokens; text is scored after generation."""
        return MetricCollection({})

    def outputs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (n, V) before each of the n tokens that count, and those tokens (n,)."""
        targets = batch["labels"][:, 1:]
        kept = targets != IGNORED
        return self.predict_step(batch, 0)[:, :-1][kept], targets[kept]

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Logits (B, L, V)."""
        assert self.model is not None
        return self.model(**text_inputs(batch, self.model), use_cache=False).logits

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep only what trains of a quantised model.

        bitsandbytes writes its 4-bit weights into a state_dict and cannot read them back; the base
        comes from its name again (`pretrained`).
        """
        if self.settings.quantize:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: state[name] for name in self._trained()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model or method.

        Raises:
            ValueError: naming what differs.
        """
        super().on_load_checkpoint(checkpoint)
        if self.settings.quantize and (wrong := self._trained() ^ checkpoint["state_dict"].keys()):
            raise ValueError(
                f"this checkpoint of a quantised model holds other parameters than train here, "
                f"{min(wrong)} for one: give the one that a run with these settings wrote"
            )

    def _trained(self) -> set[str]:
        assert self.model is not None
        return {f"model.{name}" for name in trainable(self.model)}


def match_tokenizer(model: Any, trainer: Any) -> None:
    """See to it that a model and the DataModule's tokenizer fit, if there is one.

    A model that knows no padding token (GPT-2, as a classifier) takes the tokenizer's.

    Raises:
        ValueError: if the tokenizer has tokens that the model has no embedding of.
    """
    data = getattr(trainer, "datamodule", None)
    tokens, config = getattr(data, "vocab_size", 0), model.config
    if tokens > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokens} tokens and the model embeds {config.vocab_size}: set "
            "data.tokenizer to the model's own, or vocab_size in model.model_args and data alike"
        )
    if config.pad_token_id is None:
        config.pad_token_id = getattr(data, "pad_token_id", None)


def text_inputs(batch: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """What a transformers model takes of a batch.

    Raises:
        ValueError: if a text is longer than the model has positions for.
    """
    length = batch["input_ids"].shape[1]
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(
            f"a text has {length} tokens and the model {longest} positions: set data.max_length to "
            f"{longest} or less"
        )
    return {name: value for name, value in batch.items() if name != "labels"}


def loss_of(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of (n, C) with classes (n,), or squared error of scores (n,), in fp32."""
    if logits.ndim == 1:
        return F.mse_loss(logits.float(), targets.float())
    return F.cross_entropy(logits.float(), targets, label_smoothing=label_smoothing)


def classification_scores(num_classes: int) -> MetricCollection:
    """Scores over a whole set and all ranks.

    Args:
        num_classes: more than 1 gives accuracy, F1 (of class 1 of two; of more, the mean over
            classes) and Matthews' correlation; 1 gives Pearson's and Spearman's.
    """
    scores: dict[str, Metric | MetricCollection]
    if num_classes == 1:
        scores = {"pearson": PearsonCorrCoef(), "spearman": SpearmanCorrCoef()}
    else:
        scores = {
            "accuracy": MulticlassAccuracy(num_classes, average="micro"),
            "f1": BinaryF1Score() if num_classes == 2 else MulticlassF1Score(num_classes),
            "matthews": Matthews(num_classes),
        }
    return MetricCollection(scores)


class Matthews(MulticlassMatthewsCorrCoef):
    """0 where all guesses or all labels are of one class, as scikit-learn and GLUE have it.

    torchmetrics gives two classes another number there, which depends on how many each has.
    """

    def compute(self) -> Tensor:
        """A scalar in [-1, 1]."""
        one_class = any((self.confmat.sum(side) > 0).sum() < 2 for side in (0, 1))
        return torch.zeros((), device=self.confmat.device) if one_class else super().compute()


QUERY_AND_VALUE = [  # what the families call them
    ["query", "value"],  # BERT, RoBERTa, transformers' ViT
    ["c_attn:q,v"],  # GPT-2
    ["qkv:q,v"],  # timm
    ["q_proj", "v_proj"],  # Llama, OPT
    ["q_lin", "v_lin"],  # DistilBERT
]


def query_and_value(model: nn.Module | None) -> list[str]:
    """The targets that stand for the query and value projections of a model.

    Raises:
        ValueError: if none of the known names is there.
    """
    assert model is not None
    ends = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    for targets in QUERY_AND_VALUE:
        if ends.issuperset(target.partition(":")[0] for target in targets):
            return targets
    raise ValueError(
        f"{type(model).__name__} has no queries and values by a known name: give model.targets"
    )


def has_weights(module: nn.Module) -> bool:
    """Whether a module has any parameter."""
    return any(True for _ in module.parameters())
