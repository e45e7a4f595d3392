"""Images in one folder for each class."""

from collections import Counter
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from datamodules.images import ImageData, Item, Splits
from datamodules.loading import listed


def class_folders(folder: Path) -> list[str]:
    """The sorted names of the folders in `folder`, hidden ones left out.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder, expected one with a folder for each class: set --data.root "
            "(or RECIPES_DATA) and --data.name to where the images are."
        )
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."
    )


def images_in(folder: Path, labels: dict[str, int]) -> list[Item]:
    """The images of `folder`/<class>/, at any depth; a warning counts pictures of other formats."""
    others = {".heic", ".heif", *Image.registered_extensions()}.difference(IMG_EXTENSIONS)
    found = make_dataset(str(folder), labels, (*IMG_EXTENSIONS, *others), allow_empty=True)
    items = [item for item in found if item[0].lower().endswith(IMG_EXTENSIONS)]
    if left := sorted(file for file, _ in set(found).difference(items)):
        endings = Counter(Path(file).suffix.lower() for file in left)
        counts = ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items()))
        rank_zero_warn(
            f"pictures are left out: {counts}, such as {left[0]}; to use them, convert them to one "
            f"of {', '.join(IMG_EXTENSIONS)}"
        )
    return items


def list_images(folder: Path, names: list[str], complete: bool = True) -> list[Item]:
    """The images of `folder`/<class>/, labelled by the class's place in `names`.

    Args:
        folder: holds the class folders.
        names: all classes; other files beside and in the class folders are ignored.
        complete: whether every class must have images here.

    Raises:
        ValueError: `folder` has a class that is not in `names`.
        FileNotFoundError: `complete`, and a class has no images.
    """
    if unknown := sorted(set(class_folders(folder)) - set(names)):
        raise ValueError(
            f"{folder} has the class {unknown[0]!r}, which is none of the {len(names)} training "
            "classes: rename or remove that folder."
        )
    if not names:
        raise FileNotFoundError(
            f"{folder} holds no class folders, expected {folder}/<class>/<image>: set --data.root "
            "(and --data.name) to the folder above the classes."
        )
    labels = {name: label for label, name in enumerate(names)}
    items = images_in(folder, labels)
    if complete and (empty := set(range(len(names))) - {label for _, label in items}):
        raise FileNotFoundError(
            f"{folder / names[min(empty)]} has no images (known are {', '.join(IMG_EXTENSIONS)}): "
            "add some, remove the folder, or set --data.root to the folder above the classes "
            "(without it, that is RECIPES_DATA)."
        )
    return items


def all_images(folder: Path) -> list[Item]:
    """The images below a folder, at any depth, as the one class 0.

    Raises:
        FileNotFoundError: there are none.
    """
    items = images_in(folder.parent, {folder.name: 0})
    if not items:
        raise FileNotFoundError(
            f"{folder} has no images (known are {', '.join(IMG_EXTENSIONS)}), in no folder below "
            "it either: name the folder that has them."
        )
    return items


VAL = "val"  # default name of the validation folder, which need not exist


class ImageFolderData(ImageData):
    """Folders of classes: root/train/<class>/*, root/val/<class>/* and perhaps a test part.

    Without a train folder the classes are the folders of root itself. Without a val folder
    `val_fraction` of each class is held out for validation. Classes are numbered in the order of
    their names.

    Args:
        labelled: False takes all images below root, in whatever folder, as one class.
        train: name of the training folder.
        val: name of the validation folder. None, or "val" if there is no such folder, holds out
            `val_fraction` instead.
        test: name of the test folder, if there is one.
        val_fraction: see `ImageData`.
        **kwargs: see `ImageData`.
    """

    def __init__(
        self,
        labelled: bool = True,
        train: str = "train",
        val: str | None = VAL,
        test: str | None = None,
        val_fraction: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(val_fraction=val_fraction, **kwargs)
        self.labelled, self.train, self.val, self.test = labelled, train, val, test

    @property
    def num_classes(self) -> int:
        """The number of classes, which a classifier needs.

        Raises:
            ValueError: there is one class only, which would be every answer.
        """
        if len(self.class_names) == 1:
            raise ValueError(
                f"{self.folder} has one class only, {self.class_names[0]!r}, expected two or more "
                "for a classifier: give each class a folder, and leave data.labelled true."
            )
        return len(self.class_names)

    def load(self) -> Splits:
        if not self.labelled:
            return Splits(["image"], all_images(self.folder))
        train = self.folder / self.train
        val = self.folder / self.val if self.val else None
        if val and self.val == VAL and not val.is_dir():
            val = None
        test = self.folder / self.test if self.test else None
        if not train.is_dir() and (val or test):
            raise FileNotFoundError(
                f"{train} is not a folder, but the other parts are given: put the training images "
                "there, or name their folder in --data.train."
            )
        names = class_folders(train if train.is_dir() else self.folder)
        if not train.is_dir():
            return Splits(names, list_images(self.folder, names))
        parts = {self.train, self.val, self.test}
        if unused := [name for name in class_folders(self.folder) if name not in parts]:
            rank_zero_warn(
                f"{self.folder} has the folders {listed(unused)}, which no part uses: name it in "
                "--data.val or --data.test, or rename it"
            )
        held = list_images(val, names, complete=False) if val else None
        if held == []:
            raise FileNotFoundError(
                f"{val} has no images: add some, or remove the folder and leave --data.val out, "
                "to hold out val_fraction of the training images."
            )
        return Splits(
            names,
            list_images(train, names),
            held,
            list_images(test, names, complete=False) if test else None,
        )
