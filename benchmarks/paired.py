"""The command line and the Markdown output that all benchmarks share."""

import platform
import shlex
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class ImageCase:
    """One timm model at one batch size; benchmarks add a method that builds it.

    Attributes:
        name: timm architecture.
        batch: images in a batch.
        model_args: further arguments of timm.create_model.
    """

    name: str
    batch: int
    model_args: dict[str, Any] = field(default_factory=dict)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(B, 3, H, W)."""
        size = self.model_args.get("img_size", 224)
        return (self.batch, 3, size, size)

    def __str__(self) -> str:
        depth = f", {self.model_args['depth']} layers" if "depth" in self.model_args else ""
        return f"{self.name} at {self.input_shape[-1]}{depth}, batch {self.batch}"


def command_line(
    module: str, doc: str | None, repeats: int, seconds: float, per: str, threads: int | None = None
) -> ArgumentParser:
    """The arguments that benchmarks share; read them with `parsed`.

    Args:
        module: the benchmark's name.
        doc: its docstring, whose first paragraph is the description.
        repeats: default of --repeats.
        seconds: default of --seconds.
        per: what takes that long, such as "table".
        threads: default of --threads; None for torch's own.
    """
    parser = ArgumentParser(
        f"python -m benchmarks.{module}", description=(doc or "").split("\n\n")[0]
    )
    add, default = parser.add_argument, "torch's" if threads is None else threads
    add("--repeats", type=int, default=repeats, help=f"rounds at most (default: {repeats})")
    add("--seconds", type=float, default=seconds, help=f"about, per {per} (default: {seconds:g})")
    add("--quick", action="store_true", help="a toy model, three rounds")
    add("--threads", type=int, default=threads, help=f"CPU threads (default: {default})")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    return parser


def parsed(parser: ArgumentParser, argv: Sequence[str] | None) -> Namespace:
    """The options of a command line, sys.argv's when None, with a torch device as `device`.

    It sets torch's threads. With --quick `repeats` is at most three.
    """
    options = parser.parse_args(argv)
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: expected at least 1")
    if options.quick:
        options.repeats = min(options.repeats, 3)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    options.device = torch.device(options.device)
    return options


def heading(module: str, argv: Sequence[str] | None, device: torch.device) -> str:
    """What was run, where and when: the first line of a benchmark's output."""
    arguments = sys.argv[1:] if argv is None else argv
    command = shlex.join(["python", "-m", f"benchmarks.{module}", *arguments])
    return f"`{command}` · {machine(device)} · {time.strftime('%Y-%m-%d')}\n"


def spread(values: Sequence[float]) -> str:
    """Median, least and greatest."""
    return f"{statistics.median(values):.3f} ({min(values):.3f}–{max(values):.3f})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine(device: torch.device) -> str:
    """The device, its threads and the software, in one line."""
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, {torch.get_num_threads()} CPU threads · torch {torch.__version__}"
