"""CUB-200-2011 birds in the official layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from datamodules.images import ImageData, Item, Splits, read_image

Box = tuple[float, float, float, float]  # x, y, width, height in pixels
Value = TypeVar("Value")


class CUBData(ImageData):
    """CUB-200-2011 (Wah et al., 2011): 5,994 training and 5,794 test images of 200 species.

    root (or root/CUB_200_2011) holds images.txt, image_class_labels.txt, train_test_split.txt,
    classes.txt, bounding_boxes.txt and images/. There is no official validation part: with
    `val_fraction` 0 the test images validate too.

    Args:
        crop_to_box: cut each image to its bounding box first.
        **kwargs: see `ImageData`.
    """

    def __init__(self, crop_to_box: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.crop_to_box = crop_to_box

    def load(self) -> Splits:
        inner = self.folder / "CUB_200_2011"
        base = inner if inner.is_dir() else self.folder
        images = read_table(base / "images.txt", str)
        classes = read_table(base / "classes.txt", str)
        if list(classes) != list(range(1, len(classes) + 1)):
            raise ValueError(
                f"{base / 'classes.txt'} numbers its classes otherwise than 1, 2, …, "
                f"{len(classes)}: take the official file."
            )

        def class_id(text: str) -> int:
            if int(text) not in classes:
                raise ValueError(f"class {text} is not in classes.txt")
            return int(text)

        labels = read_table(base / "image_class_labels.txt", class_id, images)
        in_training = read_table(base / "train_test_split.txt", is_one, images)
        boxes: dict[int, Box | None] = dict.fromkeys(images)
        if self.crop_to_box:
            boxes.update(read_table(base / "bounding_boxes.txt", parse_box, images))
        train: list[Item] = []
        test: list[Item] = []
        for image, name in images.items():
            path = base / "images" / name
            if not path.is_file():
                raise FileNotFoundError(
                    f"{path} is missing, but {base / 'images.txt'} names it as image {image}: "
                    "unpack the images there."
                )
            part = train if in_training[image] else test
            part.append(((str(path), boxes[image]), labels[image] - 1))
        return Splits(list(classes.values()), train, None, test)

    @staticmethod
    def read(source: tuple[str, Box | None]) -> Image.Image:
        path, box = source
        image = read_image(path)
        if box is None:
            return image
        x, y, width, height = box
        return image.crop((round(x), round(y), round(x + width), round(y + height)))


def is_one(text: str) -> bool:
    """Reads 0 or 1.

    Raises:
        ValueError: for any other text.
    """
    if text not in ("0", "1"):
        raise ValueError(f"{text!r} is neither 0 nor 1")
    return text == "1"


def parse_box(text: str) -> Box:
    """Reads "x y width height".

    Raises:
        ValueError: if these are not four numbers, or the box is empty.
    """
    x, y, width, height = map(float, text.split())
    if width < 1 or height < 1:
        raise ValueError(f"a box of {width} × {height} pixels is empty")
    return x, y, width, height


def read_table(
    path: Path, parse: Callable[[str], Value], images: dict[int, str] | None = None
) -> dict[int, Value]:
    """Reads lines of "<id> <value>".

    Args:
        path: the file.
        parse: converts the text of a value; its ValueError is raised again with file and line.
        images: the ids that the file must have, each once; None: any ids.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: a line has another format, or an id is unknown, repeated or missing.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: set --data.root to the unpacked CUB_200_2011 folder."
        )
    table: dict[int, Value] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        key, _, value = line.strip().partition(" ")
        try:
            if int(key) in table:
                raise ValueError(f"id {key} comes twice")
            if images is not None and int(key) not in images:
                raise ValueError(f"id {key} is not in images.txt")
            table[int(key)] = parse(value)
        except ValueError as error:
            raise ValueError(
                f'{path}, line {number}, {line!r}: expected "<id> <value>", but {error}; take the '
                "official file."
            ) from error
    if images is not None and (left_out := images.keys() - table.keys()):
        raise ValueError(
            f"{path} has no line for image {min(left_out)} of images.txt: take the official file."
        )
    return table
