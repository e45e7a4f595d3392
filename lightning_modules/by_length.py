"""Runs an encoder on parts of a batch of texts, of like length each, so that it pads less."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXTS = 8  # of a part; with fewer, the matrix products of a small BERT become inefficient


def run_by_length(encoder: nn.Module) -> None:
    """Make a transformers encoder run the texts of a batch in parts of like length, in place.

    A batch is as long as its longest text: of 128 sentences of SciERC 55 to 62 % are padding, on
    which an encoder spends as much as on words. Hidden states of words and pooled outputs stay the
    same within rounding; those of padding have no meaning. Only on a CPU, since a GPU needs large
    batches.

    Args:
        encoder: the `base_model` of a transformers model. Its inputs are `input_ids` and
            `attention_mask` (B, L), and perhaps others of this shape; with any other input, or
            without an attention mask, it runs as before.
    """
    # copies and pickles with the encoder, unlike a method, which pickles as an attribute's name
    encoder.forward = partial(_forward, encoder)


def _forward(
    encoder: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **others: Any,
) -> Any:
    """The encoder's output for ids (B, L), from parts of TEXTS texts."""
    whole = type(encoder).forward
    tensors = {name: value for name, value in others.items() if isinstance(value, Tensor)}
    if (
        input_ids is None
        or attention_mask is None
        or input_ids.device.type != "cpu"
        or any(value.shape != input_ids.shape for value in [attention_mask, *tensors.values()])
        or any(others.get(f"output_{name}") for name in ("hidden_states", "attentions"))
    ):
        return whole(encoder, input_ids=input_ids, attention_mask=attention_mask, **others)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, **tensors}
    settings = {name: value for name, value in others.items() if name not in tensors}
    size = input_ids.shape[1]
    # up to the last word, on whichever side the padding stands
    lengths = (attention_mask.bool() * torch.arange(1, size + 1)).amax(1).clamp(min=1)
    order = lengths.argsort()
    hidden: list[Tensor] = []
    pooled: list[Any] = []
    for rows in order.split(TEXTS):
        longest = int(lengths[rows].max())
        part = {name: value[rows, :longest] for name, value in batch.items()}
        output = whole(encoder, **part, **settings)
        hidden.append(F.pad(output.last_hidden_state, (0, 0, 0, size - longest)))
        pooled.append(getattr(output, "pooler_output", None))
    back = order.argsort()
    output.last_hidden_state = torch.cat(hidden)[back]
    if pooled[0] is not None:
        output.pooler_output = torch.cat(pooled)[back]
    return output
