"""Self-distillation for further pre-training, on images (Tables 1, 3 to 6, Figs. 1, 3 and 5).

A ViT that was pre-trained as a masked auto-encoder is further pre-trained on the target images,
distilled into a fresh copy of the original, and fine-tuned. It is compared with fine-tuning alone,
the baselines and the ablations, by accuracy on the test part after the last step.

    python -m recipes.self_distillation.images                     digits: a minute on a CPU
    make weights && python -m recipes.self_distillation.images --preset small --seeds 14
                                             DINOv2's ViT-S/14, Tiny-ImageNet, then CIFAR-10
    python -m recipes.self_distillation.images --preset small_steps --seeds 3     Fig. 1, same data
    python -m recipes.self_distillation.images --preset small_sizes --seeds 3     Fig. 3, same data
    python -m recipes.self_distillation.images --preset paper --seeds 5 --data.root /data
    python -m recipes.self_distillation.images --preset steps --data.root /data   Fig. 1, CUB
    python -m recipes.self_distillation.images --preset sizes --data.root /data   Fig. 3

--rows finetune,further,self_distillation limits what is run; shared_grid.yaml has all rows. Presets
of real data run on one GPU with --trainer.accelerator gpu --trainer.precision bf16-mixed.

Your own images, in my_folder/train/<class>/ and my_folder/val/<class>/ or just my_folder/<class>/:

    python -m recipes.self_distillation.images --preset own --data.root my_folder

This starts from facebook/vit-mae-base, or from --init_from mae.pth; --decoder_steps 2000 first
trains a decoder for weights that have none. Further pre-training and distillation use the training
images, or with --unlabelled other_folder all images below that folder. The checkpoint that is best
on validation is scored; --data.test names a folder beside train and val to test on. The report ends
with the best classifier and the lines of Python that use it.

A flag that begins with --adapt, as in --adapt.trainer.max_steps 500, is for the adaptations only,
one that begins with --finetune for fine-tuning only. Without a network:

    python -m recipes.self_distillation.images --preset own --data.root my_folder \\
      --model.architecture vit_base_patch16_224.mae --init_from mae_pretrain_vit_base_full.pth
"""

import functools
from functools import partial

import pandas as pd

from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Run
from recipes.messages import console
from recipes.runner import run_experiment
from recipes.self_distillation.chains import declare, options
from recipes.self_distillation.report import PaperTables, report
from recipes.self_distillation.shared_claims import POINTS, beats, gap_and_distance, gates

PAPER: PaperTables = {
    "Table 1, accuracy, %, mean ± standard deviation of 5 runs": (
        ["Aircraft", "CUB", "Chest X-ray", "DTD", "Dogs", "Flowers"],
        {
            "finetune": ("72.33", "55.55", "77.15", "67.56", "62.53", "88.78"),
            "recadam": ("70.76 ± 1.25", "55.22 ± 1.29", "77.29 ± 1.32", "67.59 ± 1.03",
                        "61.65 ± 0.92", "88.97 ± 0.44"),
            "mars": ("72.74 ± 0.57", "55.35 ± 0.73", "77.28 ± 1.80", "66.79 ± 0.90",
                     "62.24 ± 0.96", "87.93 ± 1.21"),
            "r3f": ("72.95 ± 0.46", "55.91 ± 0.79", "76.86 ± 0.97", "65.32 ± 1.25",
                    "62.15 ± 0.48", "88.92 ± 0.78"),
            "further": ("73.38 ± 0.64", "55.72 ± 0.46", "77.79 ± 2.06", "65.55 ± 1.12",
                        "62.34 ± 0.39", "88.63 ± 0.35"),
            "self_distillation": ("74.37 ± 0.43", "58.06 ± 0.90", "79.68 ± 1.05", "68.51 ± 0.51",
                                  "63.55 ± 0.39", "90.28 ± 0.44"),
        },
    ),
    "Tables 3 and 6, accuracy, %": (
        ["CUB"],
        {
            "self_distillation": ("58.06",),
            "without_mae": ("57.60",),
            "further": ("55.72",),
            "further_x2": ("53.41",),
            "predictions": ("55.27",),
            "weights_l2": ("53.70",),
            "weights_mars": ("54.82",),
            "lambda_0.5": ("57.76",),
            "lambda_0.3": ("58.21",),
            "lambda_0.1": ("57.76",),
        },
    ),
    "Table 5, accuracy, % (self-distillation on Flowers as printed there; Table 1 has 90.28)": (
        ["Chest X-ray", "Flowers"],
        {
            "supcon": ("75.30", "76.70"),
            "finetune": ("77.15", "88.78"),
            "further": ("77.79", "88.63"),
            "self_distillation": ("79.68", "79.68"),
        },
    ),
}  # fmt: skip
USE = """
from datamodules.images import read_image

image = data.eval_transform()(read_image("new.jpg"))
print(data.class_names[model(image[None]).argmax()])
"""


def by_steps(few: int, many: int, preset: str) -> list[Claim]:
    """The claims of Fig. 1 between two numbers of further pre-training steps."""
    most = {"row": "further", "x": many}
    claims = {
        f"{many:,} steps are worse": (
            f"Many steps of further pre-training ({many:,}) give a lower test accuracy than few "
            f"({few:,}).",
            "CUB, 20k to 60k steps: towards 52",
            Comparison("accuracy", {"row": "further", "x": few}, most, **POINTS),
        ),
        f"{many:,} steps with distillation": (
            f"At many steps ({many:,}), self-distillation beats further pre-training.",
            "CUB: 58 against 52 at 60k",
            Comparison("accuracy", {"row": "self_distillation", "x": many}, most, **POINTS),
        ),
    }
    return [
        Claim(name, "self-distillation", sentence, "Fig. 1", number, test, preset=preset)
        for name, (sentence, number, test) in claims.items()
    ]


def few_examples(count: int, preset: str) -> Claim:
    """The claim of Fig. 3 at a small number of labelled images."""
    return Claim(
        name=f"{count:,} examples",
        paper="self-distillation",
        where="Fig. 3",
        sentence=f"With few examples ({count:,}), self-distillation beats fine-tuning alone.",
        number="CIFAR-100: 13 points with 1,000 examples, 6 with 2,500",
        test=Comparison(
            "score_by_size",
            {"row": "self_distillation", "x": count},
            {"row": "finetune", "x": count},
            scale=100,
        ),
        preset=preset,
    )


GATES = gates("accuracy")
CLAIMS = [
    *beats(
        "accuracy",
        "Table 1",
        {
            "further": "CUB 58.06 ± 0.90 against 55.72 ± 0.46",
            "finetune": "CUB 58.06 ± 0.90 against 55.55",
            "recadam": "CUB 58.06 ± 0.90 against 55.22 ± 1.29",
            "mars": "CUB 58.06 ± 0.90 against 55.35 ± 0.73",
            "r3f": "CUB 58.06 ± 0.90 against 55.91 ± 0.79",
        },
    ),
    *beats("accuracy", "Table 5", {"supcon": "X-ray 79.68 against 75.30"}),
    Claim(
        name="SupCon",
        paper="self-distillation",
        where="Table 5",
        sentence="Supervised contrastive pre-training is worse than fine-tuning alone.",
        number="X-ray 75.30 against 77.15",
        test=Comparison("accuracy", "finetune", "supcon", **POINTS),
        gate=GATES,
    ),
    *beats(
        "accuracy",
        "Table 3",
        {
            "without_mae": "CUB 58.06 against 57.60",
            "further_x2": "CUB 58.06 against 53.41",
            "predictions": "CUB 58.06 against 55.27",
            "weights_l2": "CUB 58.06 against 53.70",
            "weights_mars": "CUB 58.06 against 54.82",
        },
    ),
    Claim(
        name="twice the steps",
        paper="self-distillation",
        where="Table 3",
        sentence="Further pre-training for twice the steps is worse than for the usual number.",
        number="CUB 53.41 against 55.72",
        test=Comparison("accuracy", "further", "further_x2", **POINTS),
        gate=GATES,
    ),
    *(
        Claim(
            name=f"λ = {weight} hardly matters",
            paper="self-distillation",
            where="Table 6",
            sentence=f"With weight {weight} on L_MAE instead of 1, self-distillation is at most "
            "one point less accurate.",
            number=f"CUB {score} against 58.06",
            test=Comparison(
                "accuracy", f"lambda_{weight}", "self_distillation", threshold=-0.01, **POINTS
            ),
            gate=GATES,
        )
        for weight, score in (("0.5", "57.76"), ("0.3", "58.21"), ("0.1", "57.76"))
    ),
    *gap_and_distance(GATES),
    *by_steps(100, 3200, "small_steps"),
    *by_steps(5000, 60000, "steps"),
    few_examples(100, "small_sizes"),
    few_examples(200, "small_sizes"),
    few_examples(1000, "sizes"),
    few_examples(2500, "sizes"),
]


def images_report(table: pd.DataFrame, run: Run) -> list[str]:
    """The report's paragraphs."""
    return report(table, run, "images", PAPER, USE)


EXPERIMENT = Experiment(
    name="self_distillation.images",
    file=__file__,
    config="images_grid",
    description=__doc__ or "",
    declare=functools.partial(declare, kind="images"),
    report=images_report,
    options=options,
    measured_on={
        "small": "a masked auto-encoder from the first nine blocks of DINOv2's ViT-S/14, {sets}"
    },
)

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
