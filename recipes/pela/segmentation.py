"""Semantic segmentation on a dense backbone and on low-rank ones, fine-tuned the same way.

UPerNet on ADE20K. The rows are the dense backbone, the same weights factorised directly and, with
--repaired, a checkpoint of PELA's intermediate stage. --larger-batch N trains the last of these
once more with N images per device, in the memory that low rank saves (PELA+). Dense
weights come from the stage's YAML, or from --model.init_from.

    python -m recipes.pela.segmentation                             generated shapes, under a minute
    python -m recipes.pela.segmentation --preset paper --repaired runs/…/last.ckpt \\
        --data.root /data/ADEChallengeData2016

There is no preset `small`, since ADE20K was not available.
"""

from functools import partial

from recipes.claims import Claim, Comparison
from recipes.messages import console
from recipes.pela.downstream import Task, claims, experiment
from recipes.runner import run_experiment

TASK = Task(
    name="segmentation",
    title="Semantic segmentation",
    scores={"mIoU": "val/miou", "pixel accuracy": "val/pixel_accuracy"},
    note="Paper (ADE20K, UPerNet): PELA+, which trains with a larger batch in the memory saved, "
    "gains 0.57 and 0.78 mIoU over PELA (Table 9). Its tables of absolute numbers could not be "
    "found again. mIoU is at the labels' own size, here as there.",
)

CLAIMS = [
    *claims(TASK, "ADE20K, UPerNet"),
    Claim(
        "segmentation: PELA+",
        "PELA",
        "A larger batch in the memory saved improves the mIoU.",
        "Table 9, ADE20K",
        "+0.57 and +0.78 mIoU",
        Comparison("mIoU", "larger_batch", "repaired", scale=100),
        preset="paper",
    ),
]
EXPERIMENT = experiment(TASK, __file__, __doc__ or "")

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
