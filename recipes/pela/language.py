"""Perplexity of a pre-trained decoder that is compressed without any training, by ratio κ.

PELA starts its repair from a plain SVD. Here the loss of this start is compared with that of others
of equal size: factors that fit the layers' inputs (ASVD, SVD-LLM's whitening), whitened factors
with ranks by energy, and feed-forward neurons pruned by importance (MatFormer's order). Each is
calibrated on one text and scored on another; every seed has different calibration and test windows.

    python -m recipes.pela.language                           seconds, on random weights
    python -m recipes.pela.language --preset small --seeds 3  SmolLM2-135M, see `make weights`
    python -m recipes.pela.language --preset paper --decoder NAME_OR_FOLDER
"""

import copy
import math
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import nn

from datamodules import CorpusData
from lightning_modules.backbones import build_text
from lightning_modules.counting import count_parameters
from lightning_modules.layouts import Cut, feed_forwards
from lightning_modules.matformer import extract, importance, nest, reorder
from lightning_modules.pela import plan_uniform
from lightning_modules.pela.compress import Factors, Ranks, compress_each, layer_moments
from lightning_modules.pela.layers import find_layers, sizes
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.matformer.language import corpus, plain, score, text_settings
from recipes.messages import console
from recipes.nodes import device
from recipes.plots import curves
from recipes.provenance import provenance
from recipes.results import Row, by_seed, select, unique
from recipes.runner import run_experiment
from recipes.tables import Column, summary, tabulate

ROWS = {
    "plain": "plain SVD (PELA's factors)",
    "asvd": "ASVD",
    "whitened": "whitened (SVD-LLM)",
    "whitened_energy": "whitened, ranks by energy",
    "pruned": "neurons pruned by importance",
}
LOW_RANK: dict[str, tuple[Factors, Ranks]] = {
    "plain": ("svd", "uniform"),
    "asvd": ("asvd", "uniform"),
    "whitened": ("whitened", "uniform"),
    "whitened_energy": ("whitened", "energy"),
}


def nats(a: str, b: str, ratio: float, times: float = 1.0) -> Comparison:
    """The comparison that a's perplexity is more than `times` b's at a ratio, in nats."""
    worse, better = ({"row": row, "x": None if row == "dense" else ratio} for row in (a, b))
    return Comparison("loss", worse, better, math.log(times), digits=3)


GATE = Comparison(
    "loss", "chance", "dense", 3.0, says="the decoder's loss is three nats below guessing"
)

CLAIMS = [
    Claim(
        "direct",
        "PELA",
        "Low rank without repair destroys a decoder: at κ 1.5 its perplexity is more than ten "
        "times the dense one's.",
        "Section 1, there DeiT, 81 → 61 %",
        "–",
        nats("plain", "dense", 1.5, 10),
        GATE,
    ),
    Claim(
        "whitened factors",
        "PELA",
        "Factors that fit the layers' inputs (SVD-LLM) lose less than plain ones, nothing trained.",
        "not in the paper, κ 1.5 and 2",
        "–",
        [nats("plain", "whitened", 1.5), nats("plain", "whitened", 2.0)],
        GATE,
    ),
    Claim(
        "no replacement for a repair",
        "PELA",
        "Even whitened factors have more than twice the dense perplexity at κ 1.5: low rank needs "
        "a repair.",
        "not in the paper",
        "–",
        nats("whitened", "dense", 1.5, 2),
        GATE,
    ),
    *(
        Claim(
            f"{better} < {worse}",
            "PELA",
            f"{sentence}, nothing trained, κ 1.5 and 2.",
            "not in the paper",
            "–",
            [nats(worse, better, 1.5), nats(worse, better, 2.0)],
            GATE,
        )
        for better, worse, sentence in (
            ("asvd", "plain", "ASVD's factors lose less than plain ones"),
            ("whitened", "asvd", "Whitened factors lose less than ASVD's"),
            ("whitened_energy", "whitened", "Ranks by energy lose less than the same κ everywhere"),
            ("whitened", "pruned", "Low rank loses less than pruned neurons at equal parameters"),
        )
    ),
]


def declare(run: Run) -> None:
    """Declare a measurement for each seed and kind of calibration, of all ratios."""
    grid = run.grid("language_grid")
    given = {"decoder": grid["decoder"], "windows": grid["test_windows"]}
    data = grid["data"]
    if name := run.options.decoder:
        given["decoder"] = {"architecture": name, "model_args": {}, "pretrained": True}
        data = {**data, "tokenizer": name}
    given |= text_settings(data)
    rows = run.rows(ROWS, default=grid["rows"])
    missing = partial(missing_windows, Measuring(run.seeds[-1], given, {}, run.out))
    for seed in run.seeds:
        run.measure("dense", seed, measure_dense, settings=given, missing=missing)
        for kind in dict.fromkeys(kind_of(row) for row in rows):
            settings = {
                "rows": [row for row in rows if kind_of(row) == kind],
                "ratios": grid["ratios"],
                "calibration": grid["calibration_windows"],
            }
            settings = {**given, **settings}
            run.measure(kind, seed, measure_kind, settings=settings, missing=missing)


def kind_of(row: str) -> str:
    """The kind of calibration of a row; rows of one kind share it."""
    return LOW_RANK[row][0] if row in LOW_RANK else row


def measure_dense(m: Measuring) -> Iterator[Row]:
    """Scores of the decoder itself, and the loss of guessing uniformly among all tokens."""
    model, data = decoder(m), corpus(m)
    vocabulary = model.config.vocab_size
    scores = score({"dense": plain(model)}, windows(data, m), vocabulary)["dense"]
    for metric in ("loss", "perplexity"):
        yield Row("dense", metric, scores[metric])
    yield Row("dense", "parameters", count_parameters(model))
    yield Row("chance", "loss", math.log(vocabulary))


def measure_kind(m: Measuring) -> Iterator[Row]:
    """Scores and agreement with the dense decoder, of the rows of one calibration, by ratio."""
    model, data = decoder(m), corpus(m)
    samples, batches = windows(data, m), calibration(data, m)
    rows, ratios = m.settings["rows"], m.settings["ratios"]
    kind = kind_of(rows[0])
    moments = None if kind == "pruned" else layer_moments(model, batches, LOW_RANK[rows[0]][0])
    for row in rows:
        if kind == "pruned":
            smaller = prune_each(model, ratios, batches)
        else:
            smaller = compress_each(model, ratios, LOW_RANK[row][1], moments)
        by_ratio = {f"{ratio:g}": plain(small) for ratio, small in smaller.items()}
        models = {"dense": plain(model), **by_ratio}
        scores = score(models, samples, model.config.vocab_size)
        for ratio, small in smaller.items():
            for metric in ("loss", "perplexity", "agreement", "kl"):
                yield Row(row, metric, scores[f"{ratio:g}"][metric], x=ratio)
            yield Row(row, "parameters", count_parameters(small), x=ratio)


def decoder(m: Measuring) -> Any:
    """The dense model; where the settings have no pre-trained weights, the seed draws them."""
    with torch.random.fork_rng():
        torch.manual_seed(m.seed)
        model = build_text(task="causal", **m.settings["decoder"])
    return model.to(device()).eval()


def calibration(data: CorpusData, m: Measuring) -> list[dict[str, Any]]:
    """Windows of the text to calibrate on, drawn by the seed."""
    blocks: Any = data.samples("train")
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(m.seed))
    chosen = order[: m.settings["calibration"]].tolist()
    return [{"input_ids": blocks[k]["input_ids"][None], "use_cache": False} for k in chosen]


def windows(data: CorpusData, m: Measuring) -> list[dict[str, torch.Tensor]]:
    """The seed's windows of the test text, which no other seed has.

    Raises:
        ValueError: if the text has too few; seeds that share windows are no independent runs.
    """
    samples: Any = data.samples("test")
    count = min(m.settings["windows"] or len(samples), len(samples))
    start = m.seed * count
    if start + count > len(samples):
        raise ValueError(
            f"seed {m.seed} has no test windows of its own: each seed scores {count} of the "
            f"{len(samples)} that there are; run at most --seeds {len(samples) // count}, or lower "
            "test_windows in language_grid.yaml"
        )
    chosen = (samples[place] for place in range(start, start + count))
    return [{name: x[None] for name, x in sample.items()} for sample in chosen]


def missing_windows(last: Measuring) -> str:
    """Why the last seed, and so the run, cannot read its test windows; "" if it can."""
    try:
        windows(corpus(last), last)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


@torch.no_grad()
def prune_each(
    model: nn.Module, ratios: Sequence[float], batches: list[dict[str, Any]]
) -> dict[float, nn.Module]:
    """Copies with fewer feed-forward neurons, at most as large as the low-rank model of each κ.

    Every layer loses the same number of neurons, its least important ones. Ratios at which no
    neuron would be left are skipped.
    """
    model = copy.deepcopy(model)
    reorder(model, importance(model, batches, "ffn"))
    layers = feed_forwards(model)
    neurons = layers[0].units
    size_of_one = sum(  # parameters of one neuron, added up over all layers
        per_neuron(cut, layer.module.get_submodule(cut.path))
        for layer in layers
        for cut in layer.cuts
    )
    shapes = {name: sizes(layer) for name, layer in find_layers(model).items()}
    widths = {}
    for ratio in ratios:
        plan = plan_uniform(model, ratio)
        saved = sum(i * o - plan[name] * (i + o) for name, (i, o) in shapes.items())
        if (width := neurons - math.ceil(saved / size_of_one)) > 0:
            widths[ratio] = width
    distinct = sorted(set(widths.values()))
    nest(model, [*(width / neurons for width in distinct), 1.0])
    return {ratio: extract(model, distinct.index(width)) for ratio, width in widths.items()}


def per_neuron(cut: Cut, child: Any) -> int:
    """Parameters of one hidden neuron in a linear layer that has it as an output or an input."""
    bias = child.bias.numel() if cut.dim == 0 and child.bias is not None else 0
    return (child.weight.numel() + bias) // cut.units


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Perplexity, loss and agreement by ratio."""
    grid = run.grid("language_grid")
    ratios = unique(table.dropna(subset=["x"]), "x")

    def by_ratio(metric: str, **settings: Any) -> str:
        columns = [Column(f"κ {x:g}", metric, {"x": x}, **settings) for x in ratios]
        shown = tabulate(table, ROWS, columns)
        shown.show(metric)
        return shown.markdown()

    titles = {**ROWS, "dense": "dense", "chance": "a guess"}
    lines = select(table, {"metric": "loss", "row": list(titles)})
    at_right = lines[lines["x"].isna() | (lines["x"] == lines["x"].max())]
    highest_first = at_right.groupby("row")["value"].mean().sort_values(ascending=False).index
    curves(
        table,
        run.out / "loss.png",
        "loss",
        titles={row: titles[row] for row in highest_first},  # the legend as the curves end
        baselines=["dense", "chance"],
        xlabel="ratio κ: layers keep 1/κ of their parameters",
        ylabel="loss, nats a token",
    )
    name = run.options.decoder or grid["decoder"]["architecture"]
    note = "" if run.options.decoder or not grid["note"] else f" ({grid['note']})"
    scored = grid["test_windows"] or "all"
    dense, loss, size = (
        by_seed(table, n, {"row": "dense"}) for n in ("perplexity", "loss", "parameters")
    )
    return [
        f"# A decoder at low rank without training, preset {run.preset}",
        provenance(run, table),
        f"{name}{note}: {size.mean():,.0f} parameters, {summary(loss, digits=3)} nats a token, "
        f"perplexity {summary(dense, spread='range')}. Each seed calibrates on its own "
        f"{grid['calibration_windows']} windows of {grid['data']['length']} tokens (or on as many "
        f"as there are) and scores {scored} windows of another text. Nothing is trained.",
        "Perplexity, median over seeds and range:",
        by_ratio("perplexity", spread="range"),
        "Loss less that of plain SVD, in nats a token:",
        by_ratio("loss", digits=3, reference="plain"),
        "How often the most likely token is the dense decoder's, %:",
        by_ratio("agreement", scale=100),
        "Parameters, embeddings included:",
        by_ratio("parameters", digits=0, spread=""),
        "![loss by ratio](loss.png)",
    ]


def options(parser: ArgumentParser) -> None:
    """Add the flag --decoder."""
    parser.add_argument(
        "--decoder",
        metavar="NAME_OR_FOLDER",
        help="a causal language model of transformers with its tokenizer; default: the preset's",
    )


EXPERIMENT = Experiment(
    "pela.language", __file__, "language_grid", __doc__ or "", declare, report, options,
    measured_on={"small": "SmolLM2-135M-Instruct (from 4 bits), wikitext2"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
