"""The old way to write an experiment, until the last one is ported to recipes/experiment.py.

A stage is one call of `python -m recipes fit`. Its folder holds its checkpoints, its logs and
stage.json, which says what it was made from. Run again, a finished stage is skipped, a killed
one continues from last.ckpt, and one whose settings have changed starts anew.
"""

import argparse
import csv
import hashlib
import importlib
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from recipes import cli
from recipes.cli import main as run_stage
from recipes.cli import parse

console = Console()


SEVERAL = ("--trainer.devices", "--trainer.num_nodes", "--trainer.strategy")
PASSING = (
    *SEVERAL, "--trainer.accelerator", "--trainer.use_distributed_sampler",
    "--trainer.enable_", "--trainer.log_every",
    "--data.num_workers", "--data.init_args.num_workers",
)  # fmt: skip


@dataclass
class StageResult:
    """A finished stage.

    Attributes:
        checkpoint: its last.ckpt.
        history: the values of everything it logged, in order.
        seconds: of training, over all sittings.
    """

    checkpoint: Path
    history: dict[str, list[float]]
    seconds: float

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of everything it logged."""
        return {name: values[-1] for name, values in self.history.items()}

    @property
    def folder(self) -> Path:
        """Where its checkpoints, its logs and what it exported are."""
        return self.checkpoint.parent.parent


@dataclass
class Experiment:
    """One run of an experiment at one preset.

    Attributes:
        name: such as "matformer.matvit".
        folder: where the recipe's YAML files are.
        preset: "tiny", "small", "paper" or any other that the folder has files for.
        seeds: run every stage with seeds 0 … seeds - 1.
        out: runs/<experiment>/<preset>.
        extra: command-line arguments handed to every stage.
    """

    name: str
    folder: Path
    preset: str
    seeds: int
    out: Path
    extra: list[str] = field(default_factory=list)
    command: str = ""

    def stage(
        self, name: str, config: str, seed: int = 0, overrides: dict[str, Any] | None = None
    ) -> StageResult:
        """Train a stage, unless it is finished.

        Args:
            name: folder of the stage within the run.
            config: the stage's YAML without its ending; the preset's file is laid over it.
            seed: of everything random in the stage.
            overrides: arguments that this stage changes, such as {"trainer.max_epochs": 4}.

        Raises:
            SystemExit: if training on several devices failed.
        """
        folder = self.out / f"seed{seed}" / name
        files = self.files(config)
        arguments = {**(overrides or {}), "seed_everything": seed}
        fingerprint = self._fingerprint(files, arguments)
        record_file, last = folder / "stage.json", folder / "checkpoints" / "last.ckpt"
        record = json.loads(record_file.read_text()) if record_file.is_file() else {}
        title = f"{self.name} ({self.preset}), seed {seed}: {name}"
        if record.get("fingerprint") != fingerprint:
            if folder.exists():
                old = folder.with_name(f"{name}.old")
                console.print(
                    f"[yellow]{title}: its settings have changed, starting anew (before: {old})"
                )
                shutil.rmtree(old, ignore_errors=True)
                folder.rename(old)
            record = {"fingerprint": fingerprint, "finished": False, "seconds": 0.0}
        if record["finished"] and last.is_file():
            console.print(f"[dim]{title}: finished before, skipped")
            return StageResult(last, read_history(folder), record["seconds"])
        resumed = last.is_file() and continues(last)
        if folder.exists() and not resumed:
            shutil.rmtree(folder)  # the curves of a sitting that left nothing to go on with
        folder.mkdir(parents=True, exist_ok=True)
        record_file.write_text(json.dumps(record))
        # what a stage computes from the user's arguments (a quarter of max_epochs) overrides them
        args = ["fit", *files, *self.extra]
        args += [f"--{key}={_as_argument(value)}" for key, value in arguments.items()]
        args += [f"--trainer.default_root_dir={folder}", f"--checkpoint.dirpath={last.parent}"]
        sitting = f"log{len(list(folder.glob('log*')))}"  # a resumed run keeps the curves it had
        logger = {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": str(folder), "name": "", "version": sitting},
        }
        args.append(f"--trainer.logger={json.dumps(logger)}")
        if resumed:
            console.print(f"[bold]{title}: continues from {last}")
            args.append(f"--ckpt_path={last}")
        else:
            console.print(f"[bold]{title}")
        start = time.monotonic()
        self._run(args)
        record["seconds"] += time.monotonic() - start
        record["finished"] = True
        record_file.write_text(json.dumps(record))
        return StageResult(last, read_history(folder), record["seconds"])

    def sibling(self, name: str) -> "Experiment":
        """Another experiment of the same command line: its finished stages are used again."""
        return replace(
            self, name=name, out=self.out.parent.parent / folder_name(name) / self.preset
        )

    def files(self, config: str) -> list[str]:
        """The arguments that name a stage's file and its preset."""
        cli.layers(self.folder / f"{config}.yaml", self.preset)  # refuses an unknown preset
        return ["-c", str(self.folder / f"{config}.yaml"), f"--preset={self.preset}"]

    def parsed(self, config: str, further: Sequence[str] = ()) -> Any:
        """What a stage's file and the command line say."""
        file = self.folder / f"{config}.yaml"
        return parse(file, self.preset, [*self.extra, *further])

    def grid(self, config: str, under: dict[str, Any] | None = None) -> dict[str, Any]:
        """What the experiment varies at this preset."""
        return cli.grid(self.folder / f"{config}.yaml", self.preset, under)

    def datamodule(self, config: str, seed: int = 0) -> Any:
        """The DataModule of a stage, to evaluate on; the one that training used."""
        settings = self.parsed(config).data
        return type_of(settings)(**{**settings.init_args.as_dict(), "seed": seed})

    def _run(self, args: list[str]) -> None:
        """In this process on one device; in a process of its own where Lightning starts several.

        Lightning's launcher runs the whole command again on every rank, which has to be the
        stage and not the experiment.
        """
        if any(argument.startswith(SEVERAL) for argument in self.extra):
            if code := subprocess.run([sys.executable, "-m", "recipes", *args]).returncode:
                sys.exit(code)  # it has said why
            return
        # the stage's own line says enough; advice and device lists would bury it
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        run_stage(args)

    def _fingerprint(self, files: list[str], arguments: dict[str, Any]) -> str:
        """Of what a stage is made from: its files, arguments, and the weights it starts from.

        On what and how it runs is no part of that: a finished stage stays finished when the rest
        goes on elsewhere.
        """
        digest = hashlib.sha256()
        for text in cli.layers(files[1], files[2].partition("=")[2]):
            digest.update(text.encode())
        digest.update(
            json.dumps([arguments, lasting(self.extra)], sort_keys=True, default=str).encode()
        )
        for value in arguments.values():
            if isinstance(value, Path) and value.is_dir():
                value /= "model.safetensors"
            if isinstance(value, Path) and value.is_file():
                digest.update(str(value.stat().st_mtime_ns).encode())
        return digest.hexdigest()

    def provenance(self, seeds: int) -> str:
        """One line for a report on that many finished seeds: command, device, software, date."""
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
        return (
            f"`{self.command}` · {seeds} seed{'s' if seeds > 1 else ''} · {device} · "
            f"torch {torch.__version__} · {time.strftime('%Y-%m-%d')}"
        )


def lasting(arguments: Sequence[str]) -> list[str]:
    """A command line without the arguments that say on what and how a stage runs."""
    return [part for one in grouped(arguments) if not one[0].startswith(PASSING) for part in one]


def grouped(arguments: Sequence[str]) -> list[list[str]]:
    """A command line's arguments, each with the values that follow it."""
    found: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("--") or not found:
            found.append([])
        found[-1].append(argument)
    return found


def continues(checkpoint: Path) -> bool:
    """Whether a checkpoint has what training goes on with, and not the weights alone."""
    return "optimizer_states" in torch.load(
        checkpoint, map_location="cpu", weights_only=True, mmap=True
    )


def presets(folder: Path, config: str) -> list[str]:
    """The presets that a stage's file has."""
    return cli.presets(folder / f"{config}.yaml")


def from_command_line(
    name: str, file: str, config: str, description: str, argv: list[str] | None = None
) -> Experiment:
    """The experiment that a command line asks for.

    Args:
        name: such as "matformer.matvit".
        file: the recipe's __file__.
        config: its main stage, whose presets it offers.
        description: shown by --help.
        argv: arguments; sys.argv's by default.
    """
    folder = Path(file).parent
    parser = argparse.ArgumentParser(
        prog=f"python -m recipes.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any further argument goes to every stage: --data.root DIR, "
        "--trainer.accelerator gpu, --trainer.devices 8 --trainer.strategy ddp, … "
        "(python -m recipes fit --help lists them).",
    )
    known = presets(folder, config)
    parser.add_argument("--preset", default="tiny", metavar="NAME", help=f"{', '.join(known)}")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs; default 1")
    parser.add_argument("--out", default="runs", metavar="DIR", help="default runs/")
    argv = sys.argv[1:] if argv is None else argv
    options, extra = parser.parse_known_args(argv)
    if options.preset not in known:
        parser.error(f"unknown preset {options.preset!r}: expected {', '.join(known)}")
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: expected at least 1")
    out = Path(options.out) / folder_name(name) / options.preset
    command = shlex.join(["python", "-m", f"recipes.{name}", *argv])
    return Experiment(name, folder, options.preset, options.seeds, out, extra, command)


def folder_name(name: str) -> str:
    """The folder under runs/ of an experiment."""
    return name.replace(".", "-")


def type_of(settings: Any) -> Any:
    """The class that a parsed stage names as its model or data."""
    module, _, name = settings.class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def read_history(folder: Path) -> dict[str, list[float]]:
    """Every column of a stage's metrics.csv, of which each sitting has one, without gaps."""
    history: dict[str, list[float]] = {}
    for file in sorted(folder.glob("log*/metrics.csv"), key=lambda file: int(file.parent.name[3:])):
        with file.open(newline="") as rows:
            for row in csv.DictReader(rows):
                for name, value in row.items():
                    if value:
                        history.setdefault(name, []).append(float(value))
    return history


def _as_argument(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | type(None)) else str(value)


def _cpu_name() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {os.cpu_count()} cores"
