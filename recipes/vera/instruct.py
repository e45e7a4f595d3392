"""Instruction tuning: VeRA and LoRA on Alpaca around all linear layers (Section 4.3, Table 4).

Both start from the same model and see the instructions once; the loss is that of the responses.
The report has the loss on held-out examples before and after, answers side by side, and the number
of parameters that the paper's models would train. All answers are written in the form of FastChat,
whose LLM judge gives MT-Bench's scores. A preset without pre-trained weights trains the start
itself, in full, on some of the examples.

    python -m recipes.vera.instruct                              generated tasks, seconds on a CPU
    python -m recipes.vera.instruct --preset small               $RECIPES_DATA/alpaca_2k, minutes
    python -m recipes.vera.instruct --preset paper --data.root DIR
                                                                 Llama-2 7B in 4 bits, on CUDA
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_modules.decoding import generate
from lightning_modules.vera import LanguageTuning, strip
from recipes.legacy import Experiment, StageResult, from_command_line
from recipes.messages import console
from recipes.report import markdown_table, mean_sd, show_table, write_report
from recipes.vera.e2e import load, with_tokenizer
from recipes.vera.glue import NAMES, read_grid

TABLE_4 = {  # MT-Bench: LoRA, VeRA
    "Llama 7B": (5.03, 4.77),
    "Llama 13B": (5.31, 5.22),
    "Llama 2 7B": (5.19, 5.08),
    "Llama 2 13B": (5.77, 5.93),
}
LLAMA = {"7B": (4096, 11008, 32), "13B": (5120, 13824, 40)}  # width, hidden neurons, layers
SHOWN = 3  # answers in the report; the files have all

# of one seed: model → loss, trained parameters, seconds
Found = dict[str, dict[str, float]]


def main(argv: list[str] | None = None) -> Experiment:
    """Run the experiment."""
    experiment = from_command_line("vera.instruct", __file__, "instruct", __doc__ or "", argv)
    experiment = with_tokenizer(experiment, "instruct")
    grid = read_grid(experiment, "instruct_grid")
    results: list[Found] = []
    answers: dict[str, list[str]] = {}  # of the first seed
    for seed in range(experiment.seeds):
        stages = train(experiment, grid, seed)
        data = experiment.datamodule("instruct", seed)
        results.append({})
        for name, stage, module in models(experiment, stages):
            results[-1][name] = {
                "loss": held_out_loss(module, data),
                "trained": stage.metrics["tuned"] if stage else 0,
                "seconds": stage.seconds if stage else 0.0,
            }
            if seed == 0:
                answers[name] = answer(module.model, data, **grid["answers"])
        if seed == 0:
            write_answers(experiment.out / "judging", data, answers)
        report(experiment, grid, results, answers)
    return experiment


def train(experiment: Experiment, grid: dict[str, Any], seed: int) -> dict[str, StageResult]:
    """Train every method of one seed; the examples that the seed holds out, its base holds out."""
    start = {}
    if grid["base"] is not None:
        base = experiment.stage("base", "instruct", seed, grid["base"])
        start["model.init_args.init_from"] = base.checkpoint
    return {
        method: experiment.stage(
            method, "instruct", seed, {"model.method": method, **settings, **start}
        )
        for method, settings in grid["methods"].items()
    }


def models(
    experiment: Experiment, stages: dict[str, StageResult]
) -> Iterator[tuple[str, StageResult | None, LanguageTuning]]:
    """Each method with its stage and its module; at the end the start, which has no stage.

    The start is VeRA's model without its vectors, one model in memory at a time.
    """
    settings = experiment.parsed("instruct").model.init_args
    for method, stage in sorted(stages.items()):  # VeRA last
        module = load(stage.checkpoint, pretrained=settings.quantize is not None)
        yield method, stage, module
    assert module.model is not None
    strip(module.model)
    yield "start", None, module


@torch.no_grad()
def held_out_loss(module: LanguageTuning, data: Any) -> float:
    """Mean over the tokens of the held-out responses, in nats."""
    for number, batch in enumerate(data.val_dataloader()):
        inputs = {name: value.to(module.device) for name, value in batch.items()}
        module.validation_step(inputs, number)
    loss = float(module.mean_loss.compute())
    module.mean_loss.reset()
    return loss


def answer(model: nn.Module | None, data: Any, count: int, max_new_tokens: int) -> list[str]:
    """The most likely answers to the first `count` held-out instructions, token by token."""
    answers: list[str] = []
    for batch in data.prompt_dataloader("val"):
        del batch["labels"]
        answers += generate(
            model,
            batch,
            data.tokenizer,
            beams=1,
            max_new_tokens=max_new_tokens,
            no_repeat_ngram=0,
            stop=None,
        )
        if len(answers) >= count:
            break
    return answers[:count]


def write_answers(folder: Path, data: Any, answers: dict[str, list[str]]) -> None:
    """question.jsonl and model_answer/<model>.jsonl, the files that FastChat's judge reads.

    The held-out responses are there as the answers of the model "reference".
    """
    count = len(answers["start"])
    references = [texts[0] for texts in data.references("val")[:count]]
    questions = [
        {"question_id": number, "category": "alpaca", "turns": [question(prompt)]}
        for number, prompt in enumerate(data.prompts("val")[:count], start=1)
    ]
    write_lines(folder / "question.jsonl", questions)
    for model, texts in {"reference": references, **answers}.items():
        lines = [
            {
                "question_id": number,
                "answer_id": f"{model}-{number}",
                "model_id": model,
                "choices": [{"index": 0, "turns": [text]}],
                "tstamp": 0,
            }
            for number, text in enumerate(texts, start=1)
        ]
        write_lines(folder / "model_answer" / f"{model}.jsonl", lines)


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object on each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")


def question(prompt: str) -> str:
    """An instruction, and its input if it has one, out of Alpaca's template."""
    inside = prompt.partition("### Instruction:\n")[2].rpartition("\n\n### Response:")[0]
    return inside.replace("\n\n### Input:\n", "\n\n")


def llama_counts(width: int, hidden: int, layers: int) -> tuple[int, int]:
    """What VeRA of rank 1024 and LoRA of rank 64 train around all linear layers but the head.

    Σ (out + r) and Σ r (in + out) over the layers of a Llama (Section 3.2).
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


def report(
    experiment: Experiment,
    grid: dict[str, Any],
    results: Sequence[Found],
    answers: dict[str, list[str]],
) -> None:
    """Write report.md and metrics.json, and show the table."""
    header = ["", "trained parameters", "held-out loss", "perplexity", "minutes"]
    rows = []
    for name in ("start", *grid["methods"]):
        found = [result[name] for result in results]
        losses = [each["loss"] for each in found]
        minutes = sum(each["seconds"] for each in found) / len(found) / 60
        rows.append(
            [
                NAMES.get(name, "the start"),
                f"{found[0]['trained']:,.0f}",
                mean_sd(losses, digits=3),
                mean_sd([math.exp(loss) for loss in losses], digits=2),
                f"{minutes:.1f}" if name != "start" else "",
            ]
        )
    show_table(f"Instruction tuning ({experiment.preset})", header, rows)
    counts = {size: llama_counts(*shape) for size, shape in LLAMA.items()}
    data = experiment.datamodule("instruct")
    shown = []
    for number in range(min(SHOWN, len(answers["start"]))):
        said = {"reference": data.references("val")[number][0]}
        said |= {NAMES.get(name, "the start"): texts[number] for name, texts in answers.items()}
        lines = [f"**{name}**: {in_line(text)}" for name, text in said.items()]
        shown.append(f"> {in_line(question(data.prompts('val')[number]))}\n\n" + "\n\n".join(lines))
    text = [
        f"# Instruction tuning by VeRA and LoRA, preset {experiment.preset}",
        experiment.provenance(len(results)),
        "Loss in nats per token of held-out responses, perplexity its exponential; mean ± standard "
        "deviation over seeds. Both methods start from the same model, in the first row.",
        markdown_table(header, rows),
    ]
    if grid["base"] is not None:
        text.append(
            "**What this shows**: how far either method lowers the loss of a small model that was "
            "trained from scratch on some of the same instructions. **What it does not show**: "
            "how well the answers serve anyone. A model of this size that has read so little has "
            "no knowledge to draw on, and its answers below say so; the paper's question needs a "
            "pre-trained model of billions of parameters (`--preset paper`)."
        )
    text += [
        "## Answers to held-out instructions",
        *shown,
        "All of them are in judging/: question.jsonl and model_answer/*.jsonl are files of "
        "FastChat's `llm_judge`, with the held-out responses as the model `reference`.",
        "## The paper",
        markdown_table(
            ["trained parameters", "LoRA, r 64", "VeRA, r 1024"],
            [[f"Llama {size}", f"{lora:,}", f"{vera:,}"] for size, (vera, lora) in counts.items()],
        ),
        "Counted here; the paper rounds them to 159.9M and 1.6M, 250.3M and 2.4M.",
        markdown_table(
            ["MT-Bench (Table 4)", "LoRA", "VeRA"],
            [[name, *(f"{score:.2f}" for score in row)] for name, row in TABLE_4.items()],
        ),
        "Those scores are GPT-4's opinion of answers to MT-Bench's 80 questions of two turns. "
        "Nothing here takes its place: the judge is a paid service, and the loss above does not "
        "stand for it.",
    ]
    metrics = {"provenance": experiment.provenance(len(results)), "seeds": results}
    write_report(experiment.out, text, metrics)


def in_line(text: str) -> str:
    """A text as one line of Markdown."""
    return " ".join(text.split()) or "(nothing)"


if __name__ == "__main__":
    console(main)
