"""What a stage will take before it runs: steps, size, memory, files that are missing, and hours.

    python -m recipes plan -c recipes/matformer/matvit.yaml --preset small
    python -m recipes plan -c recipes/vera/text.yaml --data.train reviews.csv

Counts come from the settings and the data; times and memory from a few training and validation
steps of the very run, on this machine. A batch that would take long is measured as a small one, and
its time taken as proportional.
"""

import argparse
import logging
import math
import tempfile
import time
from collections.abc import Sequence
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

from datamodules.images import ImageData
from recipes import cli
from recipes.agreement import weights_of
from recipes.records import type_of
from recipes.tables import Table

WARM_UP, LEAST, MOST = 2, 6, 60  # training steps: before timing, timed at least and at most
ENOUGH = 8.0  # seconds of timed steps
LONG = 15.0  # seconds of a step beyond which a smaller batch is measured
SMALL = 8  # examples of that batch, at first


class Measured(Exception):
    """Ends the measured run."""


@dataclass
class Steps:
    """What a few steps have shown.

    Attributes:
        examples: in training.
        batches: of an epoch, at the measured size.
        batch: the measured size.
        val_batches: of a validation.
        step: seconds of a training batch, loading included.
        validation: seconds of a validation batch.
        setup: seconds before the first step.
        save: seconds to write a checkpoint.
        parameters: of the model, and those that train.
        macs: of an example's forward pass.
        memory: bytes of weights, gradients, moments and activations.
    """

    examples: int = 0
    batches: int = 0
    batch: int = 0
    val_batches: int = 0
    step: float = 0.0
    validation: float = 0.0
    setup: float = 0.0
    save: float = 0.0
    parameters: tuple[int, int] = (0, 0)
    macs: float = 0.0
    memory: dict[str, int] = field(default_factory=dict)


class Stopwatch(L.Callback):
    """Times steps, counts what the first ones do and keep, and then ends the run.

    Attributes:
        seen: what has been measured.
    """

    def __init__(self, folder: Path):
        self.folder, self.seen = folder, Steps()
        self.begun = self.mark = time.perf_counter()
        self.training: list[float] = []
        self.validation: list[float] = []
        self.counting = ExitStack()
        self.flops: Any = None
        self.kept: dict[int, int] = {}

    def _lap(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        before, self.mark = self.mark, time.perf_counter()
        return self.mark - before

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to time."""
        self._lap()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Time a batch."""
        self.validation.append(self._lap())

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to time."""
        if not self.training:
            self.seen.setup = time.perf_counter() - self.begun - sum(self.validation)
        self._lap()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """What follows is training again."""
        self._lap()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        """Count what the first forward pass does, and what the second one keeps."""
        if not self.training:
            self.seen.batch = batch_size(batch)
            # a CPU's fused attention has no count
            self.counting.enter_context(sdpa_kernel(SDPBackend.MATH))
            self.flops = self.counting.enter_context(FlopCounterMode(display=False))
        elif len(self.training) == 1:
            weights = {p.untyped_storage().data_ptr() for p in pl_module.parameters()}

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
        self.training.append(self._lap())
        timed = self.training[WARM_UP:]
        if len(timed) >= LEAST and (sum(timed) >= ENOUGH or len(timed) >= MOST):
            self.conclude(trainer, pl_module)
            raise Measured

    def conclude(self, trainer: Any, module: L.LightningModule) -> None:
        """Sum up."""
        seen, timed = self.seen, self.training[WARM_UP:]
        seen.step = sum(timed) / len(timed)
        later = self.validation[1:] or self.validation
        seen.validation = sum(later) / len(later) if later else 0.0
        seen.batches = int(trainer.num_training_batches)
        seen.examples = len(trainer.train_dataloader.dataset)
        seen.val_batches = int(sum(trainer.num_val_batches))
        trained = [p for p in module.parameters() if p.requires_grad]
        sizes = [sum(p.numel() for p in part) for part in (module.parameters(), trained)]
        seen.parameters = (sizes[0], sizes[1])
        seen.macs = self.flops.get_total_flops() / 2 / seen.batch
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        seen.memory = {
            "weights": sum(p.nbytes for p in module.parameters()),
            "gradients": sum(p.nbytes for p in trained),
            "moments": sum(
                value.nbytes for one in states for value in one.values() if torch.is_tensor(value)
            ),
            "activations": sum(self.kept.values()),
        }
        self._lap()
        trainer.save_checkpoint(self.folder / "timed.ckpt")
        seen.save = self._lap()


def batch_size(batch: Any) -> int:
    """Examples in a batch: the length of the first tensor in it."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, dict) else batch
    return batch_size(next(part for part in parts if not isinstance(part, int | float | str)))


@dataclass(frozen=True)
class Plan:
    """What a stage takes.

    Attributes:
        steps: measured.
        epochs: at most.
        updates: of the weights.
        effective_batch: examples of an update, over all devices.
        hours: predicted.
        extrapolated: measured on a smaller batch.
    """

    steps: Steps
    epochs: float
    updates: int
    effective_batch: int
    hours: float
    extrapolated: bool

    def table(self) -> Table:
        """For the terminal."""
        steps = self.steps
        memory = [*steps.memory.items(), ("together", sum(steps.memory.values()))]
        rows = [
            ["examples", f"{steps.examples:,}"],
            ["epochs", f"{self.epochs:,.2f}".rstrip("0").rstrip(".")],
            ["updates", f"{self.updates:,}"],
            ["examples of an update", f"{self.effective_batch:,}"],
            ["parameters", f"{steps.parameters[0]:,}"],
            ["  of which train", f"{steps.parameters[1]:,}"],
            ["multiply-adds of an example", f"{steps.macs / 1e6:,.1f} M"],
            *([f"memory, {name}", f"{size / 2**20:,.1f} MB"] for name, size in memory),
            ["a batch", f"{1e3 * steps.step:,.0f} ms of {steps.batch} examples"],
            ["time on this machine", f"{self.hours:.3g} h ({3600 * self.hours:,.0f} s)"],
        ]
        notes = ["extrapolated from a smaller batch"] if self.extrapolated else []
        return Table(["", ""], rows, notes)


def plan(path: str, preset: str = cli.PAPER, overrides: Sequence[str] = ()) -> Plan:
    """Measure a few steps of a stage, and say what all of it takes.

    Args:
        path: the stage's YAML.
        preset: of the file.
        overrides: further arguments of the stage.

    Raises:
        OSError: if data or weights are missing.
        ValueError: if a setting is wrong.
    """
    settings = cli.parse(path, preset, overrides)
    trainer, size = settings.trainer, int(settings.data.init_args.get("batch_size") or 1)
    steps, extrapolated = Steps(), size > 4 * SMALL
    if extrapolated:
        steps = measure(path, preset, overrides, SMALL)
        extrapolated = steps.step / steps.batch * size > LONG
        if extrapolated and steps.step < LONG / 4:
            larger = SMALL * max(1, int(LONG / 4 / steps.step))
            steps = measure(path, preset, overrides, min(larger, size))
    if not extrapolated:
        steps = measure(path, preset, overrides)
    devices = device_count(trainer)
    update = size * devices * trainer.accumulate_grad_batches
    each_epoch = max(1, math.ceil(steps.batches * steps.batch / update))
    limit = trainer.max_steps if trainer.max_steps > 0 else math.inf
    most_epochs = trainer.max_epochs or (1000 if limit == math.inf else math.inf)
    updates = int(min(limit, each_epoch * (math.inf if most_epochs == -1 else most_epochs)))
    epochs = updates / each_epoch
    seconds = (
        steps.setup
        + epochs * steps.batches * steps.step / devices
        + validations(trainer, epochs, updates) * steps.val_batches * steps.validation / devices
        + saves(settings.checkpoint, epochs, updates) * steps.save
    )
    return Plan(steps, epochs, updates, update, seconds / 3600, extrapolated)


def measure(path: str, preset: str, overrides: Sequence[str], batch: int | None = None) -> Steps:
    """Run a few steps of a stage on one device, with batches of a size of ours if one is given."""
    quiet = ["lightning.pytorch", "lightning.fabric", "lightning_modules"]
    levels = {name: logging.getLogger(name).level for name in quiet}
    with tempfile.TemporaryDirectory() as folder:
        stopwatch = Stopwatch(Path(folder))
        arguments = [
            *("fit", "-c", path, "--preset", preset, *overrides),
            *("--trainer.devices=1", "--trainer.strategy=auto", "--trainer.num_nodes=1"),
            *("--trainer.max_steps=-1", "--trainer.max_epochs=1000000", "--trainer.max_time=null"),
            *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
            *("--trainer.num_sanity_val_steps=4", f"--trainer.default_root_dir={folder}"),
            f"--checkpoint.dirpath={folder}",
        ]
        if batch is not None:
            arguments += [f"--data.batch_size={batch}", f"--data.eval_batch_size={batch}"]
        try:
            for name in quiet:
                logging.getLogger(name).setLevel(logging.ERROR)
            cli.main(arguments, [stopwatch])
        except Measured:
            return stopwatch.seen
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
    raise ValueError(f"{path} ended before {WARM_UP + LEAST} training steps: nothing was measured")


def validations(trainer: Any, epochs: float, updates: int) -> float:
    """How often the validation set is gone through."""
    interval = trainer.val_check_interval
    every = trainer.check_val_every_n_epoch
    if trainer.limit_val_batches == 0:
        return 0
    if isinstance(interval, int) and not isinstance(interval, bool):
        return updates * trainer.accumulate_grad_batches // interval
    return epochs // (every or 1) / (interval or 1.0)


def saves(checkpoint: Any, epochs: float, updates: int) -> float:
    """How many checkpoints are written."""
    if every := checkpoint.every_n_train_steps:
        times: float = updates // every
    else:
        times = epochs // (checkpoint.every_n_epochs or 1)
    return times * (2 if checkpoint.monitor else 1)


def device_count(trainer: Any) -> int:
    """Devices of all nodes that a stage's settings ask for."""
    devices = trainer.devices
    if devices in ("auto", -1, "-1"):
        accelerator = torch.accelerator.is_available() and trainer.accelerator != "cpu"
        count = torch.accelerator.device_count() if accelerator else 1
    elif isinstance(devices, list):
        count = len(devices)
    else:
        text = str(devices)
        count = int(text) if text.isdigit() else len([one for one in text.split(",") if one])
    return count * trainer.num_nodes


def files(path: str, preset: str, overrides: Sequence[str], verify: bool = False) -> list[str]:
    """A line for the data and the weights that a stage reads, or why they cannot be read.

    Args:
        path: the stage's YAML.
        preset: of the file.
        overrides: further arguments of the stage.
        verify: read every image.
    """
    settings = cli.parse(path, preset, overrides)
    data = settings.data
    name = data.class_path.rpartition(".")[2]
    try:
        module = type_of(data)(**data.init_args.as_dict())
        module.setup("fit")
        places = [data.init_args.get(key) for key in ("root", "name", "train", "val", "test")]
        lines = [" ".join(["data:", name, *(str(place) for place in places if place)])]
        if verify and isinstance(module, ImageData):
            lines += [f"missing: {reason}" for reason in module.unreadable()]
    except (OSError, ValueError) as error:
        lines = [f"missing: {error}"]
    start = settings.model.init_args.get("init_from")
    if start and not Path(start).exists():
        lines.append(f"missing: model.init_from {start} is not there")
    elif said := weights_of(settings):
        lines.append(said)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Show the plan of the stage that a command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any further flag is a setting of the stage.",
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the stage's YAML")
    parser.add_argument("--preset", default=cli.PAPER, metavar="NAME", help="default: paper")
    parser.add_argument("--verify", action="store_true", help="read every image beforehand")
    options, overrides = parser.parse_known_args(argv)
    lines = files(options.config, options.preset, overrides, options.verify)
    print("\n".join(lines))
    if missing := [line for line in lines if line.startswith("missing")]:
        raise ValueError(f"{len(missing)} of the things that it reads cannot be had: see above")
    made = plan(options.config, options.preset, overrides)
    made.table().show(f"{options.config}, preset {options.preset}")
