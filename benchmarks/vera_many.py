"""Speed of inference with VeRA: merged against the base model, 32 adapters in a batch against peft.

    python -m benchmarks.vera_many             under eight minutes on one core
    python -m benchmarks.vera_many --quick     a few seconds: only checks that it runs

RoBERTa-base's shape with random weights, query and value adapted, a classifier for each adapter.

1. Merged: time relative to the plain base, which has the same layers; the goal is 1 within 3 %.
2. 32 rows with 32 adapters, in one batch through `Adapters.rows`, against peft, which has all 32
   loaded and for each row sets its adapter and runs that row alone. The speed-up is printed; goals
   5 at 8 tokens a row and 2 at 128. Logits have to agree. Also printed:

   - predicted: the ratio of the multiply-adds, which is the speed-up for rows so long that one
     alone uses the machine fully;
   - the base alone: the speed-up of the same batch through the base without adapters, an upper
     bound for any batching that multiplies by W0 and by ΔW.

The model and the way of timing are those of vera_step.py.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import dataclasses
import functools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from benchmarks.paired import command_line, heading, markdown, parsed, spread
from benchmarks.vera_step import Case, macs_of, our_vera
from lightning_modules.vera import Adapters, merge, save_adapter, to_peft
from recipes.machine import rounds

ROWS = 32
TOLERANCE = 0.03
GOALS = {8: 5.0, 128: 2.0}  # times faster than peft, by tokens in a row


def write_adapters(case: Case, rank: int, folder: Path) -> list[str]:
    """Random adapters, each in our format (`folder/ours/name`) and in peft's; their names."""
    model = our_vera(case, rank)
    names = [f"adapter{i}" for i in range(ROWS)]
    for name in names:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
        save_adapter(model, folder / "ours" / name)
        to_peft(model, folder / "peft" / name, projections=False)
    return names


def merged(
    case: Case, rank: int, repeats: int, seconds: float, device: torch.device
) -> list[list[str]]:
    """Table row: the merged model against the plain base.

    Raises:
        RuntimeError: if they do not do the same multiply-adds.
    """
    ids = case.ids(device)
    models = {"plain": case.build(), "merged": merge(our_vera(case, rank))}
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(model.to(device).eval(), input_ids=ids)
        for name, model in models.items()
    }
    with torch.no_grad():
        macs = {name: macs_of(call)[0] for name, call in calls.items()}
        if macs["merged"] != macs["plain"]:
            raise RuntimeError(f"{macs['merged']} multiply-adds merged, {macs['plain']} plain")
        measured = rounds(calls, repeats, seconds, device)
    ratios = [took["merged"] / took["plain"] for took in measured]
    verdict = "met" if abs(statistics.median(ratios) - 1) <= TOLERANCE else "missed"
    size = f"{case.batch} × {case.length} tokens"
    return [[size, str(rank), spread(ratios), verdict, str(len(measured))]]


def many(
    case: Case,
    rank: int,
    lengths: Sequence[int],
    repeats: int,
    seconds: float,
    device: torch.device,
) -> list[list[str]]:
    """Table rows: a batch of 32 adapters against 32 switches, for each length of the rows.

    Raises:
        RuntimeError: if the two do not compute the same.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = write_adapters(case, rank, folder)
        adapters = Adapters(
            case.build().to(device).eval(), {name: folder / "ours" / name for name in names}
        )
        peft = PeftModel.from_pretrained(
            case.build().to(device), folder / "peft" / names[0], adapter_name=names[0]
        )
        for name in names[1:]:
            peft.load_adapter(folder / "peft" / name, name)
    peft.eval()
    base = case.build().to(device).eval()
    rows = []
    for length in lengths:
        ids = dataclasses.replace(case, length=length).ids(device)

        def batch(ids: torch.Tensor = ids) -> torch.Tensor:
            with adapters.rows(names):
                return adapters.model(input_ids=ids).logits

        def switches(ids: torch.Tensor = ids) -> torch.Tensor:
            logits = []
            for i, name in enumerate(names):
                peft.set_adapter(name)
                logits.append(peft(input_ids=ids[i : i + 1]).logits)
            return torch.cat(logits)

        calls: dict[str, Callable[[], Any]] = {
            "batch": batch,
            "switches": switches,
            "base": functools.partial(base, input_ids=ids),
        }
        with torch.no_grad():
            counted = {name: macs_of(call) for name, call in calls.items()}
            macs = {name: count for name, (count, _) in counted.items()}
            logits = {name: output for name, (_, output) in counted.items()}
            if not torch.allclose(logits["batch"], logits["switches"], rtol=1e-3, atol=1e-3):
                raise RuntimeError(f"rank {rank}, {length} tokens: the batch and peft disagree")
            measured = rounds(calls, repeats, seconds, device)
        faster = [took["switches"] / took["batch"] for took in measured]
        bound = [took["switches"] / took["base"] for took in measured]
        verdict = "–"
        if goal := GOALS.get(length):
            verdict = f"{goal:g}: {'met' if statistics.median(faster) >= goal else 'missed'}"
        rows.append(
            [
                f"{ROWS} × {length} tokens",
                str(rank),
                spread(faster),
                verdict,
                f"{macs['switches'] / macs['batch']:.3f}",
                spread(bound),
                f"{macs['switches'] / macs['base']:.3f}",
                str(len(measured)),
            ]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print Markdown."""
    parser = command_line("vera_many", __doc__, 20, 25, "table row", threads=1)
    options = parsed(parser, argv)
    device = options.device
    single, batch, ranks, lengths = Case(1, 128), Case(ROWS, 8), [1024, 256], list(GOALS)
    repeats = options.repeats
    if options.quick:
        single, batch = Case(1, 16, layers=2, hidden=32), Case(ROWS, 4, layers=2, hidden=32)
        ranks, lengths = [32, 16], [4]
    alone = [
        row
        for case in (single, batch)
        for row in merged(case, ranks[0], repeats, options.seconds, device)
    ]
    together = [
        row
        for rank in ranks
        for row in many(batch, rank, lengths, repeats, options.seconds, device)
    ]
    print(heading("vera_many", argv, device))
    print(f"Merged inference, time over the plain base's; goal: within {TOLERANCE:.0%} of 1.")
    print("Both do the same multiply-adds. Median (least–greatest) of paired rounds.\n")
    print(markdown(["batch", "rank", "merged / plain", "goal", "rounds"], alone))
    print(f"\n{ROWS} adapters in one batch, times faster than {ROWS} switches in peft.\n")
    header = ["batch", "rank", "ours", "goal", "predicted (multiply-adds)"]
    print(markdown([*header, "base alone", "base alone, predicted", "rounds"], together))


if __name__ == "__main__":
    main()
