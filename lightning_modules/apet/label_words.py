"""Classifies texts with a language model by the likeliest of the classes' label words.

In APET (arXiv 2306.02320), App. D, BLOOM and T5 generate one token after `Input: {x} Output: `.
Here only the label words are compared, not the full vocabulary, so that random guessing scores
1 / number of classes, the paper's reference line. Some tokenizers append an end token to a prompt:
T5's encoder reads it, as in its pre-training; in a decoder the label word takes its place.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.decoding import end_tokens


class LabelWords(nn.Module):
    """A decoder or encoder–decoder of transformers as a classifier.

    Args:
        model: the language model, with logits over the vocabulary.
        tokens: token id of each class's label word.
    """

    ends: Tensor

    def __init__(self, model: nn.Module, tokens: list[int]):
        super().__init__()
        self.model = model
        self.chooses_positions = "logits_to_keep" in signature(model.forward).parameters
        self.register_buffer("tokens", torch.tensor(tokens), persistent=False)
        ends = end_tokens(getattr(model.config, "eos_token_id", None))
        self.register_buffer("ends", torch.tensor(ends, dtype=torch.long), persistent=False)

    @property
    def config(self) -> Any:
        """The language model's configuration."""
        return self.model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, classes) for prompts (B, L), padded on the right, with or without an end."""
        rows = torch.arange(len(input_ids), device=input_ids.device)
        more: dict[str, Any] = {"use_cache": False}
        if self.config.is_encoder_decoder:
            start = self.config.decoder_start_token_id
            more["decoder_input_ids"] = input_ids.new_full((len(input_ids), 1), start)
            last = torch.zeros_like(rows)
        else:
            # an end token that the tokenizer has appended stands where the label word belongs
            read = attention_mask.bool() & ~torch.isin(input_ids, self.ends)
            last = (read * torch.arange(input_ids.shape[1], device=input_ids.device)).argmax(1)
            if self.chooses_positions:
                # a vocabulary's logits at every position would cost a fifth of SmolLM2's step
                more["logits_to_keep"], last = last.unique(return_inverse=True)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        return output.logits[rows, last][:, self.tokens]
