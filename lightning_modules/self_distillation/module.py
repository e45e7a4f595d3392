"""The stages: (further) pre-training, self-distillation, and fine-tuning with its rivals."""

from pathlib import Path
from types import MethodType
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from transformers import AutoModelForMaskedLM, ViTMAEConfig, ViTMAEForPreTraining

from lightning_modules.backbones import build_text, build_vision, shard
from lightning_modules.optim import (
    build_optimizer,
    parameter_groups,
    training_steps,
    with_schedule,
)
from lightning_modules.self_distillation.distillation import (
    Match,
    Reduction,
    distillation,
    prediction_matching,
    token_prediction_matching,
    weight_matching,
)
from lightning_modules.self_distillation.mae_checkpoint import (
    from_transformers,
    load_encoder,
    load_mae,
)
from lightning_modules.self_distillation.mars import mars_project, mars_start
from lightning_modules.self_distillation.masked_autoencoder import MaskedAutoencoder, mae_decoder
from lightning_modules.self_distillation.masked_image import Masking, mask_patches, pixel_loss
from lightning_modules.self_distillation.masked_text import (
    hidden_logits,
    mask_tokens,
    token_loss,
)
from lightning_modules.self_distillation.r3f import r3f
from lightning_modules.self_distillation.recadam import RecAdam
from lightning_modules.self_distillation.supcon import contrastive_loss
from lightning_modules.self_distillation.tracking import distance, fingerprint
from lightning_modules.weights import load_weights, refuse_another_model

IGNORED = -100  # label of a sample that only fills up the last evaluation round

Distil = Literal["hidden", "predictions", "l2", "mars"]
Method = Literal["plain", "recadam", "mars", "r3f", "supcon"]


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
        init_from: start from the weights of a checkpoint, state_dict or safetensors file.
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

    def build(self) -> nn.Module:
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
        model = self.build()
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


class Adaptation(Stage):
    """(Further) pre-training, and self-distillation (arXiv 2210.02871, Algorithm 1).

        loss = λ · L_MAE(θ, φ) + L_Distill(θ; θ_0)        one backward for both

    Without `distil` only the first term is there. With it the callback FrozenTeacher gives the
    teacher, whose weights are `teacher_from`'s; the student begins with `init_from`, which in the
    paper is the original pre-trained model in every round.

    Args:
        distil: what ties the student to the teacher: "hidden", hidden states of clean inputs (the
            paper); "predictions" of masked ones, or weights by the "l2" or "mars" norm (Table 3);
            null for (further) pre-training.
        teacher_from: the teacher's weights: the checkpoint of the stage before.
        match: which hidden states: "cls", "all" or "mean".
        reduction: of an example's squared errors or divergences, "sum" or "mean".
        mae_weight: λ; 0 leaves L_MAE out, and the decoder as it is.
        mask_ratio: γ, the share of patches or tokens that are hidden.
        train: "all"; or "decoder", a new one for an encoder that came without, which is frozen.
        **kwargs: see `Stage`.

    Raises:
        ValueError: for λ below 0, or if there is no loss.
    """

    def __init__(
        self,
        distil: Distil | None = None,
        teacher_from: str | None = None,
        match: Match = "cls",
        reduction: Reduction = "sum",
        mae_weight: float = 1.0,
        mask_ratio: float = 0.75,
        train: Literal["all", "decoder"] = "all",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        if mae_weight < 0 or (mae_weight == 0 and distil is None):
            raise ValueError(
                f"mae_weight is {mae_weight} and distil is {distil}: expected a weight above 0, or "
                "of 0 beside a teacher; set model.distil or model.mae_weight"
            )
        if not 0 < mask_ratio < 1:
            raise ValueError(
                f"mask_ratio is {mask_ratio}: expected a share between 0 and 1, such as .75 for "
                "patches or .15 for tokens"
            )
        self.teacher_from = teacher_from
        self.teacher: Any = None
        self.mean_error = MeanMetric()

    # What a subclass writes, besides `build` and `load`.

    def encoder_of(self, model: Any) -> nn.Module:
        """f, the part that fine-tuning goes on with."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> Any:
        """What `model.encode` takes: the clean examples."""
        raise NotImplementedError

    def hide(self, batch: Any, generator: torch.Generator | None = None) -> Any:
        """Draw what is hidden."""
        raise NotImplementedError

    def predict(self, model: nn.Module, batch: Any, hidden: Any) -> Tensor:
        """g(f(x̂)): what the model makes of the masked examples."""
        raise NotImplementedError

    def error(self, prediction: Tensor, batch: Any, hidden: Any) -> Tensor:
        """L_MAE (Eq. 2)."""
        raise NotImplementedError

    def match_predictions(self, student: Tensor, teacher: Tensor, hidden: Any) -> Tensor:
        """Table 3's prediction matching."""
        raise NotImplementedError

    def labels(self, batch: Any) -> Tensor:
        """(B,), of which only -100 matters here."""
        raise NotImplementedError

    def pick(self, batch: Any, rows: Tensor) -> Any:
        """Some rows of a batch."""
        raise NotImplementedError

    # What both have.

    def prepare(self, model: nn.Module) -> None:
        """Freeze the encoder, or a decoder that no loss reaches."""
        h, encoder = self.settings, self.encoder_of(model)
        inside = {id(parameter) for parameter in encoder.parameters()}
        if h.train == "decoder":
            encoder.requires_grad_(False)
        elif h.mae_weight == 0 and h.distil != "predictions":
            for parameter in model.parameters():
                if id(parameter) not in inside:
                    parameter.requires_grad_(False)

    def encoder_parameters(self) -> dict[str, nn.Parameter]:
        """Those of f."""
        return dict(self.encoder_of(self.model).named_parameters())

    def build_teacher(self) -> nn.Module:
        """θ_0, for the callback FrozenTeacher. Its decoder is used by "predictions" only.

        Raises:
            ValueError: if it is not said which weights it has, or they do not fit.
        """
        if self.teacher_from is None:
            raise ValueError(
                "the teacher has no weights: give model.teacher_from, the checkpoint of a further "
                "pre-training or of the round before"
            )
        teacher = self.build()
        self.load(teacher, self.teacher_from)
        return teacher

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """λ · L_MAE + L_Distill."""
        h = self.settings
        parts: dict[str, Tensor] = {}
        hidden = prediction = None
        if h.mae_weight or h.distil == "predictions":
            hidden = self.hide(batch)
            prediction = self.predict(self.model, batch, hidden)
        loss = torch.zeros((), device=self.device)
        if h.mae_weight:
            assert prediction is not None
            parts["mae"] = self.error(prediction, batch, hidden)
            loss = loss + h.mae_weight * parts["mae"]
        if h.distil is not None:
            parts["distillation"] = self._distil(batch, hidden, prediction)
            loss = loss + parts["distillation"]
        self.log_dict({f"train/{name}": value.detach() for name, value in parts.items()})
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def _distil(self, batch: Any, hidden: Any, prediction: Tensor | None) -> Tensor:
        h, teacher = self.settings, self.teacher
        if teacher is None:
            raise ValueError(
                f"distil is {h.distil!r} and there is no teacher: add "
                "callbacks.frozen_teacher.FrozenTeacher to trainer.callbacks"
            )
        if h.distil == "hidden":
            inputs = self.inputs(batch)
            with torch.no_grad():
                other = teacher.encode(inputs)
            mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
            return distillation(self.model.encode(inputs), other, h.match, h.reduction, mask)
        if h.distil == "predictions":
            assert prediction is not None
            with torch.no_grad():
                other = self.predict(teacher, batch, hidden)
            return self.match_predictions(prediction, other, hidden)
        if self.device_mesh is not None:
            raise ValueError(
                f"distil {h.distil!r} compares whole weights, and FSDP2 has sharded the student's: "
                "set trainer.strategy to ddp"
            )
        return weight_matching(self.encoder_of(self.model), self.encoder_of(teacher), h.distil)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to `val/mae`, with the same masks every time."""
        batch = self.pick(batch, self.labels(batch) != IGNORED)
        count = len(self.labels(batch))
        if count:
            generator = torch.Generator(self.device).manual_seed(batch_idx)
            hidden = self.hide(batch, generator)
            error = self.error(self.predict(self.model, batch, hidden), batch, hidden)
            self.mean_error.update(error, count)

    def on_validation_epoch_end(self) -> None:
        """Report `val/mae` over the whole set."""
        self.log("val/mae", self.mean_error.compute(), prog_bar=True)
        self.mean_error.reset()


class ImageAdaptation(Adaptation):
    """The masked auto-encoder of a ViT, further pre-trained or distilled.

    Args:
        architecture: a timm ViT, with a new decoder beside it; or transformers' ViTMAE, decoder
            included, as a hub name such as facebook/vit-mae-base or a folder.
        masking: "exact", the same number of patches of every image (the released code), or
            "bernoulli" (Eq. 2).
        norm_pix: predict pixels normalised within each patch; it belongs to the checkpoint.
        decoder_args: depth, width and heads of the decoder beside a timm ViT; MAE's by default.
        **kwargs: see `Adaptation` and `Stage`.
    """

    identity = ("architecture", "model_args", "decoder_args")

    def __init__(
        self,
        architecture: str = "facebook/vit-mae-base",
        masking: Masking = "exact",
        norm_pix: bool = True,
        decoder_args: dict[str, int] | None = None,
        **kwargs: Any,
    ):
        super().__init__(architecture=architecture, **kwargs)

    def build(self) -> nn.Module:
        """Encoder and decoder."""
        h = self.settings
        args = h.model_args or {}
        if "/" not in h.architecture and not Path(h.architecture).is_dir():
            encoder = build_vision(h.architecture, 0, args, self.pretrained)
            return MaskedAutoencoder(encoder, mae_decoder(encoder, **(h.decoder_args or {})))
        if self.pretrained:
            plain = ViTMAEForPreTraining.from_pretrained(h.architecture, **args)
        else:
            plain = ViTMAEForPreTraining(ViTMAEConfig.from_pretrained(h.architecture, **args))
        return from_transformers(plain)

    def load(self, model: Any, source: str) -> None:
        """Encoder, and decoder unless it is to be new."""
        load_mae(model, source, fresh_decoder=self.settings.train == "decoder")

    def encoder_of(self, model: Any) -> nn.Module:
        """The ViT."""
        return model.encoder

    def inputs(self, batch: Any) -> Tensor:
        """Images (B, 3, H, W)."""
        return batch[0]

    def labels(self, batch: Any) -> Tensor:
        """(B,)."""
        return batch[1]

    def pick(self, batch: Any, rows: Tensor) -> Any:
        """Some images with their labels."""
        return batch[0][rows], batch[1][rows]

    def hide(self, batch: Any, generator: torch.Generator | None = None) -> Tensor:
        """(B, N), True where a patch is hidden."""
        h, images = self.settings, batch[0]
        patches = (images.shape[-1] // self.model.patch_size) ** 2
        return mask_patches(len(images), patches, h.mask_ratio, h.masking, generator, images.device)

    def predict(self, model: nn.Module, batch: Any, hidden: Tensor) -> Tensor:
        """Pixels (B, N, patch_size² · 3)."""
        return model(batch[0], hidden)

    def error(self, prediction: Tensor, batch: Any, hidden: Tensor) -> Tensor:
        """Squared error of the hidden patches' pixels."""
        norm_pix = self.settings.norm_pix
        return pixel_loss(prediction, batch[0], hidden, self.model.patch_size, norm_pix)

    def match_predictions(self, student: Tensor, teacher: Tensor, hidden: Tensor) -> Tensor:
        """Squared difference of the pixels."""
        return prediction_matching(student, teacher, self.settings.reduction)


class TextAdaptation(Adaptation):
    """A masked language model, further pre-trained or distilled.

    The tokenizer, whose special tokens are never hidden, is the DataModule's.

    Args:
        architecture: a hub name, a folder with config.json, or a model type such as "bert".
        mask_ratio: γ of the tokens.
        as_mask: share of the hidden tokens that become the mask token.
        as_random: share that becomes another token; the rest stays as it is.
        **kwargs: see `Adaptation` and `Stage`.
    """

    def __init__(
        self,
        architecture: str = "FacebookAI/roberta-base",
        mask_ratio: float = 0.15,
        as_mask: float = 0.8,
        as_random: float = 0.1,
        **kwargs: Any,
    ):
        super().__init__(architecture=architecture, mask_ratio=mask_ratio, **kwargs)

    def build(self) -> nn.Module:
        """A transformers model for masked language modelling, with `encode`.

        Raises:
            ValueError: if it comes without a head, and is not to have a new one.
        """
        h = self.settings
        args = h.model_args or {}
        model: Any
        if self.pretrained:
            model, found = AutoModelForMaskedLM.from_pretrained(
                h.architecture, dtype=torch.float32, output_loading_info=True, **args
            )
            if found["missing_keys"] and h.train != "decoder":
                raise ValueError(
                    f"{h.architecture} has no {min(found['missing_keys'])}, so it cannot predict "
                    "tokens: fit a new head to it first, a stage with model.train decoder "
                    "(--decoder_steps 1000 of recipes.self_distillation.text), or name a masked "
                    "language model with its head"
                )
            model.train()  # it comes in eval mode, which Lightning would keep
        else:
            model = build_text(h.architecture, "masked", args)
        model.encode = MethodType(final_hidden_states, model)
        return model

    def load(self, model: Any, source: str) -> None:
        """Encoder, and head unless it is to be new."""
        new = self.settings.train == "decoder"
        load_completely(model, source, f"{model.base_model_prefix}." if new else "")

    def encoder_of(self, model: Any) -> nn.Module:
        """The model below its head. The head shares the word embeddings, which are in here."""
        return model.base_model

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """All but the labels."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def labels(self, batch: dict[str, Tensor]) -> Tensor:
        """(B,)."""
        return batch["labels"]

    def pick(self, batch: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        """Some rows."""
        return {name: value[rows] for name, value in batch.items()}

    def hide(
        self, batch: dict[str, Tensor], generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Masked ids (B, L), and the true ones where hidden, -100 elsewhere."""
        h, tokenizer = self.settings, self.trainer.datamodule.tokenizer  # type: ignore
        return mask_tokens(
            batch["input_ids"],
            batch.get("attention_mask"),
            tokenizer.mask_token_id,
            tokenizer.all_special_ids,
            len(tokenizer),
            h.mask_ratio,
            h.as_mask,
            h.as_random,
            generator,
        )

    def predict(self, model: nn.Module, batch: Any, hidden: tuple[Tensor, Tensor]) -> Tensor:
        """Logits (n, V) of the n hidden tokens."""
        others = {name: one for name, one in self.inputs(batch).items() if name != "input_ids"}
        return hidden_logits(model, *hidden, **others)

    def error(self, prediction: Tensor, batch: Any, hidden: tuple[Tensor, Tensor]) -> Tensor:
        """Cross-entropy of the hidden tokens."""
        return token_loss(prediction, hidden[1])

    def match_predictions(
        self, student: Tensor, teacher: Tensor, hidden: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Divergence at the hidden tokens."""
        mask = hidden[1] != IGNORED
        return token_prediction_matching(student, teacher, mask, self.settings.reduction)


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

    def build(self) -> nn.Module:
        """A timm model."""
        h = self.settings
        return build_vision(h.architecture, h.num_classes, h.model_args or {}, self.pretrained)

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

    def build(self) -> nn.Module:
        """A transformers model for sequence classification."""
        h = self.settings
        arguments = {**(h.model_args or {}), "num_labels": h.num_classes}
        return build_text(h.architecture, "classification", arguments, self.pretrained)

    def load(self, model: Any, source: str) -> None:
        """The encoder of a masked language model."""
        load_completely(model, source, f"{model.base_model_prefix}.")

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


def final_hidden_states(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """f(x) (B, L, D) of a transformers masked language model, without its head."""
    return model.base_model(**inputs).last_hidden_state


def head_parameters(model: nn.Module, name: str) -> list[nn.Parameter]:
    """The parameters below a dotted name; none if nothing is there."""
    return [p for n, p in model.named_parameters() if n.startswith(f"{name}.")]


def load_completely(model: nn.Module, source: str, prefix: str) -> None:
    """`load_weights`, of which nothing below the prefix may be missing but a pooler.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if weights are missing or have other shapes.
    """
    report = load_weights(model, source)
    lacking = [
        name
        for name in report.missing + report.reshaped
        if name.startswith(prefix) and ".pooler." not in name
    ]
    if lacking:
        raise ValueError(
            f"{source} does not fit {type(model).__name__}: {', '.join(lacking[:4])}; give a "
            "checkpoint of masked language modelling with this architecture, or fit a new head to "
            "it first with model.train decoder"
        )


def laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor on a parameter's device and, under FSDP2, sharded as it is."""
    if isinstance(like, DTensor) and not isinstance(tensor, DTensor):
        return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
    return tensor.to(like.device)
