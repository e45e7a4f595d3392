"""Object detection on a dense backbone and on low-rank ones, fine-tuned the same way.

Mask R-CNN on COCO; presets `tiny` and `detr` have Deformable DETR, which needs no compiled operator
of torchvision. The rows are the dense backbone, the same weights factorised directly and, with
--repaired, a checkpoint of PELA's intermediate stage. --larger-batch N trains the last of these
once more with N images per device, in the memory that low rank saves (PELA+). Dense
weights come from the stage's YAML, or from --model.init_from.

    python -m recipes.pela.detection                             generated shapes, under a minute
    python -m recipes.pela.detection --preset paper --repaired runs/…/last.ckpt \\
        --data.root /data/coco
    python -m recipes.pela.detection --preset detr --data.root /data/coco

There is no preset `small`, since COCO was not available.
"""

from functools import partial

from recipes.messages import console
from recipes.pela.downstream import Task, claims, experiment
from recipes.runner import run_experiment

TASK = Task(
    name="detection",
    title="Object detection",
    scores={"mAP": "val/map", "mAP at IoU .5": "val/map_50", "at .75": "val/map_75"},
    note="Paper (COCO): Mask and Cascade R-CNN of mmdetection on Swin; its tables of absolute "
    "numbers could not be found again. Preset `paper` is torchvision's Mask R-CNN on Swin; its "
    "multiply-adds are those of backbone and feature pyramid. The others are Deformable DETR.",
)

CLAIMS = claims(TASK, "COCO, Mask and Cascade R-CNN on Swin-Base")
EXPERIMENT = experiment(TASK, __file__, __doc__ or "")

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
