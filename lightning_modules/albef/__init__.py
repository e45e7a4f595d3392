"""ALBEF (arXiv 2107.07651), a vision–language model that PELA compresses, and its tasks."""

from lightning_modules.albef.checkpoint import load_albef
from lightning_modules.albef.model import build, skipped
from lightning_modules.albef.pretrain_module import Pretraining, Repair
from lightning_modules.albef.retrieval_module import Grounding, Retrieval
from lightning_modules.albef.tasks_module import VQA, Entailment

__all__ = [
    "VQA",
    "Entailment",
    "Grounding",
    "Pretraining",
    "Repair",
    "Retrieval",
    "build",
    "load_albef",
    "skipped",
]
