"""Analyses of trained VeRA models: vectors by layer, weight changes, fits of matrices, cost.

Fig. 3 (how far training moves d and b in each layer) and Appendix C (time and memory) on the models
of recipes.vera.glue; Appendix D (cosine of LoRA's and VeRA's weight changes: rank 64 for both, all
query layers, the same initial weights); Appendix E (fits of random 10 × 10 matrices, VeRA and LoRA
with equal numbers of parameters).

    python -m recipes.vera.analysis                            a generated task: seconds
    make weights && python -m recipes.vera.analysis --preset small --seeds 3
                                                               SST-2 and MiniLM
    python -m recipes.vera.analysis --preset paper --seeds 5   RTE and RoBERTa-base
"""

import statistics
from collections.abc import Iterator
from functools import partial

import pandas as pd
import torch
from torch import nn

from lightning_modules.counting import count_parameters
from lightning_modules.tuning import trainable
from lightning_modules.vera.analysis import (
    cosine_similarity,
    fit_lora,
    fit_vera,
    stable_rank,
    vector_changes,
    weight_changes,
)
from lightning_modules.vera.vera import projections_of
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.plots import curves
from recipes.provenance import provenance
from recipes.results import Row
from recipes.runner import run_experiment
from recipes.tables import Column, Table, tabulate
from recipes.vera import glue
from recipes.vera.methods import TITLES, train

METHODS = ("lora", "vera")
APPENDIX_C = {"LoRA": (568, 23.42), "VeRA": (578, 21.69)}  # Llama-7B, r = 64: minutes, GB
VARIED = ("data.task", "model.rank", "model.targets")


def declare(run: Run) -> None:
    """Declare recipes.vera.glue's models of one task, the pair of rank 64, and the fits."""
    grid = run.grid("analysis_grid")
    glue_run, glue_grid = run.sibling("vera.glue"), run.grid("glue_grid")
    task = grid["task"]
    metric = f"val/{glue_grid['metrics'][task]}"
    for seed in run.seeds:
        models = {
            row: train(glue_run, "glue", glue_grid, row, task, seed, glue.VARIED, metric)
            for row in METHODS
        }
        run.measure("vectors", seed, measure_vectors, {"vera": models["vera"]})
        run.measure("cost", seed, measure_cost, models)
        pair = {row: train(run, "glue", grid, row, task, seed, VARIED, metric) for row in METHODS}
        run.measure("similarity", seed, measure_similarity, pair)
        run.measure("fits", seed, measure_fits, settings=grid["fit"])


def measure_vectors(m: Measuring) -> Iterator[Row]:
    """How far training moved d and b in each layer (Fig. 3); x is the layer, from 1."""
    places: dict[str, int] = {}
    for name, moved in vector_changes(m.stages["vera"].module().model).items():
        kind = name.rpartition(":")[2].rpartition(".")[2]
        places[kind] = x = places.get(kind, 0) + 1
        for metric in ("d", "d_moved", "b_moved"):
            yield Row(metric=metric, value=getattr(moved, metric), row=kind, x=x)


def measure_similarity(m: Measuring) -> Iterator[Row]:
    """Cosine of LoRA's ΔW with VeRA's and with noise, by layer (App. D); size of both ΔW."""
    models = {row: m.stages[row].module().model for row in METHODS}
    changes = {row: weight_changes(model) for row, model in models.items()}
    generator = torch.Generator().manual_seed(m.seed)
    cosines: dict[str, list[float]] = {"LoRA · VeRA": [], "LoRA · noise": []}
    for x, (name, vera) in enumerate(changes["vera"].items(), start=1):
        lora = changes["lora"][name.partition(":")[0]]
        noise = torch.randn(lora.shape, generator=generator)
        for row, other in zip(cosines, (vera, noise), strict=True):
            cosines[row].append(cosine_similarity(lora, other))
            yield Row(metric="cosine", value=cosines[row][-1], row=row, x=x)
        weight = models["vera"].get_submodule(name.partition(":")[0]).weight
        for row, delta in (("lora", lora), ("vera", vera)):
            size = (delta.norm() / weight.norm()).item()
            yield Row(metric="relative change", value=size, row=row, x=x)
            yield Row(metric="stable rank", value=stable_rank(delta), row=row, x=x)
    for row, values in cosines.items():
        yield Row(metric="mean cosine", value=statistics.fmean(values), row=row)


def measure_fits(m: Measuring) -> Iterator[Row]:
    """Mean squared error of the best fits of random matrices (App. E); x counts parameters.

    Settings: `targets` matrices of standard normal entries, of `size` rows and columns; `steps` of
    VeRA's alternating least squares; `parameters`: VeRA's counts, each more than `size`. LoRA's
    counts are the multiples of 2·size up to size².
    """
    targets, size, steps, parameters = (
        m.settings[name] for name in ("targets", "size", "steps", "parameters")
    )
    generator = torch.Generator().manual_seed(m.seed)
    matrices = torch.randn(targets, size, size, generator=generator, dtype=torch.float64)
    for rank in range(1, size // 2 + 1):
        error = fit_lora(matrices, rank).mean().item()
        yield Row(metric="error", value=error, row="lora", x=2 * size * rank)
    for count in parameters:
        error = fit_vera(matrices, count - size, generator, steps).mean().item()
        yield Row(metric="error", value=error, row="vera", x=count)


def measure_cost(m: Measuring) -> Iterator[Row]:
    """Seconds of a stage divided by its updates, and the memory of training without activations."""
    for row, stage in m.stages.items():
        seconds = None if stage.seconds is None else stage.seconds / stage.updates
        yield Row(metric="seconds per update", value=seconds, row=row)
        yield Row(metric="bytes", value=held_bytes(stage.module().model), row=row)


def held_bytes(model: nn.Module) -> int:
    """Bytes of memory that training takes in float32, without activations.

    Counted are the weights, VeRA's A and B, and for trained parameters the gradients and AdamW's
    two moments.
    """
    frozen = 0
    if hasattr(model, "vera"):
        pairs = projections_of(model)
        frozen = sum(pair.rank * (pair.inputs + pair.outputs) for pair in pairs)
    trained = sum(parameter.numel() for parameter in trainable(model).values())
    return 4 * (count_parameters(model) + frozen + 3 * trained)


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Vectors, weight changes, fits and cost, each with its figure."""
    grid = run.grid("analysis_grid")
    fit = grid["fit"]
    kinds = list(dict.fromkeys(table[table["metric"] == "d_moved"]["row"]))
    moved = [
        Column(f"{title}, {kind}", metric, {"row": kind}, digits=2)
        for title, metric in (("‖d − d₀‖", "d_moved"), ("‖b‖", "b_moved"))
        for kind in kinds
    ]
    cosines = [
        Column(pair, "cosine", {"row": pair}, digits=5) for pair in ("LoRA · VeRA", "LoRA · noise")
    ]
    sizes = [
        Column(f"{title}, {TITLES[row]}", metric, {"row": row}, digits=digits)
        for title, metric, digits in (
            ("‖ΔW‖/‖W‖", "relative change", 3),
            ("stable rank", "stable rank", 1),
        )
        for row in METHODS
    ]
    errors = [Column(TITLES[row], "error", {"row": row}, digits=3) for row in METHODS]
    titles = {row: TITLES[row] for row in METHODS}
    curves(table, run.out / "vectors.png", "d_moved", xlabel="layer", ylabel="‖d − d₀‖")
    curves(table, run.out / "cosine.png", "cosine", xlabel="layer", ylabel="cosine of ΔW")
    curves(
        table, run.out / "fit.png", "error", titles=titles, xlabel="parameters",
        ylabel="mean squared error of the fit",
    )  # fmt: skip
    cost = [
        Column("ms per update", "seconds per update", scale=1000),
        Column("− LoRA", "seconds per update", scale=1000, reference="lora"),
        Column("MB", "bytes", scale=1e-6, digits=2, spread=""),
    ]

    def by_x(columns: list[Column], heading: str) -> str:
        return tabulate(table, None, columns, index="x", heading=heading).markdown()

    return [
        f"# What VeRA learns, preset {run.preset}",
        provenance(run, table),
        f"{grid['task']}; mean ± standard deviation over seeds.",
        "## Vectors by layer (Fig. 3)",
        "How far training moved VeRA's vectors, in the models of recipes.vera.glue after their "
        "last step. b started at zero. The paper's figure shows RoBERTa-large.",
        by_x(moved, "layer"),
        "![Changes of d by layer](vectors.png)",
        "## Weight changes (Appendix D)",
        "Cosine between the ΔW of LoRA and of VeRA, rank 64 for both, all query layers, from the "
        "same start; beside it the cosine between LoRA's and a matrix of random numbers. The "
        "paper's Fig. 5 has about 2e-3 and −8e-5.",
        by_x(cosines, "layer"),
        "![Cosine by layer](cosine.png)",
        "Their size relative to the base weight, and their stable rank ‖ΔW‖²_F / ‖ΔW‖²₂.",
        by_x(sizes, "layer"),
        "## Fitting random matrices (Appendix E)",
        f"Mean squared error over {fit['targets']} random {fit['size']} × {fit['size']} matrices "
        "of standard normal entries in float64; other matrices for each seed. LoRA: the singular "
        "value decomposition, which is optimal. VeRA, with new A and B for each target: "
        f"alternating least squares from one start, {fit['steps']} rounds; that is a local "
        "minimum, so its error is an upper bound. The paper: VeRA fits about as well as LoRA.",
        by_x(errors, "parameters"),
        "![Error against parameters](fit.png)",
        "## Cost (Appendix C)",
        "Time of the whole stage per update, evaluation and set-up included: meaningful only if "
        "the machine had nothing else to do (benchmarks/vera_step.py times the step alone). Memory "
        "is counted, not measured: weights, A and B, gradients and AdamW's moments of trained "
        "parameters, without activations.",
        tabulate(table, titles, cost, heading="method").markdown(),
        "**The paper's** (Llama-7B, r = 64):",
        Table(
            ["method", "minutes", "GB"], [[n, *map(str, v)] for n, v in APPENDIX_C.items()]
        ).markdown(),
    ]


CLAIMS = [
    Claim(
        name="analysis: VeRA's ΔW resembles LoRA's",
        paper="VeRA",
        sentence="The mean cosine of LoRA's ΔW with VeRA's is higher than with random numbers.",
        where="Appendix D, Fig. 5",
        number="2e-3 and −8e-5",
        test=Comparison("mean cosine", "LoRA · VeRA", "LoRA · noise", digits=4),
    ),
    Claim(
        name="analysis: VeRA fits as well as LoRA",
        paper="VeRA",
        sentence="With equally many parameters VeRA fits random matrices about as well as LoRA: at "
        "20, 40, 60, 80 and 100 parameters its error is at most 0.02 higher.",
        where="Appendix E, Fig. 6",
        number="a figure",
        test=[
            Comparison("error", "lora", "vera", threshold=-0.02, where={"x": x}, digits=3)
            for x in (20.0, 40.0, 60.0, 80.0, 100.0)
        ],
        measured_on="100 random 10 × 10 matrices a seed",
    ),
    *(
        Claim(
            name=f"analysis: {name}",
            paper="VeRA",
            sentence=f"In instruction tuning VeRA takes {sentence} LoRA of rank 64.",
            where="Appendix C, Llama-7B",
            number=number,
            reason="needs the paper's model and GPU; benchmarks.vera_step measures a step beside "
            "LoRA of rank 8 on a CPU (results/vera/speed.md)",
        )
        for name, sentence, number in (
            ("time", "hardly more time than", "+1.8 %, 578 and 568 minutes"),
            ("memory", "less GPU memory than", "−7.4 %, 21.69 and 23.42 GB"),
        )
    ),
]

EXPERIMENT = Experiment(
    "vera.analysis", __file__, "glue", __doc__ or "", declare, report,
    measured_on={"small": "MiniLM (22.7M parameters), SST-2"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
