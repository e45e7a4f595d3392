"""The parts of `Adaptation` that differ between images and text: model, masking, loss.

Both classes have the same methods. The formulas are in masked_image.py and masked_text.py.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, ViTMAEConfig, ViTMAEForPreTraining

from lightning_modules.backbones import build_text, build_vision, name_in_errors, text_inputs
from lightning_modules.by_length import run_by_length
from lightning_modules.labels import IGNORED
from lightning_modules.self_distillation.distillation import (
    Reduction,
    prediction_matching,
    token_prediction_matching,
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
from lightning_modules.weights import load_completely

NO_MASKED_MODEL = (
    "give a checkpoint of masked language modelling with this architecture, or fit a new head to "
    "it first with model.train decoder"
)


class MaskedImages:
    """Masked images: the pixels of hidden patches are predicted.

    Args:
        ratio: γ, the share of patches to hide.
        masking: "exact", the same number of patches of every image (the released code), or
            "bernoulli" (Eq. 2).
        norm_pix: predict pixels normalised within each patch; has to fit the checkpoint's decoder.
    """

    match = "cls"  # the hidden states that distillation compares in the released code

    def __init__(self, ratio: float = 0.75, masking: Masking = "exact", norm_pix: bool = True):
        self.ratio, self.masking, self.norm_pix = ratio, masking, norm_pix

    def build(
        self,
        architecture: str,
        model_args: dict[str, Any],
        decoder_args: dict[str, Any],
        pretrained: bool,
        new_decoder: bool,
    ) -> nn.Module:
        """A MaskedAutoencoder.

        Args:
            architecture: see `Adaptation`.
            model_args: see `Adaptation`.
            decoder_args: see `Adaptation`.
            pretrained: load the weights of the architecture's name.
            new_decoder: initialise the decoder at random, whatever the weights hold.

        Raises:
            ValueError: if the weights have no decoder and `new_decoder` is false.
        """
        of_timm = architecture.startswith(("local-dir:", "hf-hub:"))
        if of_timm or ("/" not in architecture and not Path(architecture).is_dir()):
            if pretrained and not new_decoder:
                raise without_decoder(architecture)
            encoder = build_vision(architecture, 0, model_args, pretrained)
            return MaskedAutoencoder(encoder, mae_decoder(encoder, **decoder_args))
        with name_in_errors(architecture):
            described, _ = ViTMAEConfig.get_config_dict(architecture)
        if described.get("model_type") != ViTMAEConfig.model_type:
            raise ValueError(
                f"{architecture} is no ViTMAE of transformers: give local-dir:{architecture} if it "
                "is a folder of a timm model"
            )
        config = ViTMAEConfig.from_dict(described, **model_args)
        model = from_transformers(ViTMAEForPreTraining(config))
        if pretrained:  # without model_args, so that positions can be interpolated to another size
            with name_in_errors(architecture):
                loaded: Any = ViTMAEForPreTraining.from_pretrained(
                    architecture, output_loading_info=True
                )
            published, info = loaded
            tensors = published.state_dict().items()
            state = {name: value for name, value in tensors if name not in info["missing_keys"]}
            load_mae(model, architecture, fresh_decoder=new_decoder, state=state)
        return model

    def load(self, model: Any, source: str, new_decoder: bool) -> None:
        """Load the encoder's weights, and the decoder's unless `new_decoder` is set."""
        load_mae(model, source, fresh_decoder=new_decoder)

    def hide(
        self, model: Any, images: Tensor, generator: torch.Generator | None, tokenizer: Any
    ) -> Tensor:
        """The mask (B, N) of images (B, 3, H, W), True for hidden patches."""
        patches = (images.shape[-1] // model.patch_size) ** 2
        return mask_patches(
            len(images), patches, self.ratio, self.masking, generator, images.device
        )

    def predict(self, model: nn.Module, images: Tensor, hidden: Tensor, everywhere: bool) -> Tensor:
        """Pixels (B, N, patch_size² · 3) of every patch."""
        return model(images, hidden)

    def loss(self, model: Any, prediction: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
        """L_MAE: the squared error of the hidden patches' pixels."""
        return pixel_loss(prediction, images, hidden, model.patch_size, self.norm_pix)

    def match_predictions(
        self, student: Tensor, teacher: Tensor, images: Tensor, reduction: Reduction
    ) -> Tensor:
        """Table 3's prediction matching: the squared difference of the pixels."""
        return prediction_matching(student, teacher, reduction)


class MaskedText:
    """Masked text: hidden tokens are predicted.

    Args:
        ratio: γ, the share of tokens to hide.
        as_mask: share of the hidden tokens that become the mask token.
        as_random: share of the hidden tokens that become a random token; the rest is not replaced.
    """

    match = "all"  # f(x̂) is the hidden states of all tokens (App. C)

    def __init__(self, ratio: float = 0.15, as_mask: float = 0.8, as_random: float = 0.1):
        self.ratio, self.as_mask, self.as_random = ratio, as_mask, as_random

    def build(
        self,
        architecture: str,
        model_args: dict[str, Any],
        decoder_args: dict[str, Any],
        pretrained: bool,
        new_decoder: bool,
    ) -> nn.Module:
        """A transformers model for masked language modelling, with a method `encode`.

        Args:
            architecture: see `Adaptation`.
            model_args: see `Adaptation`.
            decoder_args: without effect; for the same signature as `MaskedImages.build`.
            pretrained: load the weights of that name or folder.
            new_decoder: accept weights without a head, which is then initialised at random.

        Raises:
            ValueError: if the weights have no head and `new_decoder` is false.
        """
        model: Any
        if pretrained:
            with name_in_errors(architecture):
                model, loading = AutoModelForMaskedLM.from_pretrained(
                    architecture, dtype=torch.float32, output_loading_info=True, **model_args
                )
            if loading["missing_keys"] and not new_decoder:
                raise ValueError(
                    f"{architecture} has no {min(loading['missing_keys'])}, so it cannot predict "
                    "tokens: fit a new head to it first, a stage with model.train decoder "
                    "(--decoder_steps 1000 of recipes.self_distillation.text), or name a masked "
                    "language model with its head"
                )
            model.train()  # from_pretrained returns it in eval mode, which Lightning would keep
        else:
            model = build_text(architecture, "masked", model_args)
        model.encode = partial(final_hidden_states, model)  # copies and pickles with the model
        run_by_length(model.base_model)
        return model

    def load(self, model: Any, source: str, new_decoder: bool) -> None:
        """Load the encoder's weights, and the head's unless `new_decoder` is set."""
        required = f"{model.base_model_prefix}." if new_decoder else ""
        load_completely(model, source, NO_MASKED_MODEL, required)

    def hide(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        generator: torch.Generator | None,
        tokenizer: Any,
    ) -> tuple[Tensor, Tensor]:
        """The corrupted ids (B, L), and labels (B, L): true ids of hidden tokens, else -100."""
        return mask_tokens(
            inputs["input_ids"],
            inputs.get("attention_mask"),
            tokenizer.mask_token_id,
            tokenizer.all_special_ids,
            len(tokenizer),
            self.ratio,
            self.as_mask,
            self.as_random,
            generator,
        )

    def predict(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        hidden: tuple[Tensor, Tensor],
        everywhere: bool,
    ) -> Tensor:
        """Logits (n, V) of the n hidden tokens; (B, L, V) of all tokens if `everywhere`."""
        corrupted, labels = hidden
        others = text_inputs(inputs, model)
        del others["input_ids"]
        if everywhere:
            return model(input_ids=corrupted, **others).logits
        return hidden_logits(model, corrupted, labels, **others)

    def loss(
        self,
        model: nn.Module,
        prediction: Tensor,
        inputs: dict[str, Tensor],
        hidden: tuple[Tensor, Tensor],
    ) -> Tensor:
        """L_MAE: the cross-entropy of the hidden tokens."""
        labels = hidden[1]
        if prediction.ndim == 3:
            prediction = prediction[labels != IGNORED]
        return token_loss(prediction, labels)

    def match_predictions(
        self, student: Tensor, teacher: Tensor, inputs: dict[str, Tensor], reduction: Reduction
    ) -> Tensor:
        """Table 3's prediction matching: the divergence at every position but padding."""
        return token_prediction_matching(student, teacher, inputs.get("attention_mask"), reduction)


def final_hidden_states(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """f(x) (B, L, D) of a transformers masked language model, without its head."""
    return model.base_model(**text_inputs(inputs, model)).last_hidden_state
