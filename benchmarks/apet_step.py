"""Time and memory of a training step with APET, relative to peft's LoRA of the same budget.

    python -m benchmarks.apet_step                    about ten minutes on one core
    python -m benchmarks.apet_step --quick            a few seconds: only checks that it runs

Forward, backward and AdamW step of RoBERTa-base's shape (random weights, sequences of 128 tokens,
dropout .1, the classifier always frozen). LoRA of rank r adapts queries and values; APET trains as
many parameters, with one operation alone or all three. Single elements (ADD) need ∂L/∂W at
scattered positions; terms (CONCAT) and neurons (PLUG) are in layers that the seed draws. Goals: at
most 1.1 times LoRA's time, and 1.1 times its peak memory above the weights and AdamW's moments.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

from collections.abc import Callable, Sequence

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from benchmarks.paired import command_line, heading, markdown, parsed, spread
from benchmarks.vera_step import TARGETS, Case, peak_bytes, training_step
from lightning_modules.apet import insert
from lightning_modules.tuning import trainable
from recipes.machine import rounds

RANKS = (1, 8, 24)
OPERATIONS = (["add"], ["concat"], ["plug"], ["add", "concat", "plug"])


def lora(case: Case, rank: int) -> nn.Module:
    """peft's LoRA with nothing else trained."""
    config = LoraConfig(r=rank, target_modules=TARGETS)
    return get_peft_model(case.build(), config)


def compare(
    case: Case, rank: int, repeats: int, seconds: float, device: torch.device
) -> list[list[str]]:
    """Rows of the table for one budget."""
    base = lora(case, rank)
    budget = sum(parameter.numel() for parameter in trainable(base).values())
    models = {"LoRA": base} | {
        "+".join(operations): insert(case.build(), budget, 0, operations)
        for operations in OPERATIONS
    }
    calls: dict[str, Callable[[], None]] = {
        name: training_step(model, case, device) for name, model in models.items()
    }
    memory = {name: peak_bytes(call, device)[0] for name, call in calls.items()}
    measured = rounds(calls, repeats, seconds, device)
    return [
        [
            str(case),
            f"{budget:,} (r = {rank})",
            name,
            spread([took[name] / took["LoRA"] for took in measured]),
            f"{memory[name] / memory['LoRA']:.3f}",
            str(len(measured)),
        ]
        for name in models
        if name != "LoRA"
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print Markdown."""
    parser = command_line("apet_step", __doc__, 8, 90, "budget", threads=1)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per batch (default: 1024)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    options = parsed(parser, argv)
    device = options.device
    case, ranks = Case(options.tokens // 128, 128, options.layers), options.ranks
    if options.quick:
        case, ranks = Case(4, 16, layers=2, hidden=32), [1]
    how = (options.repeats, options.seconds, device)
    rows = [row for rank in ranks for row in compare(case, rank, *how)]
    print(heading("apet_step", argv, device))
    print("A training step over LoRA's of the same budget: median (least–greatest) of rounds.\n")
    header = ["step", "trainable parameters", "operations", "time / LoRA's", "memory / LoRA's"]
    print(markdown([*header, "rounds"], rows))


if __name__ == "__main__":
    main()
