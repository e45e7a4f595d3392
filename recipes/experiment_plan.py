"""`--plan` of an experiment: predicts the time and memory of its trainings before they run.

Stages whose settings differ only in COSTLESS ones (seed, learning rate) form a group, and one stage
of each group is measured by running a few steps (recipes/plan.py). If that stage starts from the
checkpoint of a stage that has not run yet, it starts instead from the checkpoint that the measured
steps of that stage left. If it needs a file that a measurement will write, it is measured with what
its YAML file has in that setting, and the plan notes it.
"""

import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recipes.executors import threads_of, visible_gpus
from recipes.flags import key_of, passing
from recipes.messages import sentence
from recipes.nodes import (
    Artifact,
    Later,
    Node,
    Stage,
    as_flags,
    finished,
    is_finished,
    is_measured,
    stand_in,
    unfinished,
)
from recipes.plan import Plan, files, plan
from recipes.progress import console
from recipes.records import flattened, read_record

if TYPE_CHECKING:
    from recipes.experiment import Run

# last parts of the keys of settings that affect the result but neither time nor memory
COSTLESS = ("seed", "seed_everything", "lr", "head_lr", "weight_decay", "betas", "warmup_steps")
MEASURED_CHECKPOINT = "timed.ckpt"  # left by the measured steps (recipes/stopwatch.py)


@dataclass
class Group:
    """Stages that take equal time and memory.

    Attributes:
        stages: the stages.
        left: those of them that have to run.
        folder: scratch folder of the stage that is measured.
        plan: the plan of any one of them; None if all are finished or measuring failed.
        reads: lines on the data and weights that they read, and on missing ones.
        unknown: lines on what could not be measured, and why.
    """

    stages: list[Stage]
    left: list[Stage]
    folder: Path
    plan: Plan | None = None
    reads: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The names of its stages: the only one, or the first and the last."""
        names = list(dict.fromkeys(stage.name for stage in self.stages))
        return names[0] if len(names) == 1 else f"{names[0]}, …, {names[-1]}"


def show(run: "Run", start: float | None = None) -> None:
    """Plan all stages of a run, and print the plan.

    Args:
        run: a run, declared and checked.
        start: seconds to start Python and import; by default this process's CPU time so far.
    """
    start = time.process_time() if start is None else start
    threads = torch.get_num_threads()
    if run.options.jobs > 1:
        torch.set_num_threads(threads_of(run.options.jobs))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            groups = grouped(run.chosen(), Path(scratch))
            for group in groups:
                with console.status(f"measuring a few steps of {group.title}"):
                    fill(group, groups)
                console.print(f"\n[bold]{group.title}", highlight=False)
                for line in text(group):
                    console.print(f"  {line}", highlight=False, markup=False)
    finally:
        torch.set_num_threads(threads)
    console.print()
    for line in summary(run, groups, start):
        console.print(line, highlight=False, markup=False)


def grouped(nodes: Sequence[Node], scratch: Path) -> list[Group]:
    """Group the stages of equal cost, in the order of their first stage."""
    groups: dict[str, Group] = {}
    group_of: dict[str, int] = {}  # a stage's folder → the number of its group
    to_do = unfinished(nodes)
    for stage in (node for node in nodes if isinstance(node, Stage)):
        key = cost_of(stage, group_of)
        group = groups.setdefault(key, Group([], [], scratch / str(len(groups))))
        group.stages.append(stage)
        group.left += [stage] * (stage in to_do)
        group_of[str(stage.folder)] = list(groups).index(key)
    return list(groups.values())


def cost_of(stage: Stage, group_of: Mapping[str, int]) -> str:
    """A key of all settings that affect a stage's time or memory, equal for stages of one group.

    Files of other stages enter as the number of their group.
    """
    upstream = {
        stand_in(value): f"a file of group {group_of.get(str(maker.folder))}"
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
    """The node that writes the file that a value refers to; None if the value is no such file."""
    if isinstance(value, Artifact):
        return value.node
    return value if isinstance(value, Stage) else None


def fill(group: Group, groups: Sequence[Group]) -> None:
    """Measure one stage of a group, if any is left to run."""
    if not group.left:
        return
    stage = group.left[0]

    def resolve(value: Any) -> Any:
        """A setting's value for the measured steps; None for a file that cannot be had yet."""
        if isinstance(value, Later) and all(is_measured(node) for node in value.nodes):
            return value.read([finished(node) for node in value.nodes])
        maker = maker_of(value)
        if maker is None or is_finished(maker):
            return stand_in(value)
        checkpoints = [one.folder / MEASURED_CHECKPOINT for one in groups if maker in one.stages]
        return str(checkpoints[0]) if checkpoints and checkpoints[0].is_file() else None

    substitutes = {}  # path of a substitute checkpoint → what it stands for
    unwritten = []  # arguments whose files cannot be had yet
    for key, value in stage.values().items():
        if (maker := maker_of(value)) is None or is_finished(maker):
            continue
        if (path := resolve(value)) is None:
            unwritten += as_flags({key: path})  # not the user's flag for the same setting
            given = any(key_of(key) == one for _, one, _ in stage.run.flags.given)
            group.unknown.append(
                f"{stage.name}: measured with {'the flag' if given else stage.config + '.yaml'}'s "
                f"own {key}, since "
                f"{maker.name} has not been run yet"
            )
        else:
            substitutes[path] = f"the checkpoint that {maker.name} will write"
    try:
        arguments = [*stage.arguments(resolve), f"--seed_everything={stage.seed}"]
        arguments = [one for one in arguments if one not in unwritten]
        if stage.run.options.jobs > 1:
            arguments.append("--trainer.enable_progress_bar=false")
        group.reads = files(str(stage.file), stage.run.preset, arguments)
        for path, description in substitutes.items():
            group.reads = [line.replace(path, description) for line in group.reads]
        if not any(line.startswith("missing") for line in group.reads):
            group.folder.mkdir()
            group.plan = plan(str(stage.file), stage.run.preset, arguments, group.folder)
    except Exception as error:  # the other groups are planned all the same
        if os.environ.get("RECIPES_TRACEBACK"):
            raise
        reason = sentence(error) or f"{type(error).__name__}: {error}"
        group.unknown.append(f"{stage.name}: not measured: {reason}")
    # A measured checkpoint may be large: it goes when no group still to come starts from it.
    to_come = groups[groups.index(group) + 1 :]
    needed = {node for one in to_come for later in one.stages for node in later.waits_for()}
    for one in groups:
        if one.folder.is_dir() and needed.isdisjoint(one.stages):
            shutil.rmtree(one.folder)


def text(group: Group) -> list[str]:
    """Lines on a group: how many stages are left, their plan, and what is unknown."""
    done = [stage for stage in group.stages if stage not in group.left]
    took = sum(read_record(stage.folder)["seconds"] for stage in done)
    counts = [f"{len(group.left)} to do"]
    if done:
        counts.append(f"{len(done)} finished, which took {took:,.0f} s")
    return [", ".join(counts), *(group.plan.text() if group.plan else []), *group.unknown]


def summary(run: "Run", groups: Sequence[Group], start: float) -> list[str]:
    """Lines on the run: what it reads, what is missing, total time and disk space."""
    reads = [line for group in groups for line in group.reads]
    reads += [f"missing: {reason}" for reason in run.missing()]
    stages = [stage for group in groups for stage in group.stages]
    left = [stage for group in groups for stage in group.left]
    unplanned = [stage for group in groups if group.plan is None for stage in group.left]
    took = sum(read_record(one.folder)["seconds"] for one in stages if one not in left)
    seconds = start + sum(one.plan.total * len(one.left) for one in groups if one.plan)
    measurements = [node for node in unfinished(run.chosen()) if not isinstance(node, Stage)]
    parts = [f"{len(left)} of {len(stages)} trainings are to do: {_hours(seconds)}"]
    if run.options.jobs > 1:
        parts.append(f"or {_hours(seconds / run.options.jobs)} if {run.options.jobs} run at once")
        parts += memory_at_once(run, groups)
    if took:
        parts.append(f"the finished ones took {_hours(took)}")
    if unplanned:
        parts.append(f"{len(unplanned)} that could not be measured are not included")
    if measurements:
        parts.append(f"{len(measurements)} measurements of trained models are not included")
    sizes = [(one.plan.profile.checkpoint, len(one.left)) for one in groups if one.plan]
    if sizes:
        # a running stage keeps two copies of its checkpoint, a finished one a single copy
        room = sum(size * count for size, count in sizes) + max(size for size, _ in sizes)
        free = shutil.disk_usage(existing(run.out)).free
        parts.append(
            f"their checkpoints take {room / 2**30:,.1f} GB of {free / 2**30:,.1f} GB that are "
            f"free{', which is too little' * (room > free)}"
        )
    missing = [line for line in dict.fromkeys(reads) if line.startswith("missing")]
    present = [line for line in dict.fromkeys(reads) if line not in missing]
    return [*present, *missing, "; ".join(parts) + "."]


def memory_at_once(run: "Run", groups: Sequence[Group]) -> list[str]:
    """A line on the memory that the largest stages of --jobs take together, where it is known.

    On GPUs it is that of the fullest one. Python and its libraries, in each process, are not
    included. On a cluster, or where a stage has several devices, nothing is known.
    """
    sizes = sorted(
        (sum(one.plan.memory.values()) for one in groups if one.plan for _ in one.left),
        reverse=True,
    )
    if not sizes or run.options.cluster or run.flags.several():
        return []
    gpus = len(visible_gpus())
    together = sum(sizes[: math.ceil(run.options.jobs / max(1, gpus))])
    if gpus:
        place, room = "a GPU", torch.cuda.get_device_properties(0).total_memory
    else:
        place, room = "this machine", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return [
        f"at once they take up to {together / 2**30:,.1f} GB of the {room / 2**30:,.1f} GB of "
        f"memory that {place} has{', which is too little: lower --jobs' * (together > room)}"
    ]


def existing(path: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h ({seconds:,.0f} s)"
