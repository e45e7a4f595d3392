"""Labelled sentences of a special domain, in their official formats, for further pre-training.

SciERC, ACL-ARC and ChemProt come from SciBERT's repository: a folder with train.txt, dev.txt and
test.txt, each line a JSON object with `text` and `label`. tweet_eval's sets (emotion, …) have
train_text.txt and train_labels.txt, a line for each tweet, and likewise val and test.
"""

import json
import random
import tempfile
from pathlib import Path
from typing import Any, Literal, get_args

from datamodules.loading import data_folder, require_choice
from datamodules.tables import json_lines, open_lines, read_class
from datamodules.text import Example, SentenceData

Source = Literal["folder", "generated"]


class DomainData(SentenceData):
    """Labelled sentences of one of the sets above, with a tokenizer that has a mask token.

    Classes are the labels of the training file, sorted; a label that appears only in another file
    is an error.

    Args:
        name: folder of the dataset in `root`.
        root: folder of the datasets; RECIPES_DATA when None.
        source: "folder" reads it; "generated" writes a small dataset with `write_domain` and reads
            that.
        **kwargs: see `TokenizedData`. A tokenizer without mask token gets `<mask>`, as its last
            entry.
    """

    def __init__(
        self,
        name: str = "scierc",
        root: str | None = None,
        source: Source = "folder",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_choice("source", source, get_args(Source))
        self.folder_name, self.root, self.source = name, root, source
        self._names: list[str] = []

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def class_names(self) -> list[str]:
        """The labels of the training file, by class."""
        if not self._names:
            self._names = sorted({label for _, label, _ in self._rows("train")})
        return self._names

    @property
    def tokenizer(self) -> Any:
        tokenizer = super().tokenizer
        if tokenizer.mask_token is None:
            tokenizer.add_special_tokens({"mask_token": "<mask>"})
        return tokenizer

    def load(self, part: str) -> list[Example]:
        classes = {name: number for number, name in enumerate(self.class_names)}
        rows = self._rows("test" if part == "predict" else part)
        return [
            Example(text, None, read_class(label, classes, place)) for text, label, place in rows
        ]

    def _rows(self, part: str) -> list[tuple[str, str, str]]:
        if self.source == "generated":
            with tempfile.TemporaryDirectory() as root:
                return read_domain(write_domain(root, seed=0), part)
        return read_domain(data_folder(self.root, "") / self.folder_name, part)


def read_domain(folder: str | Path, part: str) -> list[tuple[str, str, str]]:
    """Text, label and place (file and line) of each example of "train", "val" or "test".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no JSON object with text and label, or the files of texts and labels
            differ in length.
    """
    folder = Path(folder)
    texts = folder / f"{part}_text.txt"
    if texts.is_file():
        labels = folder / f"{part}_labels.txt"
        pair = open_lines(texts), open_lines(labels)
        if len(pair[0]) != len(pair[1]):
            raise ValueError(
                f"{texts} has {len(pair[0])} lines and {labels} {len(pair[1])}, expected as many: "
                "take both from one download."
            )
        return [
            (text, label, f"{labels}, line {number}")
            for number, (text, label) in enumerate(zip(*pair, strict=True), start=1)
        ]
    path = folder / ("dev.txt" if part == "val" else f"{part}.txt")
    rows = []
    for number, entry in json_lines(path):
        place = f"{path}, line {number}"
        if not isinstance(entry, dict) or not {"text", "label"} <= entry.keys():
            raise ValueError(f"{place}: this is no object with text and label: repair the line.")
        rows.append((str(entry["text"]), str(entry["label"]), place))
    return rows


# Generated data in the same format.

_RELATIONS = {
    "USED-FOR": ("is used for", "serves", "is applied to"),
    "PART-OF": ("belongs to", "is a part of", "lies within"),
    "COMPARE": ("is better than", "is compared with", "outperforms"),
    "CONJUNCTION": ("and also", "together with", "as well as"),
}
_FIRST = ("parser", "tagger", "encoder", "grammar", "lexicon", "corpus", "model", "kernel")
_SECOND = ("translation", "retrieval", "summaries", "speech", "vision", "dialogue", "search")
_ENDS = ("in this paper", "as we show", "on all tests", "with little data", "")


def write_domain(
    root: str | Path, train: int = 160, val: int = 48, test: int = 96, seed: int = 0
) -> Path:
    """Writes sentences with two marked entities and their relation, as SciERC has them.

    Args:
        root: folder for the three files.
        train: number of training examples.
        val: number of development examples.
        test: number of test examples.
        seed: seed of the sentences.

    Returns:
        The folder.
    """
    rng = random.Random(seed)
    folder = Path(root)
    for part, count in {"train": train, "dev": val, "test": test}.items():
        lines = []
        for index in range(count):
            label = list(_RELATIONS)[index % len(_RELATIONS)]
            relation, end = rng.choice(_RELATIONS[label]), rng.choice(_ENDS)
            first, second = rng.choice(_FIRST), rng.choice(_SECOND)
            text = f"The [[ {first} ]] {relation} << {second} >> {end}".strip() + " ."
            lines.append(json.dumps({"text": text, "label": label, "metadata": []}))
        (folder / f"{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
