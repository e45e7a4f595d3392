"""Semantic segmentation: ADE20K's scene parsing benchmark, and datasets in its format.

    ADEChallengeData2016/objectInfo150.txt                      the classes, from 1
    ADEChallengeData2016/images/{training,validation}/*.jpg    (or .png, .tif, …)
    ADEChallengeData2016/annotations/{training,validation}/*.png

A pixel of an annotation is a class from 1, or 0 for "other", which is neither trained on nor
scored. Labels are therefore one less: classes from 0, and -100 for "other".
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from datamodules.images import read_image
from datamodules.loading import IGNORED
from datamodules.scenes import SHAPES, SceneData, draw_shape

NAME = "ADEChallengeData2016"
CLASSES = "objectInfo150.txt"
PARTS = {"train": "training", "val": "validation"}


class SegmentationSet(Dataset):
    """Map-style dataset of `(image (3, H, W), labels (H, W))`.

    Args:
        pairs: the files of an image and of its annotation.
        num_classes: largest value that an annotation may have.
        transform: transform of both together.
    """

    def __init__(self, pairs: list[tuple[Path, Path]], num_classes: int, transform: v2.Compose):
        self.pairs, self.num_classes, self.transform = pairs, num_classes, transform

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, labels = self.read(index)
        image, labels = self.transform(tv_tensors.Image(image), tv_tensors.Mask(labels))
        # plain tensors instead of torchvision's tv_tensors
        return image.as_subclass(Tensor), labels.as_subclass(Tensor).long()

    def read(self, index: int) -> tuple[Image.Image, Tensor]:
        """The image and its labels (H, W), int32, at their original size.

        Raises:
            OSError: an image cannot be read.
            ValueError: a label is above the number of classes, or the sizes differ; or the labels
                are colours.
        """
        image_file, label_file = self.pairs[index]
        image = read_image(image_file)
        try:
            with Image.open(label_file) as file:
                labels = torch.from_numpy(np.array(file, dtype=np.int32))
        # Pillow's plugins raise all of these
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise OSError(
                f"{label_file} cannot be read as labels ({error}): replace it, or remove it with "
                "its image."
            ) from error
        if labels.ndim > 2:
            raise ValueError(
                f"{label_file} has {labels.shape[2]} channels, expected the number of a class for "
                "each pixel: save it in greyscale or with a palette, not in the classes' colours."
            )
        if labels.shape != (image.height, image.width):
            raise ValueError(
                f"{label_file} is of shape {tuple(labels.shape)} and its image of height "
                f"{image.height} and width {image.width}: expected the same, replace one of them."
            )
        if labels.max() > self.num_classes:
            raise ValueError(
                f"{label_file} has the label {labels.max()}, expected 0 to {self.num_classes}: see "
                f"{CLASSES} for the classes, or give the annotations of the benchmark, not of the "
                "full ADE20K."
            )
        return image, torch.where(labels == 0, IGNORED, labels - 1)


class WholeImages(SegmentationSet):
    """The dataset for evaluation: images are resized, labels keep their original size."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, labels = self.read(index)
        return self.transform(tv_tensors.Image(image)).as_subclass(Tensor), labels.long()

    @staticmethod
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
        """Images and labels in lists, since their sizes differ."""
        images, labels = zip(*samples, strict=True)
        return list(images), list(labels)


class SegmentationData(SceneData):
    """Square crops for training, `(images (B, 3, S, S), labels (B, S, S))`; whole images to score.

    A label is a class or -100. Training: the shorter side is resized to between half and twice S,
    then a square is cropped (padded where the image is smaller), flipped with probability ½ and
    distorted in brightness, contrast, saturation and hue, as in mmsegmentation's ADE20K recipes
    except for their limit on one class's share of a crop. Evaluation, as theirs: the shorter side
    is resized to S, without their limit of 4 S on the longer one, and labels keep their original
    size; batches are lists of images (3, h, w) and of labels (H, W). The test part is the
    validation part again, since the labels of the test images are not public.

    Args:
        **kwargs: see `SceneData`; a batch size of at least 2 for batch normalisation.
    """

    kind = "segmentation"
    folder_name = NAME

    def write(self, folder: str, **settings: Any) -> None:
        write_ade20k(folder, **settings)

    @property
    def class_names(self) -> list[str]:
        return read_classes(self.folder / CLASSES)

    @property
    def num_classes(self) -> int:
        """The number of classes.

        Raises:
            ValueError: there is one class only, which would be every pixel's: 0 is not learned.
        """
        names = self.class_names
        if len(names) == 1:
            raise ValueError(
                f"{self.folder / CLASSES} has one class only, {names[0]!r}, expected two or more: "
                "pixels of 0 count nowhere, so give the background a number and a line of its own."
            )
        return len(names)

    def pairs(self, part: str) -> list[tuple[Path, Path]]:
        return list_pairs(self.folder, PARTS["train" if part == "train" else "val"])

    def files(self, part: str) -> list[Path]:
        return [image for image, _ in self.pairs(part)]

    def samples(self, part: str) -> SegmentationSet:
        pairs = self.pairs(part)
        if part == "train":
            return SegmentationSet(pairs, self.num_classes, self.train_transform())
        return WholeImages(pairs, self.num_classes, self.eval_transform())

    def unlabelled(self, images: Sequence[Image.Image]) -> tuple[list[Tensor], list[Tensor]]:
        transform = self.eval_transform()
        pixels = [transform(tv_tensors.Image(image)).as_subclass(Tensor) for image in images]
        # of labels, predict_step reads the size alone: (H, W), without H · W numbers
        return pixels, [torch.zeros(()).expand(image.height, image.width) for image in images]

    def train_transform(self) -> v2.Compose:
        size = self.image_size
        return v2.Compose(
            [
                v2.ToImage(),
                v2.RandomShortestSize(list(range(size // 2, 2 * size + 1)), max_size=8 * size),
                v2.RandomCrop(size, pad_if_needed=True, fill=self._filling()),
                v2.RandomHorizontalFlip(),
                v2.RandomPhotometricDistort(),
                *self._to_tensor(),
            ]
        )

    def eval_transform(self) -> v2.Compose:
        return v2.Compose([v2.ToImage(), v2.Resize(self.image_size), *self._to_tensor()])

    def _filling(self) -> dict[Any, Any]:
        """Padding values: the mean colour for images, IGNORED for labels."""
        return {tv_tensors.Image: [round(255 * x) for x in self.mean], tv_tensors.Mask: IGNORED}

    def _to_tensor(self) -> list[v2.Transform]:
        to_float = v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)
        return [to_float, v2.Normalize(self.mean, self.std)]


# Reading.


def read_classes(path: Path) -> list[str]:
    """The class names of an objectInfo file, in order: a header, then lines `1\t…\tname`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its numbers are not 1, 2, 3, … (file and line).
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, expected the classes of ADE20K's scene parsing benchmark: set "
            f"--data.root to its folder {NAME}."
        )
    names = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[1:], start=2):
        cells = line.split("\t")
        if len(cells) < 2 or cells[0].strip() != str(number - 1):
            raise ValueError(
                f"{path}, line {number}: the class's number is {cells[0].strip()!r}, expected "
                f"{number - 1} and, after a tab, its name: give the file as the benchmark has it."
            )
        names.append(cells[-1].strip())
    return names


def list_pairs(folder: Path, part: str) -> list[tuple[Path, Path]]:
    """Each image of "training" or "validation" with its annotation, in the order of their names.

    Raises:
        FileNotFoundError: there are no images, or one has no annotation.
    """
    files = (folder / "images" / part).glob("*")
    images = sorted(file for file in files if file.suffix.lower() in IMG_EXTENSIONS)
    if not images:
        raise FileNotFoundError(
            f"{folder / 'images' / part} has no images (known are {', '.join(IMG_EXTENSIONS)}), "
            f"expected ADE20K's there: set --data.root to the folder {NAME}."
        )
    labels = folder / "annotations" / part
    pairs = [(image, labels / f"{image.stem}.png") for image in images]
    for image, label in pairs:
        if not label.is_file():
            raise FileNotFoundError(f"{label} is missing, the annotation of {image}: add it.")
    return pairs


# Generated data in the same format.


def write_ade20k(
    folder: str | Path, train: int = 48, val: int = 16, size: int = 64, seed: int = 0
) -> Path:
    """Writes images of coloured shapes before a striped wall, annotated in ADE20K's format.

    Classes are the wall and the shapes, each in any colour; a frame around the image is "other".
    Some images are wide and some tall.

    Args:
        folder: created if it does not exist.
        train: number of training images.
        val: number of validation images.
        size: length of the shorter side, in pixels.
        seed: seed of the images.

    Returns:
        The folder.
    """
    rng, folder = random.Random(seed), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        f"{number}\t0.1\t{train}\t{val}\t0\t{name}"
        for number, name in enumerate(("wall", *SHAPES), start=1)
    ]
    text = "\n".join(["Idx\tRatio\tTrain\tVal\tStuff\tName", *rows])
    (folder / CLASSES).write_text(text + "\n", encoding="utf-8")
    for part, count in (("training", train), ("validation", val)):
        images, annotations = folder / "images" / part, folder / "annotations" / part
        images.mkdir(parents=True, exist_ok=True)
        annotations.mkdir(parents=True, exist_ok=True)
        for number in range(1, count + 1):
            image, labels = _scene(rng, size)
            name = f"ADE_{part[:5]}_{number:08d}"
            image.save(images / f"{name}.jpg", quality=95)
            labels.save(annotations / f"{name}.png")
    return folder


def _scene(rng: random.Random, size: int) -> tuple[Image.Image, Image.Image]:
    """An image and its labels."""
    width, height = rng.choice([(size, size), (size * 4 // 3, size), (size, size * 4 // 3)])
    image, labels = Image.new("RGB", (width, height)), Image.new("L", (width, height), 1)
    draw, label = ImageDraw.Draw(image), ImageDraw.Draw(labels)
    stripes = [tuple(rng.randrange(90) for _ in range(3)) for _ in range(2)]
    for x in range(0, width, 4):
        draw.rectangle([x, 0, x + 3, height], fill=stripes[x // 4 % 2])
    for kind in rng.sample(range(len(SHAPES)), rng.randint(1, len(SHAPES))):
        side = rng.randint(size // 4, size // 2)
        x, y = rng.randint(2, width - side - 3), rng.randint(2, height - side - 3)
        colour = tuple(rng.randint(120, 255) for _ in range(3))
        draw_shape(draw, SHAPES[kind], (x, y, x + side, y + side), colour)
        draw_shape(label, SHAPES[kind], (x, y, x + side, y + side), kind + 2)
    label.rectangle([0, 0, width - 1, height - 1], outline=0)
    return image, labels
