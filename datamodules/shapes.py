"""Generated pictures of coloured shapes, with captions, questions, hypotheses and boxes.

`write` writes them into a folder in the formats of Flickr30k's retrieval lists (ALBEF's json), VQA
v2 (ALBEF's json), SNLI-VE and RefCOCO+, for the same readers as real data.
"""

import json
import pickle
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from datamodules.scenes import SHAPES, draw_shape

COLOURS = {
    "red": (215, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 210),
    "yellow": (235, 205, 50),
    "white": (240, 240, 240),
    "black": (20, 20, 20),
    "orange": (240, 130, 20),
    "purple": (130, 50, 160),
}
# position of the first thing → its relation to the second, and the second's to the first
RELATIONS = {"left": ("left of", "right of"), "top": ("above", "below")}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = (
    "a the of is are there in picture what color shape how many things which and left right above "
    "below yes no one two thing heavy old"
)
VOCABULARY = [*SPECIAL, *WORDS.split(), *COLOURS, *SHAPES]


def write(
    folder: str | Path,
    seed: int = 0,
    train: int = 480,
    val: int = 60,
    test: int = 60,
    size: int = 48,
) -> None:
    """Write the pictures and all lists.

    Each picture has two things, different in shape and colour, beside or above each other. No two
    pictures of any part show the same scene.

    Args:
        folder: for images/*.png, tokenizer/ and the lists.
        seed: seed of the scenes and positions.
        train: number of training pictures.
        val: number of validation pictures.
        test: number of test pictures.
        size: side of a picture, in pixels.

    Raises:
        ValueError: if there are not that many different scenes.
    """
    from transformers import BertTokenizer

    folder, rng = Path(folder), np.random.default_rng(seed)
    things = list(product(COLOURS, SHAPES))
    scenes = [
        (one, other, place)
        for (one, other), place in product(permutations(things, 2), RELATIONS)
        if one[0] != other[0] and one[1] != other[1]
    ]
    if train + val + test > len(scenes):
        raise ValueError(
            f"generate asks for {train} + {val} + {test} pictures, expected at most {len(scenes)}: "
            "there are only so many different ones; give fewer"
        )
    order = rng.permutation(len(scenes))
    (folder / "images").mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY) + "\n")
    BertTokenizer(vocab=str(vocabulary)).save_pretrained(folder / "tokenizer")
    start = 0
    references: dict[str, Any] = {"refs": [], "annotations": [], "images": [], "dets": {}}
    for part, count in (("train", train), ("val", val), ("test", test)):
        lists: dict[str, list] = {"retrieval": [], "vqa": [], "ve": [], "refcoco+": []}
        for number in range(start, start + count):
            _describe(folder, number, part, scenes[order[number]], size, rng, lists, references)
        start += count
        for name, entries in lists.items():
            (folder / f"{name}_{part}.json").write_text(json.dumps(entries))
    (folder / "answer_list.json").write_text(json.dumps([*COLOURS, *SHAPES, "yes", "no", "two"]))
    refer = folder / "refcoco+"
    refer.mkdir(exist_ok=True)
    (refer / "refs(unc).p").write_bytes(pickle.dumps(references["refs"]))
    instances = {key: references[key] for key in ("images", "annotations")}
    (refer / "instances.json").write_text(json.dumps(instances))
    (refer / "dets.json").write_text(json.dumps(references["dets"]))


def _describe(
    folder: Path,
    number: int,
    part: str,
    scene: tuple[tuple[str, str], tuple[str, str], str],
    size: int,
    rng: np.random.Generator,
    lists: dict[str, list],
    references: dict[str, Any],
) -> None:
    """Draw one picture, and add its captions, questions, hypotheses and phrases to the lists."""
    one, other, place = scene
    image = f"images/{number:05d}.png"
    boxes = _draw(folder / image, scene, size, rng)
    names = [" ".join(thing) for thing in (one, other)]
    forward, backward = RELATIONS[place]
    captions = [f"a {names[0]} {forward} a {names[1]}", f"a {names[1]} {backward} a {names[0]}"]
    if part == "train":
        for caption in captions:
            entry = {"image": image, "caption": caption, "image_id": number}
            lists["retrieval"].append(entry)
    else:
        lists["retrieval"].append({"image": image, "caption": captions})
    absent = str(rng.choice([colour for colour in COLOURS if colour not in (one[0], other[0])]))
    questions = [
        (f"what color is the {one[1]}", one[0]),
        (f"what shape is {other[0]}", other[1]),
        (f"is there a {names[0]}", "yes"),
        (f"is there a {absent} {one[1]}", "no"),
    ]
    for question, answer in questions:
        lists["vqa"].append(
            {
                "question_id": 10 * number + len(lists["vqa"]) % len(questions),
                "question": question,
                "image": image,
                "answer": [answer] * 10,
                "dataset": "vqa",
            }
        )
    hypotheses = [
        (f"there is a {names[1]}", "entailment"),
        (f"there is a {absent} {other[1]}", "contradiction"),
        (f"the {names[0]} is heavy", "neutral"),
    ]
    for sentence, label in hypotheses:
        # SNLI-VE names a picture without its ending
        lists["ve"].append(
            {"image": image.removesuffix(".png"), "sentence": sentence, "label": label}
        )
    split = {"test": "testA"}.get(part, part)
    references["images"].append({"id": number, "file_name": image, "height": size, "width": size})
    noise = [[int(v) for v in (*rng.integers(0, size // 2, 2), size // 3, size // 3)]]
    references["dets"][str(number)] = [*boxes, *noise]
    for turn, (name, box) in enumerate(zip(names, boxes, strict=True)):
        ref_id = 2 * number + turn
        entry = {"image": image, "text": f"the {name}", "ref_id": ref_id}
        lists["refcoco+"].append(entry)
        references["refs"].append(
            {"ref_id": ref_id, "ann_id": ref_id, "image_id": number, "split": split}
        )
        references["annotations"].append({"id": ref_id, "image_id": number, "bbox": box})


def _draw(
    file: Path,
    scene: tuple[tuple[str, str], tuple[str, str], str],
    size: int,
    rng: np.random.Generator,
) -> list[list[int]]:
    """Draw a scene, and return the boxes (x, y, w, h) of its two things, in pixels."""
    one, other, place = scene
    grey = int(rng.integers(110, 150))
    picture = Image.new("RGB", (size, size), (grey, grey, grey))
    draw, boxes = ImageDraw.Draw(picture), []
    half = size // 2
    for turn, (colour, shape) in enumerate((one, other)):
        side = int(rng.integers(int(0.6 * half), int(0.9 * half)))
        along = turn * half + int(rng.integers(0, half - side + 1))
        across = int(rng.integers(0, size - side + 1))
        x, y = (along, across) if place == "left" else (across, along)
        draw_shape(draw, shape, (x, y, x + side - 1, y + side - 1), COLOURS[colour])
        boxes.append([x, y, side, side])
    picture.save(file)
    return boxes
