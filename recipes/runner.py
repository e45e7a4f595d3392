"""Executes the nodes that an experiment declares, and writes its table and its report.

A finished node is skipped, a killed stage continues from last.ckpt, and a node whose settings have
changed starts anew; its old folder is kept under a numbered name. A stage whose settings turn out
to be those of a finished one, such as the best trial's, takes its result.
"""

import argparse
import contextlib
import fcntl
import glob
import importlib
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from recipes import archive, cli, experiment_plan, ledger, results
from recipes.cluster import RayCluster
from recipes.executors import (
    Executor,
    InProcess,
    LocalPool,
    Task,
    TaskFailed,
    sigterm_raises,
    visible_gpus,
)
from recipes.experiment import Experiment, Run, folder_name
from recipes.flags import Flags, names_in
from recipes.messages import ExperimentFailed, require_at_least
from recipes.nodes import (
    Measurement,
    Measuring,
    Node,
    Stage,
    finished,
    free_name,
    is_finished,
    is_measured,
    resolved,
    resolved_fingerprint,
    unfinished,
)
from recipes.progress import View, console
from recipes.records import ROWS, read_record, write_record
from recipes.trials import trials_of
from recipes.work import MeasurementTask, Training, measure, train

RUN = "run.json"  # in a run's folder, for `python -m recipes report`


def run_experiment(experiment: Experiment, argv: list[str] | None = None) -> Run:
    """Run an experiment from its command line, sys.argv's by default.

    Raises:
        ValueError: for a wrong argument, before anything trains.
        FileNotFoundError: if a measurement's data are missing, before anything trains.
        ExperimentFailed: if a node failed, after all nodes that do not need it are finished.
    """
    run = command_line(experiment, argv)
    experiment.declare(run)
    run.check()
    if run.options.records:
        take_records(run)
    if run.options.plan:
        list_nodes(run)
        experiment_plan.show(run)
        return run
    if missing := run.missing():
        raise FileNotFoundError("; ".join(missing))
    with locked(run):
        copy_files(run)
        try:
            with sigterm_raises():
                execute(run, executor_of(run))
        finally:
            nodes, extra = list(run.nodes.values()), run.out / RUN
            archive.pack(nodes, Path(run.options.out), run.out / archive.FILE, extra)
        if (table := table_of(run)).empty:
            console.print("Nothing was measured, so there is no report.")
        else:
            write_report(experiment, run, table)
    return run


def command_line(experiment: Experiment, argv: list[str] | None = None) -> Run:
    """Parse a command line into a run.

    Raises:
        ValueError: for an unknown preset, a number below 1, or flags that exclude each other.
    """
    main_file = experiment.folder / f"{experiment.config}.yaml"
    known = cli.presets(main_file)
    settings_help = ""
    if stage_file := experiment.stage_file:
        settings_help = (
            "Any further flag is a setting of every stage (--data.root DIR, --model.lr 1e-3, "
            "--trainer.accelerator gpu, --trainer.devices 8 --trainer.strategy ddp), or of the "
            f"stages of one file: --{stage_file.stem}.model.lr 1e-3. `python -m recipes fit -c "
            f"{os.path.relpath(stage_file)} --model.help` lists them."
        )
    parser = argparse.ArgumentParser(
        prog=f"python -m recipes.{experiment.name}",
        description=experiment.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog=settings_help,
    )
    add = parser.add_argument
    add("--preset", default="tiny", metavar="NAME", help=f"{', '.join(known)}; default tiny")
    add("--seeds", type=int, default=1, metavar="N", help="runs, with seeds 0 to N - 1; default 1")
    add("--rows", default=[], type=names_in, metavar="A,B", help="only these rows of the table")
    add(
        "--only",
        default=[],
        type=names_in,
        metavar="A,B",
        help="only these parts (stages and measurements; * and ? fit any), and what they need",
    )
    add(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="parts to run in parallel, each in a process with its share of the cores; default 1",
    )
    add(
        "--cluster",
        metavar="ADDRESS",
        help="run the parts as tasks of this Ray cluster, --jobs at once; local starts Ray here",
    )
    add("--out", default="runs", metavar="DIR", help="default runs/")
    add(
        "--records",
        type=Path,
        metavar="FILE",
        help=f"{archive.FILE} of an earlier run, from anywhere: what it finished is not repeated",
    )
    add(
        "--plan",
        action="store_true",
        help="train nothing; list what would run, with time and memory from a few timed steps",
    )
    experiment.options(parser)
    argv = sys.argv[1:] if argv is None else argv
    options, flags = parser.parse_known_args(argv)
    if options.records:  # the report's command gives the same table without them
        place = next(n for n, one in enumerate(argv) if one.startswith("--records"))
        argv = [*argv[:place], *argv[place + 1 + (argv[place] == "--records") :]]
    require_at_least(1, seeds=options.seeds, jobs=options.jobs)
    cli.layers(main_file, options.preset)  # refuses an unknown preset
    settings = Flags.read(flags)
    if options.cluster and settings.several():
        raise ValueError(
            "--cluster gives every part one device: leave out --trainer.devices, "
            "--trainer.num_nodes and --trainer.strategy, or --cluster"
        )
    return Run(
        measured_on=experiment.measured_on.get(options.preset, ""),
        name=experiment.name,
        folder=experiment.folder,
        preset=options.preset,
        seeds=range(options.seeds),
        out=Path(options.out) / folder_name(experiment.name) / options.preset,
        flags=settings,
        options=options,
        command=shlex.join(["python", "-m", f"recipes.{experiment.name}", *argv]),
    )


def executor_of(run: Run) -> Executor:
    """The executor that --cluster and --jobs select."""
    if run.options.cluster:
        return RayCluster(run.options.cluster, run.options.jobs)
    if run.options.jobs == 1:
        return InProcess()
    gpus = [] if run.flags.several() else visible_gpus()
    return LocalPool(run.options.jobs, gpus=gpus)


def main(argv: list[str]) -> None:
    """`python -m recipes report FOLDER`.

    Raises:
        FileNotFoundError: if the folder is not that of an experiment's run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m recipes report",
        description="Write an experiment's report again, without training.",
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="of a run, such as runs/matformer-matvit/tiny, or one in results/ with a records.zip",
    )
    folder = parser.parse_args(argv).folder
    if (folder / RUN).is_file():
        experiment, run = _run_again((folder / RUN).read_text())
        run.out = folder
        write_report(experiment, run, results.read(folder))
    elif (folder / archive.FILE).is_file():
        with tempfile.TemporaryDirectory() as scratch:
            experiment, run = _run_again(archive.read(folder / archive.FILE, RUN), "--out", scratch)
            nodes, file = list(run.nodes.values()), folder / archive.FILE
            found = archive.finished_in(nodes, Path(scratch), file)
            archive.unpack(found, Path(scratch), file)
            write_report(experiment, replace(run, out=folder), results.read(folder))
    else:
        raise FileNotFoundError(
            f"{folder} has no {RUN} or {archive.FILE}: expected the folder of an experiment's run"
        )


def _run_again(saved: str, *flags: str) -> tuple[Experiment, Run]:
    """The experiment and the declared run that a run.json names."""
    content = json.loads(saved)
    experiment = importlib.import_module(f"recipes.{content['experiment']}").EXPERIMENT
    run = command_line(experiment, [*shlex.split(content["command"])[3:], *flags])
    run.command = content["command"]
    experiment.declare(run)
    return experiment, run


def copy_files(run: Run) -> None:
    """Copy the YAML files into the run's folder, so that edits do not affect a running stage."""
    for node in run.nodes.values():
        if isinstance(node, Stage):
            copy = node.run.out / "stages" / node.file.name
            results.write_atomically(copy, node.file.read_text(encoding="utf-8"))
            node.file = copy


def take_records(run: Run) -> None:
    """Unpack the file of --records into the run's folder, unless a plan finds that in use."""
    nodes, base, file = list(run.nodes.values()), Path(run.options.out), run.options.records
    found = archive.finished_in(nodes, base, file)  # a file that does not fit leaves no folder
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(run))
        except ValueError as error:
            if not run.options.plan:
                raise
            console.print(f"{error}; the plan is that of the folder, without {file}")
            return
        archive.unpack(found, base, file)
    console.print(f"{file} has {len(found)} of the run's {len(nodes)} parts")


def execute(run: Run, executor: Executor) -> None:
    """Execute the nodes of a run, each after those that it waits for.

    Raises:
        ExperimentFailed: if some failed, after all nodes that do not need them are finished.
    """
    nodes = run.chosen()
    for node in nodes:
        restore_put_aside(node)
    waiting = unfinished(nodes)
    done = set(nodes).difference(waiting)
    for node in nodes:
        if node in done:
            console.print(f"[dim]{node.title}: finished before, skipped")
    running: dict[Future[Any], Node] = {}
    failed: dict[Node, str] = {}
    write_table(run)
    with View(len(nodes), executor.jobs > 1) as view:
        view.advance(len(done))
        try:
            while waiting or running:
                ready = [node for node in waiting if done.issuperset(node.waits_for())]
                for node in ready[: executor.jobs - len(running)]:
                    waiting.remove(node)
                    try:
                        prepare(node)
                        if adopted(node):
                            done.add(node)
                            view.advance()
                            continue
                        task = task_of(node, executor.jobs > 1)
                    except ValueError as error:  # a value of another node could not be read
                        failed[node] = str(error)
                        continue
                    view.start(node)
                    running[executor.submit(task, view.progress_callback(node))] = node
                    if executor.jobs == 1:
                        break  # InProcess has executed it already, so other nodes may be ready now
                if not running and not ready:
                    break  # all remaining nodes wait for failed ones
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


def restore_put_aside(node: Node) -> None:
    """Put a folder that was put aside, and has the node's settings again, back in its place."""
    if is_finished(node):
        return
    if old := next((one for one in put_aside(node.folder) if is_finished(node, one)), None):
        if node.folder.exists():
            node.folder.rename(free_name(node.folder))
        old.rename(node.folder)


def adopted(node: Node) -> bool:
    """Whether another stage has had the same training; if so, the node takes its files.

    Such as the training at the best of several rates, when a trial was as long and had its seed.
    """
    if not isinstance(node, Stage):
        return False
    this = resolved_fingerprint(node)
    write_record(node.folder, {**read_record(node.folder), "resolved": this})
    stages = (one for one in node.run.nodes.values() if isinstance(one, Stage) and is_finished(one))
    twin = next((one for one in stages if read_record(one.folder).get("resolved") == this), None)
    if twin is None:
        return False
    shutil.rmtree(node.folder)
    shutil.copytree(twin.folder, node.folder, copy_function=linked)
    write_record(node.folder, {**read_record(node.folder), "fingerprint": node.fingerprint})
    console.print(f"[dim]{node.title}: the training is that of {twin.name}, not repeated")
    return True


def linked(source: str, target: str) -> None:
    """Give a file a second name, without a second copy on disk where the file system can."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def put_aside(folder: Path) -> list[Path]:
    """The folders of a node with other settings, which `prepare` has renamed."""
    return sorted(folder.parent.glob(f"{glob.escape(folder.name)}.old*"))


def task_of(node: Node, quiet: bool) -> Task:
    """The task that executes a node."""
    log = node.folder / "node.log"
    if isinstance(node, Stage):
        return Task(train, Training(finished(node), node.run.flags.several(), quiet), log)
    assert isinstance(node, Measurement)
    task = MeasurementTask(
        node.function_name,
        Measuring(
            node.seed,
            {key: resolved(value) for key, value in node.settings.items()},
            {name: finished(one) for name, one in node.nodes.items()},
            node.folder,
        ),
        {"experiment": node.run.name, "preset": node.run.preset, "stage": node.name},
    )
    return Task(measure, task, log)


def prepare(node: Node) -> None:
    """Begin a node's record; a folder made with other settings is kept under another name."""
    record = read_record(node.folder)
    if record.get("fingerprint") == node.fingerprint and not record["finished"]:
        return
    if node.folder.exists():
        old = free_name(node.folder)
        same = record.get("fingerprint") == node.fingerprint
        why = "its checkpoint is gone" if same else "its settings have changed"
        console.print(f"[yellow]{node.title}: {why}, starting anew; before: {old}")
        node.folder.rename(old)
    write_record(node.folder, {"fingerprint": node.fingerprint, "finished": False, "seconds": 0.0})


def table_of(run: Run) -> pd.DataFrame:
    """The rows of the finished measurements of a run, in the order of their declaration."""
    parts = [
        finished(node).rows
        for node in run.nodes.values()
        if isinstance(node, Measurement) and node.run.out == run.out and is_measured(node)
    ]
    parts = [part for part in parts if len(part)]
    if not parts:
        return results.tidy([], run.name, run.preset, 0)
    return pd.concat(parts, ignore_index=True)


def write_table(run: Run) -> None:
    """Write results.csv from the finished measurements, and run.json with the command.

    Until there is a row, those of an earlier run with other settings stay.
    """
    if len(table := table_of(run)):
        results.write(run.out / ROWS, table)
        saved = {"experiment": run.name, "command": run.command}
        results.write_atomically(run.out / RUN, json.dumps(saved) + "\n")


def write_report(experiment: Experiment, run: Run, table: pd.DataFrame) -> None:
    """Write report.md: the experiment's paragraphs, its trials, and verdicts on its claims."""
    judged = ledger.verdicts_on(table, run.name, run.preset)
    results.write_report(run.out, [*experiment.report(table, run), *trials_of(run), *judged])


@contextlib.contextmanager
def locked(run: Run) -> Iterator[None]:
    """Keep other processes from using the same folders.

    Raises:
        ValueError: if another process uses one of them.
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


def list_nodes(run: Run) -> None:
    """Print the nodes, whether they are finished, and what they wait for."""
    console.print(f"[bold]{run.name}, preset {run.preset}")
    nodes = run.chosen()
    left = unfinished(nodes)
    for node in nodes:
        state = "to do" if node in left else "finished"
        needs = ", ".join(before.name for before in node.waits_for())
        after = f"; after {needs}" if needs else ""
        console.print(f"seed {node.seed}: {node.name}: {state}{after}", highlight=False)
