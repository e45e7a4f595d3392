"""The LightningModule of (further) pre-training and self-distillation, on images or text."""

from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torchmetrics import MeanMetric

from lightning_modules.backbones import match_tokenizer, shard
from lightning_modules.labels import IGNORED
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
    weight_matching,
)
from lightning_modules.self_distillation.objectives import MaskedImages, MaskedText
from lightning_modules.self_distillation.supcon import projection_head, supervised_contrastive
from lightning_modules.self_distillation.tracking_module import TrackDistance
from lightning_modules.weights import refuse_another_model

Modality = Literal["images", "text"]
Distil = Literal["hidden", "predictions", "l2", "mars"]


class Adaptation(L.LightningModule):
    """(Further) pre-training, and self-distillation (arXiv 2210.02871, Algorithm 1).

        loss = λ · L_MAE(θ, φ) + L_Distill(θ; θ_0)        one backward for both

    Without `distil` the loss has only the first term. With it, `teacher_from` gives the teacher's
    weights and `init_from` the student's, which in the paper are those of the original pre-trained
    model in every round. The next stage loads this run's checkpoint by `init_from`.

    Args:
        architecture: images: a timm ViT by its name, local-dir:FOLDER or hf-hub:NAME, which gets a
            new decoder; or transformers' ViTMAE with its decoder, as a hub name such as
            facebook/vit-mae-base or a folder. Text: a hub name, a folder with config.json, or a
            model type such as "bert"; the tokenizer, whose special tokens are never hidden, is the
            DataModule's.
        modality: "images" or "text".
        model_args: further arguments of the model or values of its configuration.
        decoder_args: depth, width and heads of a timm ViT's decoder; MAE's by default.
        mae_args: of L_MAE, see `MaskedImages` (ratio, masking, norm_pix) and `MaskedText` (ratio,
            as_mask, as_random).
        mae_weight: λ; 0 leaves L_MAE out, and the decoder is then frozen.
        distil: what student and teacher are compared by: "hidden", hidden states of unmasked inputs
            (the paper); "predictions" for masked inputs, or weights by the "l2" or "mars" norm
            (Table 3); null for (further) pre-training.
        match: the hidden states to compare: "cls", "all" or "mean"; null for "cls" on images (the
            released code) and "all" on text (App. C).
        reduction: of an example's squared differences or divergences, "sum" or "mean".
        supcon_temperature: τ of the supervised contrastive loss (Khosla et al., 2020), which
            replaces L_MAE (Table 5); null for none.
        train: "all"; or "decoder", to train a new decoder on the frozen encoder.
        pretrained: start from the weights of the architecture's name. Not saved in checkpoints.
        init_from: start from the weights of a checkpoint, state_dict or safetensors file; replaces
            `pretrained`. Not saved in checkpoints.
        teacher_from: the teacher's weights: the previous stage's checkpoint. Not saved in
            checkpoints.
        lr: peak learning rate; it decreases linearly to 0.
        betas: of Adam.
        weight_decay: decoupled, per unit of learning rate; biases and norms do not decay.
        warmup: optimizer steps of warm-up, or a share of all steps if below 1.

    Raises:
        ValueError: for settings out of range, or if there is no loss.
    """

    def __init__(
        self,
        architecture: str = "facebook/vit-mae-base",
        modality: Modality = "images",
        model_args: dict[str, Any] | None = None,
        decoder_args: dict[str, int] | None = None,
        mae_args: dict[str, Any] | None = None,
        mae_weight: float = 1.0,
        distil: Distil | None = None,
        match: Match | None = None,
        reduction: Reduction = "sum",
        supcon_temperature: float | None = None,
        train: Literal["all", "decoder"] = "all",
        pretrained: bool = False,
        init_from: str | None = None,
        teacher_from: str | None = None,
        lr: float = 1.5e-4,
        betas: list[float] = [0.9, 0.999],  # noqa: B006  (jsonargparse)
        weight_decay: float = 0.01,
        warmup: float = 0.0,
    ):
        super().__init__()
        # initial weights only: a checkpoint must load without downloading or needing these files
        self.save_hyperparameters(ignore=["init_from", "pretrained", "teacher_from"])
        self.init_from, self.pretrained, self.teacher_from = init_from, pretrained, teacher_from
        if supcon_temperature is not None and (mae_weight or distil):
            raise ValueError(
                f"supcon_temperature is {supcon_temperature} beside mae_weight {mae_weight} and "
                f"distil {distil}: the contrastive loss is used alone; set model.mae_weight 0 and "
                "model.distil null"
            )
        if mae_weight < 0 or (mae_weight == 0 and distil is None and supcon_temperature is None):
            raise ValueError(
                f"mae_weight is {mae_weight} and distil is {distil}: expected a weight above 0, or "
                "of 0 beside a teacher; set model.distil or model.mae_weight"
            )
        self.objective = make_objective(modality, mae_args or {})
        self.match: Match = match or self.objective.match
        self.model: Any = None
        self.teacher: Any = None
        self.tracker = TrackDistance()
        self.mean_error = MeanMetric()

    @property
    def start(self) -> str:
        """The fingerprint of this run's initial weights, see `weights.fingerprint`."""
        return self.tracker.start

    def configure_callbacks(self) -> list[L.Callback]:
        """The callback that logs the distance, and with `distil` FrozenTeacher."""
        from callbacks.frozen_teacher import FrozenTeacher

        return [self.tracker, *([FrozenTeacher()] if self.hparams["distil"] else [])]

    def configure_model(self) -> None:
        """Build the model once, and shard it where the strategy asks."""
        if self.model is not None:
            return
        h: Any = self.hparams
        pretrained = self.pretrained and self.init_from is None
        model = self._build(pretrained, self.init_from)
        if h.modality == "text":
            match_tokenizer(model, self._trainer, h.architecture if pretrained else None)
        training = self._trainer is not None and self.trainer.state.fn == "fit"
        self.tracker.begin(model, dict(model.base_model.named_parameters()), training)
        if h.supcon_temperature is not None:
            model.projection = projection_head(model.base_model)
        freeze_what_no_loss_reaches(model, h)
        self.model = model
        if self.device_mesh is not None:
            shard(model, self.device_mesh)
            register_fsdp_forward_method(model, "encode")

    def build_teacher(self) -> nn.Module:
        """The teacher θ_0 for the callback FrozenTeacher; only "predictions" uses its decoder.

        Raises:
            ValueError: if `teacher_from` is not given, or its weights do not fit.
        """
        if self.teacher_from is None:
            raise ValueError(
                "the teacher has no weights: give model.teacher_from, the checkpoint of a further "
                "pre-training or of the round before"
            )
        return self._build(pretrained=False, source=self.teacher_from)

    def _build(self, pretrained: bool, source: str | None) -> Any:
        h: Any = self.hparams
        new_decoder = h.train == "decoder"
        model_settings = (h.architecture, h.model_args or {}, h.decoder_args or {})
        model = self.objective.build(*model_settings, pretrained, new_decoder)
        if source is not None:
            self.objective.load(model, source, new_decoder)
        return model

    def encoder_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of the encoder f, which fine-tuning continues with, by name."""
        return dict(self.model.base_model.named_parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """λ · L_MAE + L_Distill, or the supervised contrastive loss."""
        h: Any = self.hparams
        inputs, labels = split(batch)
        parts: dict[str, Tensor] = {}
        loss = torch.zeros((), device=self.device)
        hidden = prediction = None
        if h.mae_weight or h.distil == "predictions":
            hidden = self._hide(inputs)
            everywhere = h.distil == "predictions"
            prediction = self.objective.predict(self.model, inputs, hidden, everywhere)
        if h.mae_weight:
            parts["mae"] = self.objective.loss(self.model, prediction, inputs, hidden)
            loss = loss + h.mae_weight * parts["mae"]
        if h.distil is not None:
            parts["distillation"] = self._distil(inputs, hidden, prediction)
            loss = loss + parts["distillation"]
        if h.supcon_temperature is not None:
            parts["contrast"] = loss = self._contrast(inputs, labels)
        self.log_dict({f"train/{name}": value.detach() for name, value in parts.items()})
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def _hide(self, inputs: Any, generator: torch.Generator | None = None) -> Any:
        """The masks of a batch, see `hide` of MaskedImages and MaskedText."""
        tokenizer = getattr(self.trainer.datamodule, "tokenizer", None)  # type: ignore
        return self.objective.hide(self.model, inputs, generator, tokenizer)

    def _distil(self, inputs: Any, hidden: Any, prediction: Tensor | None) -> Tensor:
        """L_Distill; `hidden` and `prediction` are those of the step's L_MAE."""
        h: Any = self.hparams
        if h.distil == "hidden":
            with torch.no_grad():
                target = self.teacher.encode(inputs)
            mask = inputs.get("attention_mask") if isinstance(inputs, dict) else None
            student = self.model.encode(inputs)
            return distillation(student, target, self.match, h.reduction, mask)
        if h.distil == "predictions":
            assert prediction is not None
            with torch.no_grad():
                target = self.objective.predict(self.teacher, inputs, hidden, everywhere=True)
            return self.objective.match_predictions(prediction, target, inputs, h.reduction)
        if self.device_mesh is not None:
            raise ValueError(
                f"distil {h.distil!r} compares whole weights, and FSDP2 has sharded the student's: "
                "set trainer.strategy to ddp"
            )
        return weight_matching(self.model.base_model, self.teacher.base_model, h.distil)

    def _contrast(self, inputs: Any, labels: Tensor) -> Tensor:
        """SupCon on two views: images and their mirror images, or texts with different dropout.

        Over the examples of all devices, with gradients: a loss of each device's alone would
        contrast fewer of them.
        """
        mirrored = inputs.flip(-1) if isinstance(inputs, Tensor) else inputs
        tokens = [self.model.encode(view)[:, 0] for view in (inputs, mirrored)]
        features = self.model.projection(torch.cat(tokens))
        labels = labels.repeat(2)
        if self.trainer.world_size > 1:
            gathered: Any = self.all_gather((features, labels), sync_grads=True)
            features, labels = (part.flatten(0, 1) for part in gathered)
        return supervised_contrastive(features, labels, self.hparams["supcon_temperature"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Add a batch to `val/mae`, with the same masks in every epoch.

        A batch's masks are drawn by its number on its device, so that `val/mae` depends a little on
        the evaluation batch size and on the number of devices.
        """
        inputs, labels = split(batch)
        real = labels != IGNORED
        count = int(real.sum())
        # a batch of padding alone is encoded too: sharded ranks pass through the model together
        inputs = rows_of(inputs, real) if count else inputs
        hidden = self._hide(inputs, torch.Generator(self.device).manual_seed(batch_idx))
        prediction = self.objective.predict(self.model, inputs, hidden, everywhere=False)
        error = self.objective.loss(self.model, prediction, inputs, hidden)
        if count:
            self.mean_error.update(error, count)

    def on_validation_epoch_end(self) -> None:
        """Log `val/mae` over the full set."""
        self.log("val/mae", self.mean_error.compute(), prog_bar=True)
        self.mean_error.reset()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW over the trainable parameters, with a linearly decreasing rate (Table 9)."""
        h: Any = self.hparams
        groups = parameter_groups(self.model, h.weight_decay)
        optimizer = build_optimizer("adamw", groups, h.lr, tuple(h.betas))
        return with_schedule(optimizer, "linear", h.warmup, training_steps(self.trainer))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the fingerprint of the initial weights."""
        checkpoint["start"] = self.start

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another model before its tensors are loaded.

        Raises:
            ValueError: naming the hyperparameter that differs.
        """
        identity = ("modality", "architecture", "model_args", "decoder_args")
        refuse_another_model(checkpoint, self.hparams, identity)
        self.tracker.resume(checkpoint["start"])


def make_objective(modality: Modality, mae_args: dict[str, Any]) -> Any:
    """A MaskedImages or a MaskedText.

    Raises:
        ValueError: for another modality, an argument that L_MAE does not have, or a ratio that
            hides nothing or everything.
    """
    kinds: dict[str, Any] = {"images": MaskedImages, "text": MaskedText}
    if modality not in kinds:
        raise ValueError(f"modality is {modality!r}: expected 'images' or 'text'")
    try:
        objective = kinds[modality](**mae_args)
    except TypeError as error:
        raise ValueError(f"mae_args is {mae_args} for {modality}: {error}; correct it") from error
    if not 0 < objective.ratio < 1:
        raise ValueError(
            f"mae_args has the ratio {objective.ratio}: expected a share between 0 and 1, such as "
            ".75 for patches or .15 for tokens"
        )
    return objective


def freeze_what_no_loss_reaches(model: Any, h: Any) -> None:
    """Freeze the encoder where only the decoder trains, and a decoder that no loss uses.

    DDP fails where a trainable parameter gets no gradient.

    Args:
        model: with `base_model`, the encoder.
        h: the hyperparameters of `Adaptation`.
    """
    encoder = {id(parameter) for parameter in model.base_model.parameters()}
    no_prediction = h.mae_weight == 0 and h.distil != "predictions"
    for name, parameter in model.named_parameters():
        if id(parameter) in encoder:
            frozen = h.train == "decoder"
        else:
            frozen = no_prediction and not name.startswith("projection.")
        if frozen:
            parameter.requires_grad_(False)


def split(batch: Any) -> tuple[Any, Tensor]:
    """Inputs and labels (B,) of a batch: (images, labels), or a dict of text with "labels"."""
    if isinstance(batch, dict):
        return {name: one for name, one in batch.items() if name != "labels"}, batch["labels"]
    return batch[0], batch[1]


def rows_of(inputs: Any, rows: Tensor) -> Any:
    """The examples of a batch's inputs that `rows` (B,) selects."""
    if isinstance(inputs, dict):
        return {name: one[rows] for name, one in inputs.items()}
    return inputs[rows]
