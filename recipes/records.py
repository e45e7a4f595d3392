"""Access to a finished node's folder, and the record of the settings that produced it."""

import csv
import hashlib
import json
import math
import os
import pkgutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jsonargparse
import pandas as pd
import torch

from recipes import cli, results
from recipes.flags import key_of, passing

RECORD = "node.json"
ROWS = "results.csv"


@dataclass
class Finished:
    """A finished node.

    Attributes:
        folder: where its checkpoints, its logs and its files are.
        seed: the node's seed.
        file: YAML file of a stage.
        preset: preset of a stage.
        arguments: settings of a stage, as command-line arguments.
    """

    folder: Path
    seed: int
    file: str = ""
    preset: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def checkpoint(self) -> Path:
        """Of a stage: its last.ckpt."""
        return self.folder / "checkpoints" / "last.ckpt"

    @property
    def best(self) -> Path:
        """Of a stage with checkpoint.filename: best, its best.ckpt."""
        return self.folder / "checkpoints" / "best.ckpt"

    @cached_property
    def history(self) -> dict[str, list[float]]:
        """Of a stage: every logged metric's values, in order."""
        return read_history(self.folder)

    @property
    def metrics(self) -> dict[str, float]:
        """Of a stage: every logged metric's last value."""
        return {name: values[-1] for name, values in self.history.items()}

    @property
    def shares(self) -> dict[str, float]:
        """Of a stage with several loss terms: `share_<term>`, the mean of its gradient's share."""
        return {
            name.removeprefix("train/"): statistics.fmean(values)
            for name, values in self.history.items()
            if name.startswith("train/share_")
        }

    @cached_property
    def updates(self) -> int:
        """Of a stage: the number of optimizer steps before its last checkpoint."""
        return torch.load(self.checkpoint, mmap=True, weights_only=True)["global_step"]

    @property
    def seconds(self) -> float | None:
        """How long the node took, summed over all processes of a resumed run.

        None if other programs used the machine meanwhile, another stage of the experiment included.
        """
        record = read_record(self.folder)
        return record["seconds"] if record.get("alone", False) else None

    @cached_property
    def rows(self) -> pd.DataFrame:
        """Of a measurement: its part of the table."""
        return results.read(self.folder)

    @cached_property
    def settings(self) -> jsonargparse.Namespace:
        """Of a stage: all its settings."""
        arguments = [*self.arguments, f"--seed_everything={self.seed}"]
        return cli.parse(self.file, self.preset, arguments)

    def datamodule(self) -> Any:
        """Of a stage: the DataModule that it trained on."""
        return instance_of(self.settings.data.as_dict())

    def module(self, device: Any = "cpu") -> Any:
        """Of a stage: the LightningModule of its last checkpoint, ready to evaluate."""
        kind = type_of(self.settings.model)
        return kind.load_from_checkpoint(self.checkpoint, map_location=device).eval()


def fingerprint(content: Mapping[str, Any], seed: int, references: Mapping[str, Any]) -> str:
    """Hash of what determines a node; a file that a setting names counts by its content.

    Args:
        content: settings; those in flags.PASSING do not count.
        seed: the node's seed.
        references: replacements of values of other nodes, by key or by path; see
            `nodes.references`.
    """
    flat = flattened(content)
    hashed = {key: _hashed(key, flat[key], references) for key in flat if not passing(key)}
    return hashlib.sha256(
        json.dumps([hashed, seed], sort_keys=True, default=str).encode()
    ).hexdigest()


def _hashed(key: str, value: Any, references: Mapping[str, Any]) -> Any:
    """What a fingerprint hashes for a setting: its replacement, its file's state, or its value."""
    if (replacement := references.get(key)) is not None:
        return replacement
    if isinstance(value, list):
        return [_hashed(key, one, references) for one in value]
    if not isinstance(value, str):
        return value
    if (replacement := references.get(value)) is not None:
        return replacement
    path = value.removeprefix("local-dir:")  # timm's name of a folder
    for file in (Path(path), Path(path, "model.safetensors")) if value else ():
        if len(value) < 1024 and os.path.isfile(file):
            stat = file.stat()
            return [value, _digest(file, stat.st_size, stat.st_mtime_ns)]
    return value


@cache
def _digest(file: Path, size: int, changed: int) -> str:
    """Hash of a file's content, read again only if size or date have changed."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def flattened(content: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dictionary with dotted keys, without "init_args"."""
    if isinstance(content, Mapping) and content:
        flat: dict[str, Any] = {}
        for name, value in content.items():
            flat |= flattened(value, f"{prefix}.{name}" if prefix else str(name))
        return flat
    if isinstance(content, list | tuple) and any(isinstance(one, Mapping) for one in content):
        return flattened({str(place): one for place, one in enumerate(content)}, prefix)
    return {key_of(prefix): content}


def at(settings: jsonargparse.Namespace, key: str) -> Any:
    """The value of a setting, such as model.lr.

    Raises:
        ValueError: if the stage has no such setting.
    """
    flat = flattened(settings.as_dict())
    if key_of(key) not in flat:
        raise ValueError(f"{key} is no setting of the stage")
    return flat[key_of(key)]


def type_of(settings: Any) -> Any:
    """The class that a stage's settings name as its model or data."""
    return pkgutil.resolve_name(settings["class_path"])


def instance_of(settings: Mapping[str, Any], **changes: Any) -> Any:
    """The model or data of a stage's settings (class_path, init_args), with changed arguments."""
    return type_of(settings)(**{**settings["init_args"], **changes})


def best(values: Sequence[float], mode: str = "max") -> float:
    """The best of a metric's values; NaN (from a collapsed run) counts as the worst."""
    sign = 1 if mode == "max" else -1
    return sign * max(sign * one if math.isfinite(one) else -math.inf for one in values)


def best_of(
    trials: Sequence[Finished],
    metric: str | Sequence[str],
    mode: str = "max",
    at_end: bool = True,
    alike: Sequence[str] = (),
) -> Finished:
    """The best of several trainings by a metric in their logs, or by the sum of several metrics.

    Args:
        trials: the trainings; of equal ones the first is taken.
        metric: its name, or several names.
        mode: "max" or "min".
        at_end: compare the last values, of the checkpoint that is scored later: a training that was
            good once and then diverged is not the best. False: compare each training's best values.
        alike: settings; trainings with the same values of them, of several seeds, count by their
            mean, and the first of them is returned.
    """
    if len(trials) == 1:
        return trials[0]
    pick = max if mode == "max" else min
    return pick(scores_of(trials, metric, mode, at_end, alike), key=lambda one: one[1])[0]


def scores_of(
    trials: Sequence[Finished],
    metric: str | Sequence[str],
    mode: str,
    at_end: bool,
    alike: Sequence[str],
) -> list[tuple[Finished, float]]:
    """What `best_of` compares: the trainings that differ, and the metric of each."""
    metrics = [metric] if isinstance(metric, str) else metric
    start = -1 if at_end else 0
    values: dict[str, list[float]] = {}
    first: dict[str, Finished] = {}
    for place, one in enumerate(trials):
        key = str([at(one.settings, name) for name in alike] or place)
        first.setdefault(key, one)
        value = sum(best(one.history[name][start:], mode) for name in metrics)
        values.setdefault(key, []).append(value)
    return [(first[key], statistics.fmean(values[key])) for key in values]


def read_record(folder: Path) -> dict[str, Any]:
    """The record in a node's folder; empty if there is none."""
    file = folder / RECORD
    return json.loads(file.read_text()) if file.is_file() else {}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a node's record: fingerprint, whether it is finished, seconds, origins."""
    results.write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")


def read_history(folder: Path) -> dict[str, list[float]]:
    """Every metric's values in order, over the metrics.csv of each process of a resumed stage.

    Steps that a killed process logged after its last checkpoint come again in the next one's log,
    and count once.
    """
    lines: list[dict[str, str]] = []
    for file in sorted(folder.glob("log*/metrics.csv"), key=lambda file: int(file.parent.name[3:])):
        with file.open(newline="") as rows:
            new = list(csv.DictReader(rows))
        again = min((int(line["step"]) for line in new if line.get("step")), default=math.inf)
        lines = [line for line in lines if int(line.get("step") or 0) < again] + new
    history: dict[str, list[float]] = {}
    for line in lines:
        for name, value in line.items():
            if value:
                history.setdefault(name, []).append(float(value))
    return history
