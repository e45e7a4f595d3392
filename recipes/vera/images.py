"""Ten images of each class: VeRA, LoRA, full fine-tuning and the head alone on ViTs (Section 4.4).

A pre-trained ViT is fine-tuned for ten epochs, its head with a learning rate of its own, and scored
once, after the last epoch, on the whole test part. Learning rates that the paper does not give are
chosen on other training images, with as many trials for every method. A seed changes which images
are drawn, their order and the head's initial weights; all start from the same pre-trained model:
the hub's, one of `make weights`, or at `tiny` one that is trained first.

    python -m recipes.vera.images                            digits 0-4, then 5-9: seconds
    make weights && python -m recipes.vera.images --preset small --seeds 5
                                                             tiny-imagenet and cifar10, ViT-S/14
    python -m recipes.vera.images --preset paper --seeds 5 --data.root /data
                                                             ViT-B and ViT-L, four data sets
"""

from collections.abc import Iterator
from functools import partial

import pandas as pd

from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.methods import measure_score
from recipes.plots import scatter
from recipes.provenance import provenance
from recipes.results import Row
from recipes.runner import run_experiment
from recipes.tables import Column, Table, tabulate
from recipes.vera.methods import TITLES, train

SETS = ("CIFAR-100", "Food-101", "Flowers-102", "RESISC45")
TABLE_5 = {  # accuracy, %, in the order of SETS
    "ViT-B, head only": (77.7, 86.1, 98.4, 67.2),
    "ViT-B, full": (86.5, 90.8, 98.9, 78.9),
    "ViT-B, LoRA": (85.9, 89.9, 98.8, 77.7),
    "ViT-B, VeRA": (84.8, 89.0, 99.0, 77.0),
    "ViT-L, head only": (79.4, 76.5, 98.9, 67.8),
    "ViT-L, full": (86.8, 78.7, 98.8, 79.0),
    "ViT-L, LoRA": (87.0, 79.5, 99.1, 78.3),
    "ViT-L, VeRA": (87.5, 79.2, 99.2, 78.6),
}
VARIED = (
    "model.architecture", "model.init_from", "data", "data.dataset", "data.name", "data.classes",
    "data.val_fraction",
)  # fmt: skip


def declare(run: Run) -> None:
    """Declare the training and score of every method on every data set, and of chance."""
    grid = run.grid("images_grid")
    common = {}
    if grid["pretrain"] is not None:
        common = {"model.init_from": run.stage("pretrain", "images", 0, settings=grid["pretrain"])}
    grid["common"] = common
    for seed in run.seeds:
        for name in grid["sets"]:
            for row in run.rows(grid["rows"]):
                stage = train(run, "images", grid, row, name, seed, VARIED, "val/accuracy")
                settings = {"row": row, "set": name, "metric": "accuracy", "part": "test"}
                title = f"{name}_{row}.score"
                run.measure(title, seed, measure_score, {"stage": stage}, settings)
            run.measure(f"{name}_chance", seed, measure_chance, {"stage": stage}, {"set": name})


def measure_chance(m: Measuring) -> Iterator[Row]:
    """The accuracy of drawing a class at random."""
    value = 1 / m.datamodule("stage").num_classes
    yield Row(metric="score", value=value, row="chance", set=m.settings["set"])


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """The table of all methods, the plot, and the paper's numbers."""
    sets = list(dict.fromkeys(table["set"]))
    columns = [
        Column("tuned parameters", "tuned", {"set": sets[0]}, digits=0, spread=""),
        *(Column(name, "score", {"set": name}, scale=100) for name in sets),
        *(
            Column(f"{name} − LoRA", "score", {"set": name}, scale=100, reference="lora")
            for name in sets
            if "lora" in set(table["row"])
        ),
    ]
    scatter(
        table, run.out / "images.png", "score", {"tuned": "tuned parameters"}, panel="set",
        titles=TITLES, baselines=["head", "chance"], scale=100, log=True, ylabel="accuracy, %",
    )  # fmt: skip
    return [
        f"# VeRA and the usual ways to fine-tune on images, preset {run.preset}",
        provenance(run, table),
        "Accuracy in % on the whole test part after the last epoch, mean ± standard deviation over "
        "seeds; ten training images of each class. Tuned parameters are those of the first data "
        "set, without the head, which every method trains. LoRA adapts timm's fused qkv as a "
        "whole, which at equal rank is as many parameters as queries and values by themselves.",
        tabulate(table, TITLES, columns, heading="method").markdown(),
        "![Accuracy against tuned parameters](images.png)",
        "**The paper's Table 5**, ViTs pre-trained on ImageNet-21k:",
        Table(
            ["", *SETS], [[name, *map(str, values)] for name, values in TABLE_5.items()]
        ).markdown(),
        "The scale differs unless the preset is `paper`: compare how the methods stand to each "
        "other, not the numbers.",
    ]


def close(name: str, row: str, number: str, threshold: float) -> Claim:
    """The claim that VeRA less another row exceeds `threshold`, on the mean of all data sets."""
    words = "above" if threshold >= 0 else "at most two points below"
    other = {"lora": "LoRA", "full": "full fine-tuning", "head": "the head alone"}[row]
    return Claim(
        name=name,
        paper="VeRA",
        sentence=f"With ten images of each class, VeRA scores {words} {other}.",
        where="Table 5, ViT-B, CIFAR-100",
        number=number,
        test=Comparison(
            "score", "vera", row, threshold=threshold, mean_over="set", scale=100, digits=1
        ),
        # where the head alone is as good as full fine-tuning, methods cannot differ
        gate=Comparison(
            "score",
            "full",
            "head",
            scale=100,
            digits=1,
            says="full fine-tuning is better than the head alone",
        ),
    )


CLAIMS = [
    close("images: VeRA near LoRA", "lora", "84.8 and 85.9", -0.02),
    close("images: VeRA near full fine-tuning", "full", "84.8 and 86.5", -0.02),
    close("images: VeRA above the head alone", "head", "84.8 and 77.7", 0.0),
]

EXPERIMENT = Experiment(
    "vera.images", __file__, "images", __doc__ or "", declare, report,
    measured_on={"small": "the first nine blocks of DINOv2's ViT-S/14, {sets}"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
