"""L_MAE on text: the masking of tokens, and the cross-entropy of their predictions.

Self-distillation (arXiv 2210.02871), Eq. 2 and Appendix C; the 80/10/10 scheme is BERT's
(arXiv 1810.04805) and RoBERTa's.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.labels import IGNORED
from lightning_modules.modes import precise


def mask_tokens(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    mask_id: int,
    special_ids: Collection[int],
    vocab_size: int,
    probability: float = 0.15,
    as_mask: float = 0.8,
    as_random: float = 0.1,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Hide each token with probability γ, z_k ~ Bernoulli(γ), but no special token or padding.

    Of the hidden tokens a share `as_mask` is replaced by the mask token, a share `as_random` by an
    ordinary token drawn uniformly, and the rest is not replaced. as_mask 1 and as_random 0 is Eq. 2
    literally.

    Args:
        input_ids: (B, L).
        attention_mask: (B, L), 0 on padding; None without padding.
        mask_id: the mask token's id (`tokenizer.mask_token_id`).
        special_ids: ids that are neither hidden nor drawn (`tokenizer.all_special_ids`).
        vocab_size: number of ids (`len(tokenizer)`).
        probability: γ.
        as_mask: share of the hidden tokens that become the mask token.
        as_random: share of the hidden tokens that become a random token.
        generator: random numbers, on the ids' device; torch's default generator if None.

    Returns:
        The corrupted ids, (B, L), and the labels, (B, L): the true id of hidden tokens, -100
        elsewhere. `labels != -100` is the mask z.

    Raises:
        ValueError: for a probability or shares out of range, a mask token outside the vocabulary,
            or a vocabulary of special tokens only.
    """
    if not 0 < probability < 1:
        raise ValueError(f"mask probability is {probability}: expected one between 0 and 1")
    if min(as_mask, as_random) < 0 or as_mask + as_random > 1 + 1e-9:
        raise ValueError(
            f"shares as_mask {as_mask} and as_random {as_random} of the hidden tokens: expected "
            "at least 0 each and at most 1 together"
        )
    if mask_id is None or not 0 <= mask_id < vocab_size:
        raise ValueError(
            f"mask_id is {mask_id}: expected an id below vocab_size {vocab_size}; take a tokenizer "
            "with a mask token"
        )
    device = input_ids.device
    special = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    special[torch.tensor(sorted(special_ids), dtype=torch.long, device=device)] = True
    ordinary = (~special).nonzero()[:, 0]
    if not len(ordinary):
        raise ValueError(f"all {vocab_size} ids are special: there is nothing to hide")

    def draw() -> Tensor:
        return torch.rand(input_ids.shape, generator=generator, device=device)

    hidden = (draw() < probability) & ~special[input_ids]
    if attention_mask is not None:
        hidden &= attention_mask.bool()
    uniform = draw()
    picks = torch.randint(len(ordinary), input_ids.shape, generator=generator, device=device)
    corrupted = input_ids.masked_fill(hidden & (uniform < as_mask), mask_id)
    swapped = hidden & (uniform >= as_mask) & (uniform < as_mask + as_random)
    corrupted = torch.where(swapped, ordinary[picks], corrupted)
    return corrupted, input_ids.masked_fill(~hidden, IGNORED)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. 2 for text: mean over examples of −1/Z Σ_k z_k · log p(x_k | x̂), in nats.

    Z is the number of an example's hidden tokens; an example with none is left out. Computed in
    float32 even under autocast (float64 logits in float64).

    Args:
        logits: (n, V) of the n hidden tokens, see `hidden_logits`.
        labels: (B, L), the true ids of hidden tokens, -100 elsewhere.

    Returns:
        A scalar; zero, with zero gradients, if no token is hidden.
    """
    hidden = labels != IGNORED
    with torch.autocast(logits.device.type, enabled=False):
        errors = F.cross_entropy(precise(logits), labels[hidden], reduction="none")
        numbers = hidden.sum(1)
        weights = 1 / numbers.clamp(min=1).to(errors.dtype)
        examples = hidden.nonzero()[:, 0]
        return (errors * weights[examples]).sum() / (numbers > 0).sum().clamp(min=1)


def hidden_logits(model: Any, corrupted: Tensor, labels: Tensor, **inputs: Any) -> Tensor:
    """A masked language model's logits for the hidden tokens.

    The head runs on the hidden tokens only, because it has most of the cost where the vocabulary is
    large.

    Args:
        model: a transformers masked language model (AutoModelForMaskedLM).
        corrupted: (B, L) ids from `mask_tokens`.
        labels: (B, L) from `mask_tokens`; n of them are not -100.
        inputs: the model's other inputs: attention_mask, token_type_ids.

    Returns:
        Logits (n, V), in the order of `labels[labels != -100]`.
    """

    def choose(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[labels != IGNORED][None]
        return output

    hook = model.base_model.register_forward_hook(choose)
    try:
        return model(input_ids=corrupted, **inputs).logits[0]
    finally:
        hook.remove()
