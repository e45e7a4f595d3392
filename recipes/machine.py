"""Timing of candidates in turn, and whether other programs used the CPU meanwhile."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

MOST = 0.05  # if other programs use a larger share of the CPU time, a timing is not reported


class OthersAtWork:
    """Counts the CPU time of other programs from its creation on.

    This process and its descendants are not other programs. Work on a GPU is not counted.
    """

    def __init__(self) -> None:
        self.start = time.monotonic(), processor_time(), own_time()

    def share(self) -> float:
        """The share of all cores' time since creation that other programs used, 0 to 1."""
        start, busy, own = self.start
        other_time = processor_time() - busy - (own_time() - own)
        passed = (time.monotonic() - start) * (os.cpu_count() or 1)
        return max(0.0, other_time) / passed if passed else 0.0

    def absent(self) -> bool:
        """Whether that share is at most MOST, too little to distort a timing."""
        return self.share() <= MOST


def processor_time() -> float:
    """Seconds of CPU time used on all cores together since the machine was booted."""
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")  # not all systems have all
    return sum(getattr(times, name, 0.0) for name in names)


def own_time() -> float:
    """Seconds of CPU time of this process and all its descendants."""
    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # it has just ended
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


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
