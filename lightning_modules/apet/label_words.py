"""Classifies texts with a language model by the likeliest of the classes' label words.

In APET (arXiv 2306.02320), App. D, BLOOM and T5 generate one token after `Input: {x} Output: `.
Here only the label words are compared, not the full vocabulary, so that random guessing scores
1 / number of classes, the paper's reference line. Some tokenizers append end tokens to a prompt:
T5's encoder reads them, as in its pre-training; in a decoder the label word takes their place. Some
put tokens before a target text too, such as BART's `<s>`: the decoder reads them before the word.
"""

from collections.abc import Sequence
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
        begins, ends: see `surround`.

    Raises:
        ValueError: if an encoder–decoder's configuration has no token to start the decoder with.
    """

    tokens: Tensor
    begins: Tensor
    ends: Tensor

    def __init__(
        self,
        model: nn.Module,
        tokens: Sequence[int],
        begins: Sequence[int] = (),
        ends: Sequence[int] = (),
    ):
        super().__init__()
        self.model = model
        if self.config.is_encoder_decoder and self.config.decoder_start_token_id is None:
            raise ValueError(
                f"the configuration of this {type(model).__name__} has no decoder_start_token_id, "
                "the token that its decoder reads first: set it in model.model_args"
            )
        self.chooses_positions = "logits_to_keep" in signature(model.forward).parameters
        self.register_buffer("tokens", torch.tensor(tokens), persistent=False)
        self.surround(begins, ends)

    def surround(self, begins: Sequence[int], ends: Sequence[int]) -> None:
        """Set the special tokens of the tokenizer.

        Args:
            begins: those before a target text, which an encoder–decoder's decoder reads.
            ends: those behind a prompt; the configuration's end tokens are added to them.
        """
        known = end_tokens(getattr(self.config, "eos_token_id", None))
        for name, ids in {"begins": begins, "ends": sorted({*ends, *known})}.items():
            values = torch.tensor(ids, dtype=torch.long, device=self.tokens.device)
            self.register_buffer(name, values, persistent=False)

    @property
    def config(self) -> Any:
        """The language model's configuration."""
        return self.model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits (B, classes) for prompts (B, L), padded on the right, with or without an end."""
        rows = torch.arange(len(input_ids), device=input_ids.device)
        more: dict[str, Any] = {"use_cache": False}
        if self.config.is_encoder_decoder:
            start = input_ids.new_full((1,), self.config.decoder_start_token_id)
            more["decoder_input_ids"] = torch.cat([start, self.begins]).expand(len(rows), -1)
            last = torch.full_like(rows, len(self.begins))
        else:
            # end tokens that the tokenizer has appended stand where the label word belongs
            read = attention_mask.bool() & ~torch.isin(input_ids, self.ends)
            last = (read * torch.arange(input_ids.shape[1], device=input_ids.device)).argmax(1)
            if self.chooses_positions:
                # a vocabulary's logits at every position would cost a fifth of SmolLM2's step
                more["logits_to_keep"], last = last.unique(return_inverse=True)
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **more)
        return output.logits[rows, last][:, self.tokens]
