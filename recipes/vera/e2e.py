"""E2E: VeRA, LoRA and full fine-tuning of a language model, decoded and scored (Table 3).

All methods start from the same model. After the last epoch the texts for the test part are decoded
with the paper's beam search and scored as the official scorer does. `tiny`, which has no
pre-trained weights, first trains the common model in full. At `small`, learning rates are chosen by
the loss on the development part, with as many trials for every method.

    python -m recipes.vera.e2e                              generated examples, seconds on a CPU
    make weights && python -m recipes.vera.e2e --preset small --seeds 3
                                                            $RECIPES_DATA/e2e_nlg and SmolLM2
    python -m recipes.vera.e2e --preset paper --seeds 3     GPT-2 medium; `large`: GPT-2 large
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from lightning_modules.generation_metrics import meteor_is_missing, score
from lightning_modules.vera import merge, strip
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.methods import decode_test_part
from recipes.nodes import device
from recipes.provenance import provenance
from recipes.records import instance_of
from recipes.results import Row, select
from recipes.runner import run_experiment
from recipes.tables import Column, Table, tabulate
from recipes.vera.methods import TITLES, train

SCORES = {"BLEU": 1, "NIST": 2, "METEOR": 1, "ROUGE_L": 1, "CIDEr": 2}  # with their digits
TABLE_3 = {  # parameters, and the scores in this order
    "GPT-2 medium, LoRA": ("0.35M", 68.9, 8.69, 46.4, 71.3, 2.51),
    "GPT-2 medium, VeRA": ("0.098M", 70.1, 8.81, 46.6, 71.5, 2.50),
    "GPT-2 large, LoRA": ("0.77M", 70.1, 8.80, 46.7, 71.9, 2.52),
    "GPT-2 large, VeRA": ("0.17M", 70.3, 8.85, 46.9, 71.6, 2.54),
}
START = "start"  # the row of the model that all methods start from
VARIED = ("model.init_from", "data.tokenizer")


def declare(run: Run) -> None:
    """Declare the training of one model with every method, and the scores of the decoded texts."""
    grid = run.grid("e2e_grid")
    grid["common"] = start_of(run, "e2e", grid)
    for seed in run.seeds:
        for row in run.rows(grid["rows"]):
            stage = train(run, "e2e", grid, row, "E2E", seed, VARIED, "val/loss", "min")
            nodes, settings = {"stage": stage}, {"row": row, "set": "E2E"}
            run.measure(f"E2E_{row}.score", seed, measure_texts, nodes, settings)
            if row == "vera" and seed == 0:
                settings = {"row": START, "set": "E2E"}
                run.measure("E2E_start.score", seed, measure_texts, nodes, settings)


def start_of(run: Run, config: str, grid: dict[str, Any]) -> dict[str, Any]:
    """The settings that give all stages the same initial model and the same tokenizer.

    If the grid has a `base`, this model is first trained in full; if the stage's file names no
    tokenizer, one is made from the training part.
    """
    common: dict[str, Any] = {}
    data = run.parsed(config).data
    if data.init_args.tokenizer is None:
        settings = {"class_path": data.class_path, "init_args": data.init_args.as_dict()}
        tokenizer = run.measure("tokenizer", 0, make_tokenizer, settings=settings)
        common["data.tokenizer"] = tokenizer / "tokenizer"
    if grid["base"] is not None:
        base = run.stage("base", config, 0, common, grid["base"])
        common["model.init_from"] = base
    return common


def make_tokenizer(m: Measuring) -> Iterator[Row]:
    """Write the tokenizer that a DataModule makes from its training part.

    Settings: `class_path` and `init_args` of the DataModule.
    """
    data = instance_of(m.settings)
    data.tokenizer.save_pretrained(m.folder / "tokenizer")
    yield Row(metric="vocabulary", value=len(data.tokenizer), row="tokenizer")


def measure_texts(m: Measuring) -> Iterator[Row]:
    """Decode a text for each meaning representation of the test part, and score the texts.

    The row "start", the common initial model, is VeRA's with its vectors removed. The official
    scorer (tuetschek/e2e-metrics) reads outputs.txt, one text a line, and references.txt.
    """
    stage, row, name = m.stages["stage"], m.settings["row"], m.settings["set"]
    data = stage.datamodule()
    module = stage.module(device())
    if row == START:
        strip(module.model)
    elif hasattr(module.model, "vera"):
        merge(module.model)
    texts = decode_test_part(module.model, data, **data.decoding)
    references = data.references("test")
    write_texts(m.folder, texts, references)
    values: dict[str, float | None] = {
        key: value for key, value in score(texts, references).items() if key in SCORES
    }
    values |= {"inputs": len(texts), "references": sum(map(len, references))}
    if row != START:
        values |= {
            "loss": stage.metrics["val/loss"],
            "trained": stage.metrics["tuned"] + stage.metrics["heads"],
            "seconds": stage.seconds,
            "examples": len(data.samples("train")),
            "updates": stage.updates,
        }
    for metric, value in values.items():
        yield Row(metric=metric, value=value, row=row, set=name)


def write_texts(folder: Path, texts: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Write outputs.txt, one text a line, and references.txt, an empty line between inputs."""
    blocks = "\n\n".join("\n".join(several) for several in references)
    (folder / "outputs.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    (folder / "references.txt").write_text(blocks + "\n", encoding="utf-8")


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """The scores, paired with LoRA's, and the paper's numbers."""
    titles = {START: "the start", **TITLES}
    present = set(table["metric"])
    columns = [Column("trained parameters", "trained", digits=0, spread="")]
    for name, digits in SCORES.items():
        if name in present:
            columns.append(Column(name.replace("_", "-"), name, digits=digits))
    if "lora" in set(table["row"]):
        columns.append(Column("BLEU − LoRA", "BLEU", reference="lora"))
    columns.append(Column("loss", "loss", digits=3))
    inputs, references = (
        select(table, {"metric": metric})["value"].max() for metric in ("inputs", "references")
    )
    scored = f"{inputs:,.0f} meaning representations of the test part, {references:,.0f} references"
    header = ["", "trained parameters", *(name.replace("_", "-") for name in SCORES)]
    return [
        f"# VeRA and the usual ways to fine-tune on E2E, preset {run.preset}",
        provenance(run, table),
        f"{scored if 'inputs' in present else 'Nothing was scored'}; 10 beams, "
        "at most 64 tokens, length penalty 0.8, no 4-gram twice. Mean ± standard deviation over "
        "seeds; loss on the development part. All methods start from the same model; the first row "
        "has its scores.",
        tabulate(table, titles, columns, heading="method").markdown(),
        meteor_is_missing() or "METEOR is computed by its Java program, version 1.5.",
        "**The paper's Table 3**:",
        Table(header, [[name, *map(str, values)] for name, values in TABLE_3.items()]).markdown(),
        "The scale differs unless the preset is `paper` or `large`: compare how the methods stand "
        "to each other, not the numbers.",
        "All texts are in seed*/E2E_*.score/outputs.txt; the official scorer reads them: "
        "`measure_scores.py references.txt outputs.txt`.",
    ]


NEAR = {  # how far VeRA may be below LoRA: no more than a fiftieth of the scores of Table 3
    "BLEU": (0.5, "half a point"),
    "NIST": (0.05, "0.05"),
    "METEOR": (0.5, "half a point"),
    "ROUGE_L": (0.5, "half a point"),
    "CIDEr": (0.05, "0.05"),
}
NO_METEOR = "its Java program was not installed on the machine of the run"
MEDIUM = [TABLE_3[f"GPT-2 medium, {method}"][1:] for method in ("VeRA", "LoRA")]
CLAIMS = [
    *(
        Claim(
            name="E2E: VeRA near LoRA" + (f", {name}" if name != "BLEU" else ""),
            paper="VeRA",
            sentence=f"VeRA's {name.replace('_', '-')} is at most {words} below LoRA's.",
            where="Table 3, GPT-2 medium",
            number=f"{vera:.{SCORES[name]}f} and {lora:.{SCORES[name]}f}",
            test=Comparison(name, "vera", "lora", threshold=-limit),
            gate=Comparison(
                "BLEU", "full", threshold=30.0, says="full fine-tuning has a BLEU above 30"
            ),
            reason=NO_METEOR if name == "METEOR" else "",
        )
        for (name, (limit, words)), vera, lora in zip(NEAR.items(), *MEDIUM, strict=True)
    ),
    Claim(
        name="E2E: with fewer parameters",
        paper="VeRA",
        sentence="VeRA trains fewer parameters than LoRA.",
        where="Table 3, GPT-2 medium",
        number="0.098M and 0.35M",
        test=Comparison("trained", "lora", "vera", exact=True, digits=0),
    ),
]

EXPERIMENT = Experiment(
    "vera.e2e", __file__, "e2e", __doc__ or "", declare, report,
    measured_on={"small": "SmolLM2-135M-Instruct (from 4 bits), E2E"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
