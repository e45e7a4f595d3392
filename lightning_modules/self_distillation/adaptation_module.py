"""(Further) pre-training and self-distillation, of images and of text."""

from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from transformers import AutoModelForMaskedLM, ViTMAEConfig, ViTMAEForPreTraining

from lightning_modules.backbones import build_text, build_vision
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
    load_mae,
    without_decoder,
)
from lightning_modules.self_distillation.masked_autoencoder import MaskedAutoencoder, mae_decoder
from lightning_modules.self_distillation.masked_image import Masking, mask_patches, pixel_loss
from lightning_modules.self_distillation.masked_text import (
    hidden_logits,
    mask_tokens,
    token_loss,
)
from lightning_modules.self_distillation.module import IGNORED, NO_MASKED_MODEL, Stage
from lightning_modules.weights import load_completely

Distil = Literal["hidden", "predictions", "l2", "mars"]


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
        teacher = self.build(pretrained=False)
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

    def build(self, pretrained: bool) -> nn.Module:
        """Encoder and decoder.

        Raises:
            ValueError: if the weights come without a decoder, and it is not to be new.
        """
        h = self.settings
        args, new = h.model_args or {}, h.train == "decoder"
        if "/" not in h.architecture and not Path(h.architecture).is_dir():
            if pretrained and not new:
                raise without_decoder(h.architecture)
            encoder = build_vision(h.architecture, 0, args, pretrained)
            return MaskedAutoencoder(encoder, mae_decoder(encoder, **(h.decoder_args or {})))
        config = ViTMAEConfig.from_pretrained(h.architecture, **args)
        model = from_transformers(ViTMAEForPreTraining(config))
        if pretrained:  # with its own config, so that positions of another size can be interpolated
            loaded: Any = ViTMAEForPreTraining.from_pretrained(
                h.architecture, output_loading_info=True
            )
            there = loaded[0].state_dict().items()
            state = {name: value for name, value in there if name not in loaded[1]["missing_keys"]}
            load_mae(model, h.architecture, fresh_decoder=new, state=state)
        return model

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

    def build(self, pretrained: bool) -> nn.Module:
        """A transformers model for masked language modelling, with `encode`.

        Raises:
            ValueError: if it comes without a head, and is not to have a new one.
        """
        h = self.settings
        args = h.model_args or {}
        model: Any
        if pretrained:
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
        required = f"{model.base_model_prefix}." if new else ""
        load_completely(model, source, NO_MASKED_MODEL, required)

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


def final_hidden_states(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """f(x) (B, L, D) of a transformers masked language model, without its head."""
    return model.base_model(**inputs).last_hidden_state
