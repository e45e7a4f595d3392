"""Images with one label each: the base of the image DataModules.

The data families are in image_folders.py, imagenet.py, cub.py, torchvision_sets.py and digits.py.
"""

import contextlib
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from PIL import Image, ImageOps
from timm.data import Mixup, auto_augment, create_transform
from timm.data.mixup import mixup_target
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms as T

from datamodules.loading import PartsData, listed, require_choice, require_limits

Item = tuple[Any, int]  # (argument of `read`, label)
Augmentation = Literal["timm", "light", "none"]


def posterize(image: Image.Image, bits_to_keep: int, **_: Any) -> Image.Image:
    """timm's posterize, but a black image at 0 bits, which RandAugment's highest level uses.

    Pillow gave black at 0 bits before version 13, and refuses it since.
    """
    if bits_to_keep < 1:
        return Image.new(image.mode, image.size)
    return auto_augment.posterize(image, bits_to_keep)


for _name in ("Posterize", "PosterizeOriginal", "PosterizeIncreasing"):
    auto_augment.NAME_TO_OP[_name] = posterize


class Splits(NamedTuple):
    """The classes and images that `ImageData.load` lists. None: the data have no such part."""

    class_names: list[str]
    train: list[Item]
    val: list[Item] | None = None
    test: list[Item] | None = None


def read_image(path: str | Path) -> Image.Image:
    """The image in the file, as RGB; see `in_rgb`.

    Raises:
        OSError: the file is missing, truncated or no image, has more pixels than Pillow opens, or
            is of a mode that `in_rgb` refuses.
    """
    try:
        with Image.open(path) as image:
            return in_rgb(image)
    # Pillow's plugins raise all of these
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise OSError(
            f"{path} cannot be read as an image ({error}): replace or remove it."
        ) from error


def in_rgb(image: Image.Image) -> Image.Image:
    """The image as RGB, whatever its mode (greyscale, palette, RGBA, CMYK), and upright.

    It is turned as its EXIF data say, if it has any: a phone stores a portrait lying on its side.
    Greyscale images of 16 bits are reduced to their upper eight bits.

    Raises:
        ValueError: the image has 32 bits per pixel, whose range is not known.
    """
    with contextlib.suppress(Exception):  # Pillow raises all kinds at EXIF data that are broken
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"its mode {image.mode} does not define the value of white")
    return image.convert("RGB")


class ImageSet(Dataset):
    """Map-style dataset of `(tensor (3, H, W), label)`.

    Args:
        items: sources and labels.
        read: returns the RGB image of a source.
        fixed: the deterministic first part of the transform: image to tensor, or with `random`
            image to image.
        random: the random second part, image to tensor.
    """

    def __init__(
        self,
        items: Sequence[Item],
        read: Callable[[Any], Image.Image],
        fixed: Callable[[Image.Image], Any],
        random: Callable[[Image.Image], Tensor] | None = None,
    ) -> None:
        self.items, self.read, self.fixed, self.random = items, read, fixed, random
        self._kept: list[Image.Image | Tensor] = []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        source, label = self.items[index]
        image: Any = self._kept[index] if self._kept else self.fixed(self.read(source))
        return image if self.random is None else self.random(image), label

    def keep(self) -> None:
        """Reads all images, applies `fixed`, and keeps the results in memory."""
        self._kept = self._kept or [self.fixed(self.read(source)) for source, _ in self.items]


class ImageData(PartsData):
    """Batches `(x (B, 3, H, W), label (B,))` of images; x is normalised by `mean` and `std`.

    Labels of samples that only fill up the last evaluation batches of several ranks are -100. A
    subclass lists the images in `load`, and reads one in `read`.

    Args:
        root: folder of the data; the environment variable RECIPES_DATA when None.
        name: folder of the data below `root`.
        image_size: height and width of x in pixels.
        batch_size: images per device and training step.
        eval_batch_size: images per device and evaluation step; `batch_size` when None.
        num_workers: processes that load images; 0 loads in the training process.
        seed: seed of splits, selection, order and augmentation.
        augmentation: how training images are augmented. "timm": random resized crop, and the
            arguments from `auto_augment` to `hflip`; "light": resize, random crop with
            image_size // 8 pixels of padding, flip; "none": resize.
        auto_augment: name of a timm policy, such as "rand-m15-n2" ("timm" only).
        random_erasing: probability of random erasing ("timm" only).
        color_jitter: strength of colour jitter; no effect beside `auto_augment` ("timm" only).
        scale: smallest and largest share of the area that a crop keeps ("timm" only).
        hflip: probability of a horizontal flip ("timm" and "light").
        interpolation: interpolation of every resize.
        mean: mean of the pixel values (0 to 1), per channel. None is 0.5, and with 0.5 for `std`
            too x is in (-1, 1); recipes use a pre-trained model's own values instead of None.
        std: standard deviation of the pixel values; see `mean`.
        crop_pct: share of the resized image's side that the centre crop of evaluation keeps.
        repeats: repeated augmentation, see `SeededSampler`.
        cache: keep images in memory after the deterministic part of the transform; for small data.
        mixup: alpha of mixup; more than 0 makes training labels soft targets (B, num_classes).
        cutmix: alpha of cutmix, with soft targets too. With both, a batch gets one of them at
            random.
        mixup_prob: probability that a batch is mixed at all.
        label_smoothing: share of the target spread over all classes; makes soft targets too.
        per_class: keep at most this many training images of each class, drawn by `seed`.
        classes: keep only these classes, relabelled 0, 1, … in this order.
        val_per_class: validate on this many images of each class, drawn from the training images
            that `per_class` left out, so that settings are not chosen on the test part; a class
            that has fewer of them is named in a warning.
        val_fraction: share of each class's training images that is held out for validation if the
            data have no validation part; 0 validates on the test part.

    Raises:
        ValueError: for settings out of range, or `val_per_class` without `per_class`; and at
            first use, if `per_class` leaves no image for it.
    """

    def __init__(
        self,
        root: str | None = None,
        name: str | None = None,
        image_size: int = 224,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 0,
        seed: int = 0,
        augmentation: Augmentation = "timm",
        auto_augment: str | None = None,
        random_erasing: float = 0.0,
        color_jitter: float = 0.0,
        scale: tuple[float, float] = (0.08, 1.0),
        hflip: float = 0.5,
        interpolation: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bicubic",
        mean: tuple[float, float, float] | None = None,
        std: tuple[float, float, float] | None = None,
        crop_pct: float = 1.0,
        repeats: int = 1,
        cache: bool = False,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mixup_prob: float = 1.0,
        label_smoothing: float = 0.0,
        per_class: int | None = None,
        val_per_class: int | None = None,
        classes: list[int] | None = None,
        val_fraction: float = 0.0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers, seed, repeats)
        require_choice("augmentation", augmentation, get_args(Augmentation))
        if not 0 <= val_fraction <= 1:
            raise ValueError(f"val_fraction is {val_fraction}, expected a share between 0 and 1.")
        require_limits(per_class=per_class)
        if val_per_class is not None and (per_class is None or val_per_class < 1):
            raise ValueError(
                f"val_per_class is {val_per_class} with per_class {per_class}: expected 1 or more "
                "of the images that per_class leaves over; set both or neither."
            )
        self.root, self.folder_name = root, name
        self.image_size, self.interpolation, self.crop_pct = image_size, interpolation, crop_pct
        self.augmentation, self.auto_augment, self.cache = augmentation, auto_augment, cache
        self.random_erasing, self.color_jitter = random_erasing, color_jitter
        self.scale, self.hflip = scale, hflip
        self.mean, self.std = mean or (0.5,) * 3, std or (0.5,) * 3
        self.mixup, self.cutmix, self.mixup_prob = mixup, cutmix, mixup_prob
        self.label_smoothing, self.val_fraction = label_smoothing, val_fraction
        self.per_class, self.val_per_class, self.classes = per_class, val_per_class, classes
        self._sets: dict[str, ImageSet] = {}
        self._drawn: set[str] = set()  # parts whose images the seed drew
        self._class_names: list[str] = []

    # Subclasses implement these.

    def load(self) -> Splits:
        """The classes, and the images of each part; reads no image."""
        raise NotImplementedError

    read: Callable[[Any], Image.Image] = staticmethod(read_image)

    def name_of(self, source: Any) -> str:
        """An image's name in a manifest: its path below `folder`, or a hash of its pixels."""
        if isinstance(source, np.ndarray):
            return hashlib.sha256(source.tobytes()).hexdigest()
        path = source[0] if isinstance(source, tuple) else source
        return Path(path).relative_to(self.folder).as_posix()

    # All of these can be used before the trainer calls `setup`.

    @property
    def folder(self) -> Path:
        """The folder of the data.

        Raises:
            ValueError: neither `root` nor RECIPES_DATA is given.
        """
        root = self.root or os.environ.get("RECIPES_DATA")
        if not root:
            raise ValueError(
                "No folder of images is given: set --data.root, or RECIPES_DATA in the environment."
            )
        return Path(root).expanduser() / (self.folder_name or "")

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def class_names(self) -> list[str]:
        self.setup()
        return self._class_names

    @property
    def train_set(self) -> ImageSet:
        self.setup()
        return self._sets["train"]

    @property
    def val_set(self) -> ImageSet:
        self.setup()
        return self._sets["val"]

    @property
    def test_set(self) -> ImageSet:
        """The test part, or the validation part when the data come without one."""
        self.setup()
        return self._sets["test"]

    def setup(self, stage: str | None = None) -> None:
        """Lists the images and splits them; repeated calls do nothing."""
        if self._sets:
            return
        names, train, val, test = self.load()
        if val is None and self.val_fraction:
            val, train = draw_per_class(train, lambda n: round(n * self.val_fraction), self.seed)
            self._drawn |= {"train", "val"} | ({"test"} if test is None else set())
        val = (test or []) if val is None else val
        test = val if test is None else test
        if self.classes is not None:
            names, train, val, test = keep_classes(self.classes, names, train, val, test)
        if self.per_class is not None:
            limit = self.per_class
            train, rest = draw_per_class(train, lambda n: min(n, limit), self.seed)
            self._drawn |= {"train"} if rest else set()
            if (count := self.val_per_class) is not None:
                if not rest:  # the settings would be chosen on the test part after all
                    raise ValueError(
                        f"per_class {limit} takes every training image and leaves none for "
                        f"val_per_class {count}: set a lower per_class."
                    )
                val, _ = draw_per_class(rest, lambda n: min(n, count), self.seed)
                found = Counter(label for _, label in val)
                if few := [name for label, name in enumerate(names) if found[label] < count]:
                    rank_zero_warn(
                        f"per_class {limit} leaves fewer than val_per_class {count} images of "
                        f"{len(few)} of {len(names)} classes, which are validated on what is left: "
                        f"{listed(few)}. Set a lower per_class to have as many of each."
                    )
                self._drawn |= {"val"}
        self._sets["train"] = ImageSet(train, self.read, *self.train_transform())
        transform = self.eval_transform()
        self._sets["val"] = ImageSet(val, self.read, transform)
        self._sets["test"] = (
            self._sets["val"] if test is val else ImageSet(test, self.read, transform)
        )
        self._class_names = names

    def unreadable(self) -> list[str]:
        """Reads every image, and returns an error message for each that cannot be read."""
        self.setup()
        reasons = {}
        for images in self._sets.values():
            for source, _ in images.items:
                try:
                    self.read(source)
                except OSError as error:
                    reasons[str(source)] = str(error)
        return list(reasons.values())

    # Transforms.

    def train_transform(self) -> tuple[Callable, Callable | None]:
        """The deterministic and the random part of the training transform, see `ImageSet`."""
        size = self.image_size
        if self.augmentation == "timm":
            return T.Compose([]), create_transform(
                size,
                is_training=True,
                auto_augment=self.auto_augment,
                color_jitter=self.color_jitter or None,  # type: ignore[arg-type]  # None: leave it out
                scale=self.scale,
                hflip=self.hflip,
                interpolation=self.interpolation,
                mean=self.mean,
                std=self.std,
                re_prob=self.random_erasing,
                re_mode="pixel",
            )
        if self.augmentation == "none":
            return T.Compose([*self._resize(size), *self._to_tensor()]), None
        random = [T.RandomCrop(size, padding=size // 8), T.RandomHorizontalFlip(self.hflip)]
        return T.Compose(self._resize(size)), T.Compose([*random, *self._to_tensor()])

    def eval_transform(self) -> Callable[[Image.Image], Tensor]:
        side = int(self.image_size / self.crop_pct)
        return T.Compose([*self._resize(side), *self._to_tensor()])

    def _resize(self, side: int) -> list[Callable]:
        resize = T.Resize(side, T.InterpolationMode(self.interpolation))
        return [resize, T.CenterCrop(self.image_size)]

    def _to_tensor(self) -> list[Callable]:
        return [T.ToTensor(), T.Normalize(self.mean, self.std)]

    # Batches.

    def describe(self) -> dict[str, Any]:
        """Class names, and the arguments that `eval_transform` depends on."""
        return {
            "kind": "images",
            "class_names": list(self.class_names),
            "transform": {
                "image_size": self.image_size,
                "interpolation": self.interpolation,
                "crop_pct": self.crop_pct,
                "mean": list(self.mean),
                "std": list(self.std),
            },
        }

    def samples(self, part: str) -> ImageSet:
        self.setup()
        images = self._sets["test" if part == "predict" else part]
        if not images.items:
            raise ValueError(
                f"The {part} part of {self.folder_name or self.root or type(self).__name__} has no "
                f"images: add some, or change val_fraction={self.val_fraction}."
            )
        if self.cache:
            images.keep()  # before workers start, so that they share the memory
        return images

    def members(self, part: str) -> tuple[list[str], bool]:
        """The images of a part, each with its class; see `PartsData.members`."""
        self.setup()
        part = "test" if part == "predict" else part
        items = self._sets[part].items
        lines = [f"{self.name_of(source)}\t{self._class_names[label]}" for source, label in items]
        return lines, part in self._drawn

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Applies mixup, cutmix and label smoothing to training batches.

        Mixing has a seed of its own, made of (seed, number of batches, rank), since Lightning calls
        this before any callback could seed the batch.

        Raises:
            ValueError: if mixup is to mix an odd number of images.
        """
        if self.trainer is None or not self.trainer.training:
            return batch
        if self.mixup or self.cutmix:
            x, label = batch
            if len(x) % 2:
                raise ValueError(
                    f"The batch has {len(x)} images and mixup needs an even number: choose an even "
                    "batch_size, not above the number of training images of a device."
                )
            mix = Mixup(
                self.mixup,
                self.cutmix,
                prob=self.mixup_prob,
                label_smoothing=self.label_smoothing,
                num_classes=self.num_classes,
            )
            rank = (self.trainer.distributed_sampler_kwargs or {"rank": 0})["rank"]
            seen = self.trainer.fit_loop.epoch_loop.total_batch_idx + 1
            with isolate_rng(include_cuda=False):
                np.random.seed(np.random.SeedSequence((self.seed, seen, rank)).generate_state(1))
                return mix(x, label)
        if self.label_smoothing:
            x, label = batch
            return x, mixup_target(label, self.num_classes, smoothing=self.label_smoothing)
        return batch


def draw_per_class(
    items: list[Item], share: Callable[[int], int], seed: int
) -> tuple[list[Item], list[Item]]:
    """Draws `share(n)` of the n items of each class; returns the drawn and the other items."""
    rng = np.random.default_rng(seed)
    labels = np.array([label for _, label in items])
    order = np.argsort(labels, kind="stable")
    drawn: set[int] = set()
    for members in np.split(order, np.flatnonzero(np.diff(labels[order])) + 1):
        places = rng.permutation(members).tolist()
        drawn.update(places[: share(len(places))])
    return (
        [item for place, item in enumerate(items) if place in drawn],
        [item for place, item in enumerate(items) if place not in drawn],
    )


def keep_classes(classes: list[int], names: list[str], *parts: list[Item]) -> tuple:
    """`names` and `parts` with only `classes`, relabelled by their place in that list.

    Raises:
        ValueError: a class is named twice or does not exist.
    """
    if len(set(classes)) < len(classes) or not set(classes) <= set(range(len(names))):
        raise ValueError(
            f"classes is {classes}, expected different numbers from 0 to {len(names) - 1}: the "
            "classes of the data, in their order; --data.classes null keeps all of them."
        )
    new = {old: place for place, old in enumerate(classes)}
    return (
        [names[old] for old in classes],
        *([(source, new[label]) for source, label in part if label in new] for part in parts),
    )
