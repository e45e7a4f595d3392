"""What models of segmentation and detection find in pictures: lists of parts, painted copies."""

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

LEGEND = 12  # most classes that a segmented picture's legend names


@dataclass(frozen=True)
class Part:
    """An object that a detector has found, or the pixels that a segmenter gives to a class.

    Attributes:
        label: the class.
        number: the class's number, from 0.
        score: how certain the detector is, 0 to 1; or the class's share of the picture's pixels.
        box: left, upper, right and lower side of an object, in pixels; None for a class's pixels.
        pixels: (H, W), true where the part is; None where a detector gives boxes alone.
    """

    label: str
    number: int
    score: float
    box: tuple[float, float, float, float] | None = None
    pixels: Tensor | None = field(default=None, compare=False, repr=False)


def parts_of_pixels(classes: Tensor, names: Sequence[str]) -> list[Part]:
    """The classes of a picture's pixels (H, W), the one with most pixels first."""
    numbers, counts = classes.unique(return_counts=True)
    parts = [
        Part(names[number], number, count / classes.numel(), pixels=(classes == number).cpu())
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    ]
    return sorted(parts, key=lambda part: -part.score)


def parts_of_detections(
    found: Mapping[str, Tensor], names: Sequence[str], threshold: float
) -> list[Part]:
    """The objects of a picture whose score is at least `threshold`, the most certain first.

    Args:
        found: "scores" (n,), "labels" (n,), "boxes" (n, 4), and "masks" (n, H, W) or none.
        names: of the classes.
        threshold: least score.
    """
    scores = found["scores"].float()
    order = [i for i in scores.argsort(descending=True).tolist() if scores[i] >= threshold]
    masks = found.get("masks")
    return [
        Part(
            names[number := int(found["labels"][i])],
            number,
            float(scores[i]),
            tuple(found["boxes"][i].tolist()),
            None if masks is None else masks[i].cpu(),
        )
        for i in order
    ]


def save_pictures(folder: Path, name: str, image: Image.Image, parts: Sequence[Part]) -> None:
    """Write a picture with its parts painted in, and the class of each pixel where that is known.

    Args:
        folder: of predictions.csv.
        name: of the picture, below the folders `pictures` and `labels`, without ".png".
        image: the picture.
        parts: what was found in it.
    """
    of_pixels = bool(parts) and parts[0].box is None
    written = {"pictures": painted(image, parts)}
    written |= {"labels": label_image(parts)} if of_pixels else {}
    for where, picture in written.items():
        file = folder / where / f"{name}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture.save(file)


def label_image(parts: Sequence[Part]) -> Image.Image:
    """The picture's classes in ADE20K's format: a pixel is the number of its class from 1."""
    assert parts and parts[0].pixels is not None
    labels = torch.zeros(parts[0].pixels.shape, dtype=torch.int32)
    for part in parts:
        labels[part.pixels] = part.number + 1
    deep = max(part.number for part in parts) > 254
    return Image.fromarray(labels.numpy().astype(np.uint16 if deep else np.uint8))


def painted(image: Image.Image, parts: Sequence[Part]) -> Image.Image:
    """A copy of an RGB picture with each part in the colour of its class, and its name."""
    pixels = np.array(image, dtype=np.float32)
    for part in parts:
        if part.pixels is not None:
            where = part.pixels.numpy()
            pixels[where] = (pixels[where] + colour(part.number)) / 2
    copy = Image.fromarray(pixels.round().astype(np.uint8))
    draw, height = ImageDraw.Draw(copy), max(10, min(copy.size) // 30)
    font = ImageFont.load_default(height)
    legend = [part for part in parts if part.box is None][:LEGEND]
    for place, part in enumerate(legend):
        write(draw, (0, place * 1.4 * height), f"{part.label} {part.score:.0%}", part.number, font)
    for part in reversed(parts):  # the most certain on top
        if part.box is not None:
            draw.rectangle(part.box, outline=colour(part.number), width=max(2, height // 8))
            corner = max(part.box[0], 0), max(part.box[1], 0)
            write(draw, corner, f"{part.label} {part.score:.0%}", part.number, font)
    return copy


def write(
    draw: ImageDraw.ImageDraw, corner: tuple[float, float], text: str, number: int, font: object
) -> None:
    """Write a text on a field of the class's colour, whose upper left corner is given."""
    draw.rectangle(draw.textbbox(corner, text, font=font), fill=colour(number))  # type: ignore
    draw.text(corner, text, fill="black", font=font)  # type: ignore[arg-type]


def colour(number: int) -> tuple[int, int, int]:
    """A bright colour for a class; those of neighbouring numbers are far apart in hue."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618 % 1, 0.65, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)
