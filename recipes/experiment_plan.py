"""`--plan` behind an experiment: what its trainings take, each and together, before they run.

Stages that differ in what costs nothing (seeds, learning rates) are measured once, by a few steps
(recipes/plan.py). Where a stage begins with the checkpoint of one that has not run yet, it begins
here with the one that those few steps have left. What a measurement is to make is not there at all:
the stage is then measured without it, which is said.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recipes.executors import threads_of
from recipes.flags import passing
from recipes.messages import sentence
from recipes.nodes import Artifact, Later, Node, Stage, finished, is_finished, stand_in
from recipes.plan import Plan, files, plan
from recipes.progress import console
from recipes.records import flattened, read_record

if TYPE_CHECKING:
    from recipes.experiment import Run

# the ends of settings that change what is learned and not what it takes
COSTLESS = ("seed", "seed_everything", "lr", "head_lr", "weight_decay", "betas", "warmup_steps")
STAND_IN = "timed.ckpt"  # what recipes/stopwatch.py leaves


@dataclass
class Group:
    """Stages that take the same.

    Attributes:
        stages: all of them.
        folder: of the measured one.
        plan: of each; None if it could not be measured, or all are finished.
        reads: what they read, and what of it is missing.
        unknown: what could not be known, and why.
    """

    stages: list[Stage]
    folder: Path
    plan: Plan | None = None
    reads: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Of its row."""
        names = list(dict.fromkeys(stage.name for stage in self.stages))
        return names[0] if len(names) == 1 else f"{names[0]}, …, {names[-1]}"

    @property
    def left(self) -> list[Stage]:
        """Those that are not finished."""
        return [stage for stage in self.stages if not is_finished(stage)]


def show(run: "Run", start: float | None = None) -> None:
    """Plan all stages of a run, and show it.

    Args:
        run: declared and checked.
        start: seconds from the start of Python to here; this process's by default.
    """
    start = time.process_time() if start is None else start
    stages = [node for node in run.chosen() if isinstance(node, Stage)]
    threads = torch.get_num_threads()
    if run.options.jobs > 1:
        torch.set_num_threads(threads_of(run.options.jobs))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            groups = grouped(stages, Path(scratch))
            for group in groups:
                with console.status(f"measuring a few steps of {group.title}"):
                    fill(group, groups)
                console.print(f"\n[bold]{group.title}", highlight=False)
                for line in text(group):
                    console.print(f"  {line}", highlight=False)
    finally:
        torch.set_num_threads(threads)
    console.print()
    for line in summary(run, groups, start):
        console.print(line, highlight=False)


def grouped(stages: Sequence[Stage], scratch: Path) -> list[Group]:
    """The stages by what they take, in order."""
    groups: dict[str, Group] = {}
    places: dict[str, int] = {}  # of a stage's group, by the stage's folder
    for stage in stages:
        key = cost_of(stage, places)
        group = groups.setdefault(key, Group([], scratch / str(len(groups))))
        group.stages.append(stage)
        places[str(stage.folder)] = list(groups).index(key)
    return list(groups.values())


def cost_of(stage: Stage, places: Mapping[str, int]) -> str:
    """What decides how much a stage takes; another stage's file is the number of its group."""
    upstream = {
        stand_in(value): f"a file of group {places.get(str(maker.folder))}"
        for value in stage.values().values()
        if (maker := maker_of(value)) is not None
    }
    settings = {
        key: upstream.get(value, value) if isinstance(value, str) else value
        for key, value in flattened(stage.parsed().as_dict()).items()
        if key.rpartition(".")[2] not in COSTLESS and not passing(key)
    }
    return str([stage.config, sorted(settings.items())])


def maker_of(value: Any) -> Node | None:
    """The node whose file a value is."""
    if isinstance(value, Artifact):
        return value.node
    return value if isinstance(value, Stage) else None


def fill(group: Group, groups: Sequence[Group]) -> None:
    """Measure one stage of a group, if any is left to run."""
    if not group.left:
        return
    stage = group.left[0]

    def known(value: Any) -> Any:
        """What a value of the settings is, as far as that can be known now."""
        if isinstance(value, Later) and all(is_finished(node) for node in value.nodes):
            return value.read([finished(node) for node in value.nodes])
        maker = maker_of(value)
        if maker is None or is_finished(maker):
            return stand_in(value)
        left = [one.folder / STAND_IN for one in groups if maker in one.stages]
        return str(left[0]) if left and left[0].is_file() else None

    stood_for = {}
    for key, value in stage.values().items():
        if (maker := maker_of(value)) is None or is_finished(maker):
            continue
        if (path := known(value)) is None:
            group.unknown.append(f"{stage.name}: measured without {key}, which {maker.name} makes")
        else:
            stood_for[path] = f"those that {maker.name} will have"
    try:
        arguments = [*stage.arguments(known), f"--seed_everything={stage.seed}"]
        if stage.run.options.jobs > 1:
            arguments.append("--trainer.enable_progress_bar=false")
        group.reads = files(str(stage.file), stage.run.preset, arguments)
        for path, name in stood_for.items():
            group.reads = [line.replace(path, name) for line in group.reads]
        if not any(line.startswith("missing") for line in group.reads):
            group.folder.mkdir()
            group.plan = plan(str(stage.file), stage.run.preset, arguments, group.folder)
    except Exception as error:  # the other groups are still planned
        if os.environ.get("RECIPES_TRACEBACK"):
            raise
        reason = sentence(error) or f"{type(error).__name__}: {error}"
        group.unknown.append(f"{stage.name}: not measured: {reason}")
    starts = {before for one in groups for later in one.stages for before in later.waits_for()}
    if group.folder.is_dir() and starts.isdisjoint(group.stages):
        shutil.rmtree(group.folder)  # as large as a checkpoint


def text(group: Group) -> list[str]:
    """What the stages of a group are, and what they take."""
    done = [stage for stage in group.stages if stage not in group.left]
    took = sum(read_record(stage.folder)["seconds"] for stage in done)
    said = [f"{len(group.left)} to do" if done else f"{len(group.stages)} to do"]
    if done:
        said.append(f"{len(done)} finished, which took {took:,.0f} s")
    return [", ".join(said), *(group.plan.text() if group.plan else []), *group.unknown]


def summary(run: "Run", groups: Sequence[Group], start: float) -> list[str]:
    """What is read, what is missing, and how long all of it takes."""
    reads = [line for group in groups for line in group.reads]
    stages = [stage for group in groups for stage in group.stages]
    left = [stage for group in groups for stage in group.left]
    unplanned = [stage for group in groups if group.plan is None for stage in group.left]
    took = sum(read_record(one.folder)["seconds"] for one in stages if one not in left)
    seconds = start + sum(one.plan.total * len(one.left) for one in groups if one.plan)
    measurements = [
        node for node in run.chosen() if not isinstance(node, Stage) and not is_finished(node)
    ]
    said = [f"{len(left)} of {len(stages)} trainings are to do: {_hours(seconds)}"]
    if run.options.jobs > 1:
        said.append(f"or {_hours(seconds / run.options.jobs)} if {run.options.jobs} always run")
    if took:
        said.append(f"the finished ones took {_hours(took)}")
    if unplanned:
        said.append(f"{len(unplanned)} that could not be measured are not in it")
    if measurements:
        said.append(f"nor are {len(measurements)} measurements of trained models")
    sizes = [(one.plan.pieces.checkpoint, len(one.left)) for one in groups if one.plan]
    if sizes:
        # a stage has its checkpoint twice until it is finished
        room = sum(size * count for size, count in sizes) + max(size for size, _ in sizes)
        free = shutil.disk_usage(existing(run.out)).free
        said.append(
            f"their checkpoints take {room / 2**30:,.1f} GB of {free / 2**30:,.1f} GB that are "
            f"free{', which is too little' * (room > free)}"
        )
    missing = [line for line in dict.fromkeys(reads) if line.startswith("missing")]
    others = [line for line in dict.fromkeys(reads) if line not in missing]
    return [*others, *missing, "; ".join(said) + "."]


def existing(path: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h ({seconds:,.0f} s)"
