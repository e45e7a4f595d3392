"""What a report's numbers come from: command, seeds, device, software, dates, git commits."""

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch

from recipes.records import read_record

if TYPE_CHECKING:
    from recipes.experiment import Run

MEASURED_ON = "Measured on "  # begins the line of models and data
SMOKE_TEST = (
    "**A smoke test**: preset `tiny` shows that every stage runs; its models are too small and its "
    "trainings too short to say anything about the paper."
)


def origin() -> dict[str, str]:
    """Device, torch version, date and git commit of this process."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _processor(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit(),
    }


def provenance(run: "Run", table: pd.DataFrame) -> str:
    """The line of a report that says what its numbers come from.

    Device, version, date and commit are those of the trainings and measurements, which may have run
    at different times. A line above says on which models and data; at preset tiny, that it is a
    smoke test.
    """
    records = [read_record(node.folder) for node in run.nodes.values()]
    origins = [one for record in records for one in record.get("made", [])]
    device, software, date, commit = (
        ", ".join(sorted({one[key] for one in origins}))
        for key in ("device", "torch", "date", "commit")
    )
    made = f"{device} · torch {software} · {date} · commit {commit}"
    if not origins:  # this machine and today's commit need not be those that made the numbers
        made = "device, versions, date and commit were not recorded"
    seeds = table["seed"].nunique()
    line = f"`{run.command}` · {seeds} seed{'s' if seeds != 1 else ''} · {made}"
    if set(table["preset"]) == {"tiny"}:
        return f"{SMOKE_TEST}\n\n{line}"
    where = measured_on(run.measured_on, table, run.command)
    return f"{where}\n\n{line}" if where else line


def measured_on(words: str, table: pd.DataFrame, command: str) -> str:
    """The line of a report that names models and data; "" without words.

    Args:
        words: see `Experiment.measured_on`.
        table: whose sets and models take the place of {sets} and {models}.
        command: of the run; where it has flags of models or data, the line says so.
    """
    if not words:
        return ""
    parts = [str(one).partition(", ") for one in table["set"].dropna().unique() if one]
    sets, models = (dict.fromkeys(part[place] for part in parts if part[place]) for place in (0, 2))
    names = " and ".join(", ".join(models).rsplit(", ", 1))  # "a, b and c"
    text = words.format(sets=", ".join(sets), models=names)
    chosen = re.search(r"--(\w+\.)?(data|model\.(architecture|init_from|model_args))\b", command)
    return f"{MEASURED_ON}{text}{' (but see the flags of the command)' * bool(chosen)}."


def git_commit() -> str:
    """The commit of this code, "1a2b3c4 with changes" if files differ from it, or "unknown"."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit, changes = (
            subprocess.run([*git, *command], capture_output=True, text=True, check=True).stdout
            for command in (
                ["rev-parse", "--short", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.strip() + " with changes" * bool(changes.strip())


def _processor() -> str:
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return f"{name}, {os.cpu_count()} cores"
