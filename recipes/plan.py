"""Predicts what a stage takes before it runs: steps, memory, hours; and lists missing files.

    python -m recipes plan -c recipes/matformer/matvit.yaml --preset small
    python -m recipes plan -c recipes/vera/text.yaml --data.train reviews.csv

Counts come from the settings and the data; times and memory from a few training and validation
steps of the stage, on this machine (recipes/stopwatch.py). If a batch would take long, two
smaller ones are measured, and time and activations are scaled. `--plan` of an experiment plans all
its stages in this way (recipes/experiment_plan.py).
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
from recipes.records import instance_of
from recipes.stopwatch import StageProfile, limited, measure
from recipes.tables import Table

LONG = 4.0  # seconds of a step above which a smaller batch is measured
SMALL = 8  # examples of the smaller batch that is tried first


@dataclass(frozen=True)
class Plan:
    """The predicted steps, memory and time of a stage.

    Attributes:
        profile: the measurements that it is based on.
        epochs: number of epochs.
        updates: number of optimizer steps.
        effective_batch: examples of an optimizer step, over all devices.
        memory: bytes of weights, gradients, moments and activations, on one device.
        seconds: predicted seconds of each part of the run.
        extrapolated: whether a smaller batch was measured.
    """

    profile: StageProfile
    epochs: float
    updates: int
    effective_batch: int
    memory: dict[str, int]
    seconds: dict[str, float]
    extrapolated: bool

    @property
    def total(self) -> float:
        """Predicted seconds of the whole run."""
        return sum(self.seconds.values())

    def text(self) -> list[str]:
        """The plan as four lines of text."""
        profile = self.profile
        total, trained = profile.parameters
        which = "all train" if total == trained else f"of which {trained:,} train"
        memory = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in self.memory.items())
        seconds = {name: value for name, value in self.seconds.items() if value}
        parts = ", ".join(f"{name} {value:,.1f}" for name, value in seconds.items())
        smaller = f" (measured: {profile.batch} examples)" if self.extrapolated else ""
        return [
            f"{self.updates:,} updates of {self.effective_batch:,} examples, "
            f"{self.epochs:,.1f} epochs of {profile.examples:,}",
            f"{total:,} parameters, {which}; {profile.macs / 1e6:,.1f} M multiply-adds an example",
            f"memory {sum(self.memory.values()) / 2**20:,.1f} MB: {memory}{smaller}; "
            f"a checkpoint {profile.checkpoint / 2**20:,.1f} MB",
            f"time {self.total:,.0f} s: {parts}; {1e3 * profile.step:,.0f} ms a batch{smaller}",
        ]

    def table(self) -> Table:
        """The plan as a table for the terminal."""
        profile = self.profile
        memory = [*self.memory.items(), ("together", sum(self.memory.values()))]
        seconds = [(name, value) for name, value in self.seconds.items() if value]
        rows = [
            ["examples", f"{profile.examples:,}"],
            ["epochs", f"{self.epochs:,.2f}".rstrip("0").rstrip(".")],
            ["updates", f"{self.updates:,}"],
            ["examples of an update", f"{self.effective_batch:,}"],
            ["parameters", f"{profile.parameters[0]:,}"],
            ["  of which train", f"{profile.parameters[1]:,}"],
            ["multiply-adds of an example", f"{profile.macs / 1e6:,.1f} M"],
            *([f"memory, {name}", f"{size / 2**20:,.1f} MB"] for name, size in memory),
            ["a checkpoint", f"{profile.checkpoint / 2**20:,.1f} MB"],
            ["a batch", f"{1e3 * profile.step:,.0f} ms of {profile.batch} examples"],
            *([f"time, {name}", f"{value:,.1f} s"] for name, value in seconds),
            ["time on this machine", f"{self.total / 3600:.3g} h ({self.total:,.0f} s)"],
        ]
        notes = [f"extrapolated from {profile.batch} examples"] if self.extrapolated else []
        return Table(["", ""], rows, notes)


def plan(
    path: str,
    preset: str = cli.PAPER,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    start: float = 0.0,
) -> Plan:
    """Measure a few steps of a stage, and predict the full run.

    Args:
        path: the stage's YAML file.
        preset: a preset of the file.
        overrides: further command-line arguments of the stage.
        folder: receives a checkpoint of the measured run, timed.ckpt.
        start: seconds before the stage begins (start of Python, imports).

    Raises:
        OSError: if data or weights are missing.
        ValueError: if a setting is wrong.
    """
    settings = cli.parse(path, preset, overrides)
    size = int(settings.data.init_args.get("batch_size") or 1)
    with tempfile.TemporaryDirectory() as scratch:
        profile, step, scale = _profile(path, preset, overrides, folder or Path(scratch), size)
    trainer, devices, extrapolated = settings.trainer, device_count(settings.trainer), scale > 1
    batches = profile.batches
    if extrapolated or devices > 1:
        batches = limited(max(1, profile.examples // (size * devices)), trainer.limit_train_batches)
    updates_per_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    limit = trainer.max_steps if trainer.max_steps > 0 else math.inf
    most_epochs = trainer.max_epochs or (1000 if limit == math.inf else math.inf)
    updates = int(min(limit, updates_per_epoch * (math.inf if most_epochs == -1 else most_epochs)))
    epochs = updates / updates_per_epoch
    evaluations = profile.evaluations / devices
    validated = validations(trainer, epochs, updates)
    sanity_batches = min(evaluations, sanity(trainer)) if profile.evaluations else 0
    sanity_check = sanity_batches * profile.evaluation
    sanity_check += profile.validation if sanity_batches else 0.0
    seconds = {
        "start of Python": start,
        "preparation": profile.setup + sanity_check,
        "training steps": epochs * batches * step,
        "around epochs": epochs * profile.epoch,
        "validation": validated * (evaluations * profile.evaluation + profile.validation),
        "checkpoints": saves(settings.checkpoint, trainer, epochs, updates) * profile.save,
    }
    memory = profile.memory | {"activations": int(profile.memory["activations"] * scale)}
    update = size * devices * trainer.accumulate_grad_batches
    return Plan(profile, epochs, updates, update, memory, seconds, extrapolated)


def _profile(
    path: str, preset: str, overrides: Sequence[str], folder: Path, size: int
) -> tuple[StageProfile, float, float]:
    """Profile a stage, with smaller batches if a step takes long.

    Some of a step does not depend on the batch (the optimizer, L_rwp of PELA), some grows with it:
    two sizes tell them apart.

    Returns:
        The profile, the seconds of a step of the settings' size, and that size over the measured.
    """
    if size <= 4 * SMALL:
        profile = measure(path, preset, overrides, folder)
        return profile, profile.step, 1.0
    small = measure(path, preset, overrides, folder, SMALL)
    if small.step / SMALL * size <= LONG:
        other = size
    elif small.step < LONG / 4:
        other = min(size, SMALL * max(4, int(LONG / 4 / small.step)))
    else:
        other = SMALL // 4
    given = () if other == size else (other,)
    second = measure(path, preset, overrides, folder, *given)
    (less, quick), (more, profile) = sorted({SMALL: small, other: second}.items())
    profile.setup = max(profile.setup, small.setup)  # only the first one imported libraries
    fixed = (quick.step * more - profile.step * less) / (more - less)
    fixed = min(max(0.0, fixed), profile.step)
    return profile, fixed + (profile.step - fixed) / more * size, size / more


def validations(trainer: Any, epochs: float, updates: int) -> float:
    """How many times training runs validation."""
    interval = trainer.val_check_interval
    every = trainer.check_val_every_n_epoch
    if trainer.limit_val_batches == 0:
        return 0
    if isinstance(interval, int) and not isinstance(interval, bool):
        return updates * trainer.accumulate_grad_batches // interval
    return epochs // (every or 1) / (interval or 1.0)


def sanity(trainer: Any) -> float:
    """The most validation batches that Lightning's sanity check runs before training."""
    steps = trainer.num_sanity_val_steps
    return 2 if steps is None else math.inf if steps == -1 else steps


def saves(checkpoint: Any, trainer: Any, epochs: float, updates: int) -> float:
    """How many checkpoint files are written, if every one is the best so far."""
    kept, last = checkpoint.save_top_k != 0, bool(checkpoint.save_last)
    every_epochs = checkpoint.every_n_epochs or 1
    at_end, interval = checkpoint.save_on_train_epoch_end, trainer.check_val_every_n_epoch or 1
    validated = epochs // math.lcm(every_epochs, interval)
    if every := checkpoint.every_n_train_steps:
        times: float = updates // every
    elif checkpoint.save_top_k == 0 and not checkpoint.monitor:
        times = 0  # Lightning writes last.ckpt with another checkpoint, or at the end
    elif interval > 1 and at_end is None and checkpoint.monitor:
        return validated * kept + epochs // every_epochs * last
    else:  # save_on_train_epoch_end=False saves after validation
        times = validated if at_end is False else epochs // every_epochs
    return max(times * (kept + last), last)


def device_count(trainer: Any) -> int:
    """Number of devices on all nodes that a stage's settings ask for."""
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
    """Lines on the data and weights that a stage reads; "missing: …" if they cannot be read.

    Args:
        path: the stage's YAML file.
        preset: a preset of the file.
        overrides: further command-line arguments of the stage.
        verify: read every image.
    """
    settings = cli.parse(path, preset, overrides)
    data = settings.data
    name = data.class_path.rpartition(".")[2]
    try:
        module = instance_of(data.as_dict())
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
    elif weights := weights_of(settings):
        lines.append(weights)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of the stage that a command line names.

    Raises:
        ValueError: if files that the stage reads are missing.
    """
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
    cli.parse(options.config, options.preset, overrides)  # imports the stage's modules
    start = time.process_time()
    lines = files(options.config, options.preset, overrides, options.verify)
    print("\n".join(lines))
    if missing := [line for line in lines if line.startswith("missing")]:
        raise ValueError(f"{len(missing)} inputs of the stage are missing: see above")
    prediction = plan(options.config, options.preset, overrides, start=start)
    prediction.table().show(f"{options.config}, preset {options.preset}")
