"""Use a trained ALBEF on your own pictures: search them, or ask about one, in several ways.

    python -m recipes.albef.use search --ckpt_path RETRIEVAL/checkpoints/last.ckpt \\
        ~/pictures "a dog in the snow"                       found.png and predictions.csv
    python -m recipes.albef.use match --ckpt_path RETRIEVAL/checkpoints/last.ckpt \\
        dog.jpg "a dog in the snow" "two cats" "a red car"
    python -m recipes.albef.use ask --ckpt_path VQA/checkpoints/last.ckpt \\
        dog.jpg "what color is the dog"
    python -m recipes.albef.use judge --ckpt_path ENTAILMENT/checkpoints/last.ckpt \\
        dog.jpg "an animal is outside" "the dog is asleep"   whether the picture says so
    python -m recipes.albef.use point --ckpt_path GROUNDING/checkpoints/last.ckpt \\
        dog.jpg "the dog on the left"                        heat.png

Instead of sentences, `match` and `judge` also take a text file with one on each line. `search` and
`match` order by similarity, and re-rank the k best (the k of the training) by image-text matching.
`ask` chooses among the answers that the model was trained with, or those of --answers yes,no,….
"""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from datamodules.captions import read_picture, usable
from datamodules.image_text import ImageTextData
from datamodules.image_text_tasks import RELATIONS
from datamodules.tables import open_lines
from lightning_modules.albef import VQA, Entailment, Grounding, Retrieval
from lightning_modules.albef.retrieval import Gallery, rerank
from recipes.albef.measures import in_pixels, show
from recipes.messages import console
from recipes.plots import plt, save_plot
from recipes.predict import described, device_of, folder_for
from recipes.tables import Table

BATCH = 32
TXT_FILE = re.compile(r"\S+\.txt", re.I)  # a name, and no sentence
ONE_TEXT = ("search", "ask", "point")  # verbs that take a single text


class Searcher:
    """Scores pictures for sentences, and sentences for pictures.

    Args:
        checkpoint: of `Retrieval`, `Pretraining` or `Repair`.

    Raises:
        FileNotFoundError: if there is no such checkpoint.
        ValueError: if the checkpoint is of another LightningModule.
    """

    def __init__(self, checkpoint: str | Path):
        self.module, self.data, _ = load(checkpoint, Retrieval)

    @torch.no_grad()
    def __call__(
        self, pictures: Sequence[Path], sentences: Sequence[str], by_text: bool = True
    ) -> Tensor:
        """Scores (sentences, pictures); with `by_text` false (pictures, sentences)."""
        device, transform = self.module.device, self.data.transform(training=False)
        tokens = self.data.tokens(sentences)
        ids, mask = (tokens[key].to(device) for key in ("input_ids", "attention_mask"))
        model = self.module.model
        text = model.encode_text(ids, mask)
        owners = torch.zeros(len(ids), dtype=torch.long, device=device)
        states = ImageStates(model, pictures, transform)
        places = torch.arange(len(pictures))
        features = [model.project_image(states[batch]) for batch in places.split(BATCH)]
        images: tuple[Tensor, Any, Tensor] = (torch.cat(features), states, places.to(device))
        gallery = Gallery(*images, model.project_text(text), text, mask, owners)
        return rerank(model, gallery, self.module.settings.k, by_text)


class ImageStates:
    """The image states (N, C) of pictures, computed when they are asked for.

    Those of all pictures of a large folder would not fit in memory.

    Args:
        model: the image encoder.
        pictures: files.
        transform: of a picture to the model's input.
    """

    def __init__(self, model: Any, pictures: Sequence[Path], transform: Callable):
        self.model, self.pictures, self.transform = model, pictures, transform

    def __getitem__(self, places: Tensor) -> Tensor:
        """The states (P, N, C) of pictures, by their places (P,), which may repeat."""
        once, back = places.unique(return_inverse=True)
        images = [self.transform(read_picture(self.pictures[place])) for place in once.tolist()]
        device = next(self.model.parameters()).device
        batches = torch.stack(images).split(BATCH)
        states = [self.model.encode_image(batch.to(device)) for batch in batches]
        return torch.cat(states)[back.to(device)]


def search(checkpoint: str | Path, folder: str | Path, sentence: str) -> pd.DataFrame:
    """The pictures below a folder, the best match of a sentence first; columns picture, score.

    Those that cannot be read are left out, and named in the log.

    Raises:
        FileNotFoundError: if the folder has no pictures.
        ValueError: if none of them can be read.
    """
    found = pictures_in(folder)
    pictures = [file for file, fit in zip(found, usable(found, "skip"), strict=True) if fit]
    scores = Searcher(checkpoint)(pictures, [sentence])[0]
    order = scores.argsort(descending=True).tolist()
    rows = [{"picture": str(pictures[i]), "score": scores[i].item()} for i in order]
    return pd.DataFrame(rows)


def match(checkpoint: str | Path, picture: str | Path, sentences: Sequence[str]) -> pd.DataFrame:
    """The sentences, the best match of a picture first; columns sentence, score."""
    scores = Searcher(checkpoint)([Path(picture)], sentences, by_text=False)[0]
    order = scores.argsort(descending=True).tolist()
    rows = [{"sentence": sentences[i], "score": scores[i].item()} for i in order]
    return pd.DataFrame(rows)


@torch.no_grad()
def ask(
    checkpoint: str | Path,
    picture: str | Path,
    question: str,
    answers: Sequence[str] | None = None,
) -> pd.DataFrame:
    """The answers to a question about a picture, likeliest first; columns answer, probability.

    Args:
        checkpoint: of `VQA`.
        picture: a file.
        question: a sentence.
        answers: the candidates; None: those that the model was trained with.
    """
    module, data, description = load(checkpoint, VQA)
    answers = list(answers or description["answers"])
    candidates, tokens = data.tokens(answers, cleaned=False), data.tokens([question])
    batch = {
        "images": data.transform(training=False)(read_picture(Path(picture)))[None],
        **tokens,
        "candidate_ids": candidates["input_ids"],
        "candidate_mask": candidates["attention_mask"],
    }
    scores = module.rank({key: value.to(module.device) for key, value in batch.items()})[0]
    probabilities, order = scores.softmax(0), scores.argsort(descending=True).tolist()
    rows = [{"answer": answers[i], "probability": probabilities[i].item()} for i in order]
    return pd.DataFrame(rows)


@torch.no_grad()
def judge(checkpoint: str | Path, picture: str | Path, sentences: Sequence[str]) -> pd.DataFrame:
    """Whether a picture entails sentences, contradicts them, or neither (neutral).

    Args:
        checkpoint: of `Entailment`.
        picture: a file.
        sentences: one or more.

    Returns:
        Columns sentence, relation and probability, in the given order.
    """
    module, data, _ = load(checkpoint, Entailment)
    image = data.transform(training=False)(read_picture(Path(picture)))
    batch = {"images": image.expand(len(sentences), -1, -1, -1), **data.tokens(sentences)}
    logits = module({key: value.to(module.device) for key, value in batch.items()})
    probabilities, relations = logits.float().softmax(-1).max(-1)
    rows = zip(sentences, relations.tolist(), probabilities.tolist(), strict=True)
    names = ["sentence", "relation", "probability"]
    return pd.DataFrame(
        [(one, RELATIONS[number], share) for one, number, share in rows], columns=names
    )


def point(checkpoint: str | Path, picture: str | Path, phrase: str, file: Path) -> pd.DataFrame:
    """Where in a picture a phrase is: the hottest pixel; columns phrase, x, y.

    Args:
        checkpoint: of `Grounding`.
        picture: a file.
        phrase: such as "the dog on the left".
        file: gets the picture under its heat map.
    """
    module, data, _ = load(checkpoint, Grounding)
    image = read_picture(Path(picture))
    batch = {"images": data.transform(training=False)(image)[None], **data.tokens([phrase])}
    heat = module.heat({key: value.to(module.device) for key, value in batch.items()})[0].cpu()
    pixels = in_pixels(heat, (image.height, image.width))
    figure, axis = plt.subplots(figsize=(8, 8 * image.height / image.width))
    show(axis, image)
    axis.imshow(pixels, cmap="inferno", alpha=0.5)
    axis.set_title(phrase)
    save_plot(figure, file)
    y, x = divmod(int(pixels.argmax()), image.width)
    return pd.DataFrame([{"phrase": phrase, "x": x, "y": y}])


def load(checkpoint: str | Path, kind: type) -> tuple[Any, ImageTextData, dict[str, Any]]:
    """A checkpoint's module, the data object that prepares its inputs, and its description.

    Raises:
        ValueError: if the checkpoint is of another LightningModule.
    """
    description, module = described(checkpoint)
    if not issubclass(module, kind):
        raise ValueError(
            f"{checkpoint} is of {module.__name__}, expected one of {kind.__name__}: give a "
            f"checkpoint of {kind.__name__.lower()}.yaml"
        )
    loaded = module.load_from_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    return loaded.to(device_of(None)).eval(), ImageTextData.described(description), description


def pictures_in(folder: str | Path) -> list[Path]:
    """The pictures below a folder, by name.

    Raises:
        FileNotFoundError: if there are none.
    """
    place = Path(folder).expanduser()
    found = sorted(f for f in place.rglob("*") if f.suffix.lower() in IMG_EXTENSIONS)
    if not found:
        raise FileNotFoundError(
            f"{folder} has no pictures: expected files that end in {', '.join(IMG_EXTENSIONS)}, "
            "at any depth"
        )
    return found


def page(rows: pd.DataFrame, title: str, file: Path) -> None:
    """Save a page with the eight best pictures of a search."""
    figure, axes = plt.subplots(2, 4, figsize=(11, 6), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for axis, row in zip(axes.flat, rows.itertuples(), strict=False):
        show(axis, Path(str(row.picture)))
        axis.set_title(Path(str(row.picture)).name, fontsize=8)
    figure.suptitle(title)
    save_plot(figure, file)


def sentences_of(given: Sequence[str]) -> list[str]:
    """The given sentences, or the lines of the one text file that is given instead.

    Raises:
        FileNotFoundError: what is given is the name of a text file that is not there.
    """
    if len(given) == 1 and (Path(given[0]).is_file() or TXT_FILE.fullmatch(given[0])):
        return [line for line in open_lines(given[0]) if line.strip()]
    return list(given)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: write predictions.csv, print its first rows, and write a picture."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.albef.use",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=("search", "match", "ask", "judge", "point"))
    parser.add_argument("place", metavar="PATH", help="a folder of pictures (search), or a picture")
    parser.add_argument(
        "texts",
        nargs="+",
        metavar="TEXT",
        help="a sentence (search), sentences (match, judge), a question (ask), a phrase (point)",
    )
    parser.add_argument("--ckpt_path", required=True, metavar="CKPT", help="the checkpoint")
    parser.add_argument(
        "--answers", metavar="A,B", help="ask: candidate answers; default: those of the training"
    )
    parser.add_argument(
        "--out",
        default=".",
        metavar="DIR",
        help="where files are written; default: the current folder",
    )
    options = parser.parse_args(argv)
    if options.verb in ONE_TEXT and len(options.texts) > 1:
        parser.error(
            f"{options.verb} takes one text, not {len(options.texts)}: put it in quotes, "
            f'"{" ".join(options.texts)}"'
        )
    if options.verb != "ask" and options.answers:
        parser.error(f"--answers is for ask, not for {options.verb}")
    answers = [one.strip() for one in options.answers.split(",")] if options.answers else None
    if answers and not all(answers):
        parser.error(f"--answers {options.answers}: an answer is empty, expected A,B,…")
    out = folder_for(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.verb == "search":
        rows = search(options.ckpt_path, options.place, options.texts[0])
        page(rows, options.texts[0], out / "found.png")
    elif options.verb == "match":
        rows = match(options.ckpt_path, options.place, sentences_of(options.texts))
    elif options.verb == "judge":
        rows = judge(options.ckpt_path, options.place, sentences_of(options.texts))
    elif options.verb == "point":
        rows = point(options.ckpt_path, options.place, options.texts[0], out / "heat.png")
    else:
        rows = ask(options.ckpt_path, options.place, options.texts[0], answers)
    rows.to_csv(out / "predictions.csv", index=False)
    cells = [
        [f"{one:.3f}" if isinstance(one, float) else str(one) for one in row]
        for row in rows.head(10).itertuples(index=False)
    ]
    Table(list(rows.columns), cells).show(options.texts[0])


if __name__ == "__main__":
    console(main)
