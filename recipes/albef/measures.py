"""Test scores of a trained ALBEF, and pages of example pictures for the report."""

import pkgutil
from collections.abc import Iterator
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_modules.albef import Grounding, skipped
from lightning_modules.albef.grounding import choose_box
from lightning_modules.albef.retrieval import Gallery, rerank
from lightning_modules.counting import count_macs, count_parameters
from lightning_modules.pela import factorize
from lightning_modules.standalone import plain
from recipes.experiment import Measuring
from recipes.methods import scores_on_test
from recipes.plots import plt, save_plot
from recipes.predict import opened_picture
from recipes.records import Finished
from recipes.results import Row

SHOWN, TOP = 5, 4  # queries on a page, and pictures for each


def score(m: Measuring) -> Iterator[Row]:
    """The scores of a model on the test part, and its size.

    Settings: `row` and `set` in the table; `ratio`: the κ at which the model is first factorised,
    without training (without `ratio` the rows also have the settings of its training); `pictures`:
    whether to draw a page of retrieved pictures or of heat maps.
    """
    stage, data = m.stages["model"], m.datamodule("model")
    module = stage.module()
    ratio = m.settings.get("ratio")
    if ratio:
        factorize(module.model, ratio, skip=skipped(module.model))
    row, name = m.settings["row"], m.settings["set"]
    values = scores_on_test(module, data) | ({} if ratio else trained_with(stage))
    if "r_mean" in values:
        recalls = [value for key, value in values.items() if key.startswith("itc_")]
        values["itc_r_mean"] = sum(recalls) / len(recalls)
    # merged after the scores, so that LoRA's matrices are counted in neither size
    pair = Pair(plain(module.model), data.max_length)
    values["parameters"] = count_parameters(pair)
    values["macs"] = count_macs(pair, (1, 3, data.image_size, data.image_size))
    for metric, value in values.items():
        yield Row(row, metric, value, name)
    if m.settings.get("pictures") and name == "retrieval":
        retrieved(module, data, m.folder / "retrieved.png")
    if m.settings.get("pictures") and name == "grounding":
        heat_maps(module, data, m.folder / "heat.png")


class Pair(nn.Module):
    """An ALBEF as a function of images alone, for counting: each comes with a text.

    Args:
        model: an ALBEF of any task.
        tokens: length L of the texts.
    """

    def __init__(self, model: Any, tokens: int):
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, images: Tensor) -> Tensor:
        """Fused states (B, L, D) of images (B, 3, H, W); no head and no answer decoder runs."""
        ids = torch.zeros(len(images), self.tokens, dtype=torch.long, device=images.device)
        return self.model.bert(ids, torch.ones_like(ids), self.model.encode_image(images))


def chance(m: Measuring) -> Iterator[Row]:
    """The expected recalls of a random order of the test part's pictures, or of its texts.

    A query with r right ones among n finds one of them in the first k with probability
    1 − C(n − r, k) / C(n, k). Settings: `set` in the table; `data`
    and `arguments`, the DataModule's class and its arguments.
    """
    data = pkgutil.resolve_name(m.settings["data"])(**m.settings["arguments"])
    counts = [len(entry.captions) for entry in data.entries("test")]
    # (r, n) of each query: one picture for each text, all its captions for each picture
    queries = {"t2i": [(1, len(counts))], "i2t": [(right, sum(counts)) for right in counts]}
    recalls = {
        f"{way}_r{k}": fmean(1 - comb(n - right, k) / comb(n, k) for right, n in pairs)
        for way, pairs in queries.items()
        for k in (1, 5, 10)
    }
    for metric, value in {**recalls, "r_mean": fmean(recalls.values())}.items():
        yield Row("chance", metric, value, m.settings["set"])


def trained_with(stage: Finished) -> dict[str, float]:
    """Learning rate, α and β of a stage, and each loss term's share of the gradient's norm."""
    values = stage.settings.model.init_args.as_dict()
    names = {"lr": "lr", "alpha": "fd_weight", "beta": "rwp_weight"}
    return {n: float(values[key]) for n, key in names.items() if key in values} | stage.shares


def gallery(module: Any, data: Any) -> Gallery:
    """The encoded test part, on the module's device."""
    loader = data.test_dataloader()
    module.eval()
    with torch.no_grad():
        parts = [
            module.encode({key: value.to(module.device) for key, value in batch.items()})
            for batch in loader
        ]
    return Gallery.of(parts).valid()


def retrieved(module: Any, data: Any, file: Path) -> None:
    """A page of texts of the test part with the pictures found for each; the right one framed."""
    encoded = gallery(module, data)
    entries = data.entries("test")
    texts = [(entry, caption) for entry in entries for caption in entry.captions]
    step = max(1, len(texts) // SHOWN)
    rows = list(range(0, len(texts), step))[:SHOWN]
    scores = rerank(module.model, encoded, module.settings.k, by_text=True, rows=rows)
    shape = (len(rows), TOP)
    figure, axes = plt.subplots(*shape, figsize=(2.2 * TOP, 2.5 * len(rows)), squeeze=False)
    for line, row, order in zip(axes, rows, scores.argsort(1, descending=True), strict=True):
        entry, caption = texts[row]
        for axis, place in zip(line, order[:TOP].tolist(), strict=True):
            show(axis, data.path(entries[place].image))
            right = entries[place].image == entry.image
            frame(axis, "tab:green" if right else "lightgrey")
        line[0].set_title(caption, loc="left", fontsize=9)
    save_plot(figure, file)


def heat_maps(module: Grounding, data: Any, file: Path) -> None:
    """A page of heat maps of phrases, each with the chosen box (orange) and the right one."""
    loader, entries = data.test_dataloader(), data.entries("test")
    step = max(1, len(entries) // (SHOWN * TOP))
    chosen = list(range(0, len(entries), step))[: SHOWN * TOP]
    figure, axes = plt.subplots(SHOWN, TOP, figsize=(2.2 * TOP, 2.5 * SHOWN), squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    module.eval()
    for axis, (place, batch) in zip(
        axes.flat, ((i, b) for i, b in enumerate(loader) if i in chosen), strict=False
    ):
        batch = {key: value.to(module.device) for key, value in batch.items()}
        heat, entry = module.heat(batch)[0].cpu(), entries[place]
        show(axis, data.path(entry.image))
        axis.imshow(in_pixels(heat, entry.size), cmap="inferno", alpha=0.5)
        best = choose_box(heat, entry.size, batch["candidates"].cpu())
        for box, colour in ((entry.candidates[best], "tab:orange"), (entry.box, "tab:green")):
            corner, width, height = box[:2], box[2], box[3]
            axis.add_patch(plt.Rectangle(corner, width, height, fill=False, ec=colour, lw=2))
        axis.set_title(entry.text, fontsize=9)
    save_plot(figure, file)


def in_pixels(heat: Tensor, size: tuple[int, int]) -> Tensor:
    """A heat map of patches (rows, columns), smoothly enlarged to a picture's height and width."""
    return F.interpolate(heat[None, None], size=size, mode="bicubic")[0, 0]


def show(axis: Any, picture: Path | Image.Image) -> None:
    """Draw a picture, or the file of one, without ticks."""
    axis.imshow(opened_picture(picture))
    axis.set_xticks([])
    axis.set_yticks([])


def frame(axis: Any, colour: str) -> None:
    """Draw a coloured frame."""
    for spine in axis.spines.values():
        spine.set(color=colour, linewidth=3)
