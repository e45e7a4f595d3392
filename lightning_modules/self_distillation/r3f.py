"""R3F: penalises changes of the predictions under small noise on the embeddings.

Aghajanyan et al., Better Fine-Tuning by Reducing Representational Collapse (arXiv 2008.03156).
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_modules.modes import precise


def r3f(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    logits: Tensor,
    epsilon: float = 1e-5,
    noise: Literal["uniform", "normal"] = "normal",
    generator: torch.Generator | None = None,
) -> Tensor:
    """[KL(p ‖ q) + KL(q ‖ p)] / B, with q from noisy embeddings; the loss is CE + λ times this.

    The noise is added to the output of the embedding layer (word embeddings, or a ViT's patch
    embeddings), before positions are added. Passing noisy `inputs_embeds` instead would change the
    positions of a RoBERTa with padding on the left. Both passes run in the model's current mode and
    draw dropout separately; gradients flow through both. The default noise is below the rounding of
    bfloat16 and float16 embeddings: train in float32.

    Args:
        model: a classifier of timm or transformers.
        inputs: images (B, C, H, W), or keyword arguments of a transformers model, without labels.
        logits: (B, C) of the clean pass, whose softmax is p.
        epsilon: scale ε of the noise, from N(0, ε²) or U(−ε, ε).
        noise: "normal" (Gaussian, as in the self-distillation paper) or "uniform".
        generator: random numbers, on the embeddings' device; torch's default generator if None.

    Returns:
        A scalar in nats, computed in float32 even under autocast (float64 logits in float64).

    Raises:
        ValueError: for another noise, ε of 0 or less, or a model without an embedding layer.
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
    """[KL(p ‖ q) + KL(q ‖ p)] / B of the softmaxes p and q of two logits (B, C)."""
    with torch.autocast(logits.device.type, enabled=False):
        p, q = (precise(x) for x in (logits, others))
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        return ((p.exp() - q.exp()) * (p - q)).sum() / len(p)


def embedding_layer(model: Any) -> nn.Module:
    """The layer that embeds tokens or patches.

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
