"""PELA on image classification: low-rank models, repaired by training, beside other compressions.

Each model of the preset is scored dense (it is trained first where no weights are given), at low
rank without training, repaired with L_fd, with L_rwp and with both, and trained as long with L_base
alone (Table 7); and the similarity of images' features is measured (Fig. 2). The first model also
has baselines of equal size, a sweep over ratios (Fig. 4), the cost of a training step (Table 8),
and fine-tuning on other images, with a larger batch in the memory that low rank saves (Table 9).
vision_grid.yaml lists the settings that the trials of each row choose from.

    python -m recipes.pela.vision                                digits, a few minutes on a CPU
    python -m recipes.pela.vision --preset small --seeds 5       ViT-S/14 of `make weights`
    python -m recipes.pela.vision --preset small --only "*-sweep*"     one table and its stages
    python -m recipes.pela.vision --preset paper --data.root /data     /data/imagenet, DeiT and Swin
"""

from functools import partial

import pandas as pd

from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Run
from recipes.messages import console
from recipes.pela.study import TREATMENTS, Study
from recipes.plots import curves, ranking
from recipes.provenance import provenance
from recipes.results import select, unique
from recipes.runner import run_experiment
from recipes.tables import Column, tabulate

ROWS = {
    "chance": "chance",
    "dense": "dense",
    "continued": "dense, trained on",
    "lora": "LoRA (merged)",
    "direct": "low rank, no training",
    "scratch": "low rank, from random weights",
    "control": "+ L_base only",
    "fd": "+ L_fd",
    "rwp": "+ L_rwp",
    "both": "+ both (PELA)",
    "tinybert": "TinyBERT distillation",
    "maskalign": "MaskAlign distillation",
    "lillama": "Lillama distillation, no labels",
    "energy": "PELA, ranks by energy",
    "asvd": "PELA, ASVD factors",
    "whitened": "PELA, whitened factors",
    "whitened_energy": "PELA, whitened, ranks by energy",
    "flar": "PELA, whitened, ranks by feature error (FLAR-SVD)",
    "pruned": "pruned neurons, L_base + L_fd",
    "nested": "slice of a nested model (MatFormer)",
    "tome": "ToMe, trained",
}
FINETUNED = {"dense": "dense", "pela": "PELA", "pela_plus": "PELA+, larger batch"}
COSTS = {
    "dense": "dense, ordinary training",
    "low_rank": "low rank, ordinary training",
    "repair": "intermediate stage, teacher included",
}
SHARES = ("base", "distillation", "perturbation")
MAIN = {"set": "deit_b κ 2"}


def accuracy(
    a: str, b: str, threshold: float = 0.0, says: str = "", **where: str | float
) -> Comparison:
    """The difference a − b in accuracy; `threshold` is a share of one, the report is in points."""
    return Comparison("accuracy", a, b, threshold, where or MAIN, scale=100, says=says)


def gates(**where: str) -> list[Comparison]:
    """The conditions for judging: the dense model has learnt, and there is something to repair.

    Dense is twenty points above chance, and five above low rank without repair.
    """
    return [
        accuracy("dense", "chance", 0.2, "the dense model is 20 points above chance", **where),
        accuracy("dense", "direct", 0.05, "the dense model is five points better than low rank "
                 "without repair", **where),
    ]  # fmt: skip


GATE = gates()
# the dense model has learnt what it can
CONVERGED = accuracy(
    "dense", "continued", -0.01,
    "trained on as long as the repair, the dense model gains at most a point",
)  # fmt: skip


def near_dense(title: str, name: str, number: str) -> Claim:
    """The claim of Table 1 about one of the paper's further models."""
    return Claim(
        f"repair, {title}",
        "PELA",
        f"The repaired low-rank {title} is at most one and a half points below the dense one.",
        f"Table 1, {title}",
        number,
        accuracy("both", "dense", -0.015, set=name),
        gates(set=name),
        preset="paper",
    )


def every_ratio(preset: str, *sweep: float) -> Claim:
    """The claim of Fig. 4 about the ratios of a preset's sweep."""
    return Claim(
        f"ratios to κ {sweep[-1]:g}",
        "PELA",
        f"At every ratio of the sweep (κ {', '.join(f'{x:g}' for x in sweep)}) the repaired model "
        "is better than low rank without repair.",
        "Fig. 4",
        "a figure, to κ 10",
        [accuracy("both", "direct", set="deit_b sweep", x=x) for x in sweep],
        GATE,
        preset=preset,
    )


def perturbation_matters(row: str) -> Comparison:
    """L_rwp is felt: on average it has more than a twentieth of the norm of the gradients."""
    return Comparison(
        "share_perturbation", row, threshold=0.05, where=MAIN, scale=100, unit="%",
        says=f"L_rwp is felt: in the row {row!r} it has more than a twentieth of the gradient",
    )  # fmt: skip


CLAIMS = [
    Claim(
        "repair",
        "PELA",
        "The repaired low-rank model is within one point of the dense one at half its parameters.",
        "Table 1, DeiT-Base",
        "−0.8 points",
        accuracy("both", "dense", -0.01),
        [*GATE, CONVERGED],
    ),
    near_dense("Swin-Base", "swin_b κ 1.5", "−1.0 points"),
    near_dense("DeiT-III-Large", "deit3_l κ 2", "−1.0 points"),
    Claim(
        "direct",
        "PELA",
        "The repaired low-rank model is more than five points above low rank without repair.",
        "Section 1",
        "81 → 61 %",
        accuracy("both", "direct", 0.05),
        GATE,
    ),
    Claim(
        "feature distillation",
        "PELA",
        "L_fd improves on training the low-rank model with L_base alone.",
        "Table 7",
        "not at hand",
        accuracy("fd", "control"),
        GATE,
    ),
    Claim(
        "weight perturbation",
        "PELA",
        "L_rwp improves on training the low-rank model with L_base alone.",
        "Table 7",
        "not at hand",
        accuracy("rwp", "control"),
        [*GATE, perturbation_matters("rwp")],
    ),
    Claim(
        "both losses",
        "PELA",
        "Both losses together are better than each alone.",
        "Table 7",
        "not at hand",
        [accuracy("both", "fd"), accuracy("both", "rwp")],
        [*GATE, perturbation_matters("both")],
    ),
    *(
        Claim(
            f"PELA > {title}",
            "PELA",
            f"PELA is better than {title} at as many parameters or multiply-adds.",
            "Tables 1 and 2",
            "not at hand",
            accuracy("both", row),
            GATE,
        )
        for row, title in (("tinybert", "TinyBERT"), ("maskalign", "MaskAlign"), ("tome", "ToMe"))
    ),
    Claim(
        "LoRA",
        "PELA",
        "PELA is at most one point below LoRA, which saves nothing at inference.",
        "Section 4",
        "slightly behind on retrieval only",
        accuracy("both", "lora", -0.01),
        [*GATE, CONVERGED],
    ),
    Claim(
        "similarity",
        "PELA",
        "In block 9, features of different images are more alike after low rank without repair "
        "than in the dense model, and less alike again after the repair.",
        "Fig. 2",
        "rises, and falls back",
        [  # block 9 is the last at `small`
            Comparison("similarity", "direct", "dense", where={"set": "deit_b", "x": 9.0}),
            Comparison("similarity", "direct", "both", where={"set": "deit_b", "x": 9.0}),
        ],
        GATE,
    ),
    Claim(
        "memory",
        "PELA",
        "A training step of the low-rank model needs less memory than the dense one's.",
        "Table 8",
        "not at hand",
        Comparison(
            "peak",
            "dense",
            "low_rank",
            where={"set": "deit_b"},
            scale=2**-20,
            unit="MiB",
            exact=True,
        ),
    ),
    Claim(
        "time",
        "PELA",
        "A training step of the low-rank model takes less time than the dense one's.",
        "Table 8",
        "not at hand",
        Comparison("seconds", "dense", "low_rank", where={"set": "deit_b"}, scale=1000, unit="ms"),
    ),
    every_ratio("small", 1.5, 2.0, 3.0, 4.0, 6.0),
    every_ratio("paper", 1.5, 2.0, 3.0, 4.0, 6.0, 10.0),
    Claim(
        "PELA+",
        "PELA",
        "A larger batch in the memory saved improves the accuracy after fine-tuning.",
        "Table 9, segmentation",
        "+0.57 and +0.78 mIoU",
        accuracy("pela_plus", "pela", set="other images"),
        GATE,
    ),
    *(
        Claim(
            f"{row}, beyond the paper",
            "PELA",
            f"PELA is better than {title} at as many parameters.",
            "not in the paper",
            "–",
            accuracy("both", row),
            GATE,
        )
        for row, title in (
            ("whitened", "the same repair from whitened factors (SVD-LLM)"),
            ("asvd", "the same repair from ASVD's factors"),
            ("energy", "the same repair with ranks by energy"),
            ("flar", "the same repair from whitened factors with FLAR-SVD's ranks"),
            ("lillama", "Lillama's joint distillation, block by block"),
            ("pruned", "a model with neurons pruned, distilled likewise"),
            ("nested", "a slice of a nested model (MatFormer)"),
        )
    ),
]


def declare(run: Run) -> None:
    """Declare the stages and measurements of all models, for each seed."""
    grid = run.grid("vision_grid")
    rows = run.rows(TREATMENTS, default=grid["rows"])
    for seed in run.seeds:
        for name, ratios in grid["models"].items():
            study = Study(run, name, seed, grid, [row for row in TREATMENTS if row in rows])
            study.declare(ratios, main=name == next(iter(grid["models"])))


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """A section for each model and ratio, then the first model's other tables."""
    text = [
        f"# PELA on image classification, preset {run.preset}",
        provenance(run, table),
        "Accuracy on the validation images in %, mean ± standard deviation over seeds. `before` is "
        "before any training. Parameters and multiply-adds of one image, head included. All rows "
        "that were trained see the images equally often, and all but the one from random weights "
        "start from the same dense weights. "
        "lr, α, β, p and ε are those of the row's training; where the preset has trials, they were "
        "chosen on training images held out for this, with as many trials for each row (the rows "
        "of PELA with other ranks or factors take PELA's). A term's share is the norm of its "
        "gradient over the sum of the terms' norms.",
    ]
    sets = [one for one in unique(table, "set") if " κ " in one]
    compressed = [row for row in ROWS if row not in ("chance", "dense")]
    # a run of parts of the table has ratios at which nothing but the dense model was measured
    shown = [name for name in sets if len(select(table, {"set": name, "row": compressed}))]
    for name in shown or sets:
        text += comparison(table, name)
        ranking(
            select(table, {"set": name}),
            run.out / f"{file_name(name)}.png",
            "accuracy",
            ROWS,
            costs={"parameters": "parameters", "macs": "multiply-adds"},
            baselines=["chance"],
            scale=100,
            xlabel="accuracy on the validation images, %",
        )
        text.append(f"![accuracy of all rows, the best on top]({file_name(name)}.png)")
    for name in unique(select(table, {"metric": "similarity"}), "set"):
        curves(
            select(table, {"set": name}),
            run.out / f"{name}_similarity.png",
            "similarity",
            titles={row: ROWS[row] for row in ("dense", "direct", "both")},
            xlabel="block",
            ylabel="mean cosine similarity of two images",
        )
        text += [
            f"## Similarity of images' features, {name} (Fig. 2)",
            f"![similarity by block]({name}_similarity.png)",
        ]
    return [*text, *sweep(table, run), *costs(table), *finetuned(table), SCALE]


def comparison(table: pd.DataFrame, name: str) -> list[str]:
    """The section of one model at one ratio: scores of all rows, and their training settings."""
    where = {"set": name}
    compared = tabulate(
        table,
        ROWS,
        [
            Column("parameters", "parameters", where, digits=0, spread=""),
            Column("multiply-adds", "macs", where, digits=0, spread=""),
            Column("before, %", "before", where, scale=100),
            Column("accuracy, %", "accuracy", where, scale=100),
            Column("− PELA", "accuracy", where, scale=100, reference="both"),
            Column("loss", "loss", where, digits=3),
        ],
    )
    settings = tabulate(
        table,
        ROWS,
        [
            Column("lr", "lr", where, digits=6, spread=""),
            *(Column(sign, n, where, digits=4, spread="") for n, sign in SIGNS.items()),
            *(Column(f"share of {n}", f"share_{n}", where, digits=3) for n in SHARES),
        ],
    )
    compared.show(name)
    tables = [one.markdown() for one in (compared, settings) if one.rows]
    return [f"## {name}", *tables]


SIGNS = {"alpha": "α", "beta": "β", "p": "p", "epsilon": "ε"}


def sweep(table: pd.DataFrame, run: Run) -> list[str]:
    """Accuracy against the ratio: a table and a plot (Fig. 4)."""
    text = []
    for name in (one for one in unique(table, "set") if one.endswith(" sweep")):
        points = select(table, {"set": name})
        if points[points["row"] == "both"].empty:  # a run with --only may have the start alone
            continue
        lines = [
            Column(ROWS[row], "accuracy", {"row": row, "set": name}, scale=100)
            for row in ("direct", "both")
        ]
        text += [
            f"## {name} over ratios (Fig. 4)",
            "Trained for fewer epochs than the tables above.",
            tabulate(points, None, lines, index="x", heading="κ").markdown(),
        ]
        if points["x"].nunique() > 1:
            file = f"{file_name(name)}.png"
            references = ["dense", "chance"]  # the same in the tables of all ratios
            model = name.removesuffix("sweep")
            tables = [one for one in unique(table, "set") if one.startswith(f"{model}κ")]
            scored = select(table, {"set": tables[:1], "row": references, "metric": "accuracy"})
            curves(
                pd.concat([points, scored]),
                run.out / file,
                "accuracy",
                titles={row: ROWS[row] for row in ("direct", "both", *references)},
                baselines=references,
                scale=100,
                xlabel="ratio κ: layers keep 1/κ of their parameters",
                ylabel="accuracy, %",
            )
            text.append(f"![accuracy against ratio]({file})")
    return text


def costs(table: pd.DataFrame) -> list[str]:
    """Memory and time of a training step (Table 8)."""
    measured = tabulate(
        select(table, {"metric": ["peak", "seconds", "batch"]}),
        COSTS,
        [
            Column("batch", "batch", digits=0, spread=""),
            Column("memory, MiB", "peak", scale=2**-20),
            Column("time, ms", "seconds", scale=1000),
        ],
    )
    return (
        [
            "## Memory and time of a training step (Table 8)",
            "On a GPU memory is the allocator's peak; on a CPU it is counted (weights, gradients, "
            "AdamW's moments, the teacher, tensors kept for the backward pass). Time is left out "
            "where other programs used the machine meanwhile.",
            measured.markdown(),
        ]
        if measured.rows
        else []
    )


def finetuned(table: pd.DataFrame) -> list[str]:
    """Accuracy after fine-tuning on other images (Table 9)."""
    where = {"set": "other images"}
    rows = tabulate(
        table,
        FINETUNED,
        [
            Column("parameters", "parameters", where, digits=0, spread=""),
            Column("accuracy, %", "accuracy", where, scale=100),
            Column("− PELA", "accuracy", where, scale=100, reference="pela"),
        ],
    )
    batch = select(table, {"metric": "fitting_batch"})["value"]
    return (
        [
            "## As a drop-in on other images (Table 9)",
            "PELA+ takes the batch that fits in the memory of the dense model's fine-tuning "
            f"({', '.join(f'{one:.0f}' for one in batch)} images by seed), at as many updates; "
            "where low rank saves no memory it is PELA's own batch.",
            rows.markdown(),
        ]
        if rows.rows
        else []
    )


def file_name(name: str) -> str:
    """A file name, without its ending, for a set."""
    return name.replace(" κ ", "_k").replace(" ", "_")


SCALE = (
    "The scale differs from the paper's unless the preset is `paper`: compare how the rows stand "
    "to each other, not the numbers."
)
EXPERIMENT = Experiment(
    "pela.vision", __file__, "deit_b", __doc__ or "", declare, report,
    measured_on={
        "small": "the first nine blocks of DINOv2's ViT-S/14 (deit_b.yaml has its settings), 50 "
                 "classes of Tiny-ImageNet",
    },
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
