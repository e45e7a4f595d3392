"""E2E (Novikova et al., arXiv 1706.09254): a restaurant's data in, a sentence about it out.

Preparation as in LoRA's pipeline, which VeRA follows: a causal language model reads the meaning
representation (MR), a begin token, a space, the text, an end token, and is trained on what follows
the begin token.
"""

import csv
import random
import re
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from datamodules.loading import IGNORED, build_loader
from datamodules.text import (
    column_error,
    data_folder,
    draw,
    filling,
    load_tokenizer,
    open_lines,
    pad,
    train_tokenizer,
)

Format = Literal["official", "lora"]
_FILES = {
    "official": {"train": "trainset.csv", "val": "devset.csv", "test": "testset_w_refs.csv"},
    "lora": {"train": "train.txt", "val": "valid.txt", "test": "test.txt"},
}


class Row(NamedTuple):
    """A meaning representation and one text for it; None where a file has no texts."""

    mr: str
    ref: str | None


class TeacherForcedSet(Dataset):
    """Map-style dataset of MR + begin + " " + text + end; `labels` are -100 before the text."""

    def __init__(self, rows: Sequence[Row], tokenizer: Any, max_length: int) -> None:
        self.rows, self.tokenizer, self.max_length = rows, tokenizer, max_length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        mr, ref = self.rows[index]
        prompt = encode_prompt(mr, self.tokenizer)
        text = " " + " ".join((ref or "").split())  # references keep their double spaces, not these
        target = [*encode(text, self.tokenizer), self.tokenizer.eos_token_id]
        ids = [*prompt, *target][: self.max_length]
        if len(ids) <= len(prompt):
            raise ValueError(
                f"The meaning representation {mr!r} has {len(prompt)} tokens and leaves none of "
                f"max_length={self.max_length} to the text: set --data.max_length higher."
            )
        labels = [IGNORED] * len(prompt) + ids[len(prompt) :]
        # a tensor: `loading` marks a sample that only fills up by arithmetic on its labels
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": torch.tensor(labels)}


class PromptSet(Dataset):
    """Map-style dataset of MR + begin, to be continued; `labels` is the place of the MR."""

    def __init__(self, mrs: Sequence[str], tokenizer: Any) -> None:
        self.mrs, self.tokenizer = mrs, tokenizer

    def __len__(self) -> int:
        return len(self.mrs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = encode_prompt(self.mrs[index], self.tokenizer)
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": index}


class E2EData(LightningDataModule):
    """Batches for a causal language model, and the references to score what it writes.

    Training and validation: `input_ids`, `attention_mask`, `labels` (B, L), padded on the right.
    Test and prediction: every different MR once, `input_ids` and `attention_mask` (B, L) padded on
    the left, as generation needs it, and `labels` (B,) the place of the MR in
    `meaning_representations("test")` and `references("test")`; -100 marks a sample that only fills
    up the last round of several ranks. `prompt_dataloader` gives the same for another part.

    Args:
        tokenizer: transformers' name of one, or a folder with its files; its end-of-text token
            begins the text if it has no begin token. None: one with `vocab_size` entries is
            trained on the training part.
        root: folder with the files; $RECIPES_DATA/e2e_nlg when None.
        source: "folder" reads `root`; "generated" writes a small set in the official format with
            `write_e2e` and reads that.
        format: "official" csv files, or "lora": lines `slot : value | …||text` of train.txt,
            valid.txt and test.txt, in `root` or in its folder lora_format.
        vocab_size: see `tokenizer`.
        max_length: a sequence's tokens beyond this many are cut off.
        batch_size: sequences per device and training step.
        eval_batch_size: sequences per device and evaluation step; `batch_size` when None.
        num_workers: processes that tokenise; 0 does so in the training process.
        seed: of order and selection.
        limit: keep at most this many training rows, drawn by `seed`.
        eval_limit: keep at most this many MRs of validation and test, with all their references.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        root: str | None = None,
        source: Literal["folder", "generated"] = "folder",
        format: Format = "official",
        vocab_size: int = 2000,
        max_length: int = 512,
        batch_size: int = 8,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        limit: int | None = None,
        eval_limit: int | None = None,
    ) -> None:
        super().__init__()
        if source not in ("folder", "generated"):
            raise ValueError(f"source is {source!r}, expected folder or generated.")
        if format not in get_args(Format):
            raise ValueError(f"format is {format!r}, expected official or lora.")
        if source == "generated" and format != "official":
            raise ValueError(f"format is {format!r}, expected official: so the generator writes.")
        for name, value in {"limit": limit, "eval_limit": eval_limit}.items():
            if value is not None and value < 1:
                raise ValueError(
                    f"{name} is {value}, expected 1 or more: leave it out to keep everything."
                )
        self.tokenizer_name, self.trained_size, self.max_length = tokenizer, vocab_size, max_length
        self.root, self.source, self.format = root, source, format
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size or batch_size
        self.num_workers, self.seed = num_workers, seed
        self.limit, self.eval_limit = limit, eval_limit
        self._rows: dict[str, list[Row]] = {}
        self._tokenizer: Any = None

    # What there is. All of these work before the trainer calls `setup`.

    def rows(self, part: str) -> list[Row]:
        """The rows of "train", "val" or "test", in order, within the limits."""
        if part not in self._rows:
            rows = self._load(_FILES[self.format][part])
            if part == "train":
                rows = draw(rows, self.limit, self.seed)
            elif self.eval_limit is not None:
                kept = set(draw(list(group(rows)), self.eval_limit, self.seed))
                rows = [row for row in rows if row.mr in kept]
            self._rows[part] = rows
        return self._rows[part]

    def meaning_representations(self, part: str) -> list[str]:
        """The different MRs of a part, in order of first appearance."""
        return list(group(self.rows(part)))

    def references(self, part: str) -> list[list[str]]:
        """The references of each of `meaning_representations(part)`, as the file writes them."""
        return list(group(self.rows(part)).values())

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            if self.tokenizer_name:
                self._tokenizer = load_tokenizer(self.tokenizer_name)
            else:
                texts = (text for row in self.rows("train") for text in row if text)
                self._tokenizer = train_tokenizer(texts, self.trained_size)
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    @property
    def pad_token_id(self) -> int:
        return self.tokenizer.pad_token_id

    def _load(self, name: str) -> list[Row]:
        if self.source == "generated":
            with tempfile.TemporaryDirectory() as scratch:
                return read_e2e(write_e2e(scratch, seed=self.seed) / name)
        folder = data_folder(self.root, "e2e_nlg")
        if self.format == "lora":
            nested = folder / "lora_format"
            return read_lora(nested / name if nested.is_dir() else folder / name)
        return read_e2e(folder / name)

    # Loaders.

    def train_dataloader(self) -> DataLoader:
        return self._teacher_forced("train", self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return self._teacher_forced("val", self.eval_batch_size)

    def test_dataloader(self) -> DataLoader:
        return self.prompt_dataloader("test")

    def predict_dataloader(self) -> DataLoader:
        return self.prompt_dataloader("test")

    def prompt_dataloader(self, part: str) -> DataLoader:
        prompts = PromptSet(self.meaning_representations(part), self.tokenizer)
        return self._loader(prompts, part, self.eval_batch_size, training=False)

    def _teacher_forced(self, part: str, batch_size: int) -> DataLoader:
        sequences = TeacherForcedSet(self.rows(part), self.tokenizer, self.max_length)
        return self._loader(sequences, part, batch_size, training=part == "train")

    def _loader(
        self, dataset: PromptSet | TeacherForcedSet, part: str, batch_size: int, training: bool
    ) -> DataLoader:
        if len(dataset) == 0:
            raise ValueError(f"The {part} part has 0 rows, expected 1 or more: add some.")
        left = isinstance(dataset, PromptSet)
        return build_loader(
            dataset,
            batch_size,
            training=training,
            seed=self.seed,
            num_workers=self.num_workers,
            collate_fn=partial(pad, fill=filling(self.tokenizer), left=left),
            trainer=self.trainer,
        )


# Tokens.


def encode(text: str, tokenizer: Any) -> list[int]:
    """The tokens of `text`, without special ones."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_prompt(mr: str, tokenizer: Any) -> list[int]:
    """MR + begin token, which is the end-of-text token if the tokenizer has none of its own.

    Raises:
        ValueError: the tokenizer has no end-of-text token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no end-of-text token, expected one as "
            "causal language models have it: choose another with --data.tokenizer."
        )
    begin = tokenizer.bos_token_id
    return [*encode(mr, tokenizer), tokenizer.eos_token_id if begin is None else begin]


# Reading.


def read_e2e(path: str | Path) -> list[Row]:
    """The rows of an official csv file: headers `mr,ref`, the same in quotes, or `MR` alone.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another header, or a row of the wrong length (file and line).
    """
    reader = csv.reader(line + "\n" for line in open_lines(path))
    header = [name.strip().lower() for name in next(reader)]
    if header not in (["mr", "ref"], ["mr"]):
        raise ValueError(
            f"{path}, line 1: the columns are {', '.join(header)}, expected mr and ref, or MR "
            "alone: give an official file of E2E."
        )
    rows = []
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise column_error(path, reader.line_num, len(cells), len(header))
        rows.append(Row(cells[0], cells[1] if len(cells) == 2 else None))
    return rows


def read_lora(path: str | Path) -> list[Row]:
    """The rows of a file in LoRA's format, `slot : value | slot : value||text`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line does not have exactly one "||" (file and line).
    """
    rows = []
    for number, line in enumerate(open_lines(path), start=1):
        parts = line.split("||")
        if len(parts) != 2:
            raise ValueError(
                f"{path}, line {number}: there are {len(parts) - 1} separators ||, expected 1 "
                "between meaning representation and text: repair the line."
            )
        rows.append(Row(parts[0].strip(), parts[1].strip()))
    return rows


def group(rows: Iterable[Row]) -> dict[str, list[str]]:
    """The texts of each different MR, both in order of first appearance."""
    groups: dict[str, list[str]] = {}
    for mr, ref in rows:
        texts = groups.setdefault(mr, [])
        if ref is not None:
            texts.append(ref)
    return groups


def slots(mr: str) -> dict[str, str]:
    """`name[Alimentum], area[city centre]` as a dict.

    Raises:
        ValueError: `mr` is not of that form.
    """
    if not re.fullmatch(r"[^\[\],]+\[[^\]]*\](, [^\[\],]+\[[^\]]*\])*", mr):
        raise ValueError(
            f"The meaning representation is {mr!r}, expected slot[value], slot[value], …: see the "
            "official files of E2E."
        )
    return dict(re.findall(r"([^\[\],]+?)\[([^\]]*)\]", mr.replace("], ", "],")))


# A small set of the same format.

_NAMES = ["The Eagle", "Blue Spice", "Café Adriatic", "Green Man", "The Mill", "Loch Fyne", "Zizzi"]
_VALUES = {
    "eatType": ["pub", "restaurant", "coffee shop"],
    "food": ["Italian", "French", "Indian", "English"],
    "priceRange": ["cheap", "high", "less than £20", "£20-25", "more than £30"],
    "customer rating": ["low", "average", "5 out of 5"],
    "area": ["riverside", "city centre"],
    "familyFriendly": ["yes", "no"],
    "near": ["Café Rouge", "Burger King", "Clare Hall"],
}


def write_e2e(
    folder: str | Path, train: int = 256, val: int = 32, test: int = 32, seed: int = 0
) -> Path:
    """Writes trainset.csv, devset.csv, testset.csv and testset_w_refs.csv in the official format.

    Down to their differences: line ends, header, quotes, £ and é, two references for each MR, and
    a training part in shuffled order. No MR is in two parts.

    Args:
        folder: made if it is not there.
        train: number of training rows.
        val: number of validation rows.
        test: number of test rows.
        seed: of what is written.

    Returns:
        The folder.
    """
    rng, folder = random.Random(seed), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[str] = set()
    for name, count, end in (
        ("trainset.csv", train, "\r\n"),
        ("devset.csv", val, "\r\n"),
        ("testset_w_refs.csv", test, "\n"),
    ):
        rows: list[tuple[str, str]] = []
        while len(rows) < count:
            chosen = {"name": rng.choice(_NAMES)}
            for slot, values in _VALUES.items():
                if slot == "eatType" or rng.random() < 0.5:
                    chosen[slot] = rng.choice(values)
            mr = ", ".join(f"{slot}[{value}]" for slot, value in chosen.items())
            if mr not in seen:
                seen.add(mr)
                rows += [(mr, _say(chosen, turned)) for turned in (False, True)]
        rows = rows[:count]
        if name == "trainset.csv":
            rng.shuffle(rows)
        quoting: Any = csv.QUOTE_ALL if "refs" in name else csv.QUOTE_MINIMAL
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, quoting=quoting, lineterminator=end)
            writer.writerows([("mr", "ref"), *rows])
        if "refs" in name:
            mrs = [[mr] for mr in dict.fromkeys(mr for mr, _ in rows)]
            with open(folder / "testset.csv", "w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([["MR"], *mrs])
    return folder


def _say(values: dict[str, str], turned: bool) -> str:
    """A text for these slots, in one of two wordings."""
    name, food = values["name"], values.get("food", "")
    kind = f"{food} {values['eatType']}".strip()
    where = f" in the {values['area']}" if "area" in values else ""
    where += f" near {values['near']}" if "near" in values else ""
    text = f"There is a {kind} called {name}{where}." if turned else f"{name} is a {kind}{where}."
    if "priceRange" in values:
        text += f" Its prices are {values['priceRange']}."
    if "customer rating" in values:
        text += f" Customers rate it {values['customer rating']}."
    if "familyFriendly" in values:
        text += f" It is{'' if values['familyFriendly'] == 'yes' else ' not'} family-friendly."
    return text
