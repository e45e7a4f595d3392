"""What executing a node does: train a stage, or measure; in this process or in a worker."""

import contextlib
import json
import logging
import pkgutil
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
from recipes.executors import ProgressCallback
from recipes.machine import OthersAtWork
from recipes.nodes import Measuring
from recipes.provenance import origin
from recipes.records import ROWS, Finished, read_record, write_record


@dataclass
class Training:
    """A stage as it is sent to the process that trains it.

    Attributes:
        node: the node's folder and settings.
        several: whether it trains on several devices.
        quiet: whether to leave out Lightning's progress bar.
    """

    node: Finished
    several: bool
    quiet: bool


def train(training: Training, on_progress: ProgressCallback) -> None:
    """Train a stage, or continue one that was killed.

    Raises:
        ValueError: if its checkpoint is a folder of shards, which no measurement can read.
    """
    node, folder = training.node, training.node.folder
    last = node.checkpoint
    require_one_file(last)
    resumed = last.is_file() and continues(last)
    if not resumed:  # remove what a killed process left without a checkpoint to resume from
        for old in folder.glob("log*"):
            shutil.rmtree(old)
        shutil.rmtree(last.parent, ignore_errors=True)
    log_name = f"log{len(list(folder.glob('log*')))}"  # a resumed run keeps its earlier logs
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "", "version": log_name},
    }
    given = node.settings.trainer.logger not in (None, True, False)
    args = ["fit", "-c", node.file, "--preset", node.preset, *node.arguments]
    args += [
        f"--seed_everything={node.seed}",
        f"--trainer.default_root_dir={folder}",
        f"--checkpoint.dirpath={last.parent}",
        f"--trainer.logger{'+' if given else ''}={json.dumps(logger if given else [logger])}",
    ]
    if not training.several:
        # "auto" would start a process for each GPU, and each would run the whole experiment
        args += ["--trainer.devices=1", "--trainer.num_nodes=1"]
    if training.quiet:
        args += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    if resumed:
        args.append(f"--ckpt_path={last}")
    with timed(folder):
        if training.several:
            # Lightning's launcher runs the process's whole command on every rank: that must be the
            # stage's, not the experiment's
            run_alone([sys.executable, "-m", "recipes", *args])
        else:
            # hide Lightning's tips and lists of devices, among which the stage's own line is lost
            logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
            logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
            run_stage(args, callbacks=[ReportProgress(on_progress)])
        require_one_file(last)
    remove_copy(node)


def require_one_file(checkpoint: Path) -> None:
    """Raise an error if a checkpoint is a folder of shards.

    Raises:
        ValueError: naming the setting that writes one file.
    """
    if checkpoint.is_dir():
        raise ValueError(
            f"{checkpoint} is a folder of shards, which cannot be measured: add "
            "--trainer.strategy fsdp2, which writes one file, and move that folder away"
        )


def remove_copy(node: Finished) -> None:
    """Remove a finished stage's second copy of its last checkpoint, to save disk space.

    Lightning writes the newest checkpoint as last.ckpt and as epoch=….ckpt.
    """
    settings = node.settings.checkpoint
    if settings.monitor is None and settings.save_top_k == 1 and node.checkpoint.is_file():
        for other in node.checkpoint.parent.glob("epoch=*.ckpt"):
            other.unlink()


def run_alone(command: list[str]) -> None:
    """Run a command in a subprocess, and pass SIGTERM on to it.

    Otherwise it would outlive this process, and the next run would train the same stage again.

    Raises:
        SIGTERMException: if SIGTERM has ended it.
        SystemExit: if it failed; it has printed the reason.
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
class MeasurementTask:
    """A measurement as it is sent to the process that executes it.

    Attributes:
        function: the function as "module:name".
        measuring: the function's argument.
        columns: the table's columns that are the same for all its rows, without the seed.
    """

    function: str
    measuring: Measuring
    columns: dict[str, str]


def measure(task: MeasurementTask, on_progress: ProgressCallback) -> None:
    """Call the measurement's function, and write its rows."""
    on_progress("measures")
    function = pkgutil.resolve_name(task.function)
    folder, seed = task.measuring.folder, task.measuring.seed
    L.seed_everything(seed, verbose=False)
    with timed(folder):
        rows = list(function(task.measuring) or ())
        results.write(folder / ROWS, results.tidy(rows, seed=seed, **task.columns))


@contextlib.contextmanager
def timed(folder: Path) -> Iterator[None]:
    """Add time, device and versions of the `with` block to a node's record.

    The record also tells whether other programs used the CPU meanwhile, so that the time is not
    comparable, and marks the node as finished if the block raises no exception.
    """
    start, others = time.monotonic(), OthersAtWork()
    ended, this_origin = False, origin()
    record = read_record(folder)
    if record.get("running"):  # a process was killed here, and its time is not known
        record["alone"] = False
    origins = record.get("made", [])
    origins += [this_origin] * (this_origin not in origins)
    write_record(folder, record | {"made": origins, "running": True})
    try:
        yield
        ended = True
    finally:
        record = read_record(folder)
        seconds = record["seconds"] + time.monotonic() - start
        alone = record.get("alone", True) and others.absent()
        record |= {"seconds": seconds, "finished": ended, "alone": alone, "running": False}
        write_record(folder, record)


def continues(checkpoint: Path) -> bool:
    """Whether training can resume from a checkpoint: it holds more than the weights."""
    return "optimizer_states" in torch.load(
        checkpoint, map_location="cpu", weights_only=True, mmap=True
    )


class ReportProgress(L.Callback):
    """Reports a training's progress, at most twice a second."""

    def __init__(self, on_progress: ProgressCallback):
        self.on_progress, self.last_report = on_progress, 0.0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report the epoch and the step."""
        if time.monotonic() - self.last_report < 0.5:
            return
        self.last_report = time.monotonic()
        epochs = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else ""
        total = trainer.estimated_stepping_batches
        steps = f"/{total}" if total != float("inf") else ""
        epoch, step = trainer.current_epoch + 1, trainer.global_step
        self.on_progress(f"epoch {epoch}{epochs}, step {step}{steps}")
