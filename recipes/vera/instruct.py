"""Instruction tuning: VeRA and LoRA on Alpaca around all linear layers (Section 4.3, Table 4).

Both start from the same model and train for one epoch on the loss of the responses. The report has
the loss on held-out examples before and after, and the number of parameters that the paper's models
train. The paper has an LLM judge score answers to MT-Bench's 80 questions of two turns. Here the
answers are written in FastChat's format, but not judged, since the judge is a paid service. The
questions are FastChat's llm_judge/data/mt_bench/question.jsonl, which is looked for as
mt_bench/question.jsonl below --data.root, or without it below $RECIPES_DATA; --questions FILE names
another place.

    python -m recipes.vera.instruct                              generated tasks, seconds on a CPU
    make weights && python -m recipes.vera.instruct --preset small --seeds 3
                                                                 $RECIPES_DATA/alpaca_2k, SmolLM2
    python -m recipes.vera.instruct --preset paper --data.root DIR
                                                                 Llama-2 7B in 4 bits, on CUDA
"""

import json
import math
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from datamodules.instructions import (
    Question,
    fill_template,
    follow_up,
    read_questions,
    write_instructions,
    write_questions,
)
from datamodules.loading import data_folder, hold_out
from datamodules.tables import json_lines, read_json
from lightning_modules.decoding import generate
from lightning_modules.vera import strip
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run
from recipes.messages import console
from recipes.methods import silent_trainer
from recipes.nodes import device
from recipes.provenance import provenance
from recipes.results import Row
from recipes.runner import run_experiment
from recipes.tables import Column, Table, tabulate
from recipes.vera.e2e import START, VARIED, start_of
from recipes.vera.methods import TITLES, train

TABLE_4 = {  # MT-Bench: LoRA, VeRA
    "Llama 7B": (5.03, 4.77),
    "Llama 13B": (5.31, 5.22),
    "Llama 2 7B": (5.19, 5.08),
    "Llama 2 13B": (5.77, 5.93),
}
TRAINING = "training.jsonl"
GENERATED = "generated"  # in place of a file of questions
LLAMA = {"7B": (4096, 11008, 32), "13B": (5120, 13824, 40)}  # width, hidden neurons, layers


def options(parser: ArgumentParser) -> None:
    """Add this experiment's own command-line flag."""
    text = "MT-Bench's question.jsonl; default: what the grid says"
    parser.add_argument("--questions", metavar="FILE", help=text)


def declare(run: Run) -> None:
    """Declare every method's training and held-out loss, and for the first seed its answers."""
    grid = run.grid("instruct_grid")
    grid["common"] = start_of(run, "instruct", grid)
    arguments = run.parsed("instruct").data.init_args
    if not arguments["val_fraction"]:
        raise ValueError(
            "data.val_fraction is 0, and the loss is that of held-out responses: set it to 0.05"
        )
    asked = {"root": arguments["root"], **grid["answers"]}
    if run.options.questions:
        asked["questions"] = str(Path(run.options.questions).resolve())
    missing = missing_questions(asked)
    if "tuning" in grid:
        settings = {key: arguments[key] for key in ("source", "root", "file", "val_fraction")}
        training = run.measure("training part", 0, write_training_part, settings=settings)
        grid["tuning"]["varied"] = {
            "data.source": "folder",
            "data.root": training / "trials",
            "data.file": TRAINING,
        }
    for seed in run.seeds:
        for row in run.rows(grid["rows"]):
            stage = train(run, "instruct", grid, row, "Alpaca", seed, VARIED, "val/loss", "min")
            nodes = {"stage": stage}
            for name in (row, START) if row == "vera" else (row,):
                settings = {"row": name, "set": "Alpaca"}
                run.measure(f"Alpaca_{name}.loss", seed, measure_loss, nodes, settings)
                if seed == 0:
                    part, settings = f"Alpaca_{name}.answers", {"row": name, **asked}
                    run.measure(part, 0, measure_answers, nodes, settings, missing)


def write_training_part(m: Measuring) -> Iterator[Row]:
    """Write the examples that are trained on: the trials hold out a share of these.

    So they see none of the responses that any seed is scored on. Settings: `source`, `root`, `file`
    and `val_fraction`, arguments of `InstructionData`.
    """
    if m.settings["source"] == "generated":
        path = write_instructions(m.folder, seed=m.seed)
    else:
        path = data_folder(m.settings["root"], "alpaca_2k") / m.settings["file"]
    if path.suffix.lower() == ".jsonl":
        entries = [entry for _, entry in json_lines(path)]
    else:
        entries = read_json(path)
    training, _ = hold_out(entries, m.settings["val_fraction"], seed=0)
    write_lines(m.folder / "trials" / TRAINING, training)
    yield from ()


def loaded(m: Measuring) -> Any:
    """A row's module; for the row "start" VeRA's with its vectors removed, the initial model."""
    module = m.stages["stage"].module(device())
    if m.settings["row"] == START:
        strip(module.model)
    return module


def measure_loss(m: Measuring) -> Iterator[Row]:
    """Mean loss per token of the held-out responses, in nats, and the cost of training."""
    stage, row = m.stages["stage"], m.settings["row"]
    data = stage.datamodule()
    [scores] = silent_trainer().validate(loaded(m), datamodule=data, verbose=False)
    loss = scores["val/loss"]
    values: dict[str, float | None] = {
        "loss": loss,
        "perplexity": math.exp(loss),
        "scored": len(data.samples("val")),
    }
    if row != START:
        values |= {
            "trained": stage.metrics["tuned"],
            "seconds": stage.seconds,
            "examples": len(data.samples("train")),
            "updates": stage.updates,
        }
    for metric, value in values.items():
        yield Row(metric=metric, value=value, row=row, set=m.settings["set"])


def measure_answers(m: Measuring) -> Iterator[Row]:
    """Answer both turns of every question by greedy decoding.

    Writes judging/question.jsonl and judging/model_answer/<row>.jsonl, the files of FastChat's
    `llm_judge`. Settings: `questions` and `root`, see `question_file`, or "generated" `questions`;
    `count`, the largest number of questions to answer; `max_new_tokens` of an answer.
    """
    data, row = m.datamodule("stage"), m.settings["row"]
    generated = m.settings["questions"] == GENERATED
    path = write_questions(m.folder) if generated else question_file(m.settings)
    questions = read_questions(path)[: m.settings["count"]]
    model = loaded(m).model
    conversations = [fill_template(question.turns[0]) for question in questions]
    answers: list[list[str]] = [[] for _ in questions]
    for turn in range(2):
        places = [i for i, question in enumerate(questions) if len(question.turns) > turn]
        if turn:
            for i in places:
                question_text = questions[i].turns[turn]
                conversations[i] = follow_up(conversations[i], answers[i][-1], question_text)
        decoded = answer(
            model, data, [conversations[i] for i in places], m.settings["max_new_tokens"]
        )
        for i, text in zip(places, decoded, strict=True):
            answers[i].append(text)
    write_judging(m.folder / "judging", row, questions, answers)
    lengths = [len(text.split()) for turns in answers for text in turns]
    yield Row(metric="questions", value=len(questions), row=row)
    yield Row(metric="answers", value=len(lengths), row=row)
    yield Row(metric="words per answer", value=sum(lengths) / max(len(lengths), 1), row=row)


def question_file(settings: Mapping[str, Any]) -> Path:
    """MT-Bench's question.jsonl.

    Args:
        settings: `questions`, its path, absolute or below `root`; without a root below
            $RECIPES_DATA.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: the path is not absolute, and there is neither a root nor $RECIPES_DATA.
    """
    path = Path(settings["questions"])
    if not path.is_absolute():
        path = data_folder(settings["root"], "") / path
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there, expected MT-Bench's questions: put FastChat's "
            "llm_judge/data/mt_bench/question.jsonl there, or name it with --questions FILE"
        )
    return path


def missing_questions(settings: Mapping[str, Any]) -> str:
    """Why the questions cannot be read; "" if they can, or are going to be generated."""
    try:
        if settings["questions"] != GENERATED:
            read_questions(question_file(settings))
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def answer(model: Any, data: Any, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
    """The greedily decoded continuation of each prompt."""
    texts: list[str] = []
    for batch in data.loader_of(prompts):
        del batch["labels"]
        texts += generate(model, batch, data.tokenizer, max_new_tokens=max_new_tokens)
    return texts


def write_judging(
    folder: Path, row: str, questions: Sequence[Question], answers: Sequence[Sequence[str]]
) -> None:
    """Write question.jsonl and model_answer/<row>.jsonl, files of FastChat's `llm_judge`."""
    write_lines(folder / "question.jsonl", [question._asdict() for question in questions])
    lines = [
        {
            "question_id": question.question_id,
            "answer_id": f"{row}-{question.question_id}",
            "model_id": row,
            "choices": [{"index": 0, "turns": list(turns)}],
            "tstamp": 0,
        }
        for question, turns in zip(questions, answers, strict=True)
    ]
    write_lines(folder / "model_answer" / f"{row}.jsonl", lines)


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def llama_counts(width: int, hidden: int, layers: int) -> tuple[int, int]:
    """Parameters of VeRA of rank 1024 and of LoRA of rank 64 on all linear layers but the head.

    Σ (out + r) and Σ r (in + out) over these layers of a Llama (Section 3.2).
    """
    config = LlamaConfig(
        hidden_size=width, intermediate_size=hidden, num_hidden_layers=layers, vocab_size=32000
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    linears = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]
    return (
        sum(layer.out_features + 1024 for layer in linears),
        sum(64 * (layer.in_features + layer.out_features) for layer in linears),
    )


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """The held-out losses, paired with LoRA's; the paper's counts and scores."""
    columns = [
        Column("trained parameters", "trained", digits=0, spread=""),
        Column("held-out loss", "loss", digits=3),
        Column("− the start", "loss", digits=3, reference=START),
        Column("perplexity", "perplexity", digits=2),
    ]
    if "lora" in set(table["row"]):
        columns.append(Column("loss − LoRA", "loss", digits=3, reference="lora"))
    counts = {size: llama_counts(*shape) for size, shape in LLAMA.items()}
    return [
        f"# Instruction tuning by VeRA and LoRA, preset {run.preset}",
        provenance(run, table),
        "Loss in nats per token of held-out responses, perplexity its exponential; mean ± standard "
        "deviation over seeds. All methods start from the same model, which the first row has. "
        "Where learning rates are tried, a held-out part of the training examples chooses them.",
        tabulate(table, {START: "the start", **TITLES}, columns, heading="method").markdown(),
        "The first seed's answers are in seed0/Alpaca_*.answers/judging/: question.jsonl and "
        "model_answer/*.jsonl are files of FastChat's `llm_judge`; answers are decoded greedily.",
        "## The paper",
        Table(
            ["trained parameters", "LoRA, r 64", "VeRA, r 1024"],
            [[f"Llama {size}", f"{lora:,}", f"{vera:,}"] for size, (vera, lora) in counts.items()],
        ).markdown(),
        "Counted here; the paper rounds them to 159.9M and 1.6M, 250.3M and 2.4M.",
        Table(
            ["MT-Bench (Table 4)", "LoRA", "VeRA"],
            [[name, *(f"{value:.2f}" for value in row)] for name, row in TABLE_4.items()],
        ).markdown(),
        "These are GPT-4's scores of answers to MT-Bench's 80 questions of two turns. The held-out "
        "loss above is no substitute for them.",
    ]


CLAIMS = [
    Claim(
        name="instructions: VeRA near LoRA",
        paper="VeRA",
        sentence="VeRA's loss on held-out responses is at most 0.05 nats above LoRA's.",
        where="Table 4, Llama 7B (MT-Bench)",
        number="4.77 and 5.03",
        test=Comparison("loss", "lora", "vera", threshold=-0.05, digits=3),
        gate=Comparison("loss", START, "lora", digits=3, says="LoRA lowers the loss"),
    ),
    Claim(
        name="instructions: MT-Bench",
        paper="VeRA",
        sentence="GPT-4 scores VeRA's answers nearly as high as LoRA's.",
        where="Table 4",
        number="4.77 and 5.03",
        reason="the judge is a paid service",
    ),
]

EXPERIMENT = Experiment(
    "vera.instruct", __file__, "instruct", __doc__ or "", declare, report, options,
    measured_on={"small": "SmolLM2-135M-Instruct (from 4 bits), instructions of Alpaca"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
