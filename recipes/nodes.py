"""The nodes of an experiment: stages, measurements, and the values passed between them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse
import torch

from recipes import cli
from recipes.flags import CLASSES, key_of
from recipes.plan import device_count
from recipes.records import Finished, fingerprint, read_record, type_of
from recipes.results import Row

if TYPE_CHECKING:
    from recipes.experiment import Run

LAST = "checkpoints/last.ckpt"


@dataclass
class Measuring:
    """The argument of a measurement's function.

    Attributes:
        seed: the node's seed.
        settings: the measurement's settings, with the values of other nodes filled in.
        stages: the finished nodes that it measures, by their names in `Run.measure`.
        folder: the node's folder, for files that the function writes.
    """

    seed: int
    settings: dict[str, Any]
    stages: dict[str, Finished]
    folder: Path

    def datamodule(self, name: str) -> Any:
        """The DataModule that a stage trained on."""
        return self.stages[name].datamodule()

    def model(self, name: str) -> Any:
        """The model that a stage trained, on the device, ready to evaluate."""
        return self.stages[name].module(device()).model


Measure = Callable[[Measuring], Iterable[Row]]


class Node:
    """A part of an experiment, stage or measurement, that has its own folder.

    Attributes:
        run: the run that it belongs to.
        name: the folder's name.
        seed: 0, 1, …
    """

    run: "Run"
    name: str
    seed: int

    @property
    def folder(self) -> Path:
        """runs/<experiment>/<preset>/seed<k>/<name>."""
        return self.run.out / f"seed{self.seed}" / self.name

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.run.name} ({self.run.preset}), seed {self.seed}: {self.name}"

    def __truediv__(self, file: str) -> "Artifact":
        """A file that the node leaves in its folder, as a value in settings."""
        return Artifact(self, file)

    def values(self) -> Mapping[str, Any]:
        """Its settings; values of other nodes are not resolved yet."""
        raise NotImplementedError

    def waits_for(self) -> list["Node"]:
        """The nodes that have to be finished before this one starts."""
        return nodes_in(self.values())

    def reads(self) -> list["Node"]:
        """The nodes whose files it reads, such as a checkpoint that it starts from.

        A node behind a `Later` is not among them: of its results one value is enough, which its
        logs or rows have, so that its checkpoint may be missing (see recipes/archive.py).
        """
        return nodes_in(self.values(), later=False)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that determines the node's result."""
        raise NotImplementedError


@dataclass(frozen=True)
class Artifact:
    """A file in a node's folder, as a value in settings."""

    node: Node
    file: str

    @property
    def path(self) -> Path:
        """Where it is or will be."""
        return self.node.folder / self.file


@dataclass(frozen=True)
class Later:
    """A setting's value that is known only when other nodes are finished.

    Attributes:
        nodes: the nodes that it is read from.
        read: returns the value, from the finished nodes.
        what: describes the value; part of the fingerprint.
        like: a value of the same type, used until then.
        metric: if it is that of the best of several trials, by what they are compared.
        scores: if so, returns the trials that differ, and the metric of each.
    """

    nodes: tuple[Node, ...]
    read: Callable[[list[Finished]], Any]
    what: str
    like: Any
    metric: str = ""
    scores: Callable[[list[Finished]], list[tuple[Finished, float]]] | None = None


@dataclass(eq=False)
class Stage(Node):
    """A training. As a value in another node's settings it means its last checkpoint.

    Attributes:
        config: its YAML file without the ending.
        varied: settings that the experiment compares; no flag may change them.
        settings: settings of the experiment that a flag may change.
        derived: settings computed by functions of all others, user's flags included, such as a
            quarter of the epochs.
        prepared: varied settings whose flags an earlier node has used, so that they may be given.
    """

    run: "Run"
    name: str
    config: str
    seed: int
    varied: dict[str, Any]
    settings: dict[str, Any]
    derived: dict[str, Callable[[jsonargparse.Namespace], Any]]
    prepared: tuple[str, ...] = field(default=(), kw_only=True)

    def values(self) -> dict[str, Any]:
        """The settings from the experiment, without the user's flags."""
        return {**self.settings, **self.varied}

    @cached_property
    def file(self) -> Path:
        """Its YAML file; during a run, the copy in the run's folder."""
        return self.run.folder / f"{self.config}.yaml"

    def arguments(self, resolve: Callable[[Any], Any] = lambda value: stand_in(value)) -> list[str]:
        """Its settings as command-line arguments, without file, seed and folder.

        Args:
            resolve: turns a Stage, Artifact or Later into a plain value.
        """
        flags = self.run.flags.of(self.config)
        settings = {key: resolve(value) for key, value in self.settings.items()}
        varied = {key: resolve(value) for key, value in self.varied.items()}
        # a class comes first: jsonargparse then drops earlier settings that the class does not have
        classes = {key: varied.pop(key) for key in CLASSES if key in varied}
        arguments = [*as_flags(classes), *as_flags(settings), *flags, *as_flags(varied)]
        if self.derived:
            others = self._parsed(arguments)
            arguments += as_flags({key: rule(others) for key, rule in self.derived.items()})
        return arguments

    def parsed(self) -> jsonargparse.Namespace:
        """All its settings, with placeholders for values of other nodes (see `stand_in`).

        Raises:
            ValueError: if a flag names what is varied, or is no setting of the stage.
        """
        compared = [key for key in self.varied if key not in self.prepared]
        self.run.flags.refuse(self.config, compared, self.run.has_rows)
        return self._parsed(self.arguments())

    def _parsed(self, arguments: Sequence[str]) -> jsonargparse.Namespace:
        try:
            return cli.parse(self.file, self.run.preset, arguments)
        except ValueError as error:
            configs = {node.config for node in self.run.nodes.values() if isinstance(node, Stage)}
            limit = f" (--{self.config}.… limits a flag to this stage)" if len(configs) > 1 else ""
            raise ValueError(f"{self.config}.yaml: {error}{limit}") from None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the parsed settings, except for those in flags.PASSING.

        The number of devices counts unless it is one, because batch sizes are per device. The text
        counts where it is that of the installed packages, which no setting names.
        """
        settings = self.parsed()
        content = settings.as_dict()
        if self.run.flags.several() and (devices := device_count(settings.trainer)) > 1:
            content["devices"] = devices
        text_of = getattr(type_of(content["data"]), "text_of", None)
        if text_of and (text := text_of(**content["data"]["init_args"])):
            content["text"] = text
        return fingerprint(content, self.seed, references(self.values()))


@dataclass(eq=False)
class Measurement(Node):
    """A function of finished nodes.

    Attributes:
        function: a top-level function, so that another process finds it by its name.
        nodes: the nodes that the function measures, by name.
        settings: settings of the function: plain values, or values of other nodes.
        missing: why data that it reads cannot be read, and the cure; "" if they can. Or a function
            that says so, of data that are costly to read: it is asked only before they are read.
    """

    run: "Run"
    name: str
    seed: int
    function: Measure
    nodes: dict[str, Node]
    settings: dict[str, Any]
    missing: str | Callable[[], str] = ""

    def values(self) -> dict[str, Any]:
        """The nodes that it is given, and the settings."""
        return {**self.nodes, **{f"settings.{key}": one for key, one in self.settings.items()}}

    @property
    def function_name(self) -> str:
        """The function as "module:name"."""
        return f"{module_name(self.function)}:{self.function.__qualname__}"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the function's name, the settings and the nodes that it is given."""
        plain = {key: stand_in(value) for key, value in self.settings.items()}
        measured = {name: node.fingerprint for name, node in self.nodes.items()}
        content = {"function": self.function_name, "settings": plain, "nodes": measured}
        later = {f"settings.{key}": value for key, value in self.settings.items()}
        return fingerprint(content, self.seed, references(later))


def module_name(function: Callable) -> str:
    """The name of a function's module, even if that module runs as __main__."""
    if function.__module__ != "__main__":
        return function.__module__
    spec = getattr(__import__("__main__"), "__spec__", None)
    return spec.name if spec else "__main__"


def nodes_in(values: Mapping[str, Any], later: bool = True) -> list[Node]:
    """The nodes that values of settings refer to, those behind a Later only if `later`."""
    nodes: dict[Node, None] = {}
    for value in values.values():
        if isinstance(value, Node):
            nodes[value] = None
        elif isinstance(value, Artifact):
            nodes[value.node] = None
        elif isinstance(value, Later) and later:
            nodes.update(dict.fromkeys(value.nodes))
    return list(nodes)


def is_finished(node: Node, folder: Path | None = None) -> bool:
    """Whether a node is finished with its current settings, in its folder or in this one.

    One that came without its files (recipes/archive.py) is not; see `is_measured`.
    """
    folder = folder or node.folder
    record = read_record(folder)
    if not record.get("finished") or record["fingerprint"] != node.fingerprint:
        return False
    return (folder / LAST).is_file() if isinstance(node, Stage) else record.get("files", True)


def is_measured(node: Node) -> bool:
    """Whether a node's logs and rows are those of its current settings, with its files or not."""
    record = read_record(node.folder)
    if record.get("finished") and not record.get("files", True):
        return record["fingerprint"] == node.fingerprint
    return is_finished(node)


def free_name(folder: Path) -> Path:
    """The name under which a node's folder is put aside: .old1, .old2, …"""
    number = 1
    while (old := folder.with_name(f"{folder.name}.old{number}")).exists():
        number += 1
    return old


def unfinished(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that have to run, in their order.

    One that came without its files has to if one that has to run reads them.

    Args:
        nodes: each after those that it waits for.
    """
    left: list[Node] = []
    read: set[Node] = set()
    for node in reversed(nodes):
        if not (is_finished(node) if node in read else is_measured(node)):
            left.insert(0, node)
            read.update(node.reads())
    return left


def finished(node: Node) -> Finished:
    """Access to a finished node's folder."""
    if not isinstance(node, Stage):
        return Finished(node.folder, node.seed)
    arguments = node.arguments(resolved)
    return Finished(node.folder, node.seed, str(node.file), node.run.preset, tuple(arguments))


def device() -> torch.device:
    """The device that measurements use: the GPU if there is one, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def stand_in(value: Any) -> Any:
    """A plain value in place of another node's: a file's path, or `Later.like`."""
    if isinstance(value, Later):
        return value.like
    return str((value / LAST).path) if isinstance(value, Stage) else _plain(value)


def resolved(value: Any) -> Any:
    """The plain value of a Stage, Artifact or Later whose nodes are finished."""
    if isinstance(value, Later):
        return value.read([finished(node) for node in value.nodes])
    return stand_in(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Artifact):
        return str(value.path)
    return str(value) if isinstance(value, Path) else value


def references(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fingerprints of the nodes that values refer to; they replace the values in a fingerprint.

    Keys are settings, or paths if the value is another node's file.
    """
    replacements: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Later):
            replacements[key_of(key)] = [value.what, *(node.fingerprint for node in value.nodes)]
        elif isinstance(value, Node | Artifact):
            node = value if isinstance(value, Node) else value.node
            file = LAST if isinstance(value, Node) else value.file
            replacements[stand_in(value)] = [file, node.fingerprint]
    return replacements


def resolved_fingerprint(stage: Stage) -> str:
    """A stage's fingerprint with the values of a Later, read from finished nodes, in its place."""
    settings = finished(stage).settings
    files = {k: v for k, v in stage.values().items() if not isinstance(v, Later)}
    return fingerprint(settings.as_dict(), stage.seed, references(files))


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Settings as arguments of a command line."""
    return [f"--{key}={_as_argument(value)}" for key, value in values.items()]


def _as_argument(value: Any) -> str:
    plain = isinstance(value, dict | list | bool | type(None))
    return json.dumps(value) if plain else str(value)
