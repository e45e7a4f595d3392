"""Checks whether other programs used the CPU while something was timed."""

import os
import time

import psutil

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
