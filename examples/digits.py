"""scikit-learn's digits as a folder of pictures, to try the README's commands with.

python examples/digits.py digits          ten classes, the digits
python examples/digits.py numbers pairs   ten classes of numbers of two digits: those of `make demo`

FOLDER/train/<class>/ holds pictures that DigitsData or PairedDigitsData trains on with seed 0, and
FOLDER/val/<class>/ some that it holds out. FOLDER/new/ has 20 more of those that are held out.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

from argparse import ArgumentParser
from pathlib import Path

from datamodules import DigitsData, PairedDigitsData


def main(folder: str, kind: str, new: int = 2) -> None:
    """Write pictures below the folder; `new` of each class without a folder of its class."""
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
    parser = ArgumentParser(description="scikit-learn's digits as a folder of pictures")
    parser.add_argument("folder")
    parser.add_argument("kind", nargs="?", choices=["digits", "pairs"], default="digits")
    main(**vars(parser.parse_args()))
