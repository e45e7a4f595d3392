"""Writes scikit-learn's digits as an image folder, to try the README's commands with.

python examples/digits.py digits          ten classes, the digits
python examples/digits.py numbers pairs   ten classes, two-digit numbers, as in `make demo`

FOLDER/train/<class>/ has training pictures of DigitsData or PairedDigitsData with seed 0, and
FOLDER/val/<class>/ held-out ones. FOLDER/new/ has 20 further held-out pictures, to predict.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

from argparse import ArgumentParser
from pathlib import Path

from datamodules import DigitsData, PairedDigitsData


def main(folder: str, kind: str, new: int = 2) -> None:
    """Write the image folder; the first `new` held-out pictures of each class go to FOLDER/new."""
    pairs = kind == "pairs"
    data = PairedDigitsData(train_pairs=1200, val_pairs=400) if pairs else DigitsData()
    for part, images in (("train", data.train_set), ("val", data.val_set)):
        counts = [0] * data.num_classes
        for source, label in images.items:
            counts[label] += 1
            file = f"{data.class_names[label]}/{counts[label]}.png"
            place = Path(folder, part, file)
            if part == "val" and counts[label] <= new:
                place = Path(folder, "new", file.replace("/", "-"))
            place.parent.mkdir(parents=True, exist_ok=True)
            data.read(source).save(place)


if __name__ == "__main__":
    parser = ArgumentParser(description="Writes scikit-learn's digits as an image folder.")
    parser.add_argument("folder")
    parser.add_argument("kind", nargs="?", choices=["digits", "pairs"], default="digits")
    main(**vars(parser.parse_args()))
