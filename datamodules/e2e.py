"""E2E (Novikova et al., arXiv 1706.09254): describe a restaurant in words, given its data.

Prepared as in LoRA's pipeline, which VeRA follows: a causal language model reads the meaning
representation (MR), a begin token, a space, the text and an end token, and is trained on the tokens
after the begin token. Of the two formats, that pipeline trains and scores on "lora": other names of
slots, and texts in tokens, as `price : more than £ 30`.
"""

import csv
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from datamodules.loading import data_folder, require_choice
from datamodules.prompted import PromptedData
from datamodules.tables import csv_cells, named_cells, open_lines
from datamodules.tokens import encode

Format = Literal["official", "lora"]
_FILES = {
    "official": {"train": "trainset.csv", "val": "devset.csv", "test": "testset_w_refs.csv"},
    "lora": {"train": "train.txt", "val": "valid.txt", "test": "test.txt"},
}


class Row(NamedTuple):
    """A meaning representation and one text for it; None where a file has no texts."""

    mr: str
    ref: str | None


class E2EData(PromptedData):
    """Meaning representations as prompts for a causal language model, and texts about them.

    A prompt is MR + begin (the end-of-text token, if the tokenizer has no begin token); the text is
    " " + ref + end. See `PromptedData` for the batches.

    Args:
        root: folder with the files; $RECIPES_DATA/e2e_nlg when None.
        source: "folder" reads `root`; "generated" writes a small set in the official format with
            `write_e2e` and reads that.
        format: "official" csv files, or "lora": lines `slot : value | …||text` of train.txt,
            valid.txt and test.txt, in `root` or in its folder lora_format.
        max_length: see `TokenizedData`.
        batch_size: see `TokenizedData`.
        **kwargs: see `PromptedData`.

    Raises:
        ValueError: for another format of generated data.
    """

    # LoRA's pipeline (arXiv 2106.09685, Appendix D), which VeRA (arXiv 2310.11454) follows
    decoding: ClassVar = {"beams": 10, "length_penalty": 0.8, "no_repeat_ngram": 4, "stop": "\n\n"}

    def __init__(
        self,
        root: str | None = None,
        source: Literal["folder", "generated"] = "folder",
        format: Format = "official",
        max_length: int = 512,
        batch_size: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_length=max_length, batch_size=batch_size, **kwargs)
        require_choice("source", source, ("folder", "generated"))
        require_choice("format", format, get_args(Format))
        if source == "generated" and format != "official":
            raise ValueError(
                f"format is {format!r}, expected official, which the generator writes."
            )
        self.root, self.source, self.format = root, source, format

    def load(self, part: str) -> list[Row]:
        rows = self._read(part)
        if part != "predict" and any(row.ref is None for row in rows):
            raise ValueError(
                f"the {part} part of E2E has meaning representations without texts, as the "
                "official testset.csv has them: give a file with the columns mr and ref."
            )
        return rows

    def _read(self, part: str) -> list[Row]:
        name = _FILES[self.format]["test" if part == "predict" else part]
        if self.source == "generated":
            with tempfile.TemporaryDirectory() as scratch:
                return read_e2e(write_e2e(scratch, seed=self.seed) / name)
        folder = data_folder(self.root, "e2e_nlg")
        if self.format == "lora":
            nested = folder / "lora_format"
            return read_lora(nested / name if nested.is_dir() else folder / name)
        return read_e2e(folder / name)

    template = "{input}"  # a meaning representation, such as "name[Eagle], food[French]"
    columns = ("mr", None)

    def encode_prompts(self, prompts: Sequence[str]) -> list[list[int]]:
        begin = self.tokenizer.bos_token_id
        begin = self.end_token_id if begin is None else begin
        return [[*ids, begin] for ids in encode(prompts, self.tokenizer)]

    def encode_texts(self, texts: Sequence[str | None]) -> list[list[int]]:
        # double spaces are removed in training texts, but not in references
        return super().encode_texts([" " + " ".join((text or "").split()) for text in texts])


# Reading.


def read_e2e(path: str | Path) -> list[Row]:
    """The rows of an official csv file: headers `mr,ref`, the same in quotes, or `MR` alone.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another header, or a row of the wrong length (file and line).
    """
    (_, names), *rows = csv_cells(path)
    header = [name.strip().lower() for name in names]
    if header not in (["mr", "ref"], ["mr"]):
        raise ValueError(
            f"{path}, line 1: the columns are {', '.join(header)}, expected mr and ref, or MR "
            "alone: give an official file of E2E."
        )
    return [Row(row["mr"], row.get("ref")) for _, row in named_cells(path, header, rows)]


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


# Generated data in the same format.

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

    Line ends, header, quotes, £ and é differ between the files as in the official ones. Each MR has
    two references and is in one part only; the training part is shuffled.

    Args:
        folder: created if it does not exist.
        train: number of training rows.
        val: number of validation rows.
        test: number of test rows.
        seed: seed of the rows.

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
