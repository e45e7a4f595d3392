"""A few steps of a training, measured: what its pieces take, what they compute, what they keep.

The run is the real one, but for short epochs: a few training batches, then a few of validation. The
first epoch warms up, counts multiply-adds and looks at memory; the later ones are timed, piece by
piece, so that a run of any length is a sum of them (recipes/plan.py).
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
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from recipes import cli

COUNTED, WATCHED = (1, 3), (2, 4)  # steps whose multiply-adds, and whose memory, are looked at
WARM_UP = 5  # steps that are not timed
SHORT = 8  # training batches of an epoch that is measured
EVALUATED = 3  # validation batches likewise, at most
LEAST, ENOUGH = 6, 8.0  # steps that are timed at least; seconds of them after which it ends
EPOCHS, QUICK = 3, 3.0  # the same for epochs, if they are quick


clock = time.perf_counter  # of the wall


class Measured(Exception):
    """Ends the measured run."""


@dataclass
class Pieces:
    """What a few steps have shown.

    Attributes:
        examples: in training.
        batches: of an epoch, at the measured size.
        batch: the measured size.
        evaluations: batches of a validation; what is no full batch counts as its share.
        setup: seconds before the first step, and what that takes longer than others.
        step: seconds of a training batch, loading included.
        epoch: seconds around an epoch's batches.
        evaluation: seconds of a validation batch.
        validation: seconds around a validation's batches.
        save: seconds to write a checkpoint.
        checkpoint: bytes of one.
        parameters: of the model, and those that train.
        macs: of an example's forward pass; of the largest of several, where steps differ.
        memory: bytes of weights, gradients, moments and activations, at the measured size.
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
    """Times the pieces of a run, and ends it when it has seen enough.

    Args:
        folder: for a checkpoint, timed.ckpt.
        full_train: the run's own limit_train_batches.
        full_val: its limit_val_batches.

    Attributes:
        pieces: what has been measured.
    """

    def __init__(self, folder: Path, full_train: Any = None, full_val: Any = None):
        self.folder, self.full = folder, (full_train, full_val)
        self.pieces = Pieces()
        self.begun = self.mark = clock()
        self.count = 0  # training batches
        self.first = 0.0  # seconds of the first
        self.steps: list[float] = []
        self.epochs: list[tuple[float, int]] = []  # seconds without validation, and batches
        self.evaluations: list[list[float]] = []  # of each validation, batch by batch
        self.validations: list[float] = []
        self.saves: list[float] = []
        self.apart = 0.0  # seconds of validation and saving since the epoch began
        self.epoch_start = self.validation_start = 0.0
        self.counting = ExitStack()
        self.flops: Any = None
        self.kept: dict[int, int] = {}

    def _lap(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before, self.mark = self.mark, clock()
        return self.mark - before

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Time every checkpoint that is written."""
        save = trainer.save_checkpoint

        def timed(*args: Any, **kwargs: Any) -> None:
            self._lap()
            save(*args, **kwargs)
            self.saves.append(self._lap())
            self.apart += self.saves[-1]

        trainer.save_checkpoint = timed

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An epoch is what lies between two of these."""
        self._lap()
        if not self.count:
            self.pieces.setup = self.mark - self.begun
        elif self.count > WARM_UP:
            batches = int(trainer.num_training_batches)
            self.epochs.append((self.mark - self.epoch_start - self.apart, batches))
            timed = self.epochs[1:]  # the first one warmed up
            if len(timed) >= EPOCHS and sum(seconds for seconds, _ in timed) >= QUICK:
                self._end(trainer, pl_module)
        self.epoch_start, self.apart = self.mark, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        """Count what some forward passes do, and what others keep."""
        if not self.count:
            self.pieces.batch = batch_size(batch)
        if self.count in COUNTED:
            # a CPU's fused attention has no count
            self.counting.enter_context(sdpa_kernel(SDPBackend.MATH))
            self.flops = self.counting.enter_context(FlopCounterMode(display=False))
        elif self.count in WATCHED:
            weights = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}
            self.kept = {}

            def keep(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    self.kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            self.counting.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """The forward pass is over."""
        self.counting.close()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        """Time a batch; end the run after enough of them."""
        lap = self._lap()
        self.counting.close()
        pieces = self.pieces
        if not self.count:
            self.first = lap
        elif self.count in COUNTED:
            macs = self.flops.get_total_flops() / 2 / pieces.batch
            pieces.macs = max(pieces.macs, macs)
        elif self.count in WATCHED:
            kept = max(pieces.memory.get("activations", 0), sum(self.kept.values()))
            pieces.memory["activations"] = kept
        elif self.count >= WARM_UP and self._steady(trainer, index):
            self.steps.append(lap)
        self.count += 1
        if self.epochs and len(self.steps) >= LEAST and sum(self.steps) >= ENOUGH:
            self._end(trainer, pl_module)

    def _steady(self, trainer: Any, index: int) -> bool:
        """Whether a batch is none of an epoch's first ones, which workers have loaded ahead."""
        ahead = 1 + 2 * getattr(trainer.train_dataloader, "num_workers", 0)
        return index >= min(ahead, trainer.num_training_batches - 1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """A validation begins."""
        self._lap()
        self.validation_start = self.mark
        self.evaluations.append([])

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Its batches begin."""
        self._lap()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Time a batch."""
        self.evaluations[-1].append(self._lap())

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """What follows is training again."""
        self._lap()
        self.validations.append(self.mark - self.validation_start)
        self.apart += self.validations[-1]

    def _end(self, trainer: Any, module: L.LightningModule) -> None:
        """Sum up, and end the run.

        Raises:
            Measured: always.
        """
        pieces = self.pieces
        pieces.step = statistics.fmean(self.steps)
        pieces.setup += max(0.0, self.first - pieces.step)
        if timed := self.epochs[1:]:
            around = statistics.fmean(seconds - n * pieces.step for seconds, n in timed)
            pieces.epoch = max(0.0, around)
        later = slice(1 if len(self.validations) > 1 else 0, None)  # the first one warmed up
        batches = [one for parts in self.evaluations[later] for one in parts[1:] or parts]
        if batches:
            pieces.evaluation = statistics.fmean(batches)
            counts = [len(one) for one in self.evaluations[later] if one]
            whole = statistics.fmean(self.validations[later][: len(counts)])
            pieces.validation = max(0.0, whole - statistics.fmean(counts) * pieces.evaluation)
        loader = trainer.train_dataloader
        pieces.examples = len(loader.dataset)
        pieces.batches = limited(len(loader), self.full[0])
        pieces.evaluations = sum(map(self._evaluations, loaders(trainer.val_dataloaders)))
        trained = [p for p in module.parameters() if p.requires_grad]
        sizes = [sum(p.numel() for p in part) for part in (module.parameters(), trained)]
        pieces.parameters = (sizes[0], sizes[1])
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        pieces.memory = {
            "weights": sum(p.nbytes for p in module.parameters()),
            "gradients": sum(p.nbytes for p in trained),
            "moments": sum(
                value.nbytes for one in states for value in one.values() if torch.is_tensor(value)
            ),
            "activations": pieces.memory.get("activations", 0),
        }
        file = self.folder / "timed.ckpt"
        trainer.save_checkpoint(file)
        pieces.checkpoint = file.stat().st_size
        pieces.save = statistics.fmean(self.saves[-5:])
        raise Measured

    def _evaluations(self, loader: Any) -> float:
        """Batches that a validation takes of a loader."""
        batches = limited(len(loader), self.full[1])
        if batches < len(loader) or not loader.batch_size:
            return batches
        return len(loader.sampler) / loader.batch_size


def limited(count: int, limit: Any) -> int:
    """How many of `count` batches a trainer takes under a limit: a number, a share, or None."""
    if limit is None:
        return count
    return min(count, limit) if isinstance(limit, int) else int(count * limit)


def loaders(given: Any) -> list[Any]:
    """A trainer's validation loaders, however the DataModule gave them."""
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
) -> Pieces:
    """Run a few steps of a stage on one device.

    Args:
        path: the stage's YAML.
        preset: of the file.
        overrides: further arguments of the stage.
        folder: for what the run writes.
        batch: a batch size of ours, if one is given.

    Raises:
        OSError: if data or weights are missing.
        ValueError: if a setting is wrong, or training ends before enough is measured.
    """
    settings = cli.parse(path, preset, overrides)
    trainer, workers = settings.trainer, settings.data.init_args.get("num_workers") or 0
    full = trainer.limit_train_batches, trainer.limit_val_batches
    short = SHORT + 4 * workers
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
        most = min(EVALUATED, full[1]) if isinstance(full[1], int) else EVALUATED
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
        return stopwatch.pieces
    raise ValueError(f"{path} ended before {WARM_UP + LEAST} training steps: nothing was measured")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Without what a run prints; its progress bar goes on, because it takes time too."""
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
