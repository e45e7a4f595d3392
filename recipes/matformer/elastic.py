"""Fine-tune a pre-trained decoder so that smaller models of many sizes can be taken from it.

Sorts the decoder's neurons by importance on calibration text (its outputs stay the same), nests it,
and fine-tunes it by sampling granularities. The baselines are the same without sorting, the same
with distillation from the frozen original, and the dense model fine-tuned on as many tokens. Writes
a table of sizes, perplexities and tokens a second, slices.json (widths by layer with their scores),
and the submodels as plain transformers folders.

    python -m recipes.matformer.elastic                         a minute, on a decoder trained here
    python -m recipes.matformer.elastic --preset small          SmolLM2-135M, see `make weights`
    python -m recipes.matformer.elastic --preset paper --elastic.model.architecture NAME_OR_FOLDER
"""

import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from rich.progress import track

from lightning_modules.backbones import build_text
from lightning_modules.counting import count_parameters
from lightning_modules.matformer import extract, importance, nest, reorder
from lightning_modules.matformer.export import save
from lightning_modules.matformer.nest import Nesting, nesting_of
from lightning_modules.matformer.nesting import granularity_names
from lightning_modules.matformer.speculative import speculative_generate
from recipes import plots
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.machine import OthersAtWork
from recipes.matformer.language import (
    corpus,
    plain,
    rows_of,
    said_unigram,
    score,
    scored_text,
    sizes,
    submodels,
    text_settings,
    unigram,
)
from recipes.matformer.starts import nested_settings
from recipes.matformer.submodels import ladder
from recipes.matformer.trials import Derived, language_training
from recipes.messages import console
from recipes.nodes import Measurement, Stage, device
from recipes.provenance import provenance
from recipes.results import Row, select
from recipes.runner import run_experiment
from recipes.tables import Column, tabulate

ROWS = {
    "elastic": "elastic (sorted, sampled)",
    "distilled": "elastic, distilled",
    "unsorted": "elastic, not sorted",
    "dense": "dense, fine-tuned",
}
UNTRAINED = {
    "sorted, untrained": "sorted, not fine-tuned",
    "as it stands": "not sorted, not fine-tuned",
}
EXPORTED = "elastic"  # the row whose uniform sizes, and one Mix'n'Match size, are saved
BETWEEN = 1  # Mix'n'Match sizes between neighbouring granularities

HALF = {"set": "half"}  # of the feed-forward neurons, whichever granularity that is
# the largest size: XL of four; a table of another number, whose sizes are numbered, also names it
FULL = {"set": ["XL", "full"]}
LEARNT = Comparison(
    "loss", "untouched", "dense", digits=3,
    says="fine-tuning lowers the loss of the dense decoder",
)  # fmt: skip

CLAIMS = [
    Claim(
        name="half of the feed-forward",
        paper="MatFormer",
        sentence="Fine-tuning alone makes a pre-trained model elastic: with half of its "
        "feed-forward it stays within 1.25 times the perplexity of the fine-tuned dense model.",
        where="Table 7 (ViT-L/16; the factor 1.25 is not the paper's)",
        number="84.27 % (L of ViT → MatViT) against 85.26 %",
        # ln 1.25
        test=Comparison("loss", "dense", {"row": "elastic", **HALF}, -0.2231, digits=3),
        gate=LEARNT,
    ),
    Claim(
        name="the whole model",
        paper="MatFormer",
        sentence="The largest size of the elastic model is within 1.05 times the perplexity of "
        "the fine-tuned dense model.",
        where="Table 7 (ViT-L/16; the factor 1.05 is not the paper's)",
        number="85.57 % (XL of ViT → MatViT) against 85.26 %",
        # ln 1.05
        test=Comparison("loss", "dense", {"row": "elastic", **FULL}, -0.0488, digits=3),
        gate=LEARNT,
    ),
    Claim(
        name="sorting first",
        paper="MatFormer",
        sentence="Sorting the neurons by importance before nesting lowers the loss with half of "
        "the feed-forward.",
        where="not in the paper, which trains from scratch",
        number="–",
        test=Comparison("loss", {"row": "unsorted", **HALF}, {"row": "elastic", **HALF}, digits=3),
        gate=LEARNT,
    ),
]


def declare(run: Run) -> None:
    """Declare sorting the decoder's neurons, then the training and scores of every row."""
    rows = run.rows(ROWS)
    settings = nested_settings(run, "elastic")
    grid = run.grid("elastic_grid")
    text = text_settings(settings.data.init_args.as_dict())
    prepared = [preparation(run, seed, grid, settings, text) for seed in run.seeds]
    fractions = settings.model.init_args.fractions
    for seed in run.seeds:
        stages = {row: fine_tuning(run, row, seed, grid, prepared, fractions) for row in rows}
        scoring = {"fractions": fractions, "timed": grid["timed_tokens"]}
        untrained = {"fractions": fractions, **text}
        run.measure("untrained", seed, measure_untrained, {"prepared": prepared[seed]}, untrained)
        for row, stage in stages.items():
            run.measure(f"sizes of {row}", seed, measure_sizes, {row: stage}, scoring)


def preparation(
    run: Run, seed: int, grid: dict[str, Any], settings: Any, text: dict[str, Any]
) -> Measurement:
    """Declare sorting the decoder's neurons, after its training if the preset trains it here."""
    base = {}
    if grid["base"]:
        base["base"] = run.stage("base", grid["base"], seed, {"model.fractions": None})
    given = {
        "architecture": settings.model.init_args.architecture,
        "model_args": settings.model.init_args.model_args or {},
        **text,
        "batches": grid["calibration_batches"],
        # blocks are left out at even distances
        "parts": [axis for axis in settings.model.init_args.fractions if axis != "depth"],
    }
    return run.measure("prepared", seed, prepare, base, given)


def fine_tuning(
    run: Run,
    row: str,
    seed: int,
    grid: dict[str, Any],
    prepared: Sequence[Measurement],
    fractions: dict[str, list[float]],
) -> Stage:
    """Declare a row's training, of the decoder that was prepared with its seed."""
    # the decoder is the user's to choose, unless it is trained here; `prepare` reads the flag
    chosen = () if grid["base"] else ("model.architecture",)
    names = granularity_names(len(next(iter(fractions.values()))))
    derived: Derived = {}
    metrics = [f"val/loss_{name}" for name in names]
    if row == "dense":
        derived, metrics = {"model.fractions": lambda c: None}, ["val/loss"]
    return language_training(
        run, row, "elastic", seed, lambda seed: varied(row, prepared[seed], grid), derived, metrics,
        chosen,
    )  # fmt: skip


def varied(row: str, prepared: Measurement, grid: dict[str, Any]) -> dict[str, Any]:
    """The settings in which a row's stage differs from elastic.yaml."""
    folder = prepared / ("original" if row == "unsorted" else "sorted")
    changed: dict[str, Any] = {
        "model.architecture": folder,
        "model.pretrained": True,
        "model.init_from": None,  # other weights would undo the sorting
    }
    if row == "distilled":
        changed["model.distill"] = grid["distill"]
        changed["trainer.callbacks"] = [
            {"class_path": "callbacks.frozen_teacher.FrozenTeacher"},
            {"class_path": "callbacks.granularity.GranularitySampling"},
        ]
    return changed


def prepare(m: Measuring) -> Iterator[Row]:
    """Write the decoder as it is and with its neurons sorted, as folders for transformers."""
    data = corpus(m)
    if "base" in m.stages:
        model = m.model("base")
    else:
        arguments = m.settings["model_args"]
        data.refuse_another_tokenizer(m.settings["architecture"])  # the exports carry the data's
        model = build_text(m.settings["architecture"], "causal", arguments, pretrained=True)
    model = model.to(device()).eval()
    _save(model, data.tokenizer, m.folder / "original")
    samples: Any = data.samples("train")
    ids = (samples[index]["input_ids"] for index in range(min(m.settings["batches"], len(samples))))
    batches = ({"input_ids": row[None]} for row in ids)
    reorder(model, importance(model, batches, m.settings["parts"]))
    _save(model, data.tokenizer, m.folder / "sorted")
    yield Row("prepared", "parameters", count_parameters(model))


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure_untrained(m: Measuring) -> Iterator[Row]:
    """Score every granularity before fine-tuning, without and with sorting; and no context."""
    data = corpus(m)
    yield from unigram(data)
    for row, folder in {"as it stands": "original", "sorted, untrained": "sorted"}.items():
        path = str(m.stages["prepared"].folder / folder)
        model: Any = build_text(path, "causal", {}, pretrained=True).to(device()).eval()
        if folder == "original":
            full = largest(m.settings["fractions"])
            scores = score({full: plain(model)}, data.val_dataloader(), model.config.vocab_size)
            yield from rows_of("untouched", scores, {full: sizes(model, None)})
        nesting = nesting_of(nest(model, m.settings["fractions"]))
        chosen = [nesting.resolve(name) for name in reversed(nesting.names)]
        scores = score(submodels(model, chosen), data.val_dataloader(), model.config.vocab_size)
        yield from rows_of(row, scores, {nesting.label(mix): sizes(model, mix) for mix in chosen})


def measure_sizes(m: Measuring) -> Iterator[Row]:
    """Score and time a fine-tuned model's sizes; write slices.json and some of the sizes."""
    ((row, stage),) = m.stages.items()
    model, data = m.model(row), m.datamodule(row)
    vocabulary = model.config.vocab_size
    if stage.settings.model.init_args.fractions is None:
        full = largest(m.settings["fractions"])
        scores = score({full: plain(model)}, data.val_dataloader(), vocabulary)
        cost = {"tokens a second": tokens_a_second(model, data, m.settings["timed"])}
        yield from rows_of(row, scores, {full: {**sizes(model, None), **cost}})
        return
    nesting = nesting_of(model)
    chosen = {nesting.label(mix): mix for mix in ladder(model, BETWEEN)[::-1]}
    scores = score(submodels(model, chosen.values()), data.val_dataloader(), vocabulary)
    costs: dict[str, dict[str, float | None]] = {}
    slices = []
    mixed = next((label for label in chosen if "*" in label), None)
    for label, mix in track(chosen.items(), description=f"sizes of {row}", transient=True):
        small = extract(model, mix)
        speed = tokens_a_second(small, data, m.settings["timed"])
        costs[label] = {**sizes(small, None), "tokens a second": speed}
        widths = {
            layer.name: layer.widths[index]
            for layer, index in zip(nesting.layers, mix, strict=True)
        }
        slices.append({"name": label, **costs[label], **scores[label], "widths": widths})
        if row == EXPORTED and (label in nesting.names or label == mixed):
            save(model, mix, m.folder / label, tokenizer=data.tokenizer)
    (m.folder / "slices.json").write_text(json.dumps(slices, indent=1) + "\n")
    yield from rows_of(row, scores, costs)
    if (name := half_of(nesting)) is not None:
        yield Row(row, "loss", scores[name]["loss"], HALF["set"])
    if (name := nesting.names[-1]) not in FULL["set"]:
        yield Row(row, "loss", scores[name]["loss"], FULL["set"][-1])


def largest(fractions: Mapping[str, Sequence[float]]) -> str:
    """The name of the largest granularity, whose size the decoder itself has."""
    return granularity_names(len(next(iter(fractions.values()))))[-1]


def half_of(nesting: Nesting) -> str | None:
    """The granularity with half of the feed-forward neurons and all else; None if none has."""
    for place, name in enumerate(nesting.names):
        shares = {axis: fractions[place] for axis, fractions in nesting.axes.items()}
        if {axis: share for axis, share in shares.items() if share < 1} == {"ffn": 0.5}:
            return name
    return None


def tokens_a_second(model: Any, data: Any, count: int) -> float | None:
    """Speed of greedy decoding of one sequence, the median of three measurements.

    None if other programs used the machine meanwhile.
    """
    positions = getattr(model.config, "max_position_embeddings", None) or data.length + count
    count = min(count, positions // 2)
    prompt = data.samples("val")[0]["input_ids"][None, : min(data.length, positions) // 2]
    prompt = prompt[:, : positions - count].to(device())
    seconds, others = [], OthersAtWork()
    for _ in range(4):  # the first, a warm-up, is not counted
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        speculative_generate(model, prompt, None, count, draft_tokens=0, eos_token_id=[])
        seconds.append(time.perf_counter() - start)  # tokens are on the CPU, so the GPU is done
    return count / statistics.median(seconds[1:]) if others.absent() else None


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """Perplexity by size, before and after training."""
    titles = {"untouched": "the decoder itself", **UNTRAINED, **ROWS}
    shown = [row for row in titles if (table["row"] == row).any()]
    lines = select(table, {"metric": ["loss", "perplexity", "parameters", "tokens a second"]})
    trained = next((row for row in ("elastic", "distilled", "unsorted") if row in shown), "")
    columns = [
        Column("parameters", "parameters", {"row": trained}, digits=0),
        Column("tokens a second", "tokens a second", {"row": trained}),
        *(Column(titles[row], "perplexity", {"row": row}, digits=2) for row in shown),
    ]
    plots.scatter(
        lines,
        run.out / "pareto.png",
        "loss",
        {"parameters": "parameters"},
        titles={row: titles[row] for row in shown if row not in UNTRAINED},
        joined=[row for row in ("elastic", "distilled", "unsorted") if row in shown],
        ylabel="loss, nats a token",
    )
    settings = run.parsed("elastic")
    folders = ""
    if trained:
        folders += " Widths by layer with their scores are in slices.json of each row's folder."
    if EXPORTED in shown:
        folders += (
            " The uniform sizes, and a Mix'n'Match size where there is one, stand ready for "
            f"transformers in {run.out}/seed0/sizes of {EXPORTED}."
        )
    untimed = (
        " Tokens a second, of one sequence, are not measured: other programs used the machine."
    ) * (bool(trained) and "tokens a second" not in set(lines["metric"]))
    sized = lines[lines["row"] != "prepared"]
    cost = sized[sized["metric"] == "parameters"].groupby("set")["value"].mean()
    largest_first = list(cost.sort_values(ascending=False).index)
    return [
        f"# A decoder made elastic, preset {run.preset}",
        provenance(run, table),
        f"Perplexity on {scored_text(table, settings.data.init_args)}. All rows saw the "
        f"same number of tokens. Labels with `*` are Mix'n'Match sizes.{folders}{untimed}"
        f"{said_unigram(table)}",
        tabulate(sized, largest_first, columns, index="set").markdown(),
        "![loss against parameters](pareto.png)",
    ]


EXPERIMENT = Experiment(
    "matformer.elastic", __file__, "elastic", __doc__ or "", declare, report,
    measured_on={"small": "SmolLM2-135M-Instruct (from 4 bits), wikitext2"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
