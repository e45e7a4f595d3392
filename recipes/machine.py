"""Whether other programs used the machine's processors while something was timed."""

import os
import time

import psutil

MOST = 0.05  # share of the processors' time that others may take from a time that is reported


class OthersAtWork:
    """Counts the processor time of other programs from now on.

    This process's time is its own, that of the processes that it started, and of theirs. Work on a
    GPU is not counted.
    """

    def __init__(self) -> None:
        self.start = time.monotonic(), processor_time(), own_time()

    def share(self) -> float:
        """Of all processors' time since the start, the part that other programs took, 0 to 1."""
        start, busy, own = self.start
        others = processor_time() - busy - (own_time() - own)
        passed = (time.monotonic() - start) * (os.cpu_count() or 1)
        return max(0.0, others) / passed if passed else 0.0

    def absent(self) -> bool:
        """Whether they took too little to change a time."""
        return self.share() <= MOST


def processor_time() -> float:
    """Seconds that all processors together have worked since the machine started."""
    times = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq", "steal")  # not all systems have all
    return sum(getattr(times, name, 0.0) for name in names)


def own_time() -> float:
    """Seconds of processor time of this process and of all that descend from it."""
    total, this = 0.0, psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # it has just ended
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
