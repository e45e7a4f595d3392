"""Measures time, multiply-adds and memory of a training by running a few steps of it.

The stage runs as it would, but with short epochs: a few training and validation batches each. The
first epoch warms up, counts multiply-adds and measures memory. In the later ones each part (step,
validation batch, checkpoint, …) is timed separately, so that the time of a run of any length is a
sum of its parts (recipes/plan.py).
"""

import contextlib
import io
import json
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_modules.counting import saved_for_backward
from recipes import cli

FLOP_STEPS, MEMORY_STEPS = (1, 3), (2, 4)  # steps at which each of the two is measured
WARM_UP = 5  # steps that are not timed
TRAIN_BATCHES = 8  # training batches of a measured epoch
VALIDATION_BATCHES = 3  # validation batches of a measured epoch, at most
MIN_STEPS, STEP_SECONDS = 6, 8.0  # the run ends after this many timed steps and seconds of them,
EPOCHS, QUICK = 3, 3.0  # or after this many timed epochs and seconds of them


clock = time.perf_counter


class Measured(Exception):
    """Raised to end the run when enough has been measured."""


@dataclass
class StageProfile:
    """Sizes, times and memory of a stage, measured in a few steps.

    Attributes:
        examples: number of training examples.
        batches: training batches of an epoch, at the measured batch size.
        batch: the measured batch size.
        evaluations: batches of a validation; an incomplete last batch counts as a fraction.
        setup: seconds before the first step, plus the extra time of that step.
        step: seconds of a training batch, loading included.
        epoch: seconds of an epoch beyond its training batches, validation and checkpoints.
        evaluation: seconds of a validation batch.
        validation: seconds of a validation beyond its batches.
        save: seconds to write a checkpoint.
        checkpoint: bytes of a checkpoint.
        parameters: number of all parameters, and of the trained ones.
        macs: multiply-adds of one example's forward pass; the largest if steps differ.
        memory: bytes of weights, gradients, moments and activations, at the measured batch size.
    """

    examples: int = 0
    batches: int = 0
    batch: int = 0
    evaluations: float = 0.0
    setup: float = 0.0
    step: float = 0.0
    epoch: float = 0.0
    evaluation: float = 0.0
    validation: float = 0.0
    save: float = 0.0
    checkpoint: int = 0
    parameters: tuple[int, int] = (0, 0)
    macs: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)


class Stopwatch(L.Callback):
    """Times the parts of a run, and ends it by raising Measured.

    Args:
        folder: receives a checkpoint, timed.ckpt.
        full_train: limit_train_batches of the unshortened run.
        full_val: limit_val_batches of the unshortened run.

    Attributes:
        profile: the measurements.
    """

    def __init__(self, folder: Path, full_train: Any = None, full_val: Any = None):
        self.folder, self.limits = folder, (full_train, full_val)
        self.profile = StageProfile()
        self.start = self.mark = clock()
        self.count = 0  # training batches so far
        self.first = 0.0  # seconds of the first training batch
        self.steps: list[float] = []
        self.epochs: list[tuple[float, int]] = []  # seconds less `excluded`, and batches
        self.evaluations: list[list[float]] = []  # seconds of each batch, by validation
        self.validations: list[float] = []
        self.saves: list[float] = []
        self.excluded = 0.0  # seconds of validation and saving since the epoch began
        self.epoch_start = self.validation_start = 0.0
        self.counting = ExitStack()
        self.flops: Any = None
        self.saved_bytes: dict[int, int] = {}  # of storages saved for backward, by address

    def _lap(self) -> float:
        """Seconds since the last call."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before, self.mark = self.mark, clock()
        return self.mark - before

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wrap the trainer's save_checkpoint, to time it."""
        save = trainer.save_checkpoint

        def timed(*args: Any, **kwargs: Any) -> None:
            self._lap()
            save(*args, **kwargs)
            self.saves.append(self._lap())
            self.excluded += self.saves[-1]

        trainer.save_checkpoint = timed

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Time the epoch that has just ended; end the run after enough of them."""
        self._lap()
        if not self.count:
            self.profile.setup = self.mark - self.start
        elif self.count > WARM_UP:
            batches = int(trainer.num_training_batches)
            self.epochs.append((self.mark - self.epoch_start - self.excluded, batches))
            timed = self.epochs[1:]  # the first one warmed up
            if len(timed) >= EPOCHS and sum(seconds for seconds, _ in timed) >= QUICK:
                self._end(trainer, pl_module)
        self.epoch_start, self.excluded = self.mark, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        """At some steps count multiply-adds of the forward pass, at others the tensors it saves."""
        if not self.count:
            self.profile.batch = batch_size(batch)
        if self.count in FLOP_STEPS:
            # FlopCounterMode does not know the fused attention kernel of CPUs
            self.counting.enter_context(sdpa_kernel(SDPBackend.MATH))
            self.flops = self.counting.enter_context(FlopCounterMode(display=False))
        elif self.count in MEMORY_STEPS:
            self.saved_bytes = self.counting.enter_context(saved_for_backward(pl_module))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Stop counting: the forward pass has ended."""
        self.counting.close()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Time a training batch; end the run after enough of them."""
        lap = self._lap()
        self.counting.close()
        profile = self.profile
        if not self.count:
            self.first = lap
        elif self.count in FLOP_STEPS:
            macs = self.flops.get_total_flops() / 2 / profile.batch
            profile.macs = max(profile.macs, macs)
        elif self.count in MEMORY_STEPS:
            largest = max(profile.memory.get("activations", 0), sum(self.saved_bytes.values()))
            profile.memory["activations"] = largest
        elif self.count >= WARM_UP and self._steady(trainer, index):
            self.steps.append(lap)
        self.count += 1
        if self.epochs and len(self.steps) >= MIN_STEPS and sum(self.steps) >= STEP_SECONDS:
            self._end(trainer, pl_module)

    def _steady(self, trainer: Any, index: int) -> bool:
        """False for the first batches of an epoch, which workers may have loaded ahead."""
        ahead = 1 + 2 * getattr(trainer.train_dataloader, "num_workers", 0)
        return index >= min(ahead, trainer.num_training_batches - 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Start timing a validation."""
        self._lap()
        self.validation_start = self.mark
        self.evaluations.append([])

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Start timing the validation's first batch."""
        self._lap()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Time a validation batch."""
        self.evaluations[-1].append(self._lap())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Time the validation, and exclude it from the epoch."""
        self._lap()
        self.validations.append(self.mark - self.validation_start)
        self.excluded += self.validations[-1]

    def _end(self, trainer: Any, module: L.LightningModule) -> None:
        """Fill in the profile from the measured times, and end the run.

        Raises:
            Measured: always.
        """
        profile = self.profile
        profile.step = statistics.fmean(self.steps)
        profile.setup += max(0.0, self.first - profile.step)
        if timed := self.epochs[1:]:
            around = statistics.fmean(seconds - n * profile.step for seconds, n in timed)
            profile.epoch = max(0.0, around)
        later = slice(1 if len(self.validations) > 1 else 0, None)  # the first one warmed up
        batches = [one for parts in self.evaluations[later] for one in parts[1:] or parts]
        if batches:
            profile.evaluation = statistics.fmean(batches)
            counts = [len(one) for one in self.evaluations[later] if one]
            total = statistics.fmean(self.validations[later][: len(counts)])
            profile.validation = max(0.0, total - statistics.fmean(counts) * profile.evaluation)
        loader = trainer.train_dataloader
        profile.examples = len(loader.dataset)
        profile.batches = limited(len(loader), self.limits[0])
        profile.evaluations = sum(map(self._evaluations, loaders(trainer.val_dataloaders)))
        trained = [p for p in module.parameters() if p.requires_grad]
        sizes = [sum(p.numel() for p in part) for part in (module.parameters(), trained)]
        profile.parameters = (sizes[0], sizes[1])
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        profile.memory = {
            "weights": sum(p.nbytes for p in module.parameters()),
            "gradients": sum(p.nbytes for p in trained),
            "moments": sum(
                value.nbytes for one in states for value in one.values() if torch.is_tensor(value)
            ),
            "activations": profile.memory.get("activations", 0),
        }
        file = self.folder / "timed.ckpt"
        trainer.save_checkpoint(file)
        profile.checkpoint = file.stat().st_size
        profile.save = statistics.fmean(self.saves[-5:])
        raise Measured

    def _evaluations(self, loader: Any) -> float:
        """Batches of a loader in the unshortened validation; an incomplete one is a fraction."""
        batches = limited(len(loader), self.limits[1])
        if batches < len(loader) or not loader.batch_size:
            return batches
        return len(loader.sampler) / loader.batch_size


def limited(count: int, limit: Any) -> int:
    """How many of `count` batches a Trainer uses under a limit (int, fraction or None)."""
    if limit is None:
        return count
    return min(count, limit) if isinstance(limit, int) else int(count * limit)


def loaders(given: Any) -> list[Any]:
    """A trainer's validation loaders as a list, from a loader, a list, a dict or None."""
    if given is None:
        return []
    if isinstance(given, dict):
        return list(given.values())
    return list(given) if isinstance(given, list | tuple) else [given]


def batch_size(batch: Any) -> int:
    """Examples in a batch: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, dict) else batch
    return batch_size(next(part for part in parts if not isinstance(part, int | float | str)))


def measure(
    path: str,
    preset: str,
    overrides: Sequence[str],
    folder: Path,
    batch: int | None = None,
) -> StageProfile:
    """Run a few steps of a stage on one device, and measure them.

    Args:
        path: the stage's YAML file.
        preset: a preset of the file.
        overrides: further command-line arguments of the stage.
        folder: receives what the run writes.
        batch: replaces the batch size of the settings, if given.

    Raises:
        OSError: if data or weights are missing.
        ValueError: if a setting is wrong, or training ends before enough is measured.
    """
    settings = cli.parse(path, preset, overrides)
    trainer, workers = settings.trainer, settings.data.init_args.get("num_workers") or 0
    full = trainer.limit_train_batches, trainer.limit_val_batches
    short = TRAIN_BATCHES + 4 * workers
    if isinstance(full[0], int):
        short = min(short, full[0])
    stopwatch = Stopwatch(folder, *full)
    arguments = [
        *("fit", "-c", path, "--preset", preset, *overrides),
        *("--trainer.devices=1", "--trainer.strategy=auto", "--trainer.num_nodes=1"),
        *("--trainer.max_steps=-1", "--trainer.max_epochs=1000000", "--trainer.max_time=null"),
        *("--trainer.check_val_every_n_epoch=1", "--trainer.val_check_interval=1.0"),
        *("--trainer.num_sanity_val_steps=0", "--trainer.enable_model_summary=false"),
        *(f"--trainer.limit_train_batches={short}", f"--trainer.default_root_dir={folder}"),
        f"--checkpoint.dirpath={folder}",
    ]
    if full[1] != 0:
        most = min(VALIDATION_BATCHES, full[1]) if isinstance(full[1], int) else VALIDATION_BATCHES
        arguments.append(f"--trainer.limit_val_batches={most}")
    if trainer.logger not in (None, True, False):
        logger = {"class_path": "CSVLogger", "init_args": {"save_dir": str(folder)}}
        arguments.append(f"--trainer.logger={json.dumps([logger])}")
    if batch is not None:
        arguments += [f"--data.batch_size={batch}", f"--data.eval_batch_size={batch}"]
    try:
        with silence():
            cli.main(arguments, [stopwatch])
    except Measured:
        return stopwatch.profile
    least = WARM_UP + MIN_STEPS
    raise ValueError(f"{path} ended before {least} training steps: nothing was measured")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress a run's output; the progress bar still runs, as it is part of a real run's time."""
    quiet = ["lightning.pytorch", "lightning.fabric", "lightning_modules"]
    levels = {name: logging.getLogger(name).level for name in quiet}
    try:
        for name in quiet:
            logging.getLogger(name).setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
