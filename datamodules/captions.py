"""Reading lists of pictures with captions, and checking which pictures can be read.

The formats are ALBEF's json (`[{"image": …, "caption": text or list of texts}, …]`: COCO,
Flickr30k, SBU, Conceptual Captions), a csv or text file with the columns image and caption
(Flickr8k), and Flickr8k's `name.jpg#0<tab>caption`.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from datamodules.images import read_image
from datamodules.tables import csv_cells, named_cells, open_lines, read_list

log = logging.getLogger(__name__)
BadImages = Literal["refuse", "skip"]
JPEG_END = b"\xff\xd9"


@dataclass(frozen=True)
class Captioned:
    """An image's path, as in the list, and its captions."""

    image: str
    captions: tuple[str, ...]


def plain(text: str) -> str:
    """A text in lower case without punctuation, hyphens and slashes as spaces (as in ALBEF)."""
    text = re.sub(r"[,.'!?\"()*#:;~]", "", text.lower()).replace("<person>", "person")
    return " ".join(re.sub(r"[-/]", " ", text).split())


def read_captions(file: Path) -> list[Captioned]:
    """A list of captions, one entry for each image, in the order of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its format is not known, it has no images, an entry is no image with a text, a
            text is blank, or a row has more or fewer cells than the header.
    """
    captions: dict[str, list[str]] = {}
    for image, texts in _pairs(file):
        if blank := [text for text in texts if not text.strip()]:
            raise ValueError(
                f"{file}: a caption of {image} is {blank[0]!r}, expected a text: fill it in, or "
                "remove it."
            )
        captions.setdefault(image, []).extend(texts)
    if not captions:
        raise ValueError(f"{file} has no captions, expected one image or more with a text.")
    return [Captioned(image, tuple(texts)) for image, texts in captions.items()]


def _pairs(file: Path) -> list[tuple[str, tuple[str, ...]]]:
    if file.suffix.lower() == ".json":
        pairs = []
        for place, entry in enumerate(read_list(file)):
            image = entry.get("image") if isinstance(entry, dict) else None
            if not isinstance(image, str) or entry.get("caption", []) == []:
                raise ValueError(
                    f"{file}, entry {place} is {str(entry)[:60]!r}, expected one with an image and "
                    "a caption: a caption list without images cannot be paired."
                )
            pairs.append((image, texts_of(entry["caption"], f"{file}, entry {place}: the caption")))
        return pairs
    lines = open_lines(file)
    if "#0\t" in lines[0]:
        pairs = []
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            name, tab, caption = line.partition("\t")
            image, _, _ = name.rpartition("#")
            if not (image and tab):
                raise ValueError(
                    f"{file}, line {number} is {line[:60]!r}, expected an image's name, #, a "
                    "number, a tab and a caption: repair the line."
                )
            pairs.append((image, (caption,)))
        return pairs
    (_, header), *rows = csv_cells(file)
    if not {"image", "caption"} <= set(header):
        raise ValueError(
            f"{file} has the columns {', '.join(header) or 'none'}, expected image and caption: a "
            "caption list without images cannot be paired."
        )
    # a caption with a comma but without quotation marks makes a row too long
    return [(row["image"], (row["caption"],)) for _, row in named_cells(file, header, rows)]


def texts_of(value: Any, what: str) -> tuple[str, ...]:
    """The texts of an entry, which may be one text or a list of them.

    Raises:
        ValueError: it is neither; `what` begins the message.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"{what} is {str(value)[:60]}, expected a text or a list of texts: correct or remove "
            "the entry."
        )
    return tuple(texts)


def usable(images: Sequence[Path], bad: BadImages) -> list[bool]:
    """Which of the images exist and can be opened as images.

    Args:
        images: files; each is checked once.
        bad: "refuse" raises an error if one cannot; "skip" counts and names them in the log.

    Raises:
        FileNotFoundError: with "refuse", a file is missing.
        ValueError: with "refuse", a file is no image; or no image is left.
    """
    reasons = {file: _fault(file) for file in dict.fromkeys(images)}
    faults = {file: reason for file, reason in reasons.items() if reason}
    if faults and (bad == "refuse" or len(faults) == len(reasons)):
        file, reason = next(iter(faults.items()))
        kind = FileNotFoundError if reason == "missing" else ValueError
        raise kind(
            f"{len(faults)} of {len(reasons)} images cannot be read: {file} is {reason}; put them "
            "there, correct --data.images, or set --data.bad_images skip to leave out single ones."
        )
    if faults:
        shown = ", ".join(f"{file} ({reason})" for file, reason in list(faults.items())[:5])
        more = ", …" if len(faults) > 5 else ""
        log.warning("%d of %d images left out: %s%s", len(faults), len(reasons), shown, more)
    return [not reasons[file] for file in images]


def read_picture(file: Path) -> Image.Image:
    """A picture in RGB; see `images.read_image`.

    Raises:
        ValueError: it cannot be decoded.
    """
    try:
        return read_image(file)
    except OSError as error:
        raise ValueError(str(error)) from error


def _fault(file: Path) -> str:
    if not file.is_file():
        return "missing"
    try:
        with Image.open(file) as image:
            kind = image.format
            image.verify()
        if kind != "PNG" and not (kind == "JPEG" and _ends(file, JPEG_END)):
            with Image.open(file) as image:  # which `verify` does not decode: it may be cut short
                image.load()
    except Exception as error:  # decoders raise all kinds
        return f"unreadable ({type(error).__name__})"
    return ""


def _ends(file: Path, end: bytes) -> bool:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - len(end)))
        return stream.read() == end
