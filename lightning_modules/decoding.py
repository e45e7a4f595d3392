"""Greedy decoding and beam search with a causal language model or an encoder–decoder.

With n beams the best continuation y maximises

    Σ_t log p(y_t | prompt, y_<t) / |y|^length_penalty

where p is renormalised after every banned token, and the token that ends y counts in |y|.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import NoRepeatNGramLogitsProcessor

from lightning_modules.backbones import first_position, positions_of, soft_tokens
from lightning_modules.modes import evaluating

# what counts of a model's generation_config: how its texts begin, and what they never hold
BEGINNINGS = ("bos_token_id", "decoder_start_token_id", "forced_bos_token_id")
BANS = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens")


def end_tokens(eos_token_id: int | Sequence[int] | None) -> list[int]:
    """The end tokens of a configuration of transformers, which gives one, several or none."""
    if eos_token_id is None:
        return []
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)


class NoRepeatAfterPrompt(LogitsProcessor):
    """Bans every token that would repeat an n-gram of the continuation.

    Unlike transformers' `no_repeat_ngram_size`, it allows n-grams of the prompt.

    Args:
        size: n.
        prompt_length: tokens of the prompt, padding included.
    """

    def __init__(self, size: int, prompt_length: int) -> None:
        self.ban, self.prompt_length = NoRepeatNGramLogitsProcessor(size), prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores (B, V) of the tokens after `input_ids` (B, L), -inf for the banned ones."""
        return self.ban(input_ids[:, self.prompt_length :], scores)


def generate(
    model: Any,
    prompts: Mapping[str, Tensor],
    tokenizer: Any,
    beams: int = 1,
    max_new_tokens: int = 64,
    length_penalty: float = 1.0,
    no_repeat_ngram: int = 0,
    stop: str | None = None,
) -> list[str]:
    """The best continuation of each prompt, without the prompt and surrounding white space.

    Of the model's generation_config count only the tokens with which texts begin and those that it
    bans. Where the tokenizer encodes `stop` as one token, as GPT-2's does a blank line, that token
    ends a continuation; otherwise the finished text is cut at `stop`. Unlike LoRA's own loop,
    transformers gives a finished beam's place to the next best one at once, not a step later.

    Args:
        model: a causal language model or encoder–decoder of transformers, with or without VeRA
            (merged adapters decode faster). Dropout is off while it decodes, whatever its mode.
        prompts: `input_ids` and `attention_mask` (B, L) padded on the left, as a DataModule's
            `prompt_dataloader` makes them; positions count from the first non-padding token.
        tokenizer: has a padding and an end-of-text token.
        beams: number of beams; 1 is greedy decoding.
        max_new_tokens: the most tokens of a continuation, the end token included.
        length_penalty: the exponent above; a larger one favours long continuations.
        no_repeat_ngram: n of the n-grams that may occur only once; 0 allows all.
        stop: text that ends a continuation besides the end-of-text token; None for no such text.

    Raises:
        ValueError: if the prompts are not padded on the left, or are too long for the model.
    """
    ids, mask = prompts["input_ids"].to(model.device), prompts["attention_mask"].to(model.device)
    _check_positions(ids, model, max_new_tokens)
    if model.config.is_encoder_decoder:
        (ids, mask), prompt_length = _padded_right(ids, mask), 0  # as the encoder was trained
        more: dict[str, Tensor] = {}
    else:
        _check_padding(mask)
        prompt_length, more = ids.shape[1], _positions(mask, model)
    ends = [tokenizer.eos_token_id]
    if stop is not None and len(token := tokenizer.encode(stop, add_special_tokens=False)) == 1:
        ends += token
    processors = LogitsProcessorList()
    if no_repeat_ngram:
        processors.append(NoRepeatAfterPrompt(no_repeat_ngram, prompt_length))
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        num_beams=beams,
        length_penalty=length_penalty if beams > 1 else None,
        early_stopping="never" if beams > 1 else None,  # until no open beam can score better
        renormalize_logits=True,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )
    with evaluating(model), _without_defaults(model), torch.no_grad():
        generated = model.generate(
            ids,
            attention_mask=mask,
            generation_config=config,
            logits_processor=processors,
            **more,
        )
    texts = tokenizer.batch_decode(
        generated[:, prompt_length:],
        skip_special_tokens=True,
        clean_up_tokenization_spaces=False,  # True would move full stops
    )
    return [(text.split(stop)[0] if stop else text).strip() for text in texts]


@contextmanager
def _without_defaults(model: Any) -> Iterator[None]:
    """Within it, of the model's generation_config only BEGINNINGS and BANS count.

    transformers takes from there every setting that a call leaves out: a least length, penalties,
    biases, a last token.
    """
    published = model.generation_config
    kept = {name: getattr(published, name, None) for name in BEGINNINGS + BANS}
    model.generation_config = GenerationConfig(**kept)
    try:
        yield
    finally:
        model.generation_config = published


def _padded_right(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, L) with the padding moved from the left to the right."""
    mask, order = mask.sort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), mask


def _positions(mask: Tensor, model: Any) -> dict[str, Tensor]:
    """RoBERTa's positions (B, L), which transformers' `generate` counts from 0 as other models'."""
    first = first_position(model)
    return {"position_ids": (mask.cumsum(1) + first - 1).clamp(min=0)} if first else {}


def _check_padding(mask: Tensor) -> None:
    if not mask[:, -1].all():
        raise ValueError(
            "A prompt ends in padding, expected padding on the left only: take the batches of a "
            "DataModule's prompt_dataloader."
        )


def _check_positions(ids: Tensor, model: Any, max_new_tokens: int) -> None:
    longest, soft = positions_of(model), soft_tokens(model)
    read, apart = soft + ids.shape[1], model.config.is_encoder_decoder
    needed = max(read, max_new_tokens) if apart else read + max_new_tokens
    if longest is not None and needed > longest:
        before = f", {soft} soft tokens before it" * bool(soft)
        raise ValueError(
            f"A prompt of {ids.shape[1]} tokens{before} and max_new_tokens={max_new_tokens} are "
            f"more than the {longest} positions of the model: shorten the prompt or max_new_tokens."
        )
