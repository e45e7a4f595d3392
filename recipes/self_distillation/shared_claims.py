"""Claims and gates that the experiments on images and on text share."""

from collections.abc import Mapping, Sequence
from typing import Any

from recipes.claims import Claim, Comparison

PAPER = "self-distillation"
POINTS: dict[str, Any] = {"mean_over": "set", "scale": 100}
OVER = {  # row that self-distillation is claimed to beat → the claim's name and sentence
    "further": ("over further", "Self-distillation beats further pre-training."),
    "finetune": ("over fine-tuning", "Self-distillation beats fine-tuning alone."),
    "recadam": ("over RecAdam", "Self-distillation beats RecAdam."),
    "mars": ("over MARS", "Self-distillation beats MARS."),
    "r3f": ("over R3F", "Self-distillation beats R3F."),
    "supcon": ("over SupCon", "Self-distillation beats supervised contrastive pre-training."),
    "without_mae": ("L_MAE helps", "Self-distillation is worse without L_MAE."),
    "further_x2": (
        "over twice the steps",
        "Self-distillation beats further pre-training for twice the steps.",
    ),
    "predictions": ("predictions", "Matching hidden states beats matching predictions."),
    "weights_l2": ("weights", "Matching hidden states beats matching weights (ℓ2)."),
    "weights_mars": ("weights, MARS", "Matching hidden states beats matching weights (MARS)."),
}


def gates(metric: str) -> list[Comparison]:
    """The conditions for judging claims about `metric`, which is measured on the test part.

    They name no set and take no mean, so each set has to meet them (see `Comparison.mean_over`).
    """
    return [
        Comparison(
            metric, "finetune", "scratch", threshold=0.1, scale=100,
            says="fine-tuning is ten points better than training from scratch",
        ),
        Comparison(
            "val_mae_by_share", {"row": "further", "x": 1.0}, {"row": "further", "x": 0.5},
            digits=4,
            says="further pre-training overfits: held-out L_MAE rises in its second half",
        ),
    ]  # fmt: skip


def beats(metric: str, where: str, numbers: Mapping[str, str]) -> list[Claim]:
    """Claims that self-distillation beats each row of `numbers`, which has the paper's figures."""
    return [
        Claim(
            name=OVER[row][0],
            paper=PAPER,
            where=where,
            sentence=OVER[row][1],
            number=number,
            test=Comparison(metric, "self_distillation", row, **POINTS),
            gate=gates(metric),
        )
        for row, number in numbers.items()
    ]


def gap_and_distance(gate: Sequence[Comparison]) -> list[Claim]:
    """Claims on the generalisation gap and on the distances from the initial weights."""
    return [
        Claim(
            name="gap",
            paper=PAPER,
            where="Section 5.2, Table 4",
            sentence="Self-distillation has a smaller generalisation gap (test loss less training "
            "loss) than further pre-training.",
            number="smaller",
            test=Comparison("gap", "further", "self_distillation", mean_over="set"),
            gate=gate,
        ),
        Claim(
            name="adaptation stays near",
            paper=PAPER,
            where="Section 5.2, Fig. 5",
            sentence="Before fine-tuning, self-distillation is nearer to the initial weights than "
            "further pre-training.",
            number="nearer",
            test=Comparison("adaptation_distance", "further", "distil", mean_over="set"),
            gate=gate,
        ),
        Claim(
            name="fine-tuning stays near",
            paper=PAPER,
            where="Section 5.2, Fig. 5",
            sentence="After fine-tuning, too, self-distillation is nearer to the initial weights "
            "than further pre-training.",
            number="nearer",
            test=Comparison("distance", "further", "self_distillation", mean_over="set"),
            gate=gate,
        ),
        Claim(
            name="the first round matters most",
            paper=PAPER,
            where="Section 5.2, Fig. 5",
            sentence="The distance from the initial weights after fine-tuning falls more in round "
            "1 of self-distillation than in round 2, 3 or 4.",
            number="a figure",
            test=[
                Comparison("distance_fall", {"x": 1.0}, {"x": later}, mean_over="set")
                for later in (2.0, 3.0, 4.0)
            ],
            gate=gate,
        ),
    ]
