"""Self-distillation (arXiv 2210.02871): further pre-training regularised by a teacher."""

from lightning_modules.self_distillation.adaptation_module import Adaptation
from lightning_modules.self_distillation.distillation import (
    distillation,
    prediction_matching,
    token_prediction_matching,
    weight_matching,
)
from lightning_modules.self_distillation.finetuning_module import Finetuning
from lightning_modules.self_distillation.mae_checkpoint import (
    from_transformers,
    load_encoder,
    load_mae,
    to_transformers,
)
from lightning_modules.self_distillation.mars import mars_project, mars_start
from lightning_modules.self_distillation.masked_autoencoder import MaskedAutoencoder, mae_decoder
from lightning_modules.self_distillation.masked_image import mask_patches, masked_autoencoding
from lightning_modules.self_distillation.masked_text import mask_tokens
from lightning_modules.self_distillation.r3f import r3f
from lightning_modules.self_distillation.recadam import RecAdam
from lightning_modules.self_distillation.supcon import supervised_contrastive
from lightning_modules.self_distillation.tracking import distance

__all__ = [
    "Adaptation",
    "Finetuning",
    "MaskedAutoencoder",
    "RecAdam",
    "distance",
    "distillation",
    "from_transformers",
    "load_encoder",
    "load_mae",
    "mae_decoder",
    "mars_project",
    "mars_start",
    "mask_patches",
    "mask_tokens",
    "masked_autoencoding",
    "prediction_matching",
    "r3f",
    "supervised_contrastive",
    "to_transformers",
    "token_prediction_matching",
    "weight_matching",
]
