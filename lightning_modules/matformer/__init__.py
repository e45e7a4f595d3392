"""MatFormer (arXiv 2310.07707): one nested Transformer that holds many smaller ones."""

from lightning_modules.matformer.mix_and_match import arrange, mix_and_match
from lightning_modules.matformer.module import MatViT
from lightning_modules.matformer.nest import extract, nest, set_granularity
from lightning_modules.matformer.speculative import speculative_generate

__all__ = [
    "MatViT",
    "arrange",
    "extract",
    "mix_and_match",
    "nest",
    "set_granularity",
    "speculative_generate",
]
