"""Pictures with phrases that refer to one object in them: RefCOCO+."""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.captions import Captioned
from datamodules.image_text import CaptionData
from datamodules.tables import read_json, read_list, require_keys


@dataclass(frozen=True)
class Referred:
    """An image of (height, width), a phrase, the box it refers to, and boxes to choose from.

    Boxes are COCO's (x, y, width, height), in pixels.
    """

    image: str
    text: str
    box: tuple[float, ...]
    candidates: tuple[tuple[float, ...], ...]
    size: tuple[int, int]


class GroundingData(CaptionData):
    """RefCOCO+: find the box that a phrase refers to.

    Training uses images with phrases, in the batches of `CaptionData`, and no boxes. The files are
    ALBEF's refcoco+_{train,val,test}.json (`image`, `text`, and for evaluation `ref_id`), and for
    evaluation refcoco+/refs(unc).p, instances.json and dets.json (image id → boxes). An evaluation
    batch has one phrase, whatever `eval_batch_size` is: a dict with `images` (1, 3, S, S),
    `input_ids`, `attention_mask`, `box` (4,), `candidates` (K, 4), `size` (2,), and `labels` (1,),
    the index of the phrase.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.eval_batch_size = 1  # images have different numbers of boxes

    def read(self, part: str) -> list:
        files = self.list_files(part, f"refcoco+_{part}.json")
        rows = []
        for file in files:
            for place, entry in enumerate(read_list(file)):
                keys = ["image", "text"] if part == "train" else ["image", "text", "ref_id"]
                require_keys(file, place, entry, keys)
                rows.append(entry)
        if part == "train":
            texts: dict[str, list[str]] = {}
            for row in rows:
                texts.setdefault(row["image"], []).append(row["text"])
            return [Captioned(image, tuple(its)) for image, its in texts.items()][: self.limit]
        folder = self.folder / "refcoco+"
        refs = {ref["ref_id"]: ref for ref in read_refs(folder / "refs(unc).p")}
        instances, boxes = read_json(folder / "instances.json"), read_json(folder / "dets.json")
        annotations = {entry["id"]: entry for entry in instances["annotations"]}
        images = {entry["id"]: entry for entry in instances["images"]}
        entries = []
        for row in rows:
            if row["ref_id"] not in refs:
                raise ValueError(
                    f"ref_id {row['ref_id']} of {files[0]} is not in {folder / 'refs(unc).p'}: "
                    "give files of one version of RefCOCO+."
                )
            ref = refs[row["ref_id"]]
            try:
                image = images[ref["image_id"]]
                candidates = tuple(tuple(box[:4]) for box in boxes[str(ref["image_id"])])
                box = tuple(annotations[ref["ann_id"]]["bbox"])
            except KeyError as error:
                raise ValueError(
                    f"ref_id {row['ref_id']} is of image {ref['image_id']} and annotation "
                    f"{ref['ann_id']}, but {error} is not in instances.json or dets.json of "
                    f"{folder}: give files of one version of RefCOCO+."
                ) from error
            size = (image["height"], image["width"])
            entries.append(Referred(row["image"], row["text"], box, candidates, size))
        return entries

    def samples(self, part: str) -> Dataset:
        if part == "train":
            return super().samples(part)
        return GroundingSet(self, self.entries(part))


class GroundingSet(Dataset):
    """The evaluation samples of `GroundingData`."""

    def __init__(self, data: GroundingData, entries: list[Referred]) -> None:
        self.data, self.entries = data, entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, place: int) -> dict[str, Any]:
        image = self.data.picture(self.entries[place].image, training=False)
        return {"image": image, "entry": self.entries[place], "labels": place}

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch of one, see `GroundingData`."""
        [sample] = samples
        entry = sample["entry"]
        return {
            "images": sample["image"][None],
            "labels": torch.tensor([sample["labels"]]),
            "box": torch.tensor(entry.box, dtype=torch.float32),
            "candidates": torch.tensor(entry.candidates, dtype=torch.float32),
            "size": torch.tensor(entry.size),
            **self.data.tokens([entry.text]),
        }


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_refs(file: Path) -> list[dict[str, Any]]:
    """REFER's references: a pickle, of which only plain lists and dicts are loaded.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no such pickle.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing, expected REFER's references there.")
    try:
        return _PlainUnpickler(io.BytesIO(file.read_bytes())).load()
    except Exception as error:  # unpickling raises all kinds
        raise ValueError(
            f"{file} is no pickle of plain lists ({error}): fetch RefCOCO+'s own file again."
        ) from error
