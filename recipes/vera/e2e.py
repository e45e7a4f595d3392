"""E2E: VeRA, LoRA and full fine-tuning of a language model, decoded and scored (Table 3).

All methods start from the same model. After the last epoch each describes the restaurants of the
test part, by the paper's beam search, and is scored as the official scorer does. A preset without
pre-trained weights trains the start itself, in full: `small` on the same data in LoRA's notation
(`name : Blue Spice | Type : pub`, texts cut into tokens), so that what the methods have to learn
is the official notation (`name[Blue Spice], eatType[pub]`, plain text).

    python -m recipes.vera.e2e                              generated examples, seconds on a CPU
    python -m recipes.vera.e2e --preset small --seeds 3     $RECIPES_DATA/e2e_nlg, a small GPT-2
    python -m recipes.vera.e2e --preset paper --seeds 3     GPT-2 medium
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from lightning_modules.decoding import generate
from lightning_modules.generation_metrics import meteor_is_missing, score
from lightning_modules.vera import LanguageTuning, merge, strip
from recipes.legacy import Experiment, StageResult, from_command_line
from recipes.messages import console
from recipes.report import markdown_table, mean_sd, show_table, write_report
from recipes.vera.glue import NAMES, read_grid

SCORES = {"BLEU": 1, "NIST": 2, "METEOR": 1, "ROUGE_L": 1, "CIDEr": 2}  # with their digits
TABLE_3 = {  # parameters, and the scores in this order
    "GPT-2 medium, LoRA": ("0.35M", 68.9, 8.69, 46.4, 71.3, 2.51),
    "GPT-2 medium, VeRA": ("0.098M", 70.1, 8.81, 46.6, 71.5, 2.50),
    "GPT-2 large, LoRA": ("0.77M", 70.1, 8.80, 46.7, 71.9, 2.52),
    "GPT-2 large, VeRA": ("0.17M", 70.3, 8.85, 46.9, 71.6, 2.54),
}

# of one model: trained parameters, val/loss, seconds, scores
Found = dict[str, float]


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line("vera.e2e", __file__, "e2e", __doc__ or "", argv)
    experiment = with_tokenizer(experiment, "e2e")
    grid = read_grid(experiment, "e2e_grid")
    data = experiment.datamodule("e2e")  # one set to score on, whatever the seed of training
    write_references(experiment.out / "references.txt", data.references("test"))
    start = {}
    if grid["base"] is not None:
        base = experiment.stage("base", "e2e", 0, grid["base"])
        start["model.init_args.init_from"] = base.checkpoint
    results: list[dict[str, Found]] = []
    outputs: dict[str, list[str]] = {}  # of the first seed
    for seed in range(experiment.seeds):
        found = {}
        for method, settings in grid["methods"].items():
            overrides = {"model.method": method, **settings, **start}
            stage = experiment.stage(method, "e2e", seed, overrides)
            texts = decode(stage, data, f"seed {seed}: {NAMES[method]} writes")
            outputs.setdefault(method, texts)
            found[method] = {
                "trained": stage.metrics["tuned"] + stage.metrics["heads"],
                "loss": stage.metrics["val/loss"],
                "seconds": stage.seconds,
                **score(texts, data.references("test")),
            }
            if method == "vera" and "start" not in outputs:
                outputs["start"] = decode(stage, data, "the start writes", stripped=True)
        results.append(found)
        report(experiment, data, results, outputs)
    return experiment


def with_tokenizer(experiment: Experiment, config: str) -> Experiment:
    """The experiment with one tokenizer for all stages, where they would train one each."""
    data = experiment.datamodule(config)
    if data.tokenizer_name is not None:
        return experiment
    folder = experiment.out / "tokenizer"
    data.tokenizer.save_pretrained(folder)
    return replace(experiment, extra=[*experiment.extra, f"--data.tokenizer={folder}"])


def load(checkpoint: Path, **arguments: Any) -> LanguageTuning:
    """The module of a stage's checkpoint, ready to evaluate."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = LanguageTuning.load_from_checkpoint(checkpoint, map_location=device, **arguments)
    return module.eval()


def decode(stage: StageResult, data: Any, title: str, stripped: bool = False) -> list[str]:
    """A text for each meaning representation of the test part; written once, then read again.

    The file beside the stage's checkpoints has a text on each line, as the official scorer
    (tuetschek/e2e-metrics) reads it, with references.txt as its reference file.

    Args:
        stage: whose model writes.
        data: the DataModule.
        title: shown while it writes.
        stripped: without its VeRA adapter: what it started from.
    """
    file = stage.folder / ("start.txt" if stripped else "outputs.txt")
    if not file.is_file():
        model: Any = load(stage.checkpoint).model
        if stripped:
            strip(model)
        elif hasattr(model, "vera"):
            merge(model)
        texts = [""] * len(data.prompts("test"))
        for batch in track(data.test_dataloader(), title):
            places = batch.pop("labels").tolist()
            for place, text in zip(places, generate(model, batch, data.tokenizer), strict=True):
                texts[place] = " ".join(text.split())
        file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").split("\n")[:-1]


def write_references(path: Path, references: Sequence[Sequence[str]]) -> None:
    """The references of each input on lines of their own, an empty line between two inputs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join("\n".join(texts) for texts in references) + "\n", encoding="utf-8")


def report(
    experiment: Experiment,
    data: Any,
    results: Sequence[dict[str, Found]],
    outputs: dict[str, list[str]],
) -> None:
    """Write report.md and metrics.json, and show the table."""
    references = data.references("test")
    start = score(outputs["start"], references)
    header = ["", "trained parameters", *(name.replace("_", "-") for name in SCORES), "minutes"]
    rows = [["the start", "0", *cells([start]), ""]]
    for method in results[0]:
        found = [result[method] for result in results]
        minutes = f"{statistics.fmean(each['seconds'] for each in found) / 60:.1f}"
        rows.append([NAMES[method], f"{found[0]['trained']:,.0f}", *cells(found), minutes])
    show_table(f"E2E ({experiment.preset})", header, rows)
    mr = data.prompts("test")[0]
    example = {"input": mr, "a reference": references[0][0]}
    example |= {NAMES.get(name, "the start"): texts[0] for name, texts in outputs.items()}
    text = [
        f"# VeRA and its rivals on E2E, preset {experiment.preset}",
        experiment.provenance(len(results)),
        f"{len(references)} meaning representations of the test part, "
        f"{sum(map(len, references)):,} references; 10 beams, at most 64 tokens, length penalty "
        "0.8, no 4-gram twice. Mean ± standard deviation over seeds; minutes are those of "
        "training. All methods start from the same model, whose own scores are in the first row.",
        markdown_table(header, rows),
        meteor_is_missing() or "METEOR is that of the Java program of 1.5.",
        "**The paper's Table 3**:",
        markdown_table(
            header[:-1],
            [
                [name, size, *cells([dict(zip(SCORES, row, strict=True))])]
                for name, (size, *row) in TABLE_3.items()
            ],
        ),
        "The scale differs unless the preset is `paper`: compare how the methods stand to each "
        "other, not the numbers.",
        "**An example**, of the first seed:",
        *(f"**{name}**: {said}" for name, said in example.items()),
        "All texts are in seed*/*/outputs.txt, those of the start in seed0/vera/start.txt; the "
        "official scorer reads them: `measure_scores.py references.txt seed0/vera/outputs.txt`.",
    ]
    metrics = {"provenance": experiment.provenance(len(results)), "start": start, "seeds": results}
    write_report(experiment.out, text, metrics)


def cells(found: Sequence[Found]) -> list[str]:
    """The scores as the table shows them."""
    return [
        mean_sd([each[name] for each in found], digits=digits) if name in found[0] else "n/a"
        for name, digits in SCORES.items()
    ]


if __name__ == "__main__":
    console(main)
