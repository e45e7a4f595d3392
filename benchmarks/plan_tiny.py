"""Compares what `plan` predicts with what training takes: seconds, steps, memory of tiny stages.

    python -m benchmarks.plan_tiny                    some ten minutes
    python -m benchmarks.plan_tiny --preset small --stages matformer/matvit --limit 400
    python -m benchmarks.plan_tiny --quick            only checks that it runs

Each stage is planned in one process and trained as by `python -m recipes fit` in another, in turns.
Timing starts after the libraries are imported and ends with the training: the start of Python takes
two to ten seconds, which would dominate a short training. On one thread (OMP_NUM_THREADS=1) it is
CPU time instead of wall-clock time, so that other processes matter less. The goal is a prediction
within 15 %. Memory is the peak of one training step (torch's profiler, or CUDA's own count), with
weights and moments.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.paired import markdown, spread
from recipes import cli, stopwatch
from recipes.plan import plan

ROOT = Path(__file__).resolve().parents[1]
GOAL = 0.15
STAGES = (
    "matformer/matvit",
    "matformer/matlm",
    "pela/dense",
    "vera/images",
    "vera/glue --data.task=RTE",
    "vera/e2e",
    "self_distillation/images_adapt",
    "apet/encoder --data.task=RTE",
)
PROFILED = 6  # the step whose memory is measured


class Peak(L.Callback):
    """Measures the peak memory of one training step, then ends the run."""

    def __init__(self) -> None:
        self.peak = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        """Start the memory profiler, at a step at which gradients and moments exist."""
        if trainer.global_step == PROFILED:
            states = [s for one in trainer.optimizers for s in one.state.values()]
            moments = [v for s in states for v in s.values() if torch.is_tensor(v)]
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self.peak = sum(t.nbytes for t in [*pl_module.parameters(), *grads, *moments])
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self.profile = torch.profiler.profile(profile_memory=True)
            self.profile.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Compute the peak, and end the run."""
        if not hasattr(self, "profile"):
            return
        self.profile.__exit__(None, None, None)
        if torch.cuda.is_available():
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self.peak += largest_rise(self.profile)
        raise stopwatch.Measured


def largest_rise(profile: Any) -> int:
    """Peak of allocated bytes, relative to the start of the profile."""
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.plan_tiny")
    parser.add_argument("--preset", default="tiny", help="default tiny")
    parser.add_argument("--stages", nargs="+", default=STAGES, metavar="STAGE", help="with flags")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--limit", type=int, default=0, help="default 0: the file's steps")
    parser.add_argument("--quick", action="store_true", help="one short round of one stage")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        return CHILDREN[options.child](*options.stages[0].split(), preset=options.preset)
    stages = [STAGES[0]] if options.quick else options.stages
    limit = 30 if options.quick else options.limit
    more = f" --trainer.max_steps={limit}" if limit else ""
    rows = [
        row(f"{stage}{more}", options.preset, 1 if options.quick else options.rounds)
        for stage in stages
    ]
    command = shlex.join(["python", "-m", "benchmarks.plan_tiny", *argv])
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(
        f"`{command}` · {os.cpu_count()} cores, OMP_NUM_THREADS {threads}, preset {options.preset}"
    )
    header = ["stage", "seconds predicted", "measured", "ratio", "steps predicted", "done"]
    print(markdown([*header, "MB predicted", "measured"], rows))
    print(f"goal: a ratio within {1 - GOAL:.2f} and {1 + GOAL:.2f}")


def row(stage: str, preset: str, rounds: int) -> list[str]:
    """A row of the table: one stage, planned and trained in turns."""
    plans, runs = [], []
    for _ in range(rounds):
        plans.append(child("plan", stage, preset))
        runs.append(child("fit", stage, preset))
    peak = child("peak", stage, preset)
    ratios = [planned["seconds"] / run["seconds"] for planned, run in zip(plans, runs, strict=True)]
    return [
        stage,
        spread([planned["seconds"] for planned in plans]),
        spread([run["seconds"] for run in runs]),
        spread(ratios),
        f"{plans[0]['updates']:,}",
        f"{runs[0]['updates']:,}",
        f"{plans[0]['memory'] / 2**20:,.1f}",
        f"{peak['peak'] / 2**20:,.1f}",
    ]


def child(kind: str, stage: str, preset: str) -> dict[str, float]:
    """Run a function of CHILDREN in a new process, and read the JSON in its last line.

    Raises:
        RuntimeError: if it fails.
    """
    command = [sys.executable, "-m", "benchmarks.plan_tiny", "--child", kind]
    command += ["--preset", preset, "--stages", stage]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if subprocess.run(command, stdout=out, stderr=err, cwd=ROOT).returncode:
            err.seek(0)
            raise RuntimeError(f"{shlex.join(command)}: {err.read()[-2000:]}")
        out.seek(0)
        result: dict[str, float] = json.loads(out.read().strip().splitlines()[-1])
    return result


def clock() -> float:
    """Seconds of CPU time on one thread, else of wall-clock time."""
    return time.process_time() if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter()


def plan_child(stage: str, *flags: str, preset: str) -> None:
    """Print the predicted seconds, optimizer steps and memory of a stage."""
    stopwatch.clock = clock
    file = f"recipes/{stage}.yaml"
    cli.parse(file, preset, flags)  # imports the stage's modules
    predicted = plan(file, preset, flags)
    memory = sum(predicted.memory.values())
    result = {"seconds": predicted.total, "updates": predicted.updates, "memory": memory}
    print(json.dumps(result))


def fit_child(stage: str, *flags: str, preset: str) -> None:
    """Train a stage as `fit` does, and print its seconds and optimizer steps."""
    cli.parse(f"recipes/{stage}.yaml", preset, flags)  # imports the stage's modules
    start = clock()
    with tempfile.TemporaryDirectory() as folder:
        run = cli.main(arguments(stage, flags, preset, folder))
    print(json.dumps({"updates": run.trainer.global_step, "seconds": clock() - start}))


def peak_child(stage: str, *flags: str, preset: str) -> None:
    """Print the peak memory of a training step of a stage."""
    peak = Peak()
    with tempfile.TemporaryDirectory() as folder:
        try:
            cli.main(arguments(stage, flags, preset, folder), [peak])
        except stopwatch.Measured:
            print(json.dumps({"peak": peak.peak}))


def arguments(stage: str, flags: Sequence[str], preset: str, folder: str) -> list[str]:
    """Command-line arguments that train a stage and write into `folder`."""
    places = [f"--trainer.default_root_dir={folder}", f"--checkpoint.dirpath={folder}"]
    return ["fit", "-c", f"recipes/{stage}.yaml", "--preset", preset, *flags, *places]


CHILDREN = {"plan": plan_child, "fit": fit_child, "peak": peak_child}

if __name__ == "__main__":
    main()
