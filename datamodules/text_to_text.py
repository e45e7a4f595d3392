"""Questions with answers and texts with summaries, for decoders and encoder–decoders.

APET (arXiv 2306.02320), App. D, has every task in the form `Input: {x} Output: {y}`. A decoder
reads both as one sequence and learns to generate the second; an encoder–decoder reads the input and
learns to generate the output.

Files, as published:

    SQuAD        train-v1.1.json, dev-v1.1.json, or train.json, dev.json: {"data":
                 [{"paragraphs": [{"context", "qas": [{"question", "answers": [{"text"}]}]}]}]}
    NQ-Open      NQ-open.train.jsonl, NQ-open.dev.jsonl, or train.jsonl, dev.jsonl: {"question",
                 "answer": [texts]} on each line
    SAMSum       train.json, val.json, test.json: [{"dialogue", "summary"}]
    Multi-News   train.src, train.tgt, val.src, …: a text on each line, the same lines in both
    columns      your own csv, tsv or jsonl, with the columns `text` and `target`

All but the last can come through `datasets` too, by name (source "hub"). A target without text is
refused; SQuAD 2's questions without an answer are left out.
"""

import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.utils.data import Dataset

from datamodules.loading import data_folder, hold_out, require_choice, require_share
from datamodules.prompted import PromptedData, TeacherForcedSet
from datamodules.tables import hub_rows, json_lines, open_lines, read_json, read_table
from datamodules.tokens import Role, encode_behind, filling, framed, special_tokens

Source = Literal["folder", "hub", "generated"]
Form = Literal["squad", "nq_open", "samsum", "multi_news", "columns"]


class Pair(NamedTuple):
    """An input and its target text."""

    text: str
    target: str


class TextToTextData(PromptedData):
    """Inputs, and target texts that a model should generate for them.

    Batches of training, validation and test: `input_ids`, `attention_mask`, `labels`, padded on the
    right. For a decoder they are (B, L), input and target, with labels -100 for the input's tokens;
    for an encoder–decoder the input is (B, L), and the labels are the target (B, M). For
    prompts see `PromptedData`; an input with several answers is one, with all as its references.

    An input that is too long is truncated; the word `Output:` still follows it.

    Args:
        form: format of the files, see the module's description.
        root: folder of the files; $RECIPES_DATA/<form> when None. With source "hub", a name that
            `datasets` knows or a folder that it reads, with the columns of the published set; the
            set's name on the hub when None.
        source: "folder" reads `root`; "hub" loads, and downloads, with `datasets`; "generated"
            writes a few questions in NQ-Open's form with `write_nq_open` and reads those.
        files: names of the train, val and test files, if they differ from the published ones
            (required for "columns"); without a test file the val file is the test part.
        encoder_decoder: whether the model is an encoder–decoder, such as T5.
        target_length: most tokens of a target, special ones included; longer ones are truncated.
        val_fraction: share of the training inputs, drawn by `seed`, that is held out for validation
            instead of the val file, which then serves as test only (NQ-Open has no test file); an
            input's answers stay together. 0 holds nothing out.
        **kwargs: see `PromptedData`.

    Raises:
        ValueError: for files that the form or the source does not take, or a `target_length` that
            leaves no token to the target.
    """

    def __init__(
        self,
        form: Form,
        root: str | None = None,
        source: Source = "folder",
        files: dict[str, str] | None = None,
        encoder_decoder: bool = False,
        target_length: int = 64,
        val_fraction: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_choice("form", form, get_args(Form))
        require_choice("source", source, get_args(Source))
        if source == "hub" and (form not in HUB or files):
            raise ValueError(
                f"form is {form!r} and files is {files}, expected one of {', '.join(HUB)} without "
                "files, which `datasets` loads: set --data.source folder to read your own."
            )
        if form == "columns" and not {"train", "val"} <= set(files or ()):
            raise ValueError(
                f"files is {files}, expected the names of your train and val files: set "
                '--data.files \'{"train": "train.csv", "val": "val.csv"}\'.'
            )
        if source == "generated" and (form != "nq_open" or files):
            raise ValueError(
                f"form is {form!r} and files is {files}, expected nq_open without files, which the "
                "generator writes: set --data.source folder to read your own."
            )
        if target_length < 2:
            raise ValueError(
                f"target_length is {target_length}, expected 2 or more: one token of the target, "
                "and the end-of-text token."
            )
        require_share(val_fraction, "0 to validate on the val file")
        self.val_fraction = val_fraction
        self.form, self.root, self.source = form, root, source
        self.names = {**FILES[form], **(files or {})}
        self.encoder_decoder, self.target_length = encoder_decoder, target_length
        if form == "columns":
            self.columns = ("text", None)

    def load(self, part: str) -> list[Pair]:
        if self.drawn(part):
            pairs = self._official("train")
            texts = list(dict.fromkeys(pair.text for pair in pairs))
            train, val = hold_out(texts, self.val_fraction, self.seed)
            kept = set(train if part == "train" else val)
            return [pair for pair in pairs if pair.text in kept]
        return self._official(part)

    def drawn(self, part: str) -> bool:
        return self.val_fraction > 0 and part in ("train", "val")

    def _official(self, part: str) -> list[Pair]:
        part = part if part in self.names else "val"
        if self.source == "hub":
            return list(read_hub(self.form, self.root or HUB[self.form], part))
        name = self.names[part]
        if self.source == "generated":
            with tempfile.TemporaryDirectory() as scratch:
                return list(read_nq_open(write_nq_open(scratch, self.seed) / name))
        path = data_folder(self.root, self.form) / name
        published = path.with_name(PUBLISHED.get(self.form, {}).get(name, name))
        return list(READERS[self.form](path if path.is_file() else published))

    template = "Input: {input}"  # before ` Output:`, which encode_prompts adds

    def filled(self, text: str) -> str:
        """The input itself, to which `encode_prompts` adds `Input:`."""
        return text

    @property
    def prompt_length(self) -> int:
        """Most tokens of a prompt; a decoder's max_length is of prompt and target together."""
        return self.max_length - (0 if self.encoder_decoder else self.target_length)

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        if self.encoder_decoder:
            begins, ends = self._around("text")
        else:
            begin = self.tokenizer.bos_token_id
            begins, ends = [] if begin is None else [begin], []
        return framed(prompts, self.tokenizer, self.prompt_length, begins, ends)

    def describe(self) -> dict[str, Any]:
        """As of every prompt, with texts of at most `target_length` tokens."""
        return {**super().describe(), "decoding": {"max_new_tokens": self.target_length}}

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        role: Role = "text_target" if self.encoder_decoder else "text"
        begins, ends = self._around(role) if self.encoder_decoder else ([], [self.end_token_id])
        room = self.target_length - len(begins) - len(ends)
        if room < 1:
            raise ValueError(
                f"target_length is {self.target_length}, expected {len(begins) + len(ends) + 1} or "
                "more: one token of the target, and the tokenizer's special ones."
            )
        spaced = [f" {text.strip()}" for text in texts]
        long = encode_behind("Output:", spaced, self.tokenizer, role)
        return [[*begins, *ids[:room], *ends] for ids in long]

    def _around(self, role: Role) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before and after a text: BART's `<s>` and `</s>`, T5's `</s>`.

        The end-of-text token is there for every tokenizer, since it ends a generated text.
        """
        begins, ends = special_tokens(self.tokenizer, role)
        return begins, ends if self.end_token_id in ends else [*ends, self.end_token_id]

    def samples(self, part: str) -> Dataset:
        if not self.encoder_decoder or part == "predict":
            return super().samples(part)
        texts, targets = zip(*self.examples(part), strict=True)
        pairs = list(zip(self.encode_prompts(texts), self.encode_texts(targets), strict=True))
        return EncoderDecoderSet(pairs, filling(self.tokenizer))


class EncoderDecoderSet(TeacherForcedSet):
    """A `TeacherForcedSet` for an encoder–decoder: the inputs alone, the targets as `labels`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids, target = self.pairs[index]
        # a tensor, since SeededDataset does arithmetic on the labels of samples that only fill up
        return {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            "labels": torch.tensor(target),
        }


def read_squad(path: Path) -> Iterator[Pair]:
    """Pairs of question and context with each answer; questions without answers are left out.

    The question comes first, since an input that is too long loses its end.
    """
    with _shape(path, "SQuAD's"):
        for article in read_json(path)["data"]:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    answers = [answer["text"] for answer in question["answers"]]
                    text = " ".join([question["question"], paragraph["context"]])
                    yield from _answered(text, answers, f"{path}, {question['question']!r}")


def read_nq_open(path: Path) -> Iterator[Pair]:
    """Pairs of a question with each of its answers."""
    with _shape(path, "NQ-Open's"):
        for number, row in json_lines(path):
            yield from _answered_in_nq_open(row, f"{path}, line {number}")


def read_samsum(path: Path) -> Iterator[Pair]:
    """Pairs of a dialogue and its summary."""
    with _shape(path, "SAMSum's"):
        for number, row in enumerate(read_json(path), start=1):
            yield _pair(row["dialogue"], row["summary"], f"{path}, entry {number}")


def read_multi_news(path: Path) -> Iterator[Pair]:
    """Pairs of an event's articles and their summary, from a src file and the tgt beside it.

    Raises:
        ValueError: if they have different numbers of lines, a summary is empty, or the name has no
            src.
    """
    before, src, after = path.name.rpartition("src")
    if not src:
        raise ValueError(
            f"{path.name} has no src in its name, expected one as train.src.cleaned, whose "
            "summaries are in train.tgt.cleaned or train.tgt: rename both files."
        )
    beside = path.with_name(f"{before}tgt{after}")
    if not beside.is_file():  # beside train.src.cleaned, train.tgt is published
        beside = path.with_name(f"{before}tgt")
    sources, targets = open_lines(path), open_lines(beside)
    if len(sources) != len(targets):
        raise ValueError(
            f"{path} has {len(sources)} lines and {beside.name} {len(targets)}, "
            "expected equal numbers: fetch both files of one release."
        )
    for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1):
        place = f"{beside}, line {number}"
        yield _summarised(source.replace("NEWLINE_CHAR", "\n"), target, place)


def _pair(text: Any, target: Any, place: str) -> Pair:
    """A pair whose target is not empty; its text may be, as in Multi-News, or null."""
    text = "" if text is None else text  # `datasets` reads an empty cell of a csv as null
    if not isinstance(text, str):
        raise ValueError(
            f"{place}: the input is {text!r}, expected a text: correct it, or remove it with its "
            "target."
        )
    if not isinstance(target, str) or not target.strip():
        raise ValueError(
            f"{place}: the target is {target!r}, expected a text: fill it in, or remove it with "
            "its input."
        )
    return Pair(text, target)


def _answered(text: Any, answers: Iterable[str], place: str) -> Iterator[Pair]:
    return (_pair(text, answer, place) for answer in dict.fromkeys(answers))


def _answered_in_nq_open(row: dict[str, Any], place: str) -> Iterator[Pair]:
    """Pairs of a question, which unlike SQuAD 2's always has an answer."""
    if isinstance(row["answer"], str):  # else each of its characters would be an answer
        raise ValueError(f"{place}: the answer is {row['answer']!r}, expected a list of answers.")
    return _answered(row["question"], row["answer"] or [""], place)


def _summarised(articles: str, summary: str, place: str) -> Pair:
    """A pair of Multi-News, on one line each."""
    return _pair(articles.replace("\n", " "), summary.removeprefix("– "), place)


def read_hub(form: str, name: str, part: str) -> Iterator[Pair]:
    """Pairs of a set that `datasets` loads, as its files give them.

    Args:
        form: a key of HUB.
        name: on the hub, or a folder that `datasets` reads.
        part: "train", "val" or "test".

    Raises:
        ValueError: it has other columns, or a target is empty.
    """
    rows = hub_rows(name, part)
    with _shape(Path(name), f"{HUB[form]}'s"):
        for number, row in enumerate(rows, start=1):
            place = f"{name}, {part}, row {number}"
            if form == "squad":
                text = " ".join([row["question"], row["context"]])
                yield from _answered(text, row["answers"]["text"], place)
            elif form == "nq_open":
                yield from _answered_in_nq_open(row, place)
            elif form == "samsum":
                yield _pair(row["dialogue"], row["summary"], place)
            else:
                yield _summarised(row["document"], row["summary"], place)


def read_columns(path: Path) -> Iterator[Pair]:
    """Pairs of the columns `text` and `target` of a table.

    Raises:
        ValueError: if a column is missing, or rows have no target.
    """
    rows = read_table(path, ["text", "target"], "rename the column")
    if empty := [line for line, row in rows if not row["target"].strip()]:
        raise ValueError(
            f"{path}, line {empty[0]}: there is no target, as in {len(empty)} of {len(rows)} rows: "
            "fill it in, or remove the line."
        )
    for _, row in rows:
        yield Pair(row["text"], row["target"])


READERS: Mapping[str, Callable[[Path], Iterator[Pair]]] = {
    "squad": read_squad,
    "nq_open": read_nq_open,
    "samsum": read_samsum,
    "multi_news": read_multi_news,
    "columns": read_columns,
}
HUB: Mapping[str, str] = {  # names in `datasets`
    "squad": "rajpurkar/squad",
    "nq_open": "google-research-datasets/nq_open",
    # copies: Samsung/samsum is gone (huggingface/datasets#7573), and alexfabbri/multi_news is a
    # script, which datasets 4 does not run (huggingface/datasets#7746)
    "samsum": "knkarthick/samsum",
    "multi_news": "Awesome075/multi_news_parquet",
}
FILES: Mapping[str, dict[str, str]] = {
    "squad": {"train": "train.json", "val": "dev.json"},
    "nq_open": {"train": "train.jsonl", "val": "dev.jsonl"},
    "samsum": {"train": "train.json", "val": "val.json", "test": "test.json"},
    "multi_news": {"train": "train.src", "val": "val.src", "test": "test.src"},
    "columns": {},
}
PUBLISHED: Mapping[str, dict[str, str]] = {  # names that are taken where those of FILES are missing
    "squad": {"train.json": "train-v1.1.json", "dev.json": "dev-v1.1.json"},
    "nq_open": {"train.jsonl": "NQ-open.train.jsonl", "dev.jsonl": "NQ-open.dev.jsonl"},
}


class _shape:
    """Context manager that turns a missing key or a wrong type into an error about the file."""

    def __init__(self, path: Path, whose: str) -> None:
        self.path, self.whose = path, whose

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if isinstance(error, KeyError | TypeError | AttributeError):
            raise ValueError(
                f"{self.path} is not in {self.whose} form ({type(error).__name__}: {error}): see "
                "datamodules/text_to_text.py for what is expected."
            ) from error


# Generated data in the same format.

_SUBJECTS = ("the cook", "a waiter", "my sister", "the old man", "our teacher")
_VERBS = ("likes", "sells", "paints", "carries", "buys")


def write_nq_open(folder: str | Path, seed: int = 0) -> Path:
    """Write train.jsonl and dev.jsonl in NQ-Open's form: questions that a small model can learn.

    Args:
        folder: created if it does not exist.
        seed: seed of the questions.

    Returns:
        The folder.
    """
    rng, folder = random.Random(seed), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    answers = {verb: rng.choice(_SUBJECTS) for verb in _VERBS}
    for part, count in (("train", 64), ("dev", 16)):
        verbs = [rng.choice(_VERBS) for _ in range(count)]
        pairs = [
            {"question": f"who {verb} {rng.choice(_SUBJECTS)}", "answer": [answers[verb]]}
            for verb in verbs
        ]
        lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
        (folder / f"{part}.jsonl").write_text(lines, encoding="utf-8")
    return folder
