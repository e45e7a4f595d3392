"""The base of the DataModules for segmentation and detection; drawing generated scenes."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from PIL import Image, ImageDraw
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torchvision.transforms import v2

from datamodules.loading import PartsData, data_folder, require_choice


class SceneData(PartsData):
    """Base of the segmentation and detection DataModules: folder, image size, normalisation.

    A subclass writes a small generated dataset in `write`.

    Args:
        root: the folder of the data; the folder `folder_name` in $RECIPES_DATA when None.
        source: "folder" reads `root`; "generated" writes a small dataset in the same format and
            reads that.
        image_size: S, the side of the square that images are resized to, in pixels.
        batch_size: images per device and training step.
        mean: mean of the pixel values (0 to 1), per channel.
        std: standard deviation of the pixel values, per channel.
        generate: settings of the generated dataset: "train", "val" (numbers of images) and "size"
            (in pixels).
        **kwargs: see `PartsData`.
    """

    kind: ClassVar[str]  # of what is predicted, see `PartsData.describe`
    folder_name: ClassVar[str]

    def __init__(
        self,
        root: str | None = None,
        source: Literal["folder", "generated"] = "folder",
        image_size: int = 512,
        batch_size: int = 2,
        mean: tuple[float, float, float] = IMAGENET_DEFAULT_MEAN,
        std: tuple[float, float, float] = IMAGENET_DEFAULT_STD,
        generate: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        require_choice("source", source, ("folder", "generated"))
        self.root, self.source, self.generate = root, source, generate
        self.image_size, self.mean, self.std = image_size, mean, std
        self._scratch: tempfile.TemporaryDirectory | None = None

    @property
    def folder(self) -> Path:
        """The folder of the data; generated data are written at the first access."""
        if self.source == "folder":
            return data_folder(self.root, self.folder_name)
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory()  # goes when this object does
            self.write(self._scratch.name, seed=self.seed, **(self.generate or {}))
        return Path(self._scratch.name)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, in the order of their numbers."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    def write(self, folder: str, **settings: Any) -> None:
        """Write a small generated dataset, in the same format, into a folder."""
        raise NotImplementedError

    def files(self, part: str) -> list[Path]:
        """The images of a part, in order."""
        raise NotImplementedError

    def members(self, part: str) -> tuple[list[str], bool]:
        """The images' paths below the folder; the seed draws generated ones."""
        files = [str(file.relative_to(self.folder)) for file in self.files(part)]
        return files, self.source == "generated"

    def unlabelled(self, images: Sequence[Image.Image]) -> Any:
        """A batch of RGB pictures without labels, as the modules' `predict_step` takes it."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Class names, and the arguments that `unlabelled` depends on."""
        return {
            "kind": self.kind,
            "class_names": self.class_names,
            "transform": {
                "image_size": self.image_size,
                "mean": list(self.mean),
                "std": list(self.std),
            },
        }


class Square(v2.Transform):
    """Resizes the longer side to `size` pixels and pads at the right and at the bottom.

    Args:
        size: side of the square, in pixels.
        fill: padding value, as in torchvision's Pad.
    """

    def __init__(self, size: int, fill: Any) -> None:
        super().__init__()
        self.size, self.fill = size, fill

    def forward(self, *inputs: Any) -> Any:
        """The inputs, resized and padded in the same way."""
        height, width = self.seen(self.size, *v2.functional.get_size(inputs[0]))
        padding = [0, 0, self.size - width, self.size - height]
        return v2.Compose([v2.Resize([height, width]), v2.Pad(padding, fill=self.fill)])(*inputs)

    @staticmethod
    def seen(size: int, height: int, width: int) -> tuple[int, int]:
        """Height and width that an image of the given height and width takes up in the square."""
        scale = size / max(height, width)
        return max(1, round(height * scale)), max(1, round(width * scale))


SHAPES = ("square", "disc", "triangle")  # of the generated scenes


def draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, box: tuple[int, int, int, int], fill: Any
) -> None:
    """Draw one of SHAPES so that it touches the four sides of a box (x1, y1, x2, y2)."""
    if shape == "square":
        draw.rectangle(box, fill=fill)
    elif shape == "disc":
        draw.ellipse(box, fill=fill)
    else:
        x1, y1, x2, y2 = box
        draw.polygon([(x1, y2), (x2, y2), ((x1 + x2) // 2, y1)], fill=fill)
