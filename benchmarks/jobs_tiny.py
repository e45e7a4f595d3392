"""Compares --jobs 2 with one thread each to --jobs 1 with two threads, on tiny stages of MatViT.

    python -m benchmarks.jobs_tiny                 some minutes on two idle cores
    python -m benchmarks.jobs_tiny --quick         only checks that it runs

Both train the same four independent ViTs on digits, from the command line to the report, libraries
imported and processes started included. They alternate, and the ratio is the median over rounds of
the ratio within a round; the goal is that two jobs are at least 1.5 times as fast. Times are
wall-clock times, so the machine has to be idle.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paired import markdown, spread

GOAL = 1.5
WAYS = {"1 job, 2 threads": (1, 2), "2 jobs, 1 thread each": (2, 1)}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.jobs_tiny")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument(
        "--epochs",
        type=int,
        default=160,
        help="of MatViT, four times those of an independent model (default: 160, the preset's)",
    )
    parser.add_argument("--quick", action="store_true", help="one round of 4 epochs")
    options = parser.parse_args(argv)
    count, epochs = (1, 4) if options.quick else (options.rounds, options.epochs)
    measured = [{name: seconds(*way, epochs) for name, way in WAYS.items()} for _ in range(count)]
    one, two = WAYS
    ratios = [took[one] / took[two] for took in measured]
    rows = [[name, spread([took[name] for took in measured])] for name in WAYS]
    print(
        f"`{shlex.join(['python', '-m', 'benchmarks.jobs_tiny', *argv])}` · {os.cpu_count()} cores"
    )
    print(markdown(["", "seconds, median (least–greatest)"], rows))
    print(f"two jobs are {spread(ratios)} times as fast; goal {GOAL}")


def seconds(jobs: int, threads: int, epochs: int) -> float:
    """Wall-clock seconds of the whole command.

    Raises:
        subprocess.CalledProcessError: if it fails.
    """
    with tempfile.TemporaryDirectory() as out:
        command = [
            *(sys.executable, "-m", "recipes.matformer.matvit", "--rows", "independent"),
            *("--jobs", str(jobs), "--out", out, f"--trainer.max_epochs={epochs}"),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        start = time.perf_counter()
        subprocess.run(
            command, check=True, capture_output=True, env=environment, cwd=Path(__file__).parents[1]
        )
        return time.perf_counter() - start


if __name__ == "__main__":
    main()
