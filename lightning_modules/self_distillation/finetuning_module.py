"""Fine-tuning after adaptation, plain or by a rival, of images and of text."""

from typing import Any, Literal

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_modules.backbones import build_text, build_vision
from lightning_modules.optim import training_steps
from lightning_modules.self_distillation.mae_checkpoint import load_encoder
from lightning_modules.self_distillation.mars import mars_project, mars_start
from lightning_modules.self_distillation.module import IGNORED, NO_MASKED_MODEL, Stage, laid_out
from lightning_modules.self_distillation.r3f import r3f
from lightning_modules.self_distillation.recadam import RecAdam, require_convergence
from lightning_modules.self_distillation.supcon import contrastive_loss
from lightning_modules.weights import load_completely

Method = Literal["plain", "recadam", "mars", "r3f", "supcon"]


class Finetuning(Stage):
    """Classification with a new head on the encoder of `init_from`, plain or by a rival.

    Args:
        num_classes: outputs of the head.
        method: "plain" cross-entropy with AdamW; "recadam", "mars", "r3f", or "supcon", the
            supervised contrastive loss.
        anneal_k: RecAdam's k, per step.
        anneal_t0: RecAdam's t0, in steps.
        pretrain_cof: RecAdam's γ.
        radius: MARS's γ.
        r3f_weight: λ of R3F.
        r3f_epsilon: its noise.
        r3f_noise: "uniform" or "normal".
        supcon_alpha: share of the contrastive loss.
        supcon_temperature: τ.
        **kwargs: see `Stage`. Dropout is among the model_args.
    """

    identity = ("architecture", "model_args", "num_classes", "method")

    def __init__(
        self,
        num_classes: int,
        method: Method = "plain",
        anneal_k: float = 0.1,
        anneal_t0: float = 250.0,
        pretrain_cof: float = 5000.0,
        radius: float = 4.0,
        r3f_weight: float = 1.0,
        r3f_epsilon: float = 1e-5,
        r3f_noise: Literal["uniform", "normal"] = "uniform",
        supcon_alpha: float = 0.9,
        supcon_temperature: float = 0.3,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.centres: dict[str, Tensor] = {}  # MARS's start
        self.mean_loss = MeanMetric()
        self.scores = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(num_classes, average="micro"),
                "f1": MulticlassF1Score(num_classes, average="macro"),
            }
        )

    # What a subclass writes, besides `build` and `load`.

    @property
    def heads(self) -> list[str]:
        """The modules that are new."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> Any:
        """What the model takes, and `r3f`."""
        raise NotImplementedError

    def labels(self, batch: Any) -> Tensor:
        """(B,)."""
        raise NotImplementedError

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and the [CLS] token's final hidden state (B, D)."""
        raise NotImplementedError

    # What both have.

    def configure_model(self) -> None:
        """As every stage, and with MARS, remember where the weights began."""
        new = self.model is None
        super().configure_model()
        if new and self.settings.method == "mars":
            self.centres = mars_start(self.model, self.heads)

    def encoder_parameters(self) -> dict[str, nn.Parameter]:
        """All but the heads'."""
        new = tuple(f"{head}." for head in self.heads)
        return {n: p for n, p in self.model.named_parameters() if not n.startswith(new)}

    def forward(self, inputs: Any) -> Tensor:
        """Logits (B, C)."""
        output = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        return getattr(output, "logits", output)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        h, labels, inputs = self.settings, self.labels(batch), self.inputs(batch)
        if h.method == "supcon":
            logits, features = self.features(batch)
            loss = contrastive_loss(
                logits.float(), features, labels, h.supcon_alpha, h.supcon_temperature
            )
        else:
            logits = self(inputs)
            loss = F.cross_entropy(logits.float(), labels)
            if h.method == "r3f":
                noisy = r3f(self.model, inputs, logits, h.r3f_epsilon, h.r3f_noise)
                loss = loss + h.r3f_weight * noisy
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """As every stage; RecAdam that would diverge is refused before the first step."""
        found: Any = super().configure_optimizers()
        if self.settings.method == "recadam":
            schedule = found["lr_scheduler"]["scheduler"]
            require_convergence(found["optimizer"], schedule, training_steps(self.trainer))
        return found

    def build_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """AdamW, or RecAdam with plain Adam for the heads."""
        h = self.settings
        if h.method != "recadam":
            return super().build_optimizer(groups)
        new = {
            id(parameter) for head in self.heads for parameter in head_parameters(self.model, head)
        }
        split = []
        for group in groups:
            for anchored in (True, False):
                params = [p for p in group["params"] if (id(p) not in new) == anchored]
                if params:
                    split.append({**group, "params": params, "anchored": anchored})
        return RecAdam(
            split,
            h.lr,
            tuple(h.betas),
            anneal_k=h.anneal_k,
            anneal_t0=h.anneal_t0,
            pretrain_cof=h.pretrain_cof,
        )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """A step, and with MARS the projection, before anything can save the weights."""
        super().optimizer_step(*args, **kwargs)
        if self.settings.method == "mars":
            mars_project(self.model, self.centres, self.settings.radius)

    def on_train_start(self) -> None:
        """As every stage, and with MARS's start: where the weights are, sharded as they are."""
        super().on_train_start()
        parameters = dict(self.model.named_parameters())
        self.centres = {name: laid_out(c, parameters[name]) for name, c in self.centres.items()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As every stage, and MARS's start: a resumed run's weights are not where it began."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["mars_start"] = {
            name: (centre.full_tensor() if isinstance(centre, DTensor) else centre).cpu()
            for name, centre in self.centres.items()
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """As every stage, and MARS's start."""
        super().on_load_checkpoint(checkpoint)
        self.centres = checkpoint["mars_start"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the scores."""
        self._score(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to the scores."""
        self._score(batch)

    def _score(self, batch: Any) -> None:
        labels, logits = self.labels(batch), self(self.inputs(batch)).float()
        valid = labels != IGNORED
        if valid.any():
            labels, logits = labels[valid], logits[valid]
            self.mean_loss.update(F.cross_entropy(logits, labels), len(labels))
            self.scores.update(logits, labels)

    def on_validation_epoch_end(self) -> None:
        """Report `val/loss`, `val/accuracy` (which is micro F1) and `val/f1` (macro)."""
        self._report("val")

    def on_test_epoch_end(self) -> None:
        """Report `test/loss`, `test/accuracy` and `test/f1`."""
        self._report("test")

    def _report(self, stage: str) -> None:
        self.log(f"{stage}/loss", self.mean_loss.compute())
        for name, value in self.scores.compute().items():
            self.log(f"{stage}/{name}", value, prog_bar=True)
        self.mean_loss.reset()
        self.scores.reset()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Logits (B, C)."""
        return self(self.inputs(batch))


class ImageFinetuning(Finetuning):
    """An image classifier: a timm ViT.

    Args:
        num_classes: outputs of the head, on the [CLS] token after the final norm.
        architecture: timm name.
        **kwargs: see `Finetuning` and `Stage`.
    """

    def __init__(
        self, num_classes: int, architecture: str = "vit_base_patch16_224.mae", **kwargs: Any
    ):
        super().__init__(num_classes=num_classes, architecture=architecture, **kwargs)

    def build(self, pretrained: bool) -> nn.Module:
        """A timm model."""
        h = self.settings
        return build_vision(h.architecture, h.num_classes, h.model_args or {}, pretrained)

    def load(self, model: nn.Module, source: str) -> None:
        """The encoder of a masked auto-encoder; the decoder is dropped."""
        load_encoder(model, source)

    @property
    def heads(self) -> list[str]:
        """The classifier."""
        return ["head"]

    def inputs(self, batch: Any) -> Tensor:
        """Images (B, 3, H, W)."""
        return batch[0]

    def labels(self, batch: Any) -> Tensor:
        """(B,)."""
        return batch[1]

    def features(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Logits, and what the final norm gives for [CLS]."""
        found: list[Tensor] = []
        # a hook, because a sharded model has to be called as a whole
        handle = self.model.norm.register_forward_hook(lambda m, i, out: found.append(out[:, 0]))
        try:
            logits = self(batch[0])
        finally:
            handle.remove()
        return logits, found[0]


class TextFinetuning(Finetuning):
    """A sentence classifier of transformers.

    BERT's pooler counts as part of the head: masked language models have none.

    Args:
        num_classes: outputs of the head.
        architecture: a hub name, a folder with config.json, or a model type such as "bert".
        **kwargs: see `Finetuning` and `Stage`.
    """

    def __init__(
        self, num_classes: int, architecture: str = "FacebookAI/roberta-base", **kwargs: Any
    ):
        super().__init__(num_classes=num_classes, architecture=architecture, **kwargs)

    def build(self, pretrained: bool) -> nn.Module:
        """A transformers model for sequence classification."""
        h = self.settings
        arguments = {**(h.model_args or {}), "num_labels": h.num_classes}
        return build_text(h.architecture, "classification", arguments, pretrained)

    def load(self, model: Any, source: str) -> None:
        """The encoder of a masked language model."""
        load_completely(model, source, NO_MASKED_MODEL, f"{model.base_model_prefix}.")

    @property
    def heads(self) -> list[str]:
        """The classifier, by whatever name it has, and the pooler."""
        base = self.model.base_model_prefix
        names = [name for name, _ in self.model.named_children() if name != base]
        names.append(f"{base}.pooler")
        return [name for name in names if head_parameters(self.model, name)]

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """All but the labels."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def labels(self, batch: dict[str, Tensor]) -> Tensor:
        """(B,)."""
        return batch["labels"]

    def features(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits, and the last layer's first token."""
        output = self.model(**self.inputs(batch), output_hidden_states=True)
        return output.logits, output.hidden_states[-1][:, 0]


def head_parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters below a dotted name; none if nothing is there."""
    return [p for n, p in model.named_parameters() if n.startswith(f"{name}.")]
