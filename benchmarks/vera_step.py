"""Time, multiply-adds and memory of a training step with VeRA, against peft's VeRA and LoRA.

    python -m benchmarks.vera_step                         under ten minutes on one core
    python -m benchmarks.vera_step --quick                 a few seconds: only checks that it runs
    python -m benchmarks.vera_step --tokens 8192 --layers 12 --ranks 1024

Forward, backward and AdamW step of RoBERTa-base's shape (random weights, sequences of 128 tokens,
its own dropout of 0.1, query and value adapted, the classifier trained), against peft's VeRA of the
same rank and peft's LoRA of rank 8, of 1,024 and 8,192 tokens.

1. Time: ours over peft's VeRA; goals 0.92 and 0.80.
2. The time that VeRA adds to LoRA's step, against what its additional multiply-adds predict; the
   goal is at most 1.1 times the prediction. Multiply-adds are counted while the step runs, over
   all matrix products of forward and backward, so they are those actually computed.
3. Peak memory of a step, beyond what is allocated before it (weights, moments of AdamW).

8,192 tokens are measured with three layers unless --layers is given: depth hardly changes the ratio
and does not change which code runs, and twelve layers take four times as long. Candidates are timed
in turn, and a ratio is the median over rounds of the ratio within a round, followed by the least
and the greatest. On one CPU thread, the default, CPU time is measured, so that other processes do
not count.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import functools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, VeraConfig, get_peft_model
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import RobertaConfig, RobertaForSequenceClassification

from benchmarks.paired import command_line, heading, markdown, parsed, spread
from lightning_modules.vera import add_vera
from recipes.machine import rounds

TARGETS = ["query", "value"]
LORA_RANK = 8
EXCESS_GOAL = 1.1
GOALS = {1024: 0.92, 8192: 0.80}  # ours over peft's VeRA, by tokens
LAYERS = {1024: 12, 8192: 3}


@dataclass
class Case:
    """RoBERTa of one size at one batch size.

    Attributes:
        batch, length: B rows of N tokens.
        layers, hidden: depth and width; the feed-forward networks are 4 times as wide.
    """

    batch: int
    length: int
    layers: int = 12
    hidden: int = 768

    def build(self) -> nn.Module:
        """A RoBERTa with a classifier, random weights, the same ones every time."""
        torch.manual_seed(0)
        config = RobertaConfig(
            vocab_size=50265 if self.hidden == 768 else 100,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=max(self.hidden // 64, 1),
            max_position_embeddings=514,
            type_vocab_size=1,
        )
        return RobertaForSequenceClassification(config)

    def ids(self, device: torch.device) -> torch.Tensor:
        """(B, N)."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(5, 100, (self.batch, self.length), generator=generator).to(device)

    @property
    def tokens(self) -> int:
        """B·N."""
        return self.batch * self.length

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, {self.layers} layers"


def lora(case: Case) -> nn.Module:
    """peft's LoRA."""
    config = LoraConfig(r=LORA_RANK, target_modules=TARGETS, task_type="SEQ_CLS")
    return get_peft_model(case.build(), config)


def peft_vera(case: Case, rank: int) -> nn.Module:
    """peft's VeRA."""
    config = VeraConfig(r=rank, target_modules=TARGETS, task_type="SEQ_CLS")
    return get_peft_model(case.build(), config)


def our_vera(case: Case, rank: int) -> nn.Module:
    """VeRA of this repository."""
    return add_vera(case.build(), rank, TARGETS, heads=["classifier"])


def training_step(model: nn.Module, case: Case, device: torch.device) -> Callable[[], None]:
    """Forward, backward and AdamW step; no gradient is left behind."""
    ids = case.ids(device)
    labels = torch.arange(case.batch, device=device) % 2
    model.to(device).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)

    def step(ids: torch.Tensor = ids) -> None:
        model(input_ids=ids, labels=labels[: len(ids)]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(ids[:1, :8])  # the first call allocates AdamW's moments, which later steps must not count
    return step


def peak_bytes(call: Callable[[], Any], device: torch.device) -> tuple[int, Any]:
    """Peak bytes of tensors during a call, beyond those allocated before, and the call's result."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        return torch.cuda.max_memory_allocated(device) - before, result
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    records = [event["args"] for event in events if event["name"] == "[memory]"]
    before = records[0]["Total Allocated"] - records[0]["Bytes"]
    return max(record["Total Allocated"] for record in records) - before, result


def macs_of(call: Callable[[], Any]) -> tuple[int, Any]:
    """Multiply-adds of all matrix products of a call, and what it returns."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    # FlopCounterMode does not know the CPU's attention kernel, which is used without dropout.
    with FlopCounterMode(display=False, custom_mapping={kernel: attention}) as counter:
        result = call()
    return counter.get_total_flops() // 2, result


def compare(
    case: Case, ranks: Sequence[int], repeats: int, seconds: float, device: torch.device
) -> tuple[list[list[str]], list[list[str]], list[list[str]]]:
    """Rows of the three tables for one model at one batch size.

    Raises:
        RuntimeError: if ours and peft's VeRA do not train equally many parameters.
    """
    models = {"lora": lora(case)}
    for rank in ranks:
        pair = {f"ours {rank}": our_vera(case, rank), f"peft {rank}": peft_vera(case, rank)}
        trained = [
            sum(p.numel() for p in model.parameters() if p.requires_grad) for model in pair.values()
        ]
        if trained[0] != trained[1]:
            raise RuntimeError(f"rank {rank}: ours trains {trained[0]} numbers, peft {trained[1]}")
        models |= pair
    calls = {name: training_step(model, case, device) for name, model in models.items()}
    macs, memory = {}, {}
    for name, call in calls.items():
        memory[name], (macs[name], _) = peak_bytes(functools.partial(macs_of, call), device)
    measured = rounds(calls, repeats, seconds, device)

    def ratios(name: str, other: str) -> list[float]:
        return [took[name] / took[other] for took in measured]

    goal = GOALS.get(case.tokens)
    times, excesses, peaks = [], [], []
    for rank in ranks:
        ours, peft = f"ours {rank}", f"peft {rank}"
        ratio = statistics.median(ratios(ours, peft))
        verdict = "–" if goal is None else f"{goal}: {'met' if ratio <= goal else 'missed'}"
        times.append(
            [
                str(case),
                str(rank),
                spread(ratios(ours, peft)),
                verdict,
                f"{macs[ours] / macs[peft]:.3f}",
                f"{macs['lora'] / macs[peft]:.3f}",
                str(len(measured)),
            ]
        )
        for label, name in (("ours", ours), ("peft's", peft)):
            excess = statistics.median(ratios(name, "lora")) - 1
            predicted = macs[name] / macs["lora"] - 1
            share = excess / predicted
            verdict = "met" if share <= EXCESS_GOAL else "missed"
            excesses.append(
                [
                    str(case),
                    str(rank),
                    label,
                    f"{(macs[name] - macs['lora']) / 1e9:.3f} G",
                    spread(ratios(name, "lora")),
                    f"{1 + predicted:.3f}",
                    f"{share:.2f}",
                    verdict if label == "ours" else "–",
                ]
            )
        peaks.append(
            [
                str(case),
                str(rank),
                *(f"{memory[name] / 2**20:,.1f}" for name in ("lora", peft, ours)),
                f"{memory[ours] / memory[peft]:.3f}",
                f"{memory[ours] / memory['lora']:.3f}",
            ]
        )
    return times, excesses, peaks


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print Markdown."""
    parser = command_line("vera_step", __doc__, 8, 60, "size", threads=1)
    parser.add_argument("--tokens", type=int, nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 256])
    parser.add_argument("--layers", type=int, help="(default: 12, and 3 for 8,192 tokens)")
    options = parsed(parser, argv)
    device = options.device
    cases = [Case(n // 128, 128, options.layers or LAYERS[n]) for n in options.tokens]
    ranks, repeats = options.ranks, options.repeats
    if options.quick:
        cases, ranks = [Case(4, 16, layers=2, hidden=32)], [32, 16]
    results = [compare(case, ranks, repeats, options.seconds, device) for case in cases]
    times, excesses, peaks = (
        [r for rows in table for r in rows] for table in zip(*results, strict=True)
    )
    print(heading("vera_step", argv, device))
    print("Training step, time over peft's VeRA: median (least–greatest) of paired rounds.\n")
    header = ["step", "rank", "ours / peft's VeRA", "goal", "predicted (multiply-adds)"]
    print(markdown([*header, "LoRA's, predicted", "rounds"], times))
    print(f"\nWhat VeRA adds to LoRA's step (rank {LORA_RANK}), and what multiply-adds predict;")
    print(f"goal: ours adds at most {EXCESS_GOAL} times the predicted.\n")
    header = ["step", "rank", "VeRA", "further multiply-adds", "time / LoRA's", "predicted"]
    print(markdown([*header, "excess / predicted excess", "goal"], excesses))
    print("\nPeak memory of a step in MiB, above the weights and AdamW's moments.\n")
    header = ["step", "rank", "LoRA", "peft's VeRA", "ours", "ours / peft's VeRA", "ours / LoRA"]
    print(markdown(header, peaks))


if __name__ == "__main__":
    main()
