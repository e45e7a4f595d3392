"""Classification by a language model: which label's word would it write?

APET (arXiv 2306.02320), App. D, has BLOOM and T5 write one token behind `Input: {x} Output: `. Here
the classes' words compete with each other and not with the whole vocabulary, so that the guess of
chance is one in the number of classes, as the paper's line is.
"""

from typing import Any

import torch
from torch import Tensor, nn


class LabelWords(nn.Module):
    """A decoder or encoder–decoder of transformers as a classifier.

    Args:
        model: its logits are over the vocabulary.
        tokens: the token of each class's word.
    """

    def __init__(self, model: nn.Module, tokens: list[int]):
        super().__init__()
        self.model = model
        self.register_buffer("tokens", torch.tensor(tokens), persistent=False)

    @property
    def config(self) -> Any:
        """The language model's."""
        return self.model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, classes) of prompts (B, L), padded on the right."""
        places = torch.arange(len(input_ids), device=input_ids.device)
        more: dict[str, Any] = {"use_cache": False}
        if self.config.is_encoder_decoder:
            start = self.config.decoder_start_token_id
            more["decoder_input_ids"] = input_ids.new_full((len(input_ids), 1), start)
            last = torch.zeros_like(places)
        else:
            last = attention_mask.sum(1) - 1
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        return output.logits[places, last][:, self.tokens]
