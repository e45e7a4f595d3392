"""The base of the text DataModules; labelled sentences, and tables of your own.

`TokenizedData` is what all of them share: parts, limits and a tokenizer. `SentenceData` is for one
or two sentences with a label, whatever the source; glue.py builds on it. `TextData` reads csv, tsv
and jsonl files whose columns have names. prompted.py is for texts that a language model writes.
"""

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.loading import IGNORED, PartsData


class Example(NamedTuple):
    """One or two sentences; `label` is a class, a score, or None where the data give none."""

    first: str
    second: str | None = None
    label: float | None = None


class SentenceSet(Dataset):
    """Map-style dataset of tokenised examples: `input_ids`, `attention_mask`, …, `labels`."""

    def __init__(
        self, examples: Sequence[Example], tokenizer: Any, max_length: int, regression: bool
    ) -> None:
        self.examples, self.tokenizer = examples, tokenizer
        self.max_length, self.regression = max_length, regression

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        first, second, label = self.examples[index]
        sample = dict(self.tokenizer(first, second, truncation=True, max_length=self.max_length))
        label = IGNORED if label is None else label
        return {**sample, "labels": float(label) if self.regression else int(label)}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        return pad(samples, filling(self.tokenizer))


class TokenizedData(PartsData):
    """Text in parts, and its tokenizer: the base of the text DataModules.

    A subclass says in `load` what a part holds, and in `samples` what a model is given. A part
    is read when it is first asked for, so that a missing one matters only to those who use it.

    Args:
        tokenizer: transformers' name of one, or a folder with its files. None: one with
            `vocab_size` entries is trained on the training part.
        vocab_size: see `tokenizer`.
        max_length: an example's tokens beyond this many are cut off.
        batch_size: examples per device and training step.
        eval_batch_size: examples per device and evaluation step; `batch_size` when None.
        num_workers: processes that make samples; 0 does so in the training process.
        seed: of order, splits and selection.
        limit: keep at most this many training examples, drawn by `seed`.
        eval_limit: likewise for validation and test.
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
        for name, value in {"limit": limit, "eval_limit": eval_limit}.items():
            if value is not None and value < 1:
                raise ValueError(
                    f"{name} is {value}, expected 1 or more: leave it out to keep all examples."
                )
        self.tokenizer_name, self.trained_size, self.max_length = tokenizer, vocab_size, max_length
        self.limit, self.eval_limit = limit, eval_limit
        self._parts: dict[str, list] = {}
        self._tokenizer: Any = None

    # What a subclass writes.

    def load(self, part: str) -> list:
        """All examples of "train", "val", "test" or "predict": tuples that hold their texts."""
        raise NotImplementedError

    def select(self, part: str, examples: list) -> list:
        """Not more of the examples than `limit` or `eval_limit`."""
        limits = {"train": self.limit, "val": self.eval_limit, "test": self.eval_limit}
        return draw(examples, limits.get(part), self.seed)

    # What there is. All of these work before the trainer calls `setup`.

    def examples(self, part: str) -> list:
        """The examples of a part, in order, within the limits.

        Raises:
            ValueError: there is none.
        """
        if part not in self._parts:
            found = self.select(part, self.load(part))
            if not found:
                raise ValueError(f"The {part} part has 0 examples, expected 1 or more: add some.")
            self._parts[part] = found
        return self._parts[part]

    def members(self, part: str) -> tuple[list[str], bool]:
        """The examples of a part as JSON; see `PartsData.members`."""
        examples = self.examples(part)
        lines = [json.dumps(example, ensure_ascii=False) for example in examples]
        return lines, len(examples) < len(self.load(part))

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
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def pad_token_id(self) -> int:
        return self.tokenizer.pad_token_id


class SentenceData(TokenizedData):
    """Labelled sentences in, padded batches out: the dict that transformers' models take.

    Keys: `input_ids` and `attention_mask` (B, L) with L the longest of the batch, `token_type_ids`
    if the tokenizer makes them, and `labels` (B,): int64 classes, or float32 scores. A label that
    is not there (an unlabelled part, or a sample that only fills up the last evaluation round of
    several ranks) is -100. Of a pair that is too long, the longer sentence is cut off first.

    A subclass says in `load` which `Example`s a part holds. Arguments: see `TokenizedData`.
    """

    @property
    def num_classes(self) -> int:
        """Number of classes; 1 for regression."""
        raise NotImplementedError

    @property
    def regression(self) -> bool:
        return self.num_classes == 1

    def samples(self, part: str) -> SentenceSet:
        examples = self.examples(part)
        return SentenceSet(examples, self.tokenizer, self.max_length, self.regression)


class TextData(SentenceData):
    """Tables of sentences: csv, tsv or jsonl files with named columns.

    The ending of a file's name says its format. csv is quoted as spreadsheets quote; in tsv a
    quotation mark is a character like others; jsonl has an object on each line. Classes are the
    labels of the training file in order, of numbers if all are numbers and else of letters; a
    label that appears elsewhere only is an error.

    Args:
        train: file to train on.
        val: file to validate on; None: a share of the training file, drawn by `seed`.
        test: file to test on and to predict; None: the validation part. It may lack labels.
        text: column of the sentence.
        pair: column of the second sentence, if there is one.
        label: column of the label.
        regress: labels are numbers to predict, not classes.
        val_fraction: see `val`.
        **kwargs: see `TokenizedData`.
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
        self.files = {"train": train, "val": val, "test": test}
        self.text, self.pair, self.label = text, pair, label
        self.regress, self.val_fraction = regress, val_fraction
        self._names: list[str] = []

    @property
    def num_classes(self) -> int:
        return 1 if self.regress else len(self.class_names)

    @property
    def class_names(self) -> list[str]:
        """The labels as the training file writes them, by class; none for regression."""
        if not self._names and not self.regress:
            found = {row[self.label] for _, row in self._rows("train", labelled=True)}
            self._names = sorted(found, key=_natural(found))
        return self._names

    def load(self, part: str) -> list[Example]:
        if part == "predict" or (part == "test" and self.files["test"] is None):
            part = "test" if self.files["test"] else "val"
        if self.files[part] is not None:
            examples = self._read(part)
            if part == "train" and self.files["val"] is None:
                examples = hold_out(examples, self.val_fraction, self.seed)[0]
            return examples
        return hold_out(self._read("train"), self.val_fraction, self.seed)[1]

    def members(self, part: str) -> tuple[list[str], bool]:
        lines, drawn = super().members(part)
        own_file = part not in ("train", "val") and self.files["test"]
        return lines, drawn or not (self.files["val"] or own_file)

    def _rows(self, part: str, labelled: bool) -> list[tuple[int, dict[str, str]]]:
        columns = [self.text, self.pair, self.label if labelled else None]
        return read_table(self.files[part] or "", [name for name in columns if name])

    def _read(self, part: str) -> list[Example]:
        path = self.files[part] or ""
        labelled = part != "test" or self.label in table_columns(path)
        examples = []
        for line, row in self._rows(part, labelled):
            label = self._label(row[self.label], f"{path}, line {line}") if labelled else None
            examples.append(Example(row[self.text], row[self.pair] if self.pair else None, label))
        return examples

    def _label(self, text: str, place: str) -> float:
        if self.regress:
            return read_score(text, place)
        return read_class(text, self.class_names, place)


# Reading.


def read_class(text: str, names: Sequence[str], place: str) -> int:
    """The class with this name. Raises ValueError, which names the place, if there is none."""
    if text not in names:
        raise ValueError(
            f"{place}: the label is {text!r}, expected one of {', '.join(map(repr, names))}: "
            "correct the line, or give the training part an example of that label."
        )
    return list(names).index(text)


def read_score(text: str, place: str) -> float:
    """The finite number that `text` writes. Raises ValueError, which names the place, if none."""
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not np.isfinite(number):
        raise ValueError(f"{place}: the score is {text!r}, expected a number: correct the line.")
    return number


def open_lines(path: str | Path) -> list[str]:
    """The lines of a UTF-8 file, with or without a byte order mark, without their ends.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty or not UTF-8.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{path} is not there, expected a text file: correct its name, or put it there."
        )
    try:
        # not splitlines(): a sentence may hold what Unicode takes for a line end
        lines = Path(path).read_bytes().decode("utf-8-sig").replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8.") from error
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise ValueError(f"{path} is empty, expected lines of text: put the data in it.")
    return lines


def column_error(path: str | Path, line: int, count: int, expected: int) -> ValueError:
    """The error of a row that has more or fewer columns than its header."""
    return ValueError(
        f"{path}, line {line}: the row has {count} columns, expected {expected}: repair the line."
    )


def read_table(path: str | Path, columns: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """The rows of a csv, tsv or jsonl file, each with the number of the line it ends on.

    Args:
        path: the file.
        columns: names that must be there.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown ending, a column that is missing, a row of the wrong length or a
            line that is no JSON object.
    """
    suffix, lines = Path(path).suffix.lower(), open_lines(path)
    rows: list[tuple[int, dict[str, str]]] = []
    if suffix == ".jsonl":
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path}, line {number}: this is no JSON ({error}): repair the line."
                ) from error
            if not isinstance(found, dict):
                raise ValueError(
                    f"{path}, line {number}: this is a {type(found).__name__}, expected an object "
                    "with the columns as keys: repair the line."
                )
            _require(columns, found, f"{path}, line {number}")
            rows.append((number, {name: _as_text(value) for name, value in found.items()}))
        return rows
    header = table_columns(path)
    _require(columns, header, str(path))
    if suffix == ".tsv":
        split = [(number, line.split("\t")) for number, line in enumerate(lines, start=1) if line]
    else:
        reader = csv.reader(line + "\n" for line in lines)
        split = [(reader.line_num, row) for row in reader if row]
    for number, cells in split[1:]:
        if len(cells) != len(header):
            raise column_error(path, number, len(cells), len(header))
        rows.append((number, dict(zip(header, cells, strict=True))))
    return rows


def table_columns(path: str | Path) -> list[str]:
    """The names of a table's columns; of jsonl, those of its first line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the ending is none of csv, tsv and jsonl.
    """
    suffix, first = Path(path).suffix.lower(), open_lines(path)[0]
    if suffix == ".jsonl":
        try:
            found = json.loads(first)
        except json.JSONDecodeError:
            return []  # read_table says what is wrong
        return list(found) if isinstance(found, dict) else []
    if suffix == ".tsv":
        return first.split("\t")
    if suffix == ".csv":
        return next(csv.reader([first]))
    raise ValueError(
        f"{path} ends in {suffix or 'nothing'}, expected .csv, .tsv or .jsonl: rename the file."
    )


def _require(columns: Iterable[str], found: Iterable[str], place: str) -> None:
    if missing := [name for name in columns if name not in found]:
        raise ValueError(
            f"{place}: there is no column {missing[0]!r}, the columns are "
            f"{', '.join(map(repr, found))}: set the names with text, pair and label."
        )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _natural(labels: Iterable[str]) -> Callable[[str], Any]:
    """The sort key: by number if all labels are numbers."""
    try:
        for label in labels:
            float(label)
    except ValueError:
        return str
    return lambda label: (float(label), label)


def draw(items: list, count: int | None, seed: int) -> list:
    """`count` of the items, drawn by `seed`, in their order; all of them when None."""
    if count is None or count >= len(items):
        return items
    chosen = np.random.default_rng(seed).permutation(len(items))[:count]
    return [items[place] for place in sorted(chosen.tolist())]


def hold_out(items: list, fraction: float, seed: int) -> tuple[list, list]:
    """The items without a share that `seed` draws, and the share, one item or more of it."""
    count = max(1, round(len(items) * fraction))
    chosen = set(np.random.default_rng(seed).permutation(len(items))[:count].tolist())
    return (
        [item for place, item in enumerate(items) if place not in chosen],
        [item for place, item in enumerate(items) if place in chosen],
    )


def data_folder(root: str | None, default: str) -> Path:
    """`root`, or the folder `default` in RECIPES_DATA when None.

    Raises:
        ValueError: neither is given.
        FileNotFoundError: the folder is not there.
    """
    named = os.environ.get("RECIPES_DATA")
    if root is None and not named:
        raise ValueError(
            "No folder of text is given: set --data.root, or RECIPES_DATA in the environment, "
            "or --data.source generated to try things out."
        )
    folder = Path(root).expanduser() if root else Path(named or "").expanduser() / default
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder, expected the data there: correct --data.root."
        )
    return folder


# Tokens.


def load_tokenizer(name: str) -> Any:
    """transformers' tokenizer of this name or in this folder; it always has a padding token.

    One that comes without (GPT-2's, Llama's) pads with its end-of-text token.

    Raises:
        OSError: there is no such tokenizer, or no network to fetch it.
        ValueError: the tokenizer has neither a padding token nor an end-of-text token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise OSError(
            f"The tokenizer {name!r} cannot be loaded, expected a folder with its files or a name "
            f"that transformers can fetch ({str(error).splitlines()[0]}): correct --data.tokenizer."
        ) from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"The tokenizer {name!r} has neither a padding nor an end-of-text token, expected "
                "one of them: add a pad_token to its files."
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of these texts; no text is beyond it.

    One sentence becomes `<s> a </s>`, two `<s> a </s> b </s>`. Ids: 0 `<pad>`, 1 `<s>` (begin,
    class), 2 `</s>` (end, separator), then the 256 bytes, then merges.

    Raises:
        ValueError: `vocab_size` leaves no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>"]
    if vocab_size < 256 + len(special):
        raise ValueError(
            f"vocab_size is {vocab_size}, expected {256 + len(special)} or more: one entry for "
            "each byte and three special ones."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B </s>",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        model_max_length=1_000_000,
        model_input_names=["input_ids", "attention_mask"],
    )


def filling(tokenizer: Any) -> dict[str, int]:
    """What a tokenizer's columns are padded with."""
    return {
        "input_ids": tokenizer.pad_token_id,
        "attention_mask": 0,
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
        "labels": IGNORED,
    }


def pad(
    samples: Sequence[dict[str, Any]], fill: dict[str, int], left: bool = False
) -> dict[str, Tensor]:
    """A batch of samples: lists are padded to the longest (B, L), numbers become one tensor (B,).

    Args:
        samples: all with the same keys; a list may be a tensor (L,).
        fill: what each list is padded with, by key.
        left: pad at the front, as generation needs it.
    """
    batch = {}
    for key, first in samples[0].items():
        values = [_plain(sample[key]) for sample in samples]
        if isinstance(first, (int, float)):
            batch[key] = torch.tensor(values)
            continue
        longest = max(map(len, values))
        rows = []
        for value in values:
            extra = [fill[key]] * (longest - len(value))
            rows.append(extra + value if left else value + extra)
        batch[key] = torch.tensor(rows)
    return batch


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value
