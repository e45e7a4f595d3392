"""The work of a node: training a stage, or measuring; in this process or in a worker."""

import contextlib
import importlib
import json
import logging
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from recipes import results
from recipes.cli import main as run_stage
from recipes.executors import ShowProgress
from recipes.machine import OthersAtWork
from recipes.nodes import Measuring
from recipes.provenance import origin
from recipes.records import ROWS, Finished, read_record, write_record


@dataclass
class TrainingTask:
    """A stage, ready to be sent to the process that trains it.

    Attributes:
        title: of the node.
        node: its folder and settings.
        several: whether it trains on several devices.
        quiet: whether to leave out Lightning's progress bar.
    """

    title: str
    node: Finished
    several: bool
    quiet: bool


def train(task: TrainingTask, show: ShowProgress) -> None:
    """Train a stage, or continue one that was killed."""
    node, folder = task.node, task.node.folder
    last = node.checkpoint
    resumed = last.is_file() and continues(last)
    if not resumed:  # it was killed before its first checkpoint: begin anew
        for old in folder.glob("log*"):
            shutil.rmtree(old)
        shutil.rmtree(last.parent, ignore_errors=True)
    log = f"log{len(list(folder.glob('log*')))}"  # a resumed stage keeps the curves it had
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "", "version": log},
    }
    given = any(argument.startswith("--trainer.logger=") for argument in node.arguments)
    args = ["fit", "-c", node.file, "--preset", node.preset, *node.arguments]
    args += [
        f"--seed_everything={node.seed}",
        f"--trainer.default_root_dir={folder}",
        f"--checkpoint.dirpath={last.parent}",
        f"--trainer.logger{'+' if given else ''}={json.dumps(logger if given else [logger])}",
    ]
    if task.quiet:
        args += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    if resumed:
        args.append(f"--ckpt_path={last}")
    with timed(folder):
        if task.several:
            # Lightning's launcher runs the process's whole command on every rank: that must be the
            # stage's, not the experiment's
            run_alone([sys.executable, "-m", "recipes", *args])
        else:
            # Lightning's advice and lists of devices would bury the stage's own line
            logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
            logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
            run_stage(args, callbacks=[ProgressCallback(show)])
    remove_copy(node)


def remove_copy(node: Finished) -> None:
    """Remove the checkpoint that a finished stage has under two names.

    Lightning writes the newest one as last.ckpt and by its epoch. An experiment has many stages.
    """
    settings = node.settings.checkpoint
    if settings.monitor is None and settings.save_top_k == 1 and node.checkpoint.is_file():
        for other in node.checkpoint.parent.glob("epoch=*.ckpt"):
            other.unlink()


def run_alone(command: list[str]) -> None:
    """Run a command in a process of its own, which SIGTERM ends too.

    Otherwise it would go on after this process, and the next run would start its stage once more.

    Raises:
        SIGTERMException: if SIGTERM has ended it.
        SystemExit: if it failed; it has printed why.
    """
    with subprocess.Popen(command) as process:
        before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        raise SIGTERMException
    if code:
        sys.exit(code)


@dataclass
class MeasuringTask:
    """A measurement, ready to be sent to the process that executes it.

    Attributes:
        title: of the node.
        function: module and name.
        measuring: what the function is given.
        columns: the table's columns that all its rows share, beside the seed.
    """

    title: str
    function: str
    measuring: Measuring
    columns: dict[str, str]


def measure(task: MeasuringTask, show: ShowProgress) -> None:
    """Measure, and write the rows."""
    show("measures")
    module, _, name = task.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    folder, seed = task.measuring.folder, task.measuring.seed
    L.seed_everything(seed, verbose=False)
    with timed(folder):
        rows = list(function(task.measuring) or ())
        results.write(folder / ROWS, results.tidy(rows, seed=seed, **task.columns))


@contextlib.contextmanager
def timed(folder: Path) -> Iterator[None]:
    """Add the work of this process to a node's record: time, machine, versions and commit.

    It also records whether other programs used the machine meanwhile: such a time says little.

    The node is marked as finished at the end.
    """
    start, others = time.monotonic(), OthersAtWork()
    ended, here = False, origin()
    try:
        yield
        ended = True
    finally:
        record = read_record(folder)
        seconds = record["seconds"] + time.monotonic() - start
        made = record.get("made", [])
        made += [here] * (here not in made)
        alone = record.get("alone", True) and others.absent()
        record |= {"seconds": seconds, "finished": ended, "made": made, "alone": alone}
        write_record(folder, record)


def continues(checkpoint: Path) -> bool:
    """Whether training can resume from a checkpoint: it holds more than the weights."""
    return "optimizer_states" in torch.load(
        checkpoint, map_location="cpu", weights_only=True, mmap=True
    )


class ProgressCallback(L.Callback):
    """Reports a training's progress, at most twice a second."""

    def __init__(self, show: ShowProgress):
        self.show, self.last = show, 0.0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report the epoch and the step."""
        if time.monotonic() - self.last < 0.5:
            return
        self.last = time.monotonic()
        epochs = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else ""
        total = trainer.estimated_stepping_batches
        steps = f"/{total}" if total != float("inf") else ""
        self.show(f"epoch {trainer.current_epoch + 1}{epochs}, step {trainer.global_step}{steps}")
