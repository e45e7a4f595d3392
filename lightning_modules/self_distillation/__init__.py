"""Self-distillation (arXiv 2210.02871): further pre-training that stays near the original."""

from lightning_modules.self_distillation.adaptation_module import ImageAdaptation, TextAdaptation
from lightning_modules.self_distillation.distillation import (
    distillation,
    prediction_matching,
    token_prediction_matching,
    weight_matching,
)
from lightning_modules.self_distillation.finetuning_module import ImageFinetuning, TextFinetuning
from lightning_modules.self_distillation.mae_checkpoint import (
    from_transformers,
    load_encoder,
    load_mae,
    to_transformers,
)
from lightning_modules.self_distillation.mars import mars_project, mars_start
from lightning_modules.self_distillation.masked_autoencoder import MaskedAutoencoder, mae_decoder
from lightning_modules.self_distillation.masked_image import mask_patches, masked_autoencoding
from lightning_modules.self_distillation.masked_text import mask_tokens, masked_language_modelling
from lightning_modules.self_distillation.r3f import r3f
from lightning_modules.self_distillation.recadam import RecAdam
from lightning_modules.self_distillation.supcon import contrastive_loss
from lightning_modules.self_distillation.tracking import distance, fingerprint

__all__ = [
    "ImageAdaptation",
    "ImageFinetuning",
    "MaskedAutoencoder",
    "RecAdam",
    "TextAdaptation",
    "TextFinetuning",
    "contrastive_loss",
    "distance",
    "distillation",
    "fingerprint",
    "from_transformers",
    "load_encoder",
    "load_mae",
    "mae_decoder",
    "mars_project",
    "mars_start",
    "mask_patches",
    "mask_tokens",
    "masked_autoencoding",
    "masked_language_modelling",
    "prediction_matching",
    "r3f",
    "to_transformers",
    "token_prediction_matching",
    "weight_matching",
]
