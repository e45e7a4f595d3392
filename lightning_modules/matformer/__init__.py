"""MatFormer (arXiv 2310.07707): one nested Transformer that holds many smaller ones."""

from lightning_modules.matformer.costs import choose, layer_costs
from lightning_modules.matformer.importance import importance, reorder
from lightning_modules.matformer.matlm_module import MatLM
from lightning_modules.matformer.mix_and_match import arrange, mix_and_match
from lightning_modules.matformer.module import MatViT
from lightning_modules.matformer.nest import extract, granularity, nest, set_granularity
from lightning_modules.matformer.speculative import speculative_generate

__all__ = [
    "MatLM",
    "MatViT",
    "arrange",
    "choose",
    "extract",
    "granularity",
    "importance",
    "layer_costs",
    "mix_and_match",
    "nest",
    "reorder",
    "set_granularity",
    "speculative_generate",
]
