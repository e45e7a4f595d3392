"""R3F: a model whose predictions a little noise on its embeddings does not change.

Aghajanyan et al., Better Fine-Tuning by Reducing Representational Collapse (arXiv 2008.03156).
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn


def r3f(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    logits: Tensor,
    epsilon: float = 1e-5,
    noise: Literal["uniform", "normal"] = "normal",
    generator: torch.Generator | None = None,
) -> Tensor:
    """[KL(p ‖ q) + KL(q ‖ p)] / B, with q from noisy embeddings; the loss is CE + λ times this.

    The noise goes onto the output of the embedding layer: word embeddings, or a ViT's patch
    embeddings, in both before positions are added. So the positions are the clean pass's too, which
    RoBERTa's are not when it is given inputs_embeds with padding on the left. Runs in the model's
    present mode: in training the two passes draw dropout separately. Gradients flow through both.
    The default noise is below the rounding of bfloat16 and float16 embeddings: train in float32.

    Args:
        model: a classifier of timm or transformers.
        inputs: images (B, C, H, W), or keyword arguments of a transformers model, without labels.
        logits: (B, C) of the clean pass, whose softmax is p.
        epsilon: the noise is from N(0, ε²) or U(−ε, ε).
        noise: "normal" (Gaussian, as in the self-distillation paper) or "uniform".
        generator: source of randomness, on the embeddings' device; torch's own if None.

    Returns:
        A scalar in nats, computed in float32 also under autocast (float64 for float64).

    Raises:
        ValueError: for another noise, ε of 0 or less, or a model without embedding layer.
    """
    if noise not in ("uniform", "normal"):
        raise ValueError(f"unknown noise {noise!r}: expected 'normal' or 'uniform'")
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}: expected the noise's scale, above 0")

    def disturb(module: nn.Module, args: Any, embeddings: Tensor) -> Tensor:
        drawn = torch.empty_like(embeddings)
        if noise == "uniform":
            drawn.uniform_(-epsilon, epsilon, generator=generator)
        else:
            drawn.normal_(0, epsilon, generator=generator)
        return embeddings + drawn.detach()

    handle = embedding_layer(model).register_forward_hook(disturb)
    try:
        output = model(inputs) if isinstance(inputs, Tensor) else model(**inputs)
    finally:
        handle.remove()
    return symmetric_divergence(logits, getattr(output, "logits", output))


def symmetric_divergence(logits: Tensor, others: Tensor) -> Tensor:
    """[KL(p ‖ q) + KL(q ‖ p)] / B of two softmaxes, from logits (B, C)."""
    with torch.autocast(logits.device.type, enabled=False):
        p, q = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (logits, others))
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        return ((p.exp() - q.exp()) * (p - q)).sum() / len(p)


def embedding_layer(model: Any) -> nn.Module:
    """The layer that makes embeddings of tokens or patches.

    Raises:
        ValueError: if the model is of neither timm nor transformers.
    """
    layer = getattr(model, "patch_embed", None)
    if layer is None and hasattr(model, "get_input_embeddings"):
        layer = model.get_input_embeddings()
    if not isinstance(layer, nn.Module):
        raise ValueError(
            f"{type(model).__name__} has no embedding layer to put noise on: expected a timm ViT "
            "with patch_embed or a transformers model with get_input_embeddings"
        )
    return layer
