"""Fine-tunes a classifier of images or text, plainly or by a baseline method."""

from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)

from lightning_modules.backbones import (
    build_text,
    build_vision,
    classifier_names,
    match_tokenizer,
    shard,
    text_inputs,
)
from lightning_modules.by_length import run_by_length
from lightning_modules.evaluation import Evaluation
from lightning_modules.labels import IGNORED
from lightning_modules.optim import (
    build_optimizer,
    head_parameters,
    parameter_groups,
    split_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.self_distillation.adaptation_module import Modality, split
from lightning_modules.self_distillation.mae_checkpoint import load_encoder
from lightning_modules.self_distillation.mars import mars_project, mars_start
from lightning_modules.self_distillation.objectives import NO_MASKED_MODEL
from lightning_modules.self_distillation.r3f import r3f
from lightning_modules.self_distillation.recadam import (
    RecAdam,
    require_annealing,
    require_convergence,
)
from lightning_modules.self_distillation.tracking_module import TrackDistance, laid_out
from lightning_modules.weights import gathered, load_completely, refuse_another_model

Method = Literal["plain", "linear", "recadam", "mars", "r3f"]


class Finetuning(Evaluation, L.LightningModule):
    """Classification with a new head on a pre-trained encoder.

    Args:
        num_classes: outputs of the head. It classifies the [CLS] token after the final norm of a
            ViT; BERT's pooler counts as part of the head, because masked language models have none.
        architecture: images: a timm ViT. Text: a hub name, a folder with config.json, or a model
            type such as "bert".
        modality: "images" or "text".
        model_args: further arguments of the model or values of its configuration, such as dropout.
        method: "plain", cross-entropy with AdamW; "linear", the same for the head alone on the
            frozen encoder; or a baseline, "recadam", "mars" or "r3f".
        method_args: recadam: anneal_k, anneal_t0 and pretrain_cof, see `RecAdam`. mars: radius, see
            `mars_project`. r3f: weight λ, epsilon and noise, see `r3f`.
        pretrained: start from the weights of the architecture's name. Not saved in checkpoints.
        init_from: start from the encoder in a checkpoint, state_dict or safetensors file; replaces
            `pretrained`. Not saved in checkpoints.
        lr: peak learning rate; it decreases linearly to 0.
        betas: of Adam.
        weight_decay: decoupled, per unit of learning rate; biases and norms do not decay.
        warmup: optimizer steps of warm-up, or a share of all steps if below 1.

    Raises:
        ValueError: for an unknown method, or method_args that the method does not have.
    """

    def __init__(
        self,
        num_classes: int,
        architecture: str = "vit_base_patch16_224.mae",
        modality: Modality = "images",
        model_args: dict[str, Any] | None = None,
        method: Method = "plain",
        method_args: dict[str, Any] | None = None,
        pretrained: bool = False,
        init_from: str | None = None,
        lr: float = 1e-4,
        betas: list[float] = [0.9, 0.999],  # noqa: B006  (jsonargparse)
        weight_decay: float = 0.01,
        warmup: float = 0.0,
    ):
        super().__init__()
        # initial weights only: a checkpoint must load without downloading or needing these files
        self.save_hyperparameters(ignore=["init_from", "pretrained"])
        self.init_from, self.pretrained = init_from, pretrained
        self.method_args = checked(method, method_args or {})
        self.model: Any = None
        self.centres: dict[str, Tensor] = {}  # see mars_start
        self.tracker = TrackDistance()
        self.mean_loss = MeanMetric()
        self.scores = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(num_classes, average="micro"),
                "f1": MulticlassF1Score(num_classes, average="macro"),
            }
        )
        self.confusion = MulticlassConfusionMatrix(num_classes)

    @property
    def start(self) -> str:
        """The fingerprint of this run's initial weights, see `weights.fingerprint`."""
        return self.tracker.start

    def configure_callbacks(self) -> list[L.Callback]:
        """The callback that logs the distance from the initial weights."""
        return [self.tracker]

    def configure_model(self) -> None:
        """Build the model once, and shard it where the strategy asks."""
        if self.model is not None:
            return
        h: Any = self.hparams
        args, pretrained = h.model_args or {}, self.pretrained and self.init_from is None
        if h.modality == "images":
            model: Any = build_vision(h.architecture, h.num_classes, args, pretrained)
        else:
            args = {**args, "num_labels": h.num_classes}
            model = build_text(h.architecture, "classification", args, pretrained)
            match_tokenizer(model, self._trainer, h.architecture if pretrained else None)
            run_by_length(model.base_model)
        if self.init_from is not None and h.modality == "images":
            load_encoder(model, self.init_from)
        elif self.init_from is not None:
            encoder = f"{model.base_model_prefix}."
            load_completely(model, self.init_from, NO_MASKED_MODEL, encoder)
        self.model = model
        training = self._trainer is not None and self.trainer.state.fn == "fit"
        self.tracker.begin(model, self.encoder_parameters(), training)
        if h.method == "mars":
            self.centres = mars_start(model, self.heads)
        if h.method == "linear":
            for parameter in self.encoder_parameters().values():
                parameter.requires_grad_(False)
        if self.device_mesh is not None:
            shard(model, self.device_mesh)

    @property
    def heads(self) -> list[str]:
        """New modules: timm's classifier; for text the encoder's siblings and its pooler."""
        base = getattr(self.model, "base_model_prefix", None)
        if base is None:
            return classifier_names(self.model)
        names = [name for name, _ in self.model.named_children() if name != base]
        names.append(f"{base}.pooler")
        return [name for name in names if head_parameters(self.model, [name])]

    def encoder_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters outside the heads, by name."""
        new = tuple(f"{head}." for head in self.heads)
        return {n: p for n, p in self.model.named_parameters() if not n.startswith(new)}

    def forward(self, inputs: Any) -> Tensor:
        """Logits (B, C) for images (B, 3, H, W) or a dict of text."""
        if isinstance(inputs, dict):
            return self.model(**text_inputs(inputs, self.model)).logits
        return self.model(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy, and with R3F its divergence in addition.

        R3F's noise is below the rounding of half precision, so both of its passes are in float32.
        """
        inputs, labels = split(batch)
        if self.hparams["method"] == "r3f":
            settings = dict(self.method_args)
            weight = settings.pop("weight", 1.0)
            with torch.autocast(self.device.type, enabled=False):
                logits = self(inputs)
                noisy = r3f(self.model, inputs, logits, **settings)
                loss = F.cross_entropy(logits, labels) + weight * noisy
        else:
            loss = F.cross_entropy(self(inputs).float(), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW or RecAdam, with a linearly decreasing learning rate (Table 9).

        Raises:
            ValueError: if RecAdam would diverge at some step, would be mostly plain Adam before the
                warm-up of the learning rate ends, or would not learn the task at all.
        """
        h: Any = self.hparams
        groups = parameter_groups(self.model, h.weight_decay)
        steps = training_steps(self.trainer)
        if h.method != "recadam":
            optimizer = build_optimizer("adamw", groups, h.lr, tuple(h.betas))
            return with_schedule(optimizer, "linear", h.warmup, steps)
        optimizer = self.recadam(groups)
        with_scheduler = with_schedule(optimizer, "linear", h.warmup, steps)
        require_convergence(optimizer, with_scheduler["lr_scheduler"]["scheduler"], steps)
        require_annealing(optimizer, h.warmup * steps if h.warmup < 1 else h.warmup, steps)
        return with_scheduler

    def recadam(self, groups: list[dict[str, Any]]) -> RecAdam:
        """RecAdam, with plain Adam for the heads.

        Args:
            groups: from `parameter_groups`.
        """
        h: Any = self.hparams
        heads = head_parameters(self.model, self.heads)
        groups = split_groups(groups, heads, {"anchored": True}, {"anchored": False})
        return RecAdam(groups, h.lr, tuple(h.betas), **self.method_args)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A step, followed for MARS by the projection, before the weights can be saved."""
        super().optimizer_step(*args, **kwargs)
        if self.hparams["method"] == "mars":
            mars_project(self.model, self.centres, **self.method_args)

    def on_train_start(self) -> None:
        """Move MARS's centres to the parameters' devices and shards."""
        parameters = dict(self.model.named_parameters())
        self.centres = {name: laid_out(c, parameters[name]) for name, c in self.centres.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the initial weights' fingerprint, and MARS's centres for resumed runs."""
        checkpoint["start"] = self.start
        checkpoint["mars_start"] = {
            name: gathered(centre).cpu() for name, centre in self.centres.items()
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model; restore the fingerprint and MARS's centres.

        Raises:
            ValueError: naming the hyperparameter that differs.
        """
        identity = ("modality", "architecture", "model_args", "num_classes", "method")
        refuse_another_model(checkpoint, self.hparams, identity)
        self.tracker.resume(checkpoint["start"])
        self.centres = checkpoint["mars_start"]

    def score(self, batch: Any) -> None:
        """Add a batch to the scores."""
        inputs, labels = split(batch)
        logits, valid = self(inputs).float(), labels != IGNORED
        if valid.any():
            labels, logits = labels[valid], logits[valid]
            self.mean_loss.update(F.cross_entropy(logits, labels), len(labels))
            self.scores.update(logits, labels)
            self.confusion.update(logits, labels)

    def report(self, stage: str) -> None:
        """Log `stage/loss`, `…/accuracy` (micro F1), `…/f1` (macro) and `…/classes_predicted`.

        The last one shows a classifier that has collapsed to one class.
        """
        self.log(f"{stage}/loss", self.mean_loss.compute())
        for name, value in self.scores.compute().items():
            self.log(f"{stage}/{name}", value, prog_bar=True)
        predicted = self.confusion.compute().sum(0) > 0
        self.log(f"{stage}/classes_predicted", predicted.sum().float())
        for metric in (self.mean_loss, self.scores, self.confusion):
            metric.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Logits (B, C)."""
        return self(split(batch)[0])


METHOD_ARGS = {
    "plain": (),
    "linear": (),
    "recadam": ("anneal_k", "anneal_t0", "pretrain_cof"),
    "mars": ("radius",),
    "r3f": ("weight", "epsilon", "noise"),
}


def checked(method: Method, settings: dict[str, Any]) -> dict[str, Any]:
    """A method's settings, after checking that the method has them.

    Raises:
        ValueError: for an unknown method, or naming a setting that it does not have.
    """
    if method not in METHOD_ARGS:
        raise ValueError(f"method is {method!r}: expected {', '.join(METHOD_ARGS)}")
    if unknown := sorted(settings.keys() - set(METHOD_ARGS[method])):
        known = ", ".join(METHOD_ARGS[method]) or "none"
        raise ValueError(
            f"method_args has {unknown[0]!r}, and method {method} takes {known}: correct it"
        )
    return settings
