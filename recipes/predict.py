"""Predicts with a trained checkpoint for new pictures or texts.

    python -m recipes predict --ckpt_path RUN/checkpoints/last.ckpt ~/new_pictures
    python -m recipes predict --ckpt_path RUN/checkpoints/last.ckpt reviews.csv --text review
    echo "well made and quick" | python -m recipes predict --ckpt_path … -
    … --granularity 'S*6+M*6', or --max_params 12M   a submodel of a nested model
    … --adapter FOLDER                         another VeRA adapter on the same base
    … --threshold 0.3                          less certain objects of a detector, too

    predictor = Predictor("RUN/checkpoints/last.ckpt")
    for prediction in predictor(["one.jpg", "two.jpg"]):
        print(prediction.label, prediction.probability)

The checkpoint itself holds the class names and the images' size, mean and standard deviation, or
the tokenizer, so nothing else is needed. The table is printed and written to predictions.csv. Of a
model of detection or segmentation it has a line for each object, or for each class in a picture;
pictures/ gets copies with these painted in, and labels/ the class of each pixel, numbered from 1.
"""

import argparse
import math
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import torch
from lightning.fabric.utilities import move_data_to_device
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from datamodules.detection import DetectionData
from datamodules.image_folders import all_images
from datamodules.images import ImageData, in_rgb, read_image
from datamodules.loading import IGNORED
from datamodules.scenes import SceneData
from datamodules.segmentation import SegmentationData
from datamodules.tables import TXT, read_table
from datamodules.text import Example, SentenceSet
from datamodules.tokens import encode, filling, pad, require_tokens, tokenizer_from
from lightning_modules.decoding import generate
from lightning_modules.matformer.costs import choose
from lightning_modules.vera.adapter import adapted_model, load_adapter
from lightning_modules.weights import read_checkpoint
from recipes.messages import require_at_least
from recipes.results import write_atomically
from recipes.scenes import Part, parts_of_detections, parts_of_pixels, save_pictures
from recipes.tables import Table

SHOWN = 20  # rows in the terminal; the file has all
WIDTH = 30  # characters of an input that a table shows
SCENES: dict[str, type[SceneData]] = {"segmentation": SegmentationData, "detection": DetectionData}
PICTURES = ("images", *SCENES)  # kinds whose inputs are pictures
# options that inputs of a kind have no use for
FOR_TEXT = ("text", "pair", "max_new_tokens")
UNUSED = {
    "images": (*FOR_TEXT, "threshold"),
    "segmentation": (*FOR_TEXT, "threshold", "top_k"),
    "detection": (*FOR_TEXT, "top_k"),
    "sentences": ("max_new_tokens", "threshold"),
    "prompts": ("threshold", "top_k"),
}
# what `Prediction.probability` is, where it is none
SCORES = {"segmentation": "share", "detection": "score"}
UNITS = {"K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}


@dataclass(frozen=True)
class Prediction:
    """A model's answer to one input.

    Attributes:
        label: the most likely class, the number of a regressor, or the text of a language model;
            the class of the first of the parts, "" without any.
        probability: probability of the class, or score of the part; None for numbers and texts.
        top: the most likely classes with their probabilities, in order; or those of all parts.
        parts: what a model of detection or segmentation has found; None from others.
    """

    label: str
    probability: float | None = None
    top: list[tuple[str, float]] = field(default_factory=list)
    parts: list[Part] | None = None


class Predictor:
    """A checkpoint, loaded and ready to predict.

    Args:
        checkpoint: checkpoint of a run on images, sentences or prompts.
        granularity: size of a nested model: "S", a label such as "S*6+M*6", or an index for each
            layer; None: the largest.
        max_params: in place of `granularity`, the Mix'n'Match submodel with at most so many
            parameters.
        adapter: a folder of `save_adapter`, whose vectors and heads replace the checkpoint's.
        batch_size: inputs per batch.
        top_k: number of classes in `Prediction.top`.
        threshold: least score of an object that a detector finds, 0 to 1.
        max_new_tokens: most tokens that a language model generates; if None, as the checkpoint's
            DataModule says, else 64.
        device: such as "cuda"; if None, the first accelerator, or the CPU.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if it has no description of its data, or a size is given but the model is not
            nested.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        granularity: str | list[int] | None = None,
        max_params: float | None = None,
        adapter: str | Path | None = None,
        batch_size: int = 32,
        top_k: int = 5,
        max_new_tokens: int | None = None,
        device: str | None = None,
        threshold: float = 0.5,
    ) -> None:
        self.description, module = described(checkpoint)
        self.kind: str = self.description["kind"]
        self.batch_size, self.top_k, self.max_new_tokens = batch_size, top_k, max_new_tokens
        self.device, self.threshold = device_of(device), threshold
        loaded: Any = module.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
        self.module = loaded.to(self.device).eval()
        if "tokenizer" in self.description:
            self.tokenizer = tokenizer_from(self.description["tokenizer"])
        if adapter is not None:
            load_adapter(adapted_model(self.module), adapter)
        if granularity is not None and max_params is not None:
            raise ValueError("granularity and max_params both choose a submodel: give one of them")
        if granularity is not None or max_params is not None:
            if getattr(self.module.hparams, "fractions", None) is None:
                raise ValueError(f"{checkpoint} is no nested model: it has one granularity")
            if max_params is not None:
                granularity = choose(self.module.model, max_params)
            self.module.granularity = granularity

    @torch.no_grad()
    def __call__(self, inputs: Sequence[Any]) -> list[Prediction]:
        """A prediction for each input.

        Args:
            inputs: paths or PIL images; sentences, or pairs of them; or prompts.

        Raises:
            OSError: if a file is no image that can be read.
            ValueError: if a PIL image has 32 bits per pixel.
        """
        answer: dict[str, Callable[[Any], list[Prediction]]] = {
            "images": self._images,
            "segmentation": self._scenes,
            "detection": self._scenes,
            "sentences": self._sentences,
            "prompts": self._prompts,
        }
        predictions: list[Prediction] = []
        for start in range(0, len(inputs), self.batch_size):
            predictions += answer[self.kind](inputs[start : start + self.batch_size])
        return predictions

    def _images(self, images: Sequence[str | Path | Image.Image]) -> list[Prediction]:
        transform = ImageData(**self.description["transform"]).eval_transform()

        def tensor(image: str | Path | Image.Image) -> Tensor:
            return transform(opened_picture(image))

        with ThreadPoolExecutor() as pool:  # decoding and resizing release the interpreter's lock
            tensors = torch.stack(list(pool.map(tensor, images))).to(self.device)
        labels = torch.full((len(tensors),), IGNORED, device=self.device)
        return self._classes(self.module.predict_step((tensors, labels), 0))

    def _scenes(self, images: Sequence[str | Path | Image.Image]) -> list[Prediction]:
        names = self.description["class_names"]
        data = SCENES[self.kind](**self.description["transform"])
        opened = [opened_picture(image) for image in images]
        batch = move_data_to_device(data.unlabelled(opened), self.device)
        predictions = []
        for found in self.module.predict_step(batch, 0):
            if self.kind == "segmentation":
                parts = parts_of_pixels(found, names)
            else:
                parts = parts_of_detections(found, names, self.threshold)
            top = [(part.label, part.score) for part in parts]
            label, score = top[0] if top else ("", None)
            predictions.append(Prediction(label, score, top, parts))
        return predictions

    def _sentences(self, sentences: Sequence[str | tuple[str, str]]) -> list[Prediction]:
        settings = {key: self.description[key] for key in ("max_length", "regression", "prompts")}
        examples = [Example(one) if isinstance(one, str) else Example(*one) for one in sentences]
        texts = SentenceSet(examples, self.tokenizer, **settings)
        batch = texts.collate([texts[place] for place in range(len(texts))])
        answers = self.module.predict_step(self._to_device(batch), 0)
        if self.description["regression"]:
            return [Prediction(f"{number:.6g}") for number in answers.flatten().tolist()]
        return self._classes(answers)

    def _prompts(self, inputs: Sequence[str | tuple[str, str]]) -> list[Prediction]:
        texts = [self._filled(*([one] if isinstance(one, str) else one)) for one in inputs]
        before, behind = self.description["before"], self.description["behind"]
        longest = self.description.get("max_length")  # without it, nothing is cut
        if not self.description["template"].endswith("{input}"):
            longest = None  # nor where the template goes on: its end asks for the answer
        room = None if longest is None else longest - len(before) - len(behind)
        ids = [[*before, *one[:room], *behind] for one in encode(texts, self.tokenizer)]
        require_tokens(ids)
        samples = [{"input_ids": one, "attention_mask": [1] * len(one)} for one in ids]
        batch = self._to_device(pad(samples, filling(self.tokenizer), left=True))
        settings = {"max_new_tokens": 64, **self.description.get("decoding", {})}
        if self.max_new_tokens is not None:
            settings["max_new_tokens"] = self.max_new_tokens
        written = generate(self.module.model, batch, self.tokenizer, **settings)
        return [Prediction(text) for text in written]

    def _filled(self, text: str, pair: str = "") -> str:
        """The prompt's template with an input in it, and with its second part if it has one."""
        template = self.description["pair_template" if pair else "template"]
        parts = {"{input}": text.strip() if self.description.get("stripped") else text}
        return re.sub("{input}|{pair}", lambda match: {**parts, "{pair}": pair}[match[0]], template)

    def _to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _classes(self, logits: Tensor) -> list[Prediction]:
        """The most likely classes of logits (B, C)."""
        sigmoid = self.module.hparams.get("loss") == "sigmoid"  # classes do not exclude each other
        shares = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
        names = self.description["class_names"]
        best = shares.topk(min(self.top_k, shares.shape[-1]))
        tops = [
            [(names[place], share) for place, share in zip(places, row, strict=True)]
            for row, places in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]
        return [Prediction(*top[0], top) for top in tops]


def opened_picture(image: str | Path | Image.Image) -> Image.Image:
    """A picture or the file of one, as RGB and upright."""
    return in_rgb(image) if isinstance(image, Image.Image) else read_image(image)


def device_of(name: str | None) -> torch.device:
    """The device of a name, or the first accelerator, or the CPU.

    Raises:
        ValueError: if this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator()
    if name is None:
        return accelerator or torch.device("cpu")
    known = ["cpu", *([accelerator.type] if accelerator else [])]
    if name.partition(":")[0] not in known:
        raise ValueError(f"device {name} is not here: expected {' or '.join(known)}")
    return torch.device(name)


def has_answers(module: type[L.LightningModule], description: Mapping[str, Any]) -> bool:
    """Whether `predict` can use a class of modules on data of this description."""
    own = module.predict_step is not L.LightningModule.predict_step
    return own or description.get("kind") == "prompts"  # language models generate


def described(checkpoint: str | Path) -> tuple[dict[str, Any], type[L.LightningModule]]:
    """A checkpoint's description of its data, and the class of its module.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it has no description.
    """
    if not Path(checkpoint).is_file():
        what = "is a folder" if Path(checkpoint).is_dir() else "is not there"
        raise FileNotFoundError(
            f"{checkpoint} {what}: expected a checkpoint, such as RUN/checkpoints/last.ckpt"
        )
    content = read_checkpoint(checkpoint)
    for state in content.values() if isinstance(content, dict) else ():
        if isinstance(state, dict) and {"description", "module"} <= state.keys():
            module = pkgutil.resolve_name(state["module"])
            if not issubclass(module, L.LightningModule):
                break
            if not has_answers(module, state["description"]):
                raise ValueError(
                    f"{checkpoint} is of {module.__name__}, which answers nothing: train a task on "
                    "it, with --model.init_from and this checkpoint"
                )
            return state["description"], module
    raise ValueError(
        f"{checkpoint} does not say what it was trained on: expected a checkpoint of a classifier, "
        "a language model or a model of detection or segmentation that an experiment or "
        "`python -m recipes fit` wrote"
    )


def read_inputs(
    paths: Sequence[str], description: dict[str, Any], text: str | None, pair: str | None
) -> list[tuple[str, Any]]:
    """Each input with its name: image files, or the rows of tables; "-" is standard input.

    Raises:
        FileNotFoundError: if a path is not there.
        ValueError: if there is nothing to read, a table has no such column, or the checkpoint was
            trained on pictures with texts (for which there is recipes.albef.use).
    """
    if description["kind"] == "pictures and texts":
        raise ValueError(
            "this checkpoint was trained on pictures with texts: to search pictures or to ask "
            "about one, `python -m recipes.albef.use --help` says how"
        )
    inputs: list[tuple[str, Any]] = []
    columns = description.get("columns", [TXT, None])
    first, second = text or columns[0], pair or (columns[1] if text is None else None)
    writes = description["kind"] == "prompts"
    if writes and pair and "pair_template" not in description:
        raise ValueError(f"--pair {pair}: this checkpoint continues one text: leave it out")
    for path in paths:
        if description["kind"] in PICTURES:
            lines = sys.stdin.read().split("\n") if path == "-" else [path]
            files = [file for line in lines if line.strip() for file in _image_files(line.strip())]
            # a name that is not UTF-8 could not be written to a table
            names = [os.fsencode(file).decode(errors="backslashreplace") for file in files]
            inputs += zip(names, files, strict=True)
        elif path == "-":
            inputs += [(line, line) for line in sys.stdin.read().split("\n") if line.strip()]
        else:
            one = TXT if path.lower().endswith(".txt") else first
            # an instruction may have an input, and a sentence of a pair has the other one
            needed = [one, second] if second and (pair or not writes) else [one]
            for _, row in read_table(path, needed, "name it with --text or --pair"):
                other = row.get(second, "") if second else ""
                paired = bool(other if writes else second)
                both = (row[one], other) if paired else row[one]
                inputs.append((row[one] + (f" | {other}" if paired else ""), both))
    if not inputs:
        raise ValueError(f"{' '.join(paths)} holds no input: expected pictures, or lines of text")
    return inputs


def _image_files(path: str) -> list[str]:
    place = Path(path).expanduser()
    if place.is_dir():
        return [str(file) for file, _ in all_images(place)]
    if not place.is_file():
        raise FileNotFoundError(f"{path} is not there: expected a picture or a folder of pictures")
    if place.suffix.lower() not in IMG_EXTENSIONS:
        known = ", ".join(IMG_EXTENSIONS)
        raise ValueError(f"{path} is no picture: expected a name that ends in one of {known}")
    return [str(place)]


def answers(
    predictor: Predictor, inputs: Sequence[tuple[str, Any]], unreadable: list[str]
) -> Iterator[tuple[str, Any, Prediction]]:
    """Each input's name, the input (of an image's file the image) and prediction, batch by batch.

    Images that cannot be read are left out, and the reason is added to `unreadable`.
    """
    for start in range(0, len(inputs), predictor.batch_size):
        batch = inputs[start : start + predictor.batch_size]
        if predictor.kind in PICTURES:
            with ThreadPoolExecutor() as pool:
                reading = [(name, pool.submit(read_image, file)) for name, file in batch]
            batch = []
            for name, done in reading:
                try:
                    batch.append((name, done.result()))
                except OSError as error:
                    unreadable.append(str(error))
        names, values = [name for name, _ in batch], [value for _, value in batch]
        yield from zip(names, values, predictor(values), strict=True)


def table_of(rows: Sequence[tuple[str, Prediction]], kind: str) -> pd.DataFrame:
    """Columns input, prediction, probability, then class and probability of rank 2, 3, …

    Of a scene, a line for each part: input, prediction, share of the pixels; or input, prediction,
    score, x1, y1, x2, y2. A picture in which nothing was found has one line, without the latter.
    """
    lines: list[dict[str, Any]] = []
    for name, one in rows:
        if one.parts is not None:
            for part in one.parts:
                line = {"input": name, "prediction": part.label, SCORES[kind]: round(part.score, 6)}
                sides = [round(side, 2) for side in part.box or ()]
                lines.append(line | dict(zip(("x1", "y1", "x2", "y2"), sides, strict=False)))
            if one.parts:
                continue
        line = {"input": name, "prediction": one.label}
        if one.probability is not None:
            line["probability"] = round(one.probability, 6)
        for place, (label, share) in enumerate(one.top[1:], 2):
            line |= {f"class_{place}": label, f"probability_{place}": round(share, 6)}
        lines.append(line)
    return pd.DataFrame(lines)


def below_common(names: Sequence[str]) -> list[str]:
    """Paths of files below the folder that they have in common."""
    full = [os.path.abspath(name) for name in names]
    common = os.path.commonpath(map(os.path.dirname, full))
    return [os.path.relpath(name, common) for name in full]


def brief(rows: Sequence[tuple[str, Prediction]], kind: str) -> Table:
    """The first rows for a terminal, with the two next classes in one column.

    Paths are shown below the folder that they have in common.
    """
    paths, names = kind in PICTURES, [name for name, _ in rows]
    names = below_common(names) if paths else names
    header = ["input", "prediction", SCORES.get(kind, "probability"), "then"]
    cells = []
    for name, (_, one) in zip(names[:SHOWN], rows, strict=False):
        share = "" if one.probability is None else f"{one.probability:.1%}"
        then = ", ".join(f"{label} {other:.1%}" for label, other in one.top[1:3])
        shown = abridged(name, paths)
        cells.append([shown, str(one.label), share, then])
    # written texts have no probability, and with --top_k 1 there is no next class
    used = [p for p in range(len(header)) if any(line[p] for line in cells)]
    more = [f"{len(rows) - SHOWN} more are in the file"] if len(rows) > SHOWN else []
    return Table([header[p] for p in used], [[line[p] for p in used] for line in cells], more)


def abridged(name: str, path: bool) -> str:
    """The end of a long path, or the beginning of a long text."""
    if len(name) <= WIDTH:
        return name
    return "…" + name[1 - WIDTH :] if path else name[: WIDTH - 1] + "…"


def folder_for(name: str | Path) -> Path:
    """Check that a name is a folder or free, so that it can be written to as a folder.

    Raises:
        ValueError: if a file has this name.
    """
    if Path(name).exists() and not Path(name).is_dir():
        raise ValueError(f"{name} is a file: expected a folder, or a name that is not taken")
    return Path(name)


def number(text: str) -> float:
    """Parse a number such as 12M, 1.5G or 12000000.

    Raises:
        argparse.ArgumentTypeError: if the text is no positive number.
    """
    unit = UNITS.get(text[-1:].upper(), 1)
    try:
        value = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 12M")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    """Predict for the inputs that a command line names.

    Raises:
        ValueError: for a number below 1, or if no picture can be read.
    """
    parser = argparse.ArgumentParser(
        prog="python -m recipes predict",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="pictures, folders, tables, or - for stdin")
    add("--ckpt_path", required=True, metavar="CKPT", help="the checkpoint to predict with")
    add("--out", default=".", metavar="DIR", help="where predictions.csv goes; default: here")
    add("--top_k", type=int, default=5, metavar="K", help="classes to list; default 5")
    add("--batch_size", type=int, default=32, metavar="N", help="inputs at once; default 32")
    add("--text", metavar="COLUMN", help="text column of a table; default: as in training")
    add("--pair", metavar="COLUMN", help="column of the second sentence of a pair")
    add(
        "--granularity",
        metavar="NAME",
        help="size of a nested model: S, S*6+M*6; default the largest",
    )
    add("--max_params", type=number, metavar="N", help="largest submodel of at most N: 12M")
    add("--adapter", metavar="DIR", help="a VeRA adapter of the same base model")
    add(
        "--threshold", type=float, default=0.5, metavar="P",
        help="least score of a detected object; default 0.5",
    )  # fmt: skip
    text = "new tokens; default: the target_length trained with, else 64"
    add("--max_new_tokens", type=int, metavar="N", help=text)
    add("--device", help="such as cuda; default: an accelerator if there is one")
    options = parser.parse_args(argv)
    for name in ("top_k", "batch_size", "max_new_tokens"):
        require_at_least(1, **{name: getattr(options, name)})
    if not 0 <= options.threshold <= 1:
        raise ValueError(f"--threshold {options.threshold}: expected a number from 0 to 1")
    out = folder_for(options.out)
    description, _ = described(options.ckpt_path)
    for name in UNUSED.get(description["kind"], ()):
        if getattr(options, name) != parser.get_default(name):
            raise ValueError(
                f"--{name} {getattr(options, name)}: this checkpoint is for {description['kind']}, "
                "which it does not change: leave it out"
            )
    inputs = read_inputs(options.paths, description, options.text, options.pair)
    predictor = Predictor(
        options.ckpt_path,
        options.granularity,
        options.max_params,
        options.adapter,
        options.batch_size,
        options.top_k,
        options.max_new_tokens,
        options.device,
        options.threshold,
    )
    unreadable: list[str] = []
    answered = answers(predictor, inputs, unreadable)
    bar = Console(stderr=True)
    rows = []
    names = [name for name, _ in inputs]
    below = dict(zip(names, below_common(names), strict=True)) if predictor.kind in SCENES else {}
    for name, value, one in track(answered, "predicting", len(inputs), console=bar, transient=True):
        if one.parts is not None:
            save_pictures(out, below[name], value, one.parts)
            one = replace(one, parts=[replace(part, pixels=None) for part in one.parts])
        rows.append((name, one))
    for reason in unreadable:
        print(f"left out: {reason}", file=sys.stderr)
    if not rows:
        raise ValueError(f"none of the {len(inputs)} pictures could be read")
    table = table_of(rows, predictor.kind)
    file = out / "predictions.csv"
    write_atomically(file, table.to_csv(index=False))
    count = f"{len(rows):,} prediction{'s' if len(rows) > 1 else ''}"
    where = f"{file}{f', {out}/pictures' if predictor.kind in SCENES else ''}"
    brief(rows, predictor.kind).show(f"{count}: {where}")
