"""scikit-learn's digits as a folder of pictures, to try the README's commands with.

python examples/digits.py digits

digits/train/<digit>/ holds 1,298 of them, digits/val/<digit>/ the others: what DigitsData trains on
with seed 0, and what it holds out. digits/new/ has 20 of those that are held out.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import sys
from pathlib import Path

from datamodules import DigitsData


def main(folder: str, new: int = 2) -> None:
    """Write the digits below the folder; `new` of each class without a folder of its class."""
    data = DigitsData()
    for part, digits in (("train", data.train_set), ("val", data.val_set)):
        counts = [0] * data.num_classes
        for source, label in digits.items:
            counts[label] += 1
            file = f"{data.class_names[label]}/{counts[label]}.png"
            place = Path(folder, part, file)
            if part == "val" and counts[label] <= new:
                place = Path(folder, "new", file.replace("/", "-"))
            place.parent.mkdir(parents=True, exist_ok=True)
            data.read(source).save(place)


if __name__ == "__main__":
    main(*sys.argv[1:2])
