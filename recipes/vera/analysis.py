"""What VeRA learns: its vectors by layer, its ΔW beside LoRA's, what it can fit, what it costs.

Fig. 3 (how far d and b move in each layer), Appendix D (cosine of the two methods' weight changes),
Appendix E (random 10 × 10 matrices at equal numbers of parameters) and Appendix C (time, memory).
The models are those of recipes.vera.glue, trained now unless they are there; LoRA and VeRA start
from the same weights.

    python -m recipes.vera.analysis                            a generated task: seconds
    make weights && python -m recipes.vera.analysis --preset small --seeds 3
                                                               SST-2 and MiniLM
    python -m recipes.vera.analysis --preset paper --seeds 5   RTE and RoBERTa-base
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from torch import nn

from lightning_modules.counting import count_parameters
from lightning_modules.tuning import trainable
from lightning_modules.vera import TextTuning
from lightning_modules.vera.analysis import (
    cosine_similarity,
    fit_lora,
    fit_vera,
    stable_rank,
    vector_changes,
    weight_changes,
)
from lightning_modules.vera.vera import projections_of
from recipes.legacy import Experiment, from_command_line, read_history
from recipes.messages import console
from recipes.report import (
    markdown_table,
    mean_sd,
    median_range,
    save_plot,
    show_table,
    write_report,
)
from recipes.vera.glue import NAMES, read_grid, train

METHODS = ("lora", "vera")
APPENDIX_C = {"LoRA": (568, 23.42), "VeRA": (578, 21.69)}  # Llama-7B, r = 64: minutes, GB

# of one seed: "cost" → method → …, "layers" → layer → …
Found = dict[str, dict[str, dict[str, float]]]


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line("vera.analysis", __file__, "glue", __doc__ or "", argv)
    grid = read_grid(experiment, "analysis_grid")
    fits = fit_matrices(**grid["fit"])
    results: list[Found] = []
    for seed in range(experiment.seeds):
        results.append(analyse(experiment, grid["task"], seed))
        report(experiment, grid, results, fits)
    return experiment


def analyse(experiment: Experiment, task: str, seed: int) -> Found:
    """Compare the two methods' models of one seed, layer by layer."""
    runs = experiment.sibling("vera.glue")
    grid = read_grid(runs, "glue_grid")
    models, cost = {}, {}
    for method in METHODS:
        scores = train(runs, grid, method, task, seed)
        folder = runs.out / f"seed{seed}" / f"{task}_{method}"
        models[method] = load(folder / "checkpoints" / "last.ckpt")
        steps = read_history(folder)["step"][-1] + 1
        cost[method] = {
            **scores,
            "seconds_per_step": scores["seconds"] / steps,
            "bytes": held_bytes(models[method]),
        }
    return {"cost": cost, "layers": compare(models["lora"], models["vera"], seed)}


def load(checkpoint: Path) -> nn.Module:
    """The adapted model of a stage's checkpoint."""
    module = TextTuning.load_from_checkpoint(checkpoint, map_location="cpu")
    assert module.model is not None
    return module.model


def compare(lora: nn.Module, vera: nn.Module, seed: int) -> dict[str, dict[str, float]]:
    """What became of each layer: VeRA's vectors, both ΔW, and their cosine (Fig. 3, App. D)."""
    generator = torch.Generator().manual_seed(seed)
    vectors = vector_changes(vera)
    changes = {"lora": weight_changes(lora), "vera": weight_changes(vera)}
    layers = {}
    for name, moved in vectors.items():
        found = {"d": moved.d, "d_moved": moved.d_moved, "b_moved": moved.b_moved}
        base: Any = vera.get_submodule(name).weight
        for method in METHODS:
            delta = changes[method][name]
            found[f"change_{method}"] = (delta.norm() / base.norm()).item()
            found[f"stable_rank_{method}"] = stable_rank(delta)
        noise = torch.randn(base.shape, generator=generator)
        found["cosine"] = cosine_similarity(changes["lora"][name], changes["vera"][name])
        found["cosine_random"] = cosine_similarity(changes["lora"][name], noise)
        layers[name] = found
    return layers


def held_bytes(model: nn.Module) -> int:
    """What training holds in float32 beside activations.

    Weights, VeRA's A and B, and gradients and AdamW's two moments of what trains.
    """
    frozen = 0
    if hasattr(model, "vera"):
        pairs = projections_of(model)
        frozen = sum(pair.rank * (pair.inputs + pair.outputs) for pair in pairs)
    trained = sum(parameter.numel() for parameter in trainable(model).values())
    return 4 * (count_parameters(model) + frozen + 3 * trained)


def fit_matrices(
    targets: int, size: int, steps: int, parameters: Sequence[int]
) -> dict[str, dict[int, list[float]]]:
    """Errors of the best fits of random matrices, by method and number of parameters (App. E).

    Args:
        targets: number of matrices of standard normal entries.
        size: their rows and columns.
        steps: of VeRA's alternating least squares.
        parameters: VeRA's, each more than `size`; LoRA has a multiple of 2·size below size².
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(targets, size, size, generator=generator, dtype=torch.float64)
    fits: dict[str, dict[int, list[float]]] = {"lora": {}, "vera": {}}
    for rank in range(1, size // 2 + 1):
        fits["lora"][2 * size * rank] = fit_lora(drawn, rank).tolist()
    for count in parameters:
        fits["vera"][count] = fit_vera(drawn, count - size, generator, steps).tolist()
    return fits


def by_kind(layers: Sequence[str]) -> dict[str, list[str]]:
    """The layers' names in order, by their last part: "query", "value"."""
    kinds: dict[str, list[str]] = {}
    for name in layers:
        kinds.setdefault(name.rpartition(".")[2], []).append(name)
    return kinds


def report(
    experiment: Experiment,
    grid: dict[str, Any],
    results: Sequence[Found],
    fits: dict[str, dict[int, list[float]]],
) -> None:
    """Write report.md, metrics.json and the plots, and show the tables."""
    kinds = by_kind(list(results[0]["layers"]))

    def table(columns: dict[str, str], digits: int) -> tuple[list[str], list[list[str]]]:
        """One row for each layer; every column once for each kind of layer."""
        header = ["layer", *(f"{title}, {kind}" for title in columns for kind in kinds)]
        rows = []
        for place, names in enumerate(zip(*kinds.values(), strict=True), 1):
            cells = [
                mean_sd([r["layers"][name][key] for r in results], 1, digits)
                for key in columns.values()
                for name in names
            ]
            rows.append([str(place), *cells])
        return header, rows

    vectors = table({"‖d - d₀‖": "d_moved", "‖b‖": "b_moved"}, 2)
    sizes = {f"‖ΔW‖/‖W‖ {NAMES[method]}": f"change_{method}" for method in METHODS}
    spreads = {f"st. rank {NAMES[method]}": f"stable_rank_{method}" for method in METHODS}
    weights = table(sizes | spreads, 2)
    cosines = table({"LoRA · VeRA": "cosine", "LoRA · noise": "cosine_random"}, 4)
    means = {
        key: [statistics.fmean(x[key] for x in r["layers"].values()) for r in results]
        for key in ("cosine", "cosine_random")
    }
    costs = cost_rows(results)
    fitted = fit_rows(fits)
    show_table(f"Vectors ({experiment.preset})", *vectors)
    show_table(f"Cosine of ΔW ({experiment.preset})", *cosines)
    show_table("Fitting random matrices: mean squared error", *fitted)
    plot_layers(experiment, kinds, results)
    plot_fits(experiment, fits)
    start = results[0]["layers"][next(iter(kinds.values()))[0]]
    fit = grid["fit"]
    text = [
        f"# What VeRA learns, preset {experiment.preset}",
        experiment.provenance(len(results)),
        f"{grid['task']}, the models of recipes.vera.glue after their last step; mean ± standard "
        "deviation over seeds.",
        "## Vectors by layer (Fig. 3)",
        f"How far training moved VeRA's vectors; in the first layer ‖d‖ ended at {start['d']:.2f}. "
        "b started at zero. The paper's figure shows RoBERTa-large.",
        markdown_table(*vectors),
        "![Changes by layer](layers.png)",
        "## Weight changes (Appendix D)",
        "Size of ΔW relative to the base weight, and stable rank ‖ΔW‖²_F / ‖ΔW‖²₂.",
        markdown_table(*weights),
        "Cosine between the ΔW of LoRA and of VeRA, both from the same start, beside that of LoRA "
        f"and a matrix of random numbers; mean of the layers {mean_sd(means['cosine'], 1, 4)} and "
        f"{mean_sd(means['cosine_random'], 1, 4)}.",
        markdown_table(*cosines),
        "## Fitting random matrices (Appendix E)",
        f"Mean squared error of {fit['targets']} random {fit['size']} × {fit['size']} matrices of "
        "standard normal entries in float64, mean ± standard deviation over matrices. LoRA: the "
        "singular value decomposition, which no training beats. VeRA, with matrices of its own for "
        f"each target: alternating least squares from one start, {fit['steps']} rounds; a local "
        "minimum, so more is possible. The last column counts the targets that VeRA fits better.",
        markdown_table(*fitted),
        "![Error against parameters](fit.png)",
        "## Cost (Appendix C)",
        "Time of the whole stage over its optimizer steps, evaluation and set-up included, median "
        "and range over seeds; whatever else the machine did is in it, so ranges that overlap say "
        "nothing. Memory is counted, not measured: weights, A and B, and gradients and AdamW's "
        "moments of what trains, without activations.",
        markdown_table(["method", "ms per step", "time / LoRA's", "MB", "MB / LoRA's"], costs),
        "**The paper's** (Llama-7B, r = 64):",
        markdown_table(
            ["method", "minutes", "GB"],
            [[name, *map(str, values)] for name, values in APPENDIX_C.items()],
        ),
    ]
    metrics = {"provenance": experiment.provenance(len(results)), "seeds": results, "fits": fits}
    write_report(experiment.out, text, metrics)


def cost_rows(results: Sequence[Found]) -> list[list[str]]:
    """A row for each method: time, and memory, both also relative to LoRA's of the same seed."""
    rows = []
    for method in METHODS:
        costs = [r["cost"][method] for r in results]
        slower = [
            x["seconds_per_step"] / r["cost"]["lora"]["seconds_per_step"]
            for x, r in zip(costs, results, strict=True)
        ]
        held, of_lora = costs[0]["bytes"], results[0]["cost"]["lora"]["bytes"]
        rows.append(
            [
                NAMES[method],
                median_range([x["seconds_per_step"] for x in costs], 1000),
                median_range(slower, 1, 3),
                f"{held / 1e6:.2f}",
                f"{held / of_lora:.4f}",
            ]
        )
    return rows


def fit_rows(fits: dict[str, dict[int, list[float]]]) -> tuple[list[str], list[list[str]]]:
    """A row for each number of parameters."""
    rows = []
    for count in sorted({*fits["lora"], *fits["vera"]}):
        found = [fits[method].get(count) for method in METHODS]
        cells = ["" if errors is None else mean_sd(errors, 1, 3) for errors in found]
        lora, vera = found
        better = ""
        if lora is not None and vera is not None:
            wins = sum(ours < theirs for ours, theirs in zip(vera, lora, strict=True))
            better = f"{wins} of {len(vera)}"
        rows.append([str(count), *cells, better])
    return ["parameters", "LoRA", "VeRA", "VeRA better"], rows


def plot_layers(
    experiment: Experiment, kinds: dict[str, list[str]], results: Sequence[Found]
) -> None:
    """Fig. 3 and Appendix D: what moved, and how alike, by layer."""
    panels = {"d_moved": "‖d - d₀‖", "b_moved": "‖b‖", "cosine": "cosine of ΔW, LoRA and VeRA"}
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.6))
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for kind, names in kinds.items():
            values = [statistics.fmean(r["layers"][n][key] for r in results) for n in names]
            axis.plot(range(1, len(names) + 1), values, "o-", label=kind)
        if key == "cosine":
            axis.axhline(0, color="grey", ls=":")
        axis.set(title=title, xlabel="layer")
        axis.legend()
    save_plot(figure, experiment.out / "layers.png")


def plot_fits(experiment: Experiment, fits: dict[str, dict[int, list[float]]]) -> None:
    """Fig. 6: error against number of parameters; a band is one standard deviation."""
    figure, axis = plt.subplots(figsize=(5.5, 4))
    for method in METHODS:
        counts = sorted(fits[method])
        means = [statistics.fmean(fits[method][count]) for count in counts]
        spreads = [statistics.stdev(fits[method][count]) for count in counts]
        (line,) = axis.plot(counts, means, "o-", label=NAMES[method])
        low, high = (
            [mean + sign * spread for mean, spread in zip(means, spreads, strict=True)]
            for sign in (-1, 1)
        )
        axis.fill_between(counts, low, high, alpha=0.15, fc=line.get_color())
    axis.set(xlabel="parameters", ylabel="mean squared error")
    axis.legend()
    save_plot(figure, experiment.out / "fit.png")


if __name__ == "__main__":
    console(main)
