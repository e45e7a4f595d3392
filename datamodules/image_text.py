"""Pictures with texts: the base of the image-text DataModules, and the one for captions."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from timm.data import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from timm.data.auto_augment import RandAugment, rand_augment_ops
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from datamodules.captions import BadImages, Captioned, plain, read_captions, read_picture, usable
from datamodules.loading import (
    data_folder,
    hold_out,
    listed,
    require_choice,
    require_limits,
    require_share,
)
from datamodules.shapes import write
from datamodules.tables import read_table
from datamodules.tokens import (
    WithTokenizer,
    filling,
    load_tokenizer,
    pad,
    tokenizer_from,
    tokenizer_state,
)

# ALBEF's RandAugment: nothing that changes colours. Its tenth operation does nothing, and each is
# done with probability ½: with the nine others alone that is a probability of 0.45.
AUGMENTATIONS = [
    *("AutoContrast", "Equalize", "Brightness", "Sharpness", "Rotate"),
    *("ShearX", "ShearY", "TranslateX", "TranslateY"),
]
PARTS = ("train", "val", "test")  # in splits.csv
MOVED = {"translate_const": 10}  # pixels, at magnitude 10


class ImageTextData(WithTokenizer):
    """Base of the image-text DataModules: their files, the image transform and the tokenizer.

    Args:
        root: the folder of the data; $RECIPES_DATA when None.
        name: the folder below `root` that has the list files.
        source: "folder" reads `root`; "generated" writes coloured shapes and reads them.
        files: the list files of each part, relative to that folder; the data's usual names when
            None.
        images: the folder that the paths in the lists are relative to, itself relative to that
            folder.
        bad_images: whether to "refuse" or to "skip" missing and unreadable images; skipped ones
            are counted and named in the log.
        tokenizer: name of a transformers tokenizer, or a folder with its files; the folder
            `tokenizer` beside the list files when None.
        max_length: most tokens of a text, special tokens included.
        image_size: height and width to which pictures are resized, in pixels.
        min_crop: training crops keep at least this share of a picture's area; 1 does not crop.
        hflip: probability of mirroring a training picture (0 where captions say left and right).
        augment: whether to apply RandAugment without colours, two operations of magnitude 7.
        mean: mean of the pixel values (0 to 1), per channel.
        std: standard deviation of the pixel values, per channel.
        generate: settings of the generated data: "train", "val", "test" (numbers of pictures),
            "size" (pixels), "seed".
        **kwargs: see `PartsData`.
    """

    def __init__(
        self,
        root: str | None = None,
        name: str = ".",
        source: Literal["folder", "generated"] = "folder",
        files: dict[str, list[str]] | None = None,
        images: str = "",
        bad_images: BadImages = "refuse",
        tokenizer: str | None = None,
        max_length: int = 30,
        image_size: int = 384,
        batch_size: int = 32,
        min_crop: float = 0.5,
        hflip: float = 0.5,
        augment: bool = True,
        mean: tuple[float, float, float] = OPENAI_CLIP_MEAN,
        std: tuple[float, float, float] = OPENAI_CLIP_STD,
        generate: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        require_choice("bad_images", bad_images, ("refuse", "skip"))
        require_choice("source", source, ("folder", "generated"))
        self.root, self.list_folder, self.source = root, name, source
        self.generate = generate or {}
        self.files, self.images, self.bad_images = files, images, bad_images
        self.tokenizer_name, self.max_length = tokenizer, max_length
        self.image_size, self.min_crop, self.hflip, self.augment = (
            image_size,
            min_crop,
            hflip,
            augment,
        )
        self.mean, self.std = tuple(mean), tuple(std)
        self._scratch: tempfile.TemporaryDirectory | None = None
        self._tokenizer: Any = None
        self._parts: dict[str, list] = {}
        self._drawn = False  # whether the seed splits the data into parts

    @classmethod
    def described(cls, description: dict[str, Any]) -> "ImageTextData":
        """Data that prepare inputs as a trained model's did, from the result of `describe`."""
        data = cls(**description["arguments"])
        data._tokenizer = tokenizer_from(description["tokenizer"])
        return data

    @property
    def folder(self) -> Path:
        """The folder of the data; generated data are written at the first access."""
        if self.source == "folder":
            place = self.list_folder
            return data_folder(self.root and str(Path(self.root) / place), place)
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory()  # goes when this object does
            write(self._scratch.name, **self.generate)
        return Path(self._scratch.name)

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_name or str(self.folder / "tokenizer"))
        return self._tokenizer

    def entries(self, part: str) -> list:
        """The entries of a part's lists whose images can be read, in order; cached."""
        part = "test" if part == "predict" else part
        if part not in self._parts:
            entries = self.read(part)
            keep = usable([self.path(entry.image) for entry in entries], self.bad_images)
            self._parts[part] = [entry for entry, fit in zip(entries, keep, strict=True) if fit]
        return self._parts[part]

    def read(self, part: str) -> list:
        """The entries of a part's lists, one for each sample; each has `image`."""
        raise NotImplementedError

    def list_files(self, part: str, default: str) -> list[Path]:
        """The list files of a part: those of `files`, or else the default one.

        Raises:
            FileNotFoundError: one of them is missing.
        """
        files = [self.folder / name for name in (self.files or {}).get(part, [default])]
        if missing := [file for file in files if not file.is_file()]:
            raise FileNotFoundError(
                f"{missing[0]} is missing, expected a list of pictures: correct --data.files."
            )
        return files

    def path(self, image: str) -> Path:
        """The path of an image that a list names."""
        return self.folder / self.images / image

    def members(self, part: str) -> tuple[list[str], bool]:
        """The entries of a part; see `PartsData.members`."""
        return [repr(entry) for entry in self.entries(part)], self._drawn

    def picture(self, image: str, training: bool) -> Tensor:
        """An image as the model's input (3, S, S); see `read_picture`."""
        return self.transform(training)(read_picture(self.path(image)))

    def transform(self, training: bool) -> v2.Compose:
        """The transform of a PIL image to (3, S, S)."""
        size, bicubic = (self.image_size, self.image_size), v2.InterpolationMode.BICUBIC
        steps: list[Any] = [v2.Resize(size, bicubic)]
        if training and self.min_crop < 1:
            steps = [v2.RandomResizedCrop(size, (self.min_crop, 1.0), interpolation=bicubic)]
        if training:
            steps.append(v2.RandomHorizontalFlip(self.hflip))
        if training and self.augment:
            steps.append(RandAugment(rand_augment_ops(7, 0.45, MOVED, AUGMENTATIONS)))
        to_tensor = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        return v2.Compose([*steps, *to_tensor, v2.Normalize(list(self.mean), list(self.std))])

    def describe(self) -> dict[str, Any]:
        """The tokenizer, and the arguments that `transform` and `tokens` depend on."""
        return {
            "kind": "pictures and texts",
            "tokenizer": tokenizer_state(self.tokenizer),
            "arguments": {
                "image_size": self.image_size,
                "mean": list(self.mean),
                "std": list(self.std),
                "max_length": self.max_length,
            },
        }

    def tokens(self, texts: Sequence[str], cleaned: bool = True) -> dict[str, Tensor]:
        """Texts as one padded batch: `input_ids` and `attention_mask`, (T, L).

        Captions and questions are cleaned by `plain`, as in ALBEF; answers are taken as they are.
        """
        rows = [
            {key: encoded[key] for key in ("input_ids", "attention_mask")}
            for encoded in (
                self.tokenizer(text, truncation=True, max_length=self.max_length)
                for text in (map(plain, texts) if cleaned else texts)
            )
        ]
        return pad(rows, filling(self.tokenizer))


class CaptionData(ImageTextData):
    """Images with captions, for pre-training and retrieval.

    A training sample is an image with one of its captions; an evaluation sample, an image with all
    of them. A batch has `images` (B, 3, S, S); `index` (B,), the numbers of the images; `input_ids`
    and `attention_mask` (T, L); `text_index` (T,), the image of each text; and `labels` (B,), equal
    to `index`, but -100 for samples that only fill up a rank's last batch.

    Without `files` it looks for ALBEF's retrieval_{train,val,test}.json, then for captions.json,
    captions.csv or captions.txt. The latter are split by splits.csv (columns image, split); if
    there is none, `val_fraction` of the images is drawn for the test part, and as large a share of
    the others for validation.

    Args:
        val_fraction: share of the images for the test part, and of the others for validation, if
            the data have no splits; at least one image of each.
        limit: use only this many images of the training part, the first ones; all when None.
        **kwargs: see `ImageTextData`.

    Raises:
        ValueError: val_fraction is no share from 0 to below 1, or limit is below 1.
    """

    def __init__(self, val_fraction: float = 0.1, limit: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require_share(val_fraction, "0.1")
        require_limits(limit=limit)
        self.val_fraction, self.limit = val_fraction, limit

    def read(self, part: str) -> list[Captioned]:
        if self.files or (self.folder / "retrieval_train.json").is_file():
            files = self.list_files(part, f"retrieval_{part}.json")
            entries = [entry for file in files for entry in read_captions(file)]
        else:
            entries = self._split(part)
        return entries[: self.limit] if part == "train" else entries

    def _split(self, part: str) -> list[Captioned]:
        names = [f"captions.{ending}" for ending in ("json", "csv", "txt")]
        file = next((self.folder / n for n in names if (self.folder / n).is_file()), None)
        if file is None:
            raise FileNotFoundError(
                f"{self.folder} has none of retrieval_train.json, {', '.join(names)}, expected one "
                "list of captions: name it with --data.files."
            )
        entries = read_captions(file)
        splits = self.folder / "splits.csv"
        if not splits.is_file():
            if len(entries) < 3:
                raise ValueError(
                    f"{file} names {len(entries)} images, expected three or more: one at least "
                    f"for each part; add some, or say in {splits.name} which part each is of."
                )
            self._drawn = True
            others, test = hold_out(entries, self.val_fraction, self.seed)
            train, val = hold_out(others, self.val_fraction, self.seed)
            return {"train": train, "val": val, "test": test}[part]
        parts = {
            row["image"]: row["split"]
            for _, row in read_table(splits, ["image", "split"], "rename it")
        }
        if left := [one.image for one in entries if parts.get(one.image) not in PARTS]:
            rank_zero_warn(
                f"{splits} puts {len(left)} of {file.name}'s {len(entries)} images into none of "
                f"the parts {', '.join(PARTS)}, and they are left out: {listed(left, 5)}"
            )
        kept = [entry for entry in entries if parts.get(entry.image) == part]
        if not kept:
            known = ", ".join(sorted(set(parts.values())))
            raise ValueError(
                f"{splits} puts no image of {file.name} into the part {part!r} (its parts are "
                f"{known}): call them train, val and test."
            )
        return kept

    def path(self, image: str) -> Path:
        folder = self.folder / self.images
        return folder / image if (folder / image).is_file() else folder / "images" / image

    def samples(self, part: str) -> Dataset:
        return CaptionSet(self, self.entries(part), training=part == "train")


class CaptionSet(Dataset):
    """The samples of `CaptionData`."""

    def __init__(self, data: CaptionData, entries: list[Captioned], training: bool) -> None:
        self.data, self.entries, self.training = data, entries, training
        self.places = [
            (index, captions)
            for index, entry in enumerate(entries)
            for captions in (zip(entry.captions) if training else [entry.captions])
        ]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: int) -> dict[str, Any]:
        index, captions = self.places[place]
        image = self.data.picture(self.entries[index].image, self.training)
        return {"image": image, "captions": captions, "labels": index, "index": index}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch, see `CaptionData`."""
        texts = [text for sample in samples for text in sample["captions"]]
        owners = [sample["labels"] for sample in samples for _ in sample["captions"]]
        return {
            "images": torch.stack([sample["image"] for sample in samples]),
            "index": torch.tensor([sample["index"] for sample in samples]),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
            "text_index": torch.tensor(owners),
            **self.data.tokens(texts),
        }
