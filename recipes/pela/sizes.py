"""Parameters and multiply-adds of the paper's models, dense and at low rank, counted exactly.

The models are built on the meta device, with the architecture, image size, κ and dense layers of
each stage's YAML file. So no data, weights or training are needed to judge what low rank saves.

    python -m recipes.pela.sizes --preset paper        under a minute
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from lightning_modules.albef import build, skipped
from lightning_modules.backbones import build_vision
from lightning_modules.pela import factorize
from lightning_modules.pela.downstream.mask_rcnn import MaskDetector
from lightning_modules.pela.downstream.pyramid import Pyramid, build_backbone
from recipes import cli
from recipes.albef.measures import Pair
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.pela.measures import size
from recipes.provenance import provenance
from recipes.results import Row
from recipes.runner import run_experiment
from recipes.tables import Column, tabulate

CONFIGS = Path(__file__).parents[1]
MODELS = {  # the stage file of each
    "deit_b": "pela/deit_b.yaml",
    "deit3_l": "pela/deit3_l.yaml",
    "swin_b": "pela/swin_b.yaml",
    "detection": "pela/detection.yaml",
    "albef": "albef/repair.yaml",
}
TITLES = {
    "deit_b": "DeiT-Base",
    "deit3_l": "DeiT-III-Large",
    "swin_b": "Swin-Base",
    "detection": "Mask R-CNN on Swin-Base",
    "albef": "ALBEF, one image and one text",
}
CLASSES = 1000  # ImageNet's
OBJECTS = 80  # COCO's classes


def saves(name: str, metric: str, share: float) -> Comparison:
    """The comparison that low rank saves the paper's share of a model's size, less a point.

    The paper prints its shares without decimals.
    """
    return Comparison(
        f"saved {metric}", "low_rank", None, share - 0.01, {"set": name}, exact=True, scale=100,
        unit="%",
    )  # fmt: skip


CLAIMS = [
    Claim(
        "Swin-Base, multiply-adds",
        "PELA",
        "At κ 1.5 low rank saves 30 % of Swin-Base's multiply-adds, less a point for rounding.",
        "Table 1, Swin-Base",
        "30 % in classification",
        saves("swin_b", "macs", 0.30),
    ),
    Claim(
        "detection, multiply-adds",
        "PELA",
        "At κ 1.5 low rank saves 18 % of the multiply-adds of Mask R-CNN on Swin-Base, less a "
        "point for rounding.",
        "COCO, Mask and Cascade R-CNN on Swin-Base",
        "18 % in detection",
        saves("detection", "macs", 0.18),
    ),
    *(
        Claim(
            f"ALBEF, {what}",
            "PELA",
            f"At κ 3 low rank saves two thirds of ALBEF's {what}, less a point for rounding.",
            "Section 4.3",
            "keeps a third",
            saves("albef", metric, 2 / 3),
        )
        for metric, what in (("parameters", "parameters"), ("macs", "multiply-adds"))
    ),
]


def declare(run: Run) -> None:
    """Declare the counts of each model."""
    for name in run.grid("sizes_grid")["models"]:
        config = cli.parse(CONFIGS / MODELS[name])
        model, data = config.model.init_args, config.data.init_args
        settings = {"name": name, "ratio": model.ratio, "side": data.image_size}
        if name == "albef":
            settings["tokens"] = data.max_length
        else:
            chosen = ("architecture", "model_args", "skip")
            settings |= {key: getattr(model, key) for key in chosen}
        for seed in run.seeds:
            run.measure(name, seed, measure_sizes, settings=settings)


def measure_sizes(m: Measuring) -> Iterator[Row]:
    """The sizes of a model, dense and at low rank, and the shares that low rank saves."""
    name, ratio, side = (m.settings[key] for key in ("name", "ratio", "side"))
    with torch.device("meta"):
        dense, low_rank = (size(built(m.settings, one), side) for one in (None, ratio))
    for metric, value in dense.items():
        yield Row("dense", metric, value, name)
        yield Row("low_rank", metric, low_rank[metric], name)
        yield Row("low_rank", f"saved {metric}", 1 - low_rank[metric] / value, name)
    yield Row("low_rank", "ratio", ratio, name)
    yield Row("low_rank", "side", side, name)


class Detector(nn.Module):
    """Mask R-CNN without the choice of regions, which has no multiply-adds: for counting alone.

    The heads run on as many regions as they get at most: boxes on those that the region proposal
    network keeps of an image, masks on those that are detected.

    Args:
        detector: on the meta device.
    """

    def __init__(self, detector: MaskDetector):
        super().__init__()
        self.rcnn = detector.rcnn.eval()

    def forward(self, image: Tensor) -> Tensor:
        """Masks of the regions of one image (1, 3, S, S)."""
        rpn, heads = self.rcnn.rpn, self.rcnn.roi_heads
        channels = self.rcnn.backbone.out_channels
        rpn.head(list(self.rcnn.backbone(image).values()))

        def crops(count: int, pool: Any) -> Tensor:
            return image.new_empty(count, channels, *pool.output_size)

        boxes = crops(rpn.post_nms_top_n(), heads.box_roi_pool)
        masks = crops(heads.detections_per_img, heads.mask_roi_pool)
        heads.box_predictor(heads.box_head(boxes))
        return heads.mask_predictor(heads.mask_head(masks))


def built(settings: dict[str, Any], ratio: float | None) -> nn.Module:
    """A model that takes images: a classifier, a detector, or an ALBEF."""
    if settings["name"] == "albef":
        model = build("pretrain", image_size=settings["side"])
        if ratio is not None:
            factorize(model, ratio, skipped(model), method="empty")
        return Pair(model, settings["tokens"])
    architecture, arguments, skip = (
        settings[key] for key in ("architecture", "model_args", "skip")
    )
    if settings["name"] == "detection":
        backbone, _ = build_backbone(architecture, arguments, ratio=ratio, skip=skip)
        return Detector(MaskDetector(Pyramid(backbone), OBJECTS))
    model = build_vision(architecture, CLASSES, arguments)
    return model if ratio is None else factorize(model, ratio, skip, method="empty")


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """The sizes of all models."""
    low: dict[str, Any] = {"where": {"row": "low_rank"}, "spread": ""}
    columns = [Column("κ", "ratio", **low), Column("pixels", "side", digits=0, **low)]
    for metric, title in (("parameters", "parameters"), ("macs", "multiply-adds")):
        columns += [
            Column(f"{title}, dense", metric, {"row": "dense"}, digits=0, spread=""),
            Column("low rank", metric, digits=0, **low),
            Column("saved, %", f"saved {metric}", scale=100, digits=2, **low),
        ]
    return [
        f"# Sizes of the paper's models, preset {run.preset}",
        provenance(run, table),
        "Counted, not measured: the same for every seed. κ divides the linear layers alone: "
        "embeddings, convolutions and norms stay, as do heads and what the released code skips. "
        "Multiply-adds are of one image, those of attention's matrix products included. Mask "
        "R-CNN's heads are counted on as many regions as they get at most: boxes on the 1,000 that "
        "are proposed, masks on the 100 that are detected. ALBEF's multiply-adds are of one image "
        "with one text of the greatest length, through image, text and fusion layers.",
        tabulate(table, TITLES, columns, index="set", heading="model").markdown(),
    ]


EXPERIMENT = Experiment(
    "pela.sizes", __file__, "sizes_grid", __doc__ or "", declare, report,
    measured_on={"paper": "the paper's architectures, on the meta device"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
