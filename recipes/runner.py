"""Executes what an experiment has declared, and ends in its table and its report.

A finished node is skipped, a killed stage continues from last.ckpt, and one whose settings have
changed starts anew beside its old folder, which is kept under a numbered name.
"""

import argparse
import contextlib
import fcntl
import importlib
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pandas as pd
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from recipes import cli, results
from recipes.cli import main as run_stage
from recipes.executors import Executor, InProcess, LocalPool, Say, Task, TaskFailed
from recipes.experiment import (
    LAST,
    Experiment,
    Measurement,
    Measuring,
    Node,
    Run,
    Stage,
    folder_name,
    resolved,
)
from recipes.flags import Flags
from recipes.messages import ExperimentFailed
from recipes.records import (
    ROWS,
    Finished,
    read_record,
    write_record,
)

console = Console()


def run_experiment(experiment: Experiment, argv: list[str] | None = None) -> Run:
    """Run an experiment from its command line, sys.argv's by default.

    Raises:
        ValueError: for a wrong argument, before anything trains.
        ExperimentFailed: if a node failed; the others are finished.
    """
    run = command_line(experiment, argv)
    experiment.declare(run)
    run.check()
    if run.options.plan:
        show_plan(run)
        return run
    with locked(run):
        (run.out / "run.json").write_text(
            json.dumps({"experiment": experiment.name, "command": run.command})
        )
        execute(run, InProcess() if run.options.jobs == 1 else LocalPool(run.options.jobs))
        if all(is_finished(node) for node in run.nodes.values()):
            write_report(experiment, run)
    return run


def command_line(experiment: Experiment, argv: list[str] | None = None) -> Run:
    """The run that a command line asks for."""
    main_file = experiment.folder / f"{experiment.config}.yaml"
    known = cli.presets(main_file)
    parser = argparse.ArgumentParser(
        prog=f"python -m recipes.{experiment.name}",
        description=experiment.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Any further flag is a setting of every stage (--data.root DIR, --model.lr 1e-3, "
        "--trainer.accelerator gpu, --trainer.devices 8 --trainer.strategy ddp), or of the stages "
        f"of one file: --{experiment.config}.model.lr 1e-3. `python -m recipes fit -c "
        f"{os.path.relpath(main_file)} --model.help` lists them.",
    )
    add = parser.add_argument
    add("--preset", default="tiny", metavar="NAME", help=f"{', '.join(known)}; default tiny")
    add("--seeds", type=int, default=1, metavar="N", help="runs, with seeds 0 to N - 1; default 1")
    add("--rows", default=[], type=_names, metavar="A,B", help="only these rows of the table")
    add(
        "--only",
        default=[],
        type=_names,
        metavar="A,B",
        help="only these parts (stages and measurements; * and ? fit any), and what they need",
    )
    add(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="parts side by side, each in a process with its share of the cores; default 1",
    )
    add("--out", default="runs", metavar="DIR", help="default runs/")
    add("--plan", action="store_true", help="show what would run, and stop")  # fmt: skip
    experiment.options(parser)
    argv = sys.argv[1:] if argv is None else argv
    options, flags = parser.parse_known_args(argv)
    for name, least in (("seeds", 1), ("jobs", 1)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} {getattr(options, name)}: expected at least {least}")
    cli.layers(main_file, options.preset)  # refuses an unknown preset
    return Run(
        name=experiment.name,
        folder=experiment.folder,
        preset=options.preset,
        seeds=range(options.seeds),
        out=Path(options.out) / folder_name(experiment.name) / options.preset,
        flags=Flags.read(flags),
        options=options,
        command=shlex.join(["python", "-m", f"recipes.{experiment.name}", *argv]),
    )


def execute(run: Run, executor: Executor) -> None:
    """Execute the nodes of a run, each after those that it waits for.

    Raises:
        ExperimentFailed: if some failed, after the others are finished.
    """
    nodes = run.chosen()
    waiting = [node for node in nodes if not skipped(node)]
    done = {node for node in nodes if node not in waiting}
    running: dict[Future[Any], Node] = {}
    failed: dict[Node, str] = {}
    write_table(run)
    with progress_of(len(nodes), executor.jobs > 1) as view:
        view.advance(len(done))
        try:
            while waiting or running:
                ready = [node for node in waiting if done.issuperset(node.waits_for())]
                for node in ready[: executor.jobs - len(running)]:
                    waiting.remove(node)
                    try:
                        task = task_of(node, executor.jobs > 1)
                    except ValueError as error:  # in a value that other nodes were to give
                        failed[node] = str(error)
                        continue
                    view.start(node)
                    running[executor.submit(task, view.teller(node))] = node
                    if executor.jobs == 1:
                        break  # it is finished already, and others may be ready
                if not running and not ready:
                    break  # all that is left waits for what failed
                for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                    node = running.pop(future)
                    view.end(node)
                    try:
                        future.result()
                    except TaskFailed as error:
                        failed[node] = str(error)
                        view.print(f"[red]{node.title}: failed")
                    else:
                        done.add(node)
                        view.advance()
                        write_table(run)
        finally:
            executor.stop()
    if failed:
        raise ExperimentFailed(_failures(failed, waiting))


def _failures(failed: dict[Node, str], stopped: list[Node]) -> str:
    by_reason: dict[str, list[str]] = {}
    for node, reason in failed.items():
        by_reason.setdefault(reason, []).append(f"{node.name} (seed {node.seed})")
    text = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())
    if stopped:
        text += f". Not run because of it: {', '.join(dict.fromkeys(n.name for n in stopped))}"
    return f"{text}. All else is finished; the same command continues."


def is_finished(node: Node) -> bool:
    """Whether a node is finished, with the settings that it has now."""
    record = read_record(node.folder)
    if not record.get("finished") or record["fingerprint"] != node.fingerprint:
        return False
    return not isinstance(node, Stage) or (node.folder / LAST).is_file()


def skipped(node: Node) -> bool:
    """Whether there is nothing to do for a node; says so."""
    if not is_finished(node):
        return False
    console.print(f"[dim]{node.title}: finished before, skipped")
    return True


def finished(node: Node) -> Finished:
    """What a finished node has left."""
    if not isinstance(node, Stage):
        return Finished(node.folder, node.seed)
    arguments = node.arguments(lambda value: resolved(value, finished))
    return Finished(node.folder, node.seed, str(node.file), node.run.preset, tuple(arguments))


def task_of(node: Node, quiet: bool) -> Task:
    """What an executor does for a node; prepares its folder."""
    prepare(node)
    if isinstance(node, Stage):
        training = Training(node.title, finished(node), node.run.flags.several(), quiet)
        return Task(node.title, train, training, node.folder / "node.log")
    assert isinstance(node, Measurement)
    look = Look(
        node.title,
        node.function_name,
        Measuring(
            node.seed,
            {key: resolved(value, finished) for key, value in node.settings.items()},
            {name: finished(one) for name, one in node.nodes.items()},
            node.folder,
        ),
        {"experiment": node.run.name, "preset": node.run.preset, "stage": node.name},
    )
    return Task(node.title, measure, look, node.folder / "node.log")


def prepare(node: Node) -> None:
    """Keep an old folder with other settings under another name, and begin a new record."""
    record = read_record(node.folder)
    if record.get("fingerprint") == node.fingerprint and not record["finished"]:
        return
    if node.folder.exists():
        old = _free_name(node.folder)
        console.print(f"[yellow]{node.title}: its settings have changed, starting anew; "
                      f"before: {old}")  # fmt: skip
        node.folder.rename(old)
    write_record(node.folder, {"fingerprint": node.fingerprint, "finished": False, "seconds": 0.0})


def _free_name(folder: Path) -> Path:
    number = 1
    while (old := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    return old


@dataclass
class Training:
    """A stage, as a process that executes it needs it.

    Attributes:
        title: of the node.
        node: where to, and what is trained.
        several: whether on several devices.
        quiet: without Lightning's progress bar.
    """

    title: str
    node: Finished
    several: bool
    quiet: bool


def train(training: Training, say: Say) -> None:
    """Train a stage, from where a killed one stopped."""
    node, folder = training.node, training.node.folder
    last = node.checkpoint
    resumed = last.is_file() and continues(last)
    if not resumed:  # the curves of a sitting that left nothing to go on with
        for old in folder.glob("log*"):
            shutil.rmtree(old)
        shutil.rmtree(last.parent, ignore_errors=True)
    sitting = f"log{len(list(folder.glob('log*')))}"  # a resumed run keeps the curves it had
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "", "version": sitting},
    }
    given = any(argument.startswith("--trainer.logger=") for argument in node.arguments)
    args = ["fit", "-c", node.file, "--preset", node.preset, *node.arguments]
    args += [
        f"--seed_everything={node.seed}",
        f"--trainer.default_root_dir={folder}",
        f"--checkpoint.dirpath={last.parent}",
        f"--trainer.logger{'+' if given else ''}={json.dumps(logger if given else [logger])}",
    ]
    if training.quiet:
        args += ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    if resumed:
        args.append(f"--ckpt_path={last}")
    with timed(folder):
        if training.several:
            # Lightning's launcher runs the whole command again on every rank, which has to be
            # the stage and not the experiment
            code = subprocess.run([sys.executable, "-m", "recipes", *args]).returncode
            if code:
                sys.exit(code)  # it has said why
            return
        # the stage's own line says enough; advice and device lists would bury it
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        run_stage(args, callbacks=[Telling(say)])


@dataclass
class Look:
    """A measurement, as a process that executes it needs it.

    Attributes:
        title: of the node.
        function: module and name.
        measuring: what the function is given.
        columns: of its rows, beside the seed.
    """

    title: str
    function: str
    measuring: Measuring
    columns: dict[str, str]


def measure(look: Look, say: Say) -> None:
    """Measure, and write the rows."""
    say("measures")
    module, _, name = look.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    folder, seed = look.measuring.folder, look.measuring.seed
    L.seed_everything(seed, verbose=False)
    with timed(folder):
        rows = list(function(look.measuring) or ())
        results.write(folder / ROWS, results.tidy(rows, seed=seed, **look.columns))


@contextlib.contextmanager
def timed(folder: Path) -> Iterator[None]:
    """Add the time of this sitting to a node's record, and at the end that it is finished."""
    start = time.monotonic()
    ended = False
    try:
        yield
        ended = True
    finally:
        record = read_record(folder)
        seconds = record["seconds"] + time.monotonic() - start
        write_record(folder, {**record, "seconds": seconds, "finished": ended})


def continues(checkpoint: Path) -> bool:
    """Whether a checkpoint has what training goes on with, and not the weights alone."""
    return "optimizer_states" in torch.load(
        checkpoint, map_location="cpu", weights_only=True, mmap=True
    )


def table_of(run: Run) -> pd.DataFrame:
    """The rows of the finished measurements of a run, in the order of their declaration."""
    parts = [
        finished(node).rows
        for node in run.nodes.values()
        if isinstance(node, Measurement) and node.run.out == run.out and is_finished(node)
    ]
    parts = [part for part in parts if len(part)]
    if not parts:
        return results.tidy([], run.name, run.preset, 0)
    return pd.concat(parts, ignore_index=True)


def write_table(run: Run) -> None:
    """Write results.csv anew."""
    results.write(run.out / ROWS, table_of(run))


def write_report(experiment: Experiment, run: Run) -> None:
    """Write report.md from the table."""
    results.write_report(run.out, experiment.report(table_of(run), run))


@contextlib.contextmanager
def locked(run: Run) -> Iterator[None]:
    """Keep other processes from running into the same folders.

    Raises:
        ValueError: if another process does.
    """
    with contextlib.ExitStack() as stack:
        for out in sorted({run.out, *(node.run.out for node in run.nodes.values())}):
            out.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((out / ".lock").open("a+"))
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise ValueError(
                    f"{out} is in use by another run (process {file.read().strip()}): wait for "
                    "it, or give another --out"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


def show_plan(run: Run) -> None:
    """Say what would run."""
    for node in run.chosen():
        state = "finished" if is_finished(node) else "to do"
        needs = ", ".join(before.name for before in node.waits_for())
        console.print(f"{node.title}: {state}" + (f"; after {needs}" if needs else ""))


class Telling(L.Callback):
    """Says how far a training is, twice a second at most."""

    def __init__(self, say: Say):
        self.say, self.last = say, 0.0

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Say the epoch and the step."""
        if time.monotonic() - self.last < 0.5:
            return
        self.last = time.monotonic()
        epochs = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else ""
        total = trainer.estimated_stepping_batches
        steps = f"/{total}" if total != float("inf") else ""
        self.say(f"epoch {trainer.current_epoch + 1}{epochs}, step {trainer.global_step}{steps}")


class progress_of:
    """One live view of the nodes that run side by side; in this process, a line for each."""

    def __init__(self, total: int, live: bool):
        self.total, self.live = total, live
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not live,
        )
        self.tasks: dict[Node, TaskID] = {}

    def __enter__(self) -> "progress_of":
        self.progress.start()
        self.all = self.progress.add_task("all parts", total=self.total, said="")
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def print(self, text: str) -> None:
        """A line above the view."""
        self.progress.console.print(text)

    def start(self, node: Node) -> None:
        """A node begins."""
        self.print(f"[bold]{node.title}")
        self.tasks[node] = self.progress.add_task(
            f"seed {node.seed}: {node.name}", total=None, said=""
        )

    def teller(self, node: Node) -> Say:
        """Takes what a node says of its progress."""
        return lambda said: self.progress.update(self.tasks[node], said=said)

    def end(self, node: Node) -> None:
        """A node has ended."""
        self.progress.remove_task(self.tasks.pop(node))

    def advance(self, count: int = 1) -> None:
        """So many more are finished."""
        self.progress.advance(self.all, count)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]
