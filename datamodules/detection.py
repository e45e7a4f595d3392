"""Object detection: COCO 2017, and datasets in its format.

    coco/annotations/instances_{train,val}2017.json
    coco/{train,val}2017/*.jpg

Category numbers have gaps (COCO's 80 go up to 90), so classes are numbered by their order. Masks
(polygons or run lengths) are read only with `masks`. A crowd, one box around many objects, is no
training target; in evaluation, COCO's rules ignore detections in it.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from datamodules.images import read_image
from datamodules.scenes import SHAPES, SceneData, Square, draw_shape
from datamodules.tables import read_json, require_keys


class Annotated(NamedTuple):
    """An image file and its annotations.

    Attributes:
        file: path of the image.
        size: its height and width, as the annotations say.
        boxes: (n, 4), corners (x1, y1, x2, y2) in pixels.
        labels: (n,), classes.
        crowd: (n,), 1 for a crowd.
        area: (n,), areas of the objects, not of their boxes.
        shapes: the objects' masks in COCO's format: lists of polygons, or run lengths.
    """

    file: Path
    size: tuple[int, int]
    boxes: Tensor
    labels: Tensor
    crowd: Tensor
    area: Tensor
    shapes: list[Any]


class DetectionSet(Dataset):
    """Map-style dataset of `(image (3, S, S), target, place)`; see `DetectionData`."""

    def __init__(self, images: list[Annotated], transform: v2.Compose, size: int, masks: bool):
        self.images, self.transform, self.size, self.masks = images, transform, size, masks

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any], int]:
        """The sample.

        Raises:
            ValueError: the image is not of the size that the annotations say.
        """
        file, size, boxes, labels, crowd, area, shapes = self.images[index]
        image = read_image(file)
        height, width = image.height, image.width
        if size != (height, width):
            raise ValueError(
                f"{file} is of height {height} and width {width}, and its annotations of height "
                f"{size[0]} and width {size[1]}: give the images that were annotated."
            )
        single = crowd == 0
        parts = [
            tv_tensors.Image(v2.functional.pil_to_tensor(image)),
            tv_tensors.BoundingBoxes(boxes[single], format="XYXY", canvas_size=(height, width)),
        ]
        truth = {"boxes": boxes, "labels": labels, "iscrowd": crowd, "area": area}
        if self.masks:
            truth["masks"] = read_masks(shapes, height, width)
            parts.append(tv_tensors.Mask(truth["masks"][single]))
        tensor, moved, *masks = self.transform(*parts)
        seen = Square.seen(self.size, height, width)
        corners = moved.as_subclass(Tensor) / torch.tensor([*seen[::-1], *seen[::-1]])
        centres = (corners[:, :2] + corners[:, 2:]) / 2
        target = {
            "boxes": torch.cat([centres, corners[:, 2:] - corners[:, :2]], dim=1),
            "class_labels": labels[single],
            "seen": torch.tensor(seen),
            "size": torch.tensor([height, width]),
            "truth": truth,
        }
        if self.masks:
            target["masks"] = masks[0].as_subclass(Tensor)
        return tensor.as_subclass(Tensor), target, index

    @staticmethod
    def collate(samples: list) -> tuple[Tensor, list[dict[str, Any]], Tensor]:
        """Images and places stacked; targets, whose sizes differ, in a list."""
        images, targets, places = zip(*samples, strict=True)
        return default_collate(list(images)), list(targets), default_collate(list(places))


class DetectionData(SceneData):
    """Batches `(images (B, 3, S, S), targets, places (B,))`.

    The longer side of an image is resized to S, and the square is padded at the right and at the
    bottom, in training and in evaluation; training images are flipped with probability ½. A target
    has "seen", the height and width that the image takes up in the square; "class_labels" (n,) and
    "boxes" (n, 4), (centre x, centre y, width, height) as shares of these, as DETR's losses take
    them; "size", the height and width of the original; and "truth", the original "boxes" (corners
    in pixels), "labels", "iscrowd" and "area", as torchmetrics' MeanAveragePrecision takes them.
    With masks, "masks" are (n, S, S) in the target and (n, height, width) in the truth. Places are
    the images' indices; -100 marks samples that only fill up the last batches of several ranks.

    Training leaves out images without a box (crowds do not count), validation has them. The test
    part is the validation part again, since the labels of the test images are not public.

    Args:
        image_size: S in pixels.
        masks: whether to read the objects' masks.
        **kwargs: see `SceneData`.
    """

    kind = "detection"
    folder_name = "coco"

    def __init__(self, image_size: int = 800, masks: bool = False, **kwargs: Any) -> None:
        super().__init__(image_size=image_size, **kwargs)
        self.masks = masks
        self._parts: dict[str, tuple[list[str], list[Annotated]]] = {}

    def write(self, folder: str, **settings: Any) -> None:
        write_coco(folder, **settings)

    @property
    def class_names(self) -> list[str]:
        return self._part("val")[0]

    def _part(self, part: str) -> tuple[list[str], list[Annotated]]:
        if part not in self._parts:
            self._parts[part] = read_coco(self.folder, f"{part}2017")
        return self._parts[part]

    def files(self, part: str) -> list[Path]:
        return [image.file for image in self.samples(part).images]

    def samples(self, part: str) -> DetectionSet:
        training = part == "train"
        names, images = self._part("train" if training else "val")
        if names != self.class_names:
            raise ValueError(
                f"The categories of training and validation differ ({len(names)} and "
                f"{self.num_classes}): give files of one version of the data."
            )
        if training:
            images = [image for image in images if (image.crowd == 0).any()]
        if not images:
            raise ValueError(f"The {part} part has no image with a box: add some.")
        return DetectionSet(images, self.transform(training), self.image_size, self.masks)

    def transform(self, training: bool) -> v2.Compose:
        filling = [round(255 * x) for x in self.mean]
        to_float = v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True)
        return v2.Compose(
            [
                v2.RandomHorizontalFlip(0.5 if training else 0.0),
                Square(self.image_size, {tv_tensors.Image: filling, tv_tensors.Mask: 0}),
                to_float,
                v2.Normalize(self.mean, self.std),
            ]
        )

    def unlabelled(self, images: Sequence[Image.Image]) -> tuple[Tensor, list[dict], Tensor]:
        transform = self.transform(training=False)
        pixels = [transform(tv_tensors.Image(image)).as_subclass(Tensor) for image in images]
        sizes = [(image.height, image.width) for image in images]
        targets = [
            {"seen": torch.tensor(Square.seen(self.image_size, *one)), "size": torch.tensor(one)}
            for one in sizes
        ]
        return torch.stack(pixels), targets, torch.arange(len(images))


# Reading.

KEYS = {  # what is read of each entry, but for what annotations may leave out
    "images": ["id", "file_name", "height", "width"],
    "annotations": ["image_id", "category_id", "bbox"],
    "categories": ["id", "name"],
}


def read_coco(folder: Path, part: str) -> tuple[list[str], list[Annotated]]:
    """The class names and the images of a part, in the order of their numbers.

    Boxes are clipped to the image; those narrower or lower than a pixel are left out, as in
    mmdetection.

    Args:
        folder: COCO's folder.
        part: such as "val2017".

    Raises:
        FileNotFoundError: the annotations or an image are missing.
        ValueError: the file does not have COCO's format, or an entry lacks what is read of it.
    """
    path = folder / "annotations" / f"instances_{part}.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing, expected COCO's annotations: set --data.root to the folder above "
            "annotations/."
        )
    content = read_json(path)
    if not isinstance(content, dict) or {"images", "annotations", "categories"} - content.keys():
        raise ValueError(
            f"{path} lacks images, annotations or categories: expected a file instances_*.json."
        )
    for table, keys in KEYS.items():
        for place, entry in enumerate(content[table]):
            require_keys(f"{path}, {table}", place, entry, keys)
    for table in ("images", "categories"):
        ids = [entry["id"] for entry in content[table]]
        if len(set(ids)) < len(ids):  # as in files that were merged
            twice = Counter(ids).most_common(1)[0][0]
            raise ValueError(
                f"{path}: two {table} have the id {twice}, so that annotations of it may be of "
                "either: give each its own id, and its annotations the same."
            )
    categories = sorted(content["categories"], key=lambda category: category["id"])
    classes = {category["id"]: place for place, category in enumerate(categories)}
    found: dict[int, list[dict]] = {image["id"]: [] for image in content["images"]}
    for annotation in content["annotations"]:
        image, category = annotation["image_id"], annotation["category_id"]
        if image not in found or category not in classes:
            what = f"image {image}" if image not in found else f"category {category}"
            raise ValueError(
                f"{path}: annotation {annotation.get('id')} is of {what}, which the file does not "
                "list: repair or remove it."
            )
        box = annotation["bbox"]
        if not isinstance(box, list) or [isinstance(x, int | float) for x in box] != [True] * 4:
            raise ValueError(
                f"{path}: annotation {annotation.get('id')} has the bbox {box!r}, expected four "
                "numbers, x, y, width and height: repair or remove it."
            )
        found[image].append(annotation)
    images = []
    for image in sorted(content["images"], key=lambda image: image["id"]):
        file = folder / part / image["file_name"]
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing, but {path} names it: add the image.")
        rows = []
        for annotation in found[image["id"]]:
            x, y, width, height = annotation["bbox"]
            x1, y1 = max(x, 0.0), max(y, 0.0)
            x2, y2 = min(x + width, image["width"]), min(y + height, image["height"])
            if x2 - x1 >= 1 and y2 - y1 >= 1:
                rows.append((x1, y1, x2, y2, annotation))
        images.append(
            Annotated(
                file,
                (image["height"], image["width"]),
                torch.tensor([row[:4] for row in rows], dtype=torch.float32).reshape(-1, 4),
                torch.tensor([classes[row[4]["category_id"]] for row in rows], dtype=torch.int64),
                torch.tensor([row[4].get("iscrowd") or 0 for row in rows], dtype=torch.int64),
                torch.tensor([area_of(row[4]) for row in rows], dtype=torch.float32),
                [row[4].get("segmentation") for row in rows],
            )
        )
    return [category["name"] for category in categories], images


def area_of(annotation: dict[str, Any]) -> float:
    """The area of an annotation's mask, or of its box if the file has no area."""
    area, (*_, width, height) = annotation.get("area"), annotation["bbox"]
    return width * height if area is None else area


def read_masks(shapes: Sequence[Any], height: int, width: int) -> Tensor:
    """Masks (n, height, width), bool, from polygons or run lengths.

    Raises:
        ValueError: one is neither.
    """
    from pycocotools import mask as coco

    masks = torch.zeros(len(shapes), height, width, dtype=torch.bool)
    for place, shape in enumerate(shapes):
        if not shape or (isinstance(shape, list) and min(map(len, shape)) < 6):
            raise ValueError(
                f"An annotation has the mask {shape!r}, expected polygons or run lengths (a "
                "polygon has three points or more): give instance annotations with their "
                "segmentation, or set --data.masks false."
            )
        if isinstance(shape, list):
            runs = coco.merge(coco.frPyObjects(shape, height, width))
        elif isinstance(shape["counts"], list):
            runs = coco.frPyObjects(shape, height, width)
        else:
            runs = shape
        masks[place] = torch.from_numpy(coco.decode(runs)).bool()
    return masks


# Generated data in the same format.

NUMBERS = (1, 3, 90)  # of the categories; with gaps, as in COCO


def write_coco(
    folder: str | Path, train: int = 48, val: int = 16, size: int = 64, seed: int = 0
) -> Path:
    """Writes images of coloured shapes with annotations in COCO's format.

    Like COCO they have category numbers with gaps, an image without a box in each part, and a crowd
    with a run-length mask in every eighth image.

    Args:
        folder: created if it does not exist.
        train: number of training images.
        val: number of validation images.
        size: length of the shorter side, in pixels.
        seed: seed of the images.

    Returns:
        The folder.
    """
    rng, folder = random.Random(seed), Path(folder)
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    categories = [
        {"id": number, "name": name, "supercategory": "shape"}
        for number, name in zip(NUMBERS, SHAPES, strict=True)
    ]
    for part, count in (("train2017", train), ("val2017", val)):
        (folder / part).mkdir(exist_ok=True)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for number in range(1, count + 1):
            width, height = rng.choice([(size, size), (size * 4 // 3, size), (size, size * 4 // 3)])
            image = Image.new("RGB", (width, height), tuple(rng.randrange(90) for _ in range(3)))
            draw = ImageDraw.Draw(image)
            for _ in range(0 if number == count else rng.randint(1, 3)):
                kind, side = rng.randrange(len(SHAPES)), rng.randint(size // 4, size // 2)
                x, y = rng.randint(0, width - side - 1), rng.randint(0, height - side - 1)
                colour = tuple(rng.randint(120, 255) for _ in range(3))
                draw_shape(draw, SHAPES[kind], (x, y, x + side, y + side), colour)
                corners = [x, y, x + side, y, x + side, y + side, x, y + side]
                annotations.append(
                    {
                        "category_id": NUMBERS[kind],
                        "bbox": [float(x), float(y), float(side), float(side)],
                        "area": float(side * side),
                        "iscrowd": 0,
                        "segmentation": [corners],
                        "image_id": number,
                    }
                )
            if number % 8 == 0 and number != count:
                # runs of pixels outside and inside, column by column: the left half
                runs = [0, width // 2 * height, (width - width // 2) * height]
                annotations.append(
                    {
                        "category_id": NUMBERS[0],
                        "bbox": [0.0, 0.0, float(width // 2), float(height)],
                        "area": float(width // 2 * height),
                        "iscrowd": 1,
                        "segmentation": {"counts": runs, "size": [height, width]},
                        "image_id": number,
                    }
                )
            name = f"{number:012d}.jpg"
            image.save(folder / part / name, quality=95)
            images.append({"id": number, "file_name": name, "width": width, "height": height})
        for place, annotation in enumerate(annotations, start=1):
            annotation["id"] = place
        content = {"images": images, "annotations": annotations, "categories": categories}
        path = folder / "annotations" / f"instances_{part}.json"
        path.write_text(json.dumps(content), encoding="utf-8")
    return folder
