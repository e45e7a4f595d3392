"""Instructions and responses in the form of Alpaca (Taori et al. 2023), for a language model.

The official file is one JSON list of objects with the keys instruction, input (may be empty, null
or missing) and output; a jsonl file has one such object on each line. Alpaca has no validation
part, so a share of the examples is held out.
"""

import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datamodules.loading import data_folder, hold_out, require_choice, require_share
from datamodules.prompted import PromptedData
from datamodules.tables import json_lines, read_json
from datamodules.tokens import encode

# Alpaca's prompts, with which Alpaca and many later models were trained
TEMPLATE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
TEMPLATE_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
_FOLLOW_UP = "{before}{response}\n\n### Instruction:\n{instruction}\n\n### Response:"
_KEYS = ("instruction", "input", "output")


class Instruction(NamedTuple):
    """An instruction in its template, and the response to it."""

    prompt: str
    response: str


class Question(NamedTuple):
    """A question of MT-Bench: two turns, the second of which refers to the first answer."""

    question_id: int
    category: str
    turns: list[str]


class InstructionData(PromptedData):
    """Instructions as prompts for a causal language model, and reference responses.

    A prompt is begin (if the tokenizer has such a token) + template; the text is the output + end.
    Prompt and output are tokenised separately, so that training and generation have equal prompts.
    See `PromptedData` for the batches; the test part is the validation part again.

    Args:
        root: folder of the file; $RECIPES_DATA/alpaca_2k when None.
        file: its name, .json or .jsonl.
        source: "folder" reads the file; "generated" writes a small one in the same form with
            `write_instructions` and reads that.
        val_fraction: share of the examples held out for validation, the same whatever the
            seed; 0 trains on all of them and has no validation part.
        max_length: see `TokenizedData`.
        batch_size: see `TokenizedData`.
        **kwargs: see `PromptedData`.
    """

    def __init__(
        self,
        root: str | None = None,
        file: str = "alpaca_2k.json",
        source: Literal["folder", "generated"] = "folder",
        val_fraction: float = 0.05,
        max_length: int = 512,
        batch_size: int = 4,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_length=max_length, batch_size=batch_size, **kwargs)
        require_choice("source", source, ("folder", "generated"))
        require_share(val_fraction, "0.05, or set 0 to train on everything")
        self.root, self.file, self.source = root, file, source
        self.val_fraction = val_fraction

    def load(self, part: str) -> list[Instruction]:
        if self.source == "generated":
            with tempfile.TemporaryDirectory() as scratch:
                examples = read_instructions(write_instructions(scratch, seed=self.seed))
        else:
            examples = read_instructions(data_folder(self.root, "alpaca_2k") / self.file)
        if self.val_fraction == 0:
            return examples if part == "train" else []
        train, val = hold_out(examples, self.val_fraction, seed=0)
        return train if part == "train" else val

    def drawn(self, part: str) -> bool:
        return self.val_fraction > 0

    def val_dataloader(self) -> Any:
        return super().val_dataloader() if self.val_fraction else []

    template = TEMPLATE.replace("{instruction}", "{input}")
    columns = ("instruction", "input")

    def describe(self) -> dict[str, Any]:
        """As of every prompt, with the template of an instruction that has an input."""
        paired = fill_template("{input}", "{pair}")
        return {**super().describe(), "pair_template": paired}

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        begin = self.tokenizer.bos_token_id
        begins = [] if begin is None else [begin]
        return [[*begins, *ids] for ids in encode(prompts, self.tokenizer)]


def fill_template(instruction: str, input: str = "") -> str:
    """Alpaca's prompt for an instruction, with or without an input."""
    template = TEMPLATE_WITH_INPUT if input else TEMPLATE
    return template.format(instruction=instruction, input=input)


def follow_up(before: str, response: str, instruction: str) -> str:
    """The prompt of a conversation's next turn: the turn before, then the new instruction.

    Args:
        before: the prompt of the turn before.
        response: the model's response to it.
        instruction: the new instruction.
    """
    return _FOLLOW_UP.format(before=before, response=response, instruction=instruction)


def read_questions(path: str | Path) -> list[Question]:
    """The questions of MT-Bench's question.jsonl (Zheng et al., arXiv 2306.05685).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON object with question_id, category and a list of turns.
    """
    questions = []
    for number, entry in json_lines(path):
        try:
            question = Question(*(entry[key] for key in Question._fields))
        except (KeyError, TypeError):
            raise ValueError(
                f"{path}, line {number}: expected an object with {', '.join(Question._fields)}, as "
                "MT-Bench's question.jsonl has them: give that file."
            ) from None
        questions.append(question)
    return questions


def read_instructions(path: str | Path) -> list[Instruction]:
    """The examples of a .json or .jsonl file in Alpaca's form, each in its template.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is no JSON list of objects, or an entry lacks a key or has a value that
            is not text (with file and number of the entry or line, from 1).
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".json", ".jsonl"):
        raise ValueError(
            f"{path} ends in {suffix or 'nothing'}, expected .json or .jsonl: rename the file."
        )
    if suffix == ".jsonl":
        places = {f"{path}, line {number}": entry for number, entry in json_lines(path)}
    else:
        entries = read_json(path)
        if not isinstance(entries, list):
            raise ValueError(
                f"{path} holds a {type(entries).__name__}, expected a list of objects with the "
                f"keys {', '.join(_KEYS)}: give a file in Alpaca's form."
            )
        places = {f"{path}, entry {n}": entry for n, entry in enumerate(entries, start=1)}
    return [_instruction(entry, place) for place, entry in places.items()]


def _instruction(entry: Any, place: str) -> Instruction:
    if not isinstance(entry, dict):
        raise ValueError(
            f"{place}: this is a {type(entry).__name__}, expected an object with the keys "
            f"{', '.join(_KEYS)}: repair the entry."
        )
    if entry.get("input") is None:
        entry = {**entry, "input": ""}
    for key in _KEYS:
        if key not in entry:
            raise ValueError(
                f"{place}: there is no key {key!r} among {', '.join(map(repr, entry)) or 'none'}, "
                f"expected {', '.join(_KEYS)}: add it (only the input may be left out)."
            )
        if not isinstance(entry[key], str):
            raise ValueError(
                f"{place}: {key} is {entry[key]!r}, expected a text: put it in quotation marks."
            )
    return Instruction(fill_template(entry["instruction"], entry["input"]), entry["output"])


# Generated data in the same format.

_NOUNS = ["lamp", "river", "apple", "window", "garden", "letter", "candle", "bridge", "violin"]
_COLOURS = {"red": "a cherry", "green": "a leaf", "blue": "the sky", "white": "snow"}


def write_instructions(folder: str | Path, count: int = 256, seed: int = 0) -> Path:
    """Writes alpaca_data.json in Alpaca's form: tasks that a small model can learn.

    There are five kinds of task, two of them without input; no example occurs twice.

    Args:
        folder: created if it does not exist.
        count: number of examples, at most 300.
        seed: seed of the selection.

    Returns:
        The file.

    Raises:
        ValueError: for more examples than there are.
    """
    every: list[tuple[str, str, str]] = []
    for noun in _NOUNS:
        every.append(("Write the word in capitals.", noun, noun.upper()))
        every.append(("Write the word twice.", noun, f"{noun} {noun}"))
        for other in _NOUNS:
            if other != noun:
                words = f"{noun} {other}"
                every.append(("Write the words in reverse order.", words, f"{other} {noun}"))
    for number in range(206):
        question = f"Which number comes after {number}?"
        every.append((question, "", f"After {number} comes {number + 1}."))
    for colour, thing in _COLOURS.items():
        every.append((f"Name something {colour}.", "", f"One {colour} thing is {thing}."))
    if count > len(every):
        raise ValueError(f"count is {count}, expected at most {len(every)}: ask for fewer.")
    chosen = random.Random(seed).sample(every, count)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    entries = [dict(zip(_KEYS, example, strict=True)) for example in chosen]
    path = folder / "alpaca_data.json"
    path.write_text(json.dumps(entries, indent=4, ensure_ascii=False), encoding="utf-8")
    return path


def write_questions(folder: str | Path, count: int = 8) -> Path:
    """Writes question.jsonl in MT-Bench's form, with tasks that a small model can learn.

    Args:
        folder: created if it does not exist.
        count: number of questions, at most 9.

    Returns:
        The file.
    """
    lines = [
        {
            "question_id": number,
            "category": "generated",
            "turns": [
                f"Write the word twice: {noun}.",
                "Now write your answer in capitals.",
            ],
        }
        for number, noun in enumerate(_NOUNS[:count], start=1)
    ]
    path = Path(folder) / "question.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
