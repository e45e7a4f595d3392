"""Handwritten digits that come with scikit-learn: real images where there is no network."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from datamodules.images import Augmentation, ImageData, Item, Splits


class DigitsData(ImageData):
    """scikit-learn's 1,797 digits of 8 × 8 pixels, grey, as RGB; ten classes of about 180.

    Source: the test part of Alpaydin and Kaynak's optical recognition of handwritten digits (UCI,
    1998). Validation serves as test.

    Args:
        image_size: 8 leaves the images as they are.
        augmentation: "light" moves a digit by up to image_size // 8 pixels.
        hflip: 0, because a mirrored digit is another digit, or none.
        val_fraction: 0.278 leaves 1,298 images to train on and 499 to validate on.
        **kwargs: see `ImageData`; `root` and `name` are not needed.
    """

    def __init__(
        self,
        image_size: int = 8,
        augmentation: Augmentation = "light",
        hflip: float = 0.0,
        val_fraction: float = 0.278,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            root=None,
            name=None,
            image_size=image_size,
            augmentation=augmentation,
            hflip=hflip,
            val_fraction=val_fraction,
            **kwargs,
        )

    def load(self) -> Splits:
        digits = load_digits()
        pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)  # the values are 0 to 16
        return Splits(
            [str(name) for name in digits.target_names],
            list(zip(pixels, digits.target.tolist(), strict=True)),
        )

    @staticmethod
    def read(source: np.ndarray) -> Image.Image:
        return Image.fromarray(source).convert("RGB")


class PairedDigitsData(DigitsData):
    """Numbers of two handwritten digits, 16 × 16 pixels; ten classes, A to J, of ten numbers each.

    A fixed random table assigns the hundred numbers to the classes, so a model has to read both
    digits and to memorise the table. Wide models do so better than narrow ones, while single digits
    are too easy for width to matter. Training and validation have different digits.

    Args:
        image_size: 16 leaves the images as they are.
        augmentation: "none", since there are 1.7 million different pairs of training digits.
        train_pairs: training images, drawn by `seed`.
        val_pairs: validation images, drawn by `seed`.
        **kwargs: see `DigitsData`.
    """

    def __init__(
        self,
        image_size: int = 16,
        augmentation: Augmentation = "none",
        train_pairs: int = 25600,
        val_pairs: int = 2000,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_size, augmentation, **kwargs)
        self.train_pairs, self.val_pairs = train_pairs, val_pairs

    def load(self) -> Splits:
        digits = DigitsData(seed=self.seed, val_fraction=self.val_fraction)
        self._drawn |= {"train", "val", "test"}
        return Splits(
            list("ABCDEFGHIJ"),
            paired(digits.train_set.items, self.train_pairs, self.seed),
            paired(digits.val_set.items, self.val_pairs, self.seed),
        )


def paired(digits: Sequence[Item], count: int, seed: int) -> list[Item]:
    """Random pairs of digits, side by side and stretched to twice the height, with their classes.

    With equal seeds, a longer list of pairs begins with the shorter one.
    """
    rng = np.random.default_rng(seed)
    classes = np.random.default_rng(0).permutation(np.arange(100) % 10)  # by number, 00 to 99
    pairs = []
    for first, second in rng.integers(len(digits), size=(count, 2)):
        (left, tens), (right, ones) = digits[first], digits[second]
        pixels = np.hstack([left, right]).repeat(2, axis=0)
        pairs.append((pixels, int(classes[10 * tens + ones])))
    return pairs
