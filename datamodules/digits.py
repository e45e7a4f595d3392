"""Handwritten digits that come with scikit-learn: real images where there is no network."""

from typing import Any

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from datamodules.images import Augmentation, ImageData, Splits


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
