"""ImageNet-1k (ILSVRC 2012), in the layout of its archives or of Kaggle."""

import csv
from pathlib import Path

from datamodules.image_folders import class_folders, list_images
from datamodules.images import ImageData, Item, Splits

SOLUTION = "LOC_val_solution.csv"


class ImageNetData(ImageData):
    """ImageNet: train/<wnid>/*, and val/<wnid>/* or val/ILSVRC2012_val_*.JPEG.

    Both parts may lie in root or, as Kaggle has it, in root/ILSVRC/Data/CLS-LOC. A flat val folder
    needs Kaggle's LOC_val_solution.csv in root. Classes are numbered in the order of their wnids,
    as torchvision and timm do. Validation serves as test: the official test images have no labels.
    """

    def load(self) -> Splits:
        kaggle = self.folder / "ILSVRC" / "Data" / "CLS-LOC"
        base = kaggle if kaggle.is_dir() else self.folder
        names = class_folders(base / "train")
        train = list_images(base / "train", names)
        if class_folders(base / "val"):
            return Splits(names, train, list_images(base / "val", names, complete=False))
        return Splits(names, train, read_solution(self.folder / SOLUTION, base / "val", names))


def read_solution(path: Path, folder: Path, names: list[str]) -> list[Item]:
    """The images of the flat `folder` with the labels of Kaggle's csv.

    Args:
        path: csv with the columns ImageId and PredictionString; the latter begins with the wnid.
        folder: holds <ImageId>.JPEG.
        names: the wnids of all classes.

    Raises:
        FileNotFoundError: the csv or an image is missing.
        ValueError: a line is incomplete or names an unknown wnid.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no class folders and {path} is missing: put Kaggle's {SOLUTION} there, "
            "or sort the images into folders named by wnid."
        )
    labels = {name: label for label, name in enumerate(names)}
    items = []
    with path.open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            wnid = (row.get("PredictionString") or "").partition(" ")[0]
            if wnid not in labels:
                raise ValueError(
                    f"{path}, line {number}: {wnid!r} is not a wnid of the {len(names)} training "
                    "classes; expected the columns ImageId,PredictionString as Kaggle has them."
                )
            image = folder / f"{row['ImageId']}.JPEG"
            if not image.is_file():
                raise FileNotFoundError(
                    f"{image} is missing, but {path}, line {number}, names it: unpack the "
                    "validation images there."
                )
            items.append((str(image), labels[wnid]))
    return items
