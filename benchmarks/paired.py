"""Interleaved timing of candidates, and the Markdown output that all benchmarks share."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class ImageCase:
    """One timm model at one batch size; benchmarks add a method that builds it.

    Attributes:
        name: timm architecture.
        batch: images in a batch.
        model_args: further arguments of timm.create_model.
    """

    name: str
    batch: int
    model_args: dict[str, Any] = field(default_factory=dict)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(B, 3, H, W)."""
        size = self.model_args.get("img_size", 224)
        return (self.batch, 3, size, size)

    def __str__(self) -> str:
        depth = f", {self.model_args['depth']} layers" if "depth" in self.model_args else ""
        return f"{self.name} at {self.input_shape[-1]}{depth}, batch {self.batch}"


def rounds(
    candidates: dict[str, Callable[[], Any]], repeats: int, seconds: float, device: torch.device
) -> list[dict[str, float]]:
    """Time candidates in rounds, in which each is called once; the first round only warms up.

    On one CPU thread CPU time is measured instead of wall-clock time, which counts other processes
    too.

    Args:
        candidates: functions to time, by name.
        repeats: number of rounds, at most.
        seconds: no further round starts after this long, but three are always measured.
        device: a GPU is synchronised before each reading of the clock.

    Returns:
        Seconds of each candidate, for each round.
    """

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elif torch.get_num_threads() == 1:
            return time.process_time()
        return time.perf_counter()

    measured: list[dict[str, float]] = []
    end = time.perf_counter() + seconds
    for index in range(-1, repeats):
        if index >= 3 and time.perf_counter() > end:
            break
        took = {}
        for name, call in candidates.items():
            start = clock()
            call()
            took[name] = clock() - start
        if index >= 0:
            measured.append(took)
    return measured


def ratio(measured: list[dict[str, float]], name: str, other: str) -> float:
    """Median over rounds of one candidate's time over another's."""
    return statistics.median(took[name] / took[other] for took in measured)


def spread(values: Sequence[float]) -> str:
    """Median, least and greatest."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(device: torch.device) -> str:
    """The device, its threads and the software, in one line."""
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, {torch.get_num_threads()} CPU threads · torch {torch.__version__}"
