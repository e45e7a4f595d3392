"""Base classes of the text DataModules, and a DataModule for tables of labelled sentences.

`TokenizedData` has what all of them share: parts, limits and a tokenizer. `SentenceData` is for one
or two sentences with a label, whatever the source; glue.py builds on it. `TextData` reads csv, tsv
and jsonl files with named columns. prompted.py is for texts that a language model generates.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.loading import IGNORED, draw, hold_out, require_limits
from datamodules.tables import TXT, read_class, read_score, read_table
from datamodules.tokens import (
    WithTokenizer,
    encode_behind,
    filling,
    framed,
    load_tokenizer,
    pad,
    require_tokens,
    special_tokens,
    tokenizer_state,
    train_tokenizer,
)


class Example(NamedTuple):
    """One or two sentences; `label` is a class, a score, or None for unlabelled data."""

    first: str
    second: str | None = None
    label: float | None = None


class SentenceSet(Dataset):
    """Map-style dataset of tokenised examples: `input_ids`, `attention_mask`, …, `labels`.

    Args:
        examples: the sentences.
        tokenizer: a transformers tokenizer.
        max_length: most tokens of an example; longer ones are truncated.
        regression: whether labels are numbers instead of classes.
        prompts: whether to write `Input: … Output:` around the sentences, for a language model.

    Raises:
        ValueError: a text is empty, and the tokenizer (GPT-2's) puts no token around it.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        tokenizer: Any,
        max_length: int,
        regression: bool,
        prompts: bool = False,
    ) -> None:
        self.examples, self.tokenizer = examples, tokenizer
        self.max_length, self.regression, self.prompts = max_length, regression, prompts
        texts = (f"{one.first}{one.second or ''}" for one in examples)
        blank = [place for place, text in enumerate(texts) if not text.strip()]
        require_tokens([self[place]["input_ids"] for place in blank])

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        first, second, label = self.examples[index]
        if self.prompts:
            around = special_tokens(self.tokenizer)
            seconds = [] if second is None else [second]
            [ids] = framed([first], self.tokenizer, self.max_length, *around, seconds)
            sample = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        else:
            length = self.max_length
            sample = dict(self.tokenizer(first, second, truncation=True, max_length=length))
        label = IGNORED if label is None else label
        return {**sample, "labels": float(label) if self.regression else int(label)}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        return pad(samples, filling(self.tokenizer))


class TokenizedData(WithTokenizer):
    """The base of the text DataModules: parts of text, and a tokenizer.

    A subclass reads a part's examples in `load`, and makes the model's inputs in `samples`. A part
    is read at its first use, so that a missing file matters only if its part is used.

    Args:
        tokenizer: name of a transformers tokenizer, or a folder with its files. None: a tokenizer
            with `vocab_size` entries is trained on the training part.
        vocab_size: see `tokenizer`.
        max_length: most tokens of an example; longer ones are truncated.
        batch_size: examples per device and training step.
        eval_batch_size: examples per device and evaluation step; `batch_size` when None.
        num_workers: processes that load samples; 0 loads in the training process.
        seed: seed of order, splits and selection.
        limit: keep at most this many training examples, drawn by `seed`.
        eval_limit: keep at most this many validation and test examples, drawn by `seed`.

    Raises:
        ValueError: for a limit below 1.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        vocab_size: int = 2000,
        max_length: int = 128,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        limit: int | None = None,
        eval_limit: int | None = None,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers, seed)
        require_limits(limit=limit, eval_limit=eval_limit)
        self.tokenizer_name, self.trained_size, self.max_length = tokenizer, vocab_size, max_length
        self.limit, self.eval_limit = limit, eval_limit
        self._parts: dict[str, list] = {}
        self._tokenizer: Any = None

    # Subclasses implement these.

    def load(self, part: str) -> list:
        """All examples of "train", "val", "test" or "predict", as tuples with their texts."""
        raise NotImplementedError

    def drawn(self, part: str) -> bool:
        """Whether the result of `load` for a part depends on the seed."""
        return False

    def select(self, part: str, examples: list) -> list:
        """The examples of a part, at most `limit` or `eval_limit` of them, drawn by `seed`."""
        limits = {"train": self.limit, "val": self.eval_limit, "test": self.eval_limit}
        return draw(examples, limits.get(part), self.seed)

    # All of these can be used before the trainer calls `setup`.

    def examples(self, part: str) -> list:
        """The examples of a part, in order, at most `limit` or `eval_limit` of them.

        Raises:
            ValueError: there is none.
        """
        if part not in self._parts:
            examples = self.select(part, self.load(part))
            if not examples:
                share = getattr(self, "val_fraction", None)  # not every source is split by a share
                other = f", or change val_fraction={share}" if share and self.drawn(part) else ""
                raise ValueError(
                    f"The {part} part has 0 examples, expected 1 or more: add some{other}."
                )
            self._parts[part] = examples
        return self._parts[part]

    def members(self, part: str) -> tuple[list[str], bool]:
        """The examples of a part as JSON; see `PartsData.members`."""
        examples = self.examples(part)
        lines = [json.dumps(example, ensure_ascii=False) for example in examples]
        return lines, self.drawn(part) or len(examples) < len(self.load(part))

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            if self.tokenizer_name:
                self._tokenizer = load_tokenizer(self.tokenizer_name)
            else:
                columns = (column for example in self.examples("train") for column in example)
                texts = (column for column in columns if isinstance(column, str))
                self._tokenizer = train_tokenizer(texts, self.trained_size)
        return self._tokenizer

    @property
    def tokenizer_cure(self) -> str:
        if self.tokenizer_name:
            return super().tokenizer_cure
        return (  # it is trained on the training part
            "give it the training examples of its own run, all settings that choose them included, "
            "since the tokenizer is trained on them"
        )

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def pad_token_id(self) -> int:
        return self.tokenizer.pad_token_id


class SentenceData(TokenizedData):
    """Labelled sentences as padded batches: the dict that transformers' models take.

    Keys: `input_ids` and `attention_mask` (B, L) with L the longest of the batch, `token_type_ids`
    if the tokenizer makes them, and `labels` (B,): int64 classes, or float32 scores. Labels are
    -100 in unlabelled parts, and for samples that only fill up the last evaluation batches of
    several ranks. In a pair that is too long, the longer sentence is truncated first.

    A subclass returns the `Example`s of a part in `load`.

    Args:
        label_words: a word for each class, which a language model should generate after
            `Input: {sentences} Output:` (APET, arXiv 2306.02320, App. D); None for a classifier.
        **kwargs: see `TokenizedData`.
    """

    def __init__(self, label_words: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.label_words = label_words

    @property
    def label_tokens(self) -> list[int]:
        """The token of each class's word.

        Raises:
            ValueError: if the words are not one for each class, or do not have a token each.
        """
        words = self.label_words or []
        if self.regression:
            raise ValueError(
                f"label_words is {words}, expected none, since the labels are numbers: train a "
                "regressor, as recipes/apet/encoder.yaml does, without --data.label_words."
            )
        if len(words) != self.num_classes or len(set(words)) < len(words):
            raise ValueError(
                f"label_words is {words}, expected {self.num_classes} different words, one for "
                "each class: correct --data.label_words."
            )
        tokens = encode_behind(" Output:", [f" {word}" for word in words], self.tokenizer)
        for word, ids in zip(words, tokens, strict=True):
            if len(ids) != 1:
                pieces = " ".join(self.tokenizer.convert_ids_to_tokens(ids))
                raise ValueError(
                    f"the label word {word!r} is {len(ids)} tokens of the tokenizer ({pieces}), "
                    "expected one: choose a commoner word in --data.label_words."
                )
        found = [ids[0] for ids in tokens]
        if len(set(found)) < len(found) or self.tokenizer.unk_token_id in found:
            raise ValueError(
                f"the label words {', '.join(map(repr, words))} have the tokens {found}, expected "
                "a known one for each: choose other words in --data.label_words."
            )
        return found

    @property
    def around_labels(self) -> dict[str, list[int]]:
        """The tokenizer's special tokens: `begins` a target, `ends` a prompt."""
        begins, _ = special_tokens(self.tokenizer, "text_target")
        _, ends = special_tokens(self.tokenizer)
        return {"begins": begins, "ends": ends}

    @property
    def num_classes(self) -> int:
        """Number of classes; 1 for regression."""
        raise NotImplementedError

    @property
    def regression(self) -> bool:
        return self.num_classes == 1

    def describe(self) -> dict[str, Any]:
        """Class names, the arguments of `SentenceSet`, and the columns of a table."""
        return {
            "kind": "sentences",
            "class_names": list(getattr(self, "class_names", [])),
            "tokenizer": tokenizer_state(self.tokenizer),
            "max_length": self.max_length,
            "regression": self.regression,
            "prompts": self.label_words is not None,
            "columns": [getattr(self, "text", TXT), getattr(self, "pair", None)],
        }

    def samples(self, part: str) -> SentenceSet:
        examples = self.examples(part)
        if part == "test" and all(example.label is None for example in examples):
            raise ValueError(
                f"None of the {len(examples)} examples of the test part has a label to score: add "
                "a column of labels, or use python -m recipes predict."
            )
        prompts = self.label_words is not None
        return SentenceSet(examples, self.tokenizer, self.max_length, self.regression, prompts)


class TextData(SentenceData):
    """Tables of sentences: csv, tsv or jsonl files with named columns.

    The ending of a file's name determines its format; see `tables.read_table`. Classes are the
    labels of the training file, sorted by number if all are numbers and else alphabetically; a
    label that appears only in another file is an error. Files that do not exist are looked for in
    the folder RECIPES_DATA.

    Args:
        train: file to train on.
        val: file to validate on; None: a share of the training file, drawn by `seed`.
        test: file to test on and to predict; None: the validation part. It may lack labels.
        text: column of the sentence.
        pair: column of the second sentence, if there is one.
        label: column of the label.
        regress: whether labels are numbers to predict, not classes.
        val_fraction: share of the training file for validation, see `val`.
        **kwargs: see `TokenizedData`.

    Raises:
        ValueError: if `val_fraction` is not between 0 and 1.
    """

    def __init__(
        self,
        train: str,
        val: str | None = None,
        test: str | None = None,
        text: str = "sentence",
        pair: str | None = None,
        label: str = "label",
        regress: bool = False,
        val_fraction: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 < val_fraction < 1:
            raise ValueError(
                f"val_fraction is {val_fraction}, expected a share between 0 and 1, both excluded: "
                "leave it at 0.1, or name a file in val."
            )
        self.files = {
            part: name and _located(name)
            for part, name in {"train": train, "val": val, "test": test}.items()
        }
        self.text, self.pair, self.label = text, pair, label
        self.regress, self.val_fraction = regress, val_fraction

    def setup(self, stage: str) -> None:
        """Read the test file before a training: what is wrong with it would be seen only after."""
        if stage == "fit" and self.files["test"]:
            self.examples("test")

    @property
    def num_classes(self) -> int:
        return 1 if self.regress else len(self._classes)

    @property
    def class_names(self) -> list[str]:
        """The labels as the training file has them, in the order of classes; [] for regression."""
        return [] if self.regress else list(self._classes)

    @functools.cached_property
    def _classes(self) -> dict[str, int]:
        found = set()
        rows = self._rows("train", labelled=True)
        for line, row in rows:
            if not row[self.label]:
                raise ValueError(
                    f"{self.files['train']}, line {line}: there is no {self.label}: fill it in, or "
                    "remove the line."
                )
            found.add(row[self.label])
        if len(found) < 2:
            raise ValueError(
                f"{self.files['train']}: the column {self.label!r} has {len(found)} different "
                "labels, expected two or more: name the right column in data.label, or set "
                "data.regress to predict numbers."
            )
        if len(found) > max(10, len(rows) / 2):
            rank_zero_warn(
                f"{self.files['train']}: the column {self.label!r} has {len(found)} different "
                f"labels in {len(rows)} lines, each of them a class: name the right column in "
                "data.label, or set data.regress to predict numbers."
            )
        whole = [name for name in sorted(found) if name.removeprefix("-").isdigit()]
        if twice := [name for name in whole if f"{name}.0" in found]:
            raise ValueError(
                f"{self.files['train']}: the labels {twice[0]!r} and '{twice[0]}.0' are one "
                "number: write it in one way."
            )
        return {name: number for number, name in enumerate(sorted(found, key=_natural(found)))}

    def load(self, part: str) -> list[Example]:
        if part == "predict" or (part == "test" and self.files["test"] is None):
            part = "test" if self.files["test"] else "val"
        if self.files[part] is not None:
            examples = self._read(part)
            if part == "train" and self.files["val"] is None:
                examples = hold_out(examples, self.val_fraction, self.seed)[0]
            return examples
        return hold_out(self._read("train"), self.val_fraction, self.seed)[1]

    def drawn(self, part: str) -> bool:
        own_file = part not in ("train", "val") and self.files["test"]
        return not (self.files["val"] or own_file)

    def _rows(self, part: str, labelled: bool) -> list[tuple[int, dict[str, str]]]:
        columns = [self.text, self.pair, self.label if labelled else None]
        return read_table(self.files[part] or "", [name for name in columns if name])

    def _read(self, part: str) -> list[Example]:
        path = self.files[part] or ""
        rows = self._rows(part, labelled=part != "test")
        labelled = any(self.label in row for _, row in rows)  # in jsonl only some may be
        examples = []
        for line, row in rows:
            text, place = row.get(self.label, ""), f"{path}, line {line}"
            label = self._label(text, place) if labelled else None
            examples.append(Example(row[self.text], row[self.pair] if self.pair else None, label))
        return examples

    def _label(self, text: str, place: str) -> float:
        if self.regress:
            score = read_score(text, place)
            if score == IGNORED:  # it would be neither trained on nor scored
                raise ValueError(
                    f"{place}: the score is {text}, which marks an example without a score here: "
                    "remove the line, or give all scores in another unit."
                )
            return score
        return read_class(text, self._classes, place)


def _located(name: str) -> str:
    """The file, or the one of that name in RECIPES_DATA if only that one exists."""
    below = Path(os.environ.get("RECIPES_DATA", "")) / name
    return str(below) if not Path(name).is_file() and below.is_file() else name


def _natural(labels: Iterable[str]) -> Callable[[str], Any]:
    """The sort key: by number if all labels are numbers; "nan" is none, and has no place."""
    try:
        if any(math.isnan(float(label)) for label in labels):
            return str
    except ValueError:
        return str
    return lambda label: (float(label), label)
