"""Prompts and texts for a causal language model: sequences to train on, prompts to continue."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset

from datamodules.loading import IGNORED, draw
from datamodules.tables import TXT
from datamodules.text import TokenizedData
from datamodules.tokens import encode, filling, pad, tokenizer_state


class TeacherForcedSet(Dataset):
    """Map-style dataset of prompt + text; `labels` are -100 for the prompt's tokens.

    Args:
        pairs: the tokens of prompt and text.
        fill: padding values, by key.
    """

    def __init__(self, pairs: Sequence[tuple[list[int], list[int]]], fill: dict[str, int]) -> None:
        self.pairs, self.collate = pairs, partial(pad, fill=fill)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        prompt, text = self.pairs[index]
        ids = [*prompt, *text]
        # a tensor, since SeededDataset does arithmetic on the labels of samples that only fill up
        labels = torch.tensor([IGNORED] * len(prompt) + text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


class PromptSet(Dataset):
    """Map-style dataset of prompts to be continued; `labels` is the index of the prompt.

    Args:
        prompts: the tokens of each prompt.
        fill: padding values, by key; prompts are padded on the left.
    """

    def __init__(self, prompts: Sequence[list[int]], fill: dict[str, int]) -> None:
        self.prompts, self.collate = prompts, partial(pad, fill=fill, left=True)

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.prompts[index]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": index}


class PromptedData(TokenizedData):
    """Batches for a causal language model, and references to score its generated texts.

    Training, validation and test: `input_ids`, `attention_mask`, `labels` (B, L), padded on the
    right; labels are -100 except for the text and its end-of-text token. Sequences are truncated to
    `max_length` tokens; examples whose prompt alone is that long are dropped, with a warning.
    `prompt_dataloader(part)`, and prediction for the test part: every different prompt once,
    `input_ids` and `attention_mask` (B, L) padded on the left, as generation needs it, and `labels`
    (B,), the index of the prompt in `prompts(part)` and `references(part)`; -100 marks samples that
    only fill up the last batches of several ranks.

    A subclass returns a part's (prompt, text) pairs in `load`, and tokenises prompts in
    `encode_prompts`. Arguments: see `TokenizedData`; but `eval_limit` counts different prompts,
    each of which keeps all its references.
    """

    # Subclasses implement this.

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of each prompt, special tokens included."""
        raise NotImplementedError

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, with the end-of-text token."""
        return [[*ids, self.end_token_id] for ids in encode(texts, self.tokenizer)]

    template: str | None = None  # of the prompt for a user's input, which replaces {input}
    # of tables with a user's inputs: that of the input, and of what replaces {pair} in a template
    columns: tuple[str, str | None] = (TXT, None)
    decoding: ClassVar[dict[str, Any]] = {}  # arguments of lightning_modules.decoding.generate

    def filled(self, text: str) -> str:
        """What `encode_prompts` takes for a user's input."""
        assert self.template is not None
        return self.template.replace("{input}", text)

    def describe(self) -> dict[str, Any]:
        """The template, the special tokens before and after a prompt, how texts are decoded."""
        if self.template is None:
            return {}
        prompt, text = self.filled("a"), self.template.replace("{input}", "a")
        [plain], [ids] = encode([text], self.tokenizer), self.encode_prompts([prompt])
        start = next(i for i in range(len(ids)) if ids[i : i + len(plain)] == plain)
        return {
            "kind": "prompts",
            "template": self.template,
            "stripped": self.encode_prompts([f" {prompt} "]) == [ids],  # of surrounding space
            "before": ids[:start],
            "behind": ids[start + len(plain) :],
            "tokenizer": tokenizer_state(self.tokenizer),
            "max_length": self.prompt_length,
            "decoding": self.decoding,
            "columns": list(self.columns),
        }

    def select(self, part: str, examples: list) -> list:
        if part == "train" or self.eval_limit is None:
            return super().select(part, examples)
        kept = set(draw(list(group(examples)), self.eval_limit, self.seed))
        return [example for example in examples if example[0] in kept]

    @property
    def prompt_length(self) -> int:
        """Most tokens of a prompt."""
        return self.max_length

    def prompts(self, part: str) -> list[str]:
        """The different prompts of a part, in order of first appearance."""
        return list(group(self.examples(part)))

    def references(self, part: str) -> list[list[str]]:
        """The reference texts of each of `prompts(part)`, as in the file."""
        return list(group(self.examples(part)).values())

    @property
    def end_token_id(self) -> int:
        """The end-of-text token.

        Raises:
            ValueError: the tokenizer has none.
        """
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                f"The tokenizer {self.tokenizer.name_or_path!r} has no end-of-text token, expected "
                "one as causal language models have it: choose another with --data.tokenizer."
            )
        return self.tokenizer.eos_token_id

    def samples(self, part: str) -> Dataset:
        if part == "predict":
            return self._prompt_set(self.prompts("test"))
        prompts, texts = zip(*self.examples(part), strict=True)
        pairs = [
            (prompt, text[: self.max_length - len(prompt)])
            for prompt, text in zip(
                self.encode_prompts(prompts), self.encode_texts(texts), strict=True
            )
            if len(prompt) < self.max_length
        ]
        if not pairs:
            raise ValueError(
                f"Every prompt of the {part} part has max_length={self.max_length} or more tokens, "
                "which leaves none for the text: set --data.max_length higher."
            )
        if dropped := len(prompts) - len(pairs):
            rank_zero_warn(
                f"{dropped} of the {len(prompts)} examples of the {part} part are left out: their "
                f"prompts have max_length={self.max_length} or more tokens."
            )
        return TeacherForcedSet(pairs, filling(self.tokenizer))

    def prompt_dataloader(self, part: str) -> DataLoader:
        return self.loader(self._prompt_set(self.prompts(part)))

    def loader_of(self, prompts: Sequence[str]) -> DataLoader:
        """Batches of any prompts, like those of `prompt_dataloader`."""
        return self.loader(self._prompt_set(prompts))

    def _prompt_set(self, prompts: Sequence[str]) -> PromptSet:
        return PromptSet(self.encode_prompts(prompts), filling(self.tokenizer))


def group(pairs: Iterable[tuple[str, str | None]]) -> dict[str, list[str]]:
    """The texts of each different prompt, both in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for prompt, text in pairs:
        texts = groups.setdefault(prompt, [])
        if text is not None:
            texts.append(text)
    return groups
