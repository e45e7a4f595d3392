"""PELA (arXiv 2310.10700): compress a pre-trained Transformer by low rank, then repair it."""

from lightning_modules.pela.baselines_module import Distillation, LoRA, TokenMerging
from lightning_modules.pela.calibration import Calibration
from lightning_modules.pela.classifier_module import Classifier
from lightning_modules.pela.compress import compress
from lightning_modules.pela.energy import plan_energy
from lightning_modules.pela.factorize import factorize, merge, plan_uniform
from lightning_modules.pela.features import Features
from lightning_modules.pela.layers import low_rank_layers, plan_of
from lightning_modules.pela.losses import feature_distillation, weight_perturbation
from lightning_modules.pela.module import PELA

__all__ = [
    "PELA",
    "Calibration",
    "Classifier",
    "Distillation",
    "Features",
    "LoRA",
    "TokenMerging",
    "compress",
    "factorize",
    "feature_distillation",
    "low_rank_layers",
    "merge",
    "plan_energy",
    "plan_of",
    "plan_uniform",
    "weight_perturbation",
]
