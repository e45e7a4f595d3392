"""Film reviews, bad (0) or good (1): IMDB (Maas et al. 2011), Rotten Tomatoes (Pang & Lee 2005)."""

from pathlib import Path
from typing import Any, Literal, get_args

from datamodules.loading import data_folder, hold_out, require_choice
from datamodules.tables import hub_rows, open_lines
from datamodules.text import Example, SentenceData

Source = Literal["folder", "hub"]
HUB = {"rotten_tomatoes": "cornell-movie-review-data/rotten_tomatoes", "imdb": "stanfordnlp/imdb"}
SHARES = (0.8, 0.9)  # of rt-polarity's lines, in file order, where train and val end


class ReviewData(SentenceData):
    """Labelled reviews.

    Rotten Tomatoes has no official split. As on the hub, the first 80 % of either file are the
    training part, the next tenth the validation part and the last the test part. It contains nine
    in ten of SST-2's sentences, so models trained on SST-2 must not be scored on it. IMDB has its
    own test part; a tenth of its training part is held out for validation.

    Args:
        name: "rotten_tomatoes" (rt-polarity.pos, rt-polarity.neg) or "imdb" (train/pos/*.txt, …).
        root: folder of the files; $RECIPES_DATA/<name> when None. With source "hub", a name that
            `datasets` knows or a folder that it reads, with the columns `text` and `label`; the
            set's name on the hub when None.
        source: "folder" reads files as published; "hub" loads, and downloads, with `datasets`: the
            same parts in another order.
        **kwargs: see `SentenceData`.
    """

    num_classes = 2
    class_names = ("negative", "positive")

    def __init__(
        self,
        name: Literal["rotten_tomatoes", "imdb"],
        root: str | None = None,
        source: Source = "folder",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_choice("name", name, ("rotten_tomatoes", "imdb"))
        require_choice("source", source, get_args(Source))
        self.name: str = name
        self.root, self.source = root, source

    def load(self, part: str) -> list[Example]:
        part = "test" if part == "predict" else part
        if self.name == "imdb" and part != "test":
            train, val = hold_out(self._read("train"), 0.1, self.seed)
            return train if part == "train" else val
        return self._read(part)

    def _read(self, part: str) -> list[Example]:
        """A part of the set as published; IMDB has no "val"."""
        if self.source == "hub":
            return self._from_hub(part)
        folder = data_folder(self.root, self.name)
        if self.name == "imdb":
            return read_imdb(folder / part)
        return [
            Example(line.strip(), None, label)
            for label, ending in enumerate(("neg", "pos"))
            for line in _share(open_lines(folder / f"rt-polarity.{ending}"), part)
        ]

    def _from_hub(self, part: str) -> list[Example]:
        name, examples = self.root or HUB[self.name], []
        for row in hub_rows(name, part):
            if row.get("text") is None or row.get("label") not in (0, 1):
                raise ValueError(
                    f"{name} has a row {row}, expected a text and a label that is 0 or 1: correct "
                    "--data.root."
                )
            examples.append(Example(_plain(row["text"]), None, int(row["label"])))
        return examples

    def drawn(self, part: str) -> bool:
        return self.name == "imdb" and part in ("train", "val")


def read_imdb(folder: Path) -> list[Example]:
    """The reviews of neg/ and pos/, one in each .txt file, in the order of their names.

    Raises:
        FileNotFoundError: there are none.
    """
    examples = [
        Example(_plain(file.read_text(encoding="utf-8")), None, label)
        for label, kind in enumerate(("neg", "pos"))
        for file in sorted((folder / kind).glob("*.txt"))
    ]
    if not examples:
        raise FileNotFoundError(
            f"{folder} has no neg/*.txt and pos/*.txt, expected the reviews of aclImdb: unpack "
            "them there, or set --data.root."
        )
    return examples


def _plain(text: str) -> str:
    return text.replace("<br />", " ").strip()


def _share(lines: list[str], part: str) -> list[str]:
    first, second = (round(share * len(lines)) for share in SHARES)
    return {"train": lines[:first], "val": lines[first:second], "test": lines[second:]}[part]
