"""What a stage will take before it runs: steps, size, memory, files that are missing, and hours.

    python -m recipes plan -c recipes/matformer/matvit.yaml --preset small
    python -m recipes plan -c recipes/vera/text.yaml --data.train reviews.csv

Counts come from the settings and the data; times and memory from a few training and validation
steps of the very run, on this machine (recipes/stopwatch.py). A batch that would take long is
measured as a small one, and its time and activations taken as proportional. `--plan` behind an
experiment plans all its stages so (recipes/experiment_plan.py).
"""

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from datamodules.images import ImageData
from recipes import cli
from recipes.agreement import weights_of
from recipes.records import type_of
from recipes.stopwatch import Pieces, limited, measure
from recipes.tables import Table

LONG = 15.0  # seconds of a step beyond which a smaller batch is measured
SMALL = 8  # examples of that batch, at first


@dataclass(frozen=True)
class Plan:
    """What a stage takes.

    Attributes:
        pieces: measured.
        epochs: at most.
        updates: of the weights.
        effective_batch: examples of an update, over all devices.
        memory: bytes of weights, gradients, moments and activations, on one device.
        seconds: predicted, by what takes them.
        extrapolated: measured on a smaller batch.
    """

    pieces: Pieces
    epochs: float
    updates: int
    effective_batch: int
    memory: dict[str, int]
    seconds: dict[str, float]
    extrapolated: bool

    @property
    def total(self) -> float:
        """Seconds of everything."""
        return sum(self.seconds.values())

    def text(self) -> list[str]:
        """In four lines."""
        pieces = self.pieces
        total, trained = pieces.parameters
        which = "all train" if total == trained else f"of which {trained:,} train"
        memory = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in self.memory.items())
        seconds = {name: value for name, value in self.seconds.items() if value}
        parts = ", ".join(f"{name} {value:,.1f}" for name, value in seconds.items())
        smaller = f" (measured: {pieces.batch} examples)" if self.extrapolated else ""
        return [
            f"{self.updates:,} updates of {self.effective_batch:,} examples, "
            f"{self.epochs:,.1f} epochs of {pieces.examples:,}",
            f"{total:,} parameters, {which}; {pieces.macs / 1e6:,.1f} M multiply-adds an example",
            f"memory {sum(self.memory.values()) / 2**20:,.1f} MB: {memory}{smaller}; "
            f"a checkpoint {pieces.checkpoint / 2**20:,.1f} MB",
            f"time {self.total:,.0f} s: {parts}; {1e3 * pieces.step:,.0f} ms a batch{smaller}",
        ]

    def table(self) -> Table:
        """For the terminal."""
        pieces = self.pieces
        memory = [*self.memory.items(), ("together", sum(self.memory.values()))]
        seconds = [(name, value) for name, value in self.seconds.items() if value]
        rows = [
            ["examples", f"{pieces.examples:,}"],
            ["epochs", f"{self.epochs:,.2f}".rstrip("0").rstrip(".")],
            ["updates", f"{self.updates:,}"],
            ["examples of an update", f"{self.effective_batch:,}"],
            ["parameters", f"{pieces.parameters[0]:,}"],
            ["  of which train", f"{pieces.parameters[1]:,}"],
            ["multiply-adds of an example", f"{pieces.macs / 1e6:,.1f} M"],
            *([f"memory, {name}", f"{size / 2**20:,.1f} MB"] for name, size in memory),
            ["a checkpoint", f"{pieces.checkpoint / 2**20:,.1f} MB"],
            ["a batch", f"{1e3 * pieces.step:,.0f} ms of {pieces.batch} examples"],
            *([f"time, {name}", f"{value:,.1f} s"] for name, value in seconds),
            ["time on this machine", f"{self.total / 3600:.3g} h ({self.total:,.0f} s)"],
        ]
        notes = [f"extrapolated from {pieces.batch} examples"] if self.extrapolated else []
        return Table(["", ""], rows, notes)


def plan(
    path: str,
    preset: str = cli.PAPER,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    start: float = 0.0,
) -> Plan:
    """Measure a few steps of a stage, and say what all of it takes.

    Args:
        path: the stage's YAML.
        preset: of the file.
        overrides: further arguments of the stage.
        folder: receives a checkpoint of the measured run, timed.ckpt.
        start: seconds that go by before the stage begins.

    Raises:
        OSError: if data or weights are missing.
        ValueError: if a setting is wrong.
    """
    settings = cli.parse(path, preset, overrides)
    size = int(settings.data.init_args.get("batch_size") or 1)
    with tempfile.TemporaryDirectory() as scratch:
        pieces, longer = _measured(path, preset, overrides, folder or Path(scratch), size)
    trainer, devices, extrapolated = settings.trainer, device_count(settings.trainer), longer > 1
    batches = pieces.batches
    if extrapolated or devices > 1:
        batches = limited(max(1, pieces.examples // (size * devices)), trainer.limit_train_batches)
    each_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    limit = trainer.max_steps if trainer.max_steps > 0 else math.inf
    most_epochs = trainer.max_epochs or (1000 if limit == math.inf else math.inf)
    updates = int(min(limit, each_epoch * (math.inf if most_epochs == -1 else most_epochs)))
    epochs = updates / each_epoch
    evaluations = pieces.evaluations / devices
    validated = validations(trainer, epochs, updates)
    sane = min(evaluations, sanity(trainer)) if pieces.evaluations else 0
    seconds = {
        "start of Python": start,
        "preparation": pieces.setup + sane * pieces.evaluation + bool(sane) * pieces.validation,
        "training steps": epochs * batches * pieces.step * longer,
        "around epochs": epochs * pieces.epoch,
        "validation": validated * (evaluations * pieces.evaluation + pieces.validation),
        "checkpoints": saves(settings.checkpoint, trainer, epochs, updates) * pieces.save,
    }
    activations = {"activations": int(pieces.memory["activations"] * longer)}
    update = size * devices * trainer.accumulate_grad_batches
    return Plan(pieces, epochs, updates, update, pieces.memory | activations, seconds, extrapolated)


def _measured(
    path: str, preset: str, overrides: Sequence[str], folder: Path, size: int
) -> tuple[Pieces, float]:
    """The pieces of a stage, and how many of the measured batches are one of its own."""
    if size <= 4 * SMALL:
        return measure(path, preset, overrides, folder), 1.0
    first = measure(path, preset, overrides, folder, SMALL)
    if first.step / SMALL * size <= LONG:
        pieces, batch = measure(path, preset, overrides, folder), size
    elif first.step < LONG / 4:
        batch = min(size, SMALL * max(1, int(LONG / 4 / first.step)))
        pieces = measure(path, preset, overrides, folder, batch)
    else:
        return first, size / SMALL
    pieces.setup = max(pieces.setup, first.setup)  # the second time, libraries are there already
    return pieces, size / batch


def validations(trainer: Any, epochs: float, updates: int) -> float:
    """How often the validation set is gone through."""
    interval = trainer.val_check_interval
    every = trainer.check_val_every_n_epoch
    if trainer.limit_val_batches == 0:
        return 0
    if isinstance(interval, int) and not isinstance(interval, bool):
        return updates * trainer.accumulate_grad_batches // interval
    return epochs // (every or 1) / (interval or 1.0)


def sanity(trainer: Any) -> float:
    """Validation batches before training, at most."""
    steps = trainer.num_sanity_val_steps
    return 2 if steps is None else math.inf if steps == -1 else steps


def saves(checkpoint: Any, trainer: Any, epochs: float, updates: int) -> float:
    """How many checkpoints are written, if each is better than those before."""
    kept, last = checkpoint.save_top_k != 0, bool(checkpoint.save_last)
    every_epochs = checkpoint.every_n_epochs or 1
    at_end, interval = checkpoint.save_on_train_epoch_end, trainer.check_val_every_n_epoch or 1
    validated = epochs // math.lcm(every_epochs, interval)
    if every := checkpoint.every_n_train_steps:
        times: float = updates // every
    elif checkpoint.save_top_k == 0 and not checkpoint.monitor:
        times = 0  # Lightning writes last.ckpt beside another, or at the end
    elif interval > 1 and at_end is None and checkpoint.monitor:
        return validated * kept + epochs // every_epochs * last
    else:  # False: after validation
        times = validated if at_end is False else epochs // every_epochs
    return max(times * (kept + last), last)


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
    cli.parse(options.config, options.preset, overrides)  # imports what the stage names
    start = time.process_time()
    lines = files(options.config, options.preset, overrides, options.verify)
    print("\n".join(lines))
    if missing := [line for line in lines if line.startswith("missing")]:
        raise ValueError(f"{len(missing)} of the things that it reads cannot be had: see above")
    made = plan(options.config, options.preset, overrides, start=start)
    made.table().show(f"{options.config}, preset {options.preset}")
