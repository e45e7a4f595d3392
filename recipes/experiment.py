"""What an experiment declares: stages, measurements, and what each of them waits for.

A stage is one call of `python -m recipes fit`; a measurement is a function that looks at finished
stages and yields rows of the experiment's table. recipes/runner.py executes them.

    def declare(run):
        for seed in run.seeds:
            dense = run.stage("dense", "dense", seed, settings={"model.lr": 1e-3})
            low = run.stage("low", "repair", seed, varied={"model.init_from": dense})
            run.measure("sizes", seed, measure_sizes, {"dense": dense, "low": low})

A stage's settings are laid over each other in this order: the paper's, the preset's, `settings`,
the user's flags, `varied`, `derived`. A flag that names what is varied is refused.
"""

import fnmatch
import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonargparse
import pandas as pd

from recipes import cli
from recipes.flags import Flags, key_of
from recipes.records import Finished, at, fingerprint, type_of
from recipes.results import Row

LAST = "checkpoints/last.ckpt"
BEST = "checkpoints/best.ckpt"  # of a stage with checkpoint.filename: best


@dataclass
class Measuring:
    """What a measurement is given.

    Attributes:
        seed: of the node.
        settings: of the measurement, with the values of other nodes filled in.
        stages: the finished nodes, by the names that the declaration gave them.
        folder: for files of its own.
    """

    seed: int
    settings: dict[str, Any]
    stages: dict[str, Finished]
    folder: Path

    def datamodule(self, name: str) -> Any:
        """The DataModule that a stage trained on."""
        return self.stages[name].datamodule()


Measure = Callable[[Measuring], Iterable[Row]]


class Node:
    """A part of an experiment with a folder of its own.

    Attributes:
        run: to which it belongs.
        name: of its folder.
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
        """How messages call it."""
        return f"{self.run.name} ({self.run.preset}), seed {self.seed}: {self.name}"

    def __truediv__(self, file: str) -> "Artifact":
        """A file that the node leaves in its folder, as a value in settings."""
        return Artifact(self, file)

    def waits_for(self) -> list["Node"]:
        """The nodes that have to be finished before."""
        raise NotImplementedError

    @cached_property
    def fingerprint(self) -> str:
        """Of everything that the node is made from."""
        raise NotImplementedError


@dataclass(frozen=True)
class Artifact:
    """A file of a node's folder."""

    node: Node
    file: str

    @property
    def path(self) -> Path:
        """Where it is or will be."""
        return self.node.folder / self.file


@dataclass(frozen=True)
class Later:
    """A value that exists when other nodes are finished.

    Attributes:
        nodes: what it is read from.
        read: gives the value, from the finished nodes.
        what: says what is read; part of the fingerprint.
        like: a value of the same type, which stands for it until then.
    """

    nodes: tuple[Node, ...]
    read: Callable[[list[Finished]], Any]
    what: str
    like: Any


@dataclass(eq=False)
class Stage(Node):
    """A training. As a value in settings it stands for its last checkpoint.

    Attributes:
        config: its YAML file without the ending.
        varied: what makes it the row that it is.
        settings: what the experiment sets and a flag may change.
        derived: functions of the settings as they are without these, such as a quarter of the
            epochs; a flag reaches them through their argument.
    """

    run: "Run"
    name: str
    config: str
    seed: int
    varied: dict[str, Any]
    settings: dict[str, Any]
    derived: dict[str, Callable[[jsonargparse.Namespace], Any]]

    def values(self) -> dict[str, Any]:
        """What the experiment says of the stage, values of other nodes among it."""
        return {**self.settings, **self.varied}

    def waits_for(self) -> list[Node]:
        """The nodes whose files or values are in its settings."""
        return nodes_in(self.values())

    @property
    def file(self) -> Path:
        """Its YAML."""
        return self.run.folder / f"{self.config}.yaml"

    def arguments(self, resolve: Callable[[Any], Any] = lambda value: stand_in(value)) -> list[str]:
        """The command line's, without what names the file, the seed and the folder.

        Args:
            resolve: gives a plain value for one of another node.
        """
        flags = self.run.flags.of(self.config)
        settings = {key: resolve(value) for key, value in self.settings.items()}
        varied = {key: resolve(value) for key, value in self.varied.items()}
        arguments = [*as_flags(settings), *flags, *as_flags(varied)]
        if self.derived:
            before = self._parsed(arguments)
            arguments += as_flags({key: rule(before) for key, rule in self.derived.items()})
        return arguments

    def parsed(self) -> jsonargparse.Namespace:
        """All its settings; other nodes' values are stood for.

        Raises:
            ValueError: if a flag names what is varied, or is no setting of the stage.
        """
        self.run.flags.refuse(self.config, self.varied, self.run.has_rows)
        return self._parsed(self.arguments())

    def _parsed(self, arguments: Sequence[str]) -> jsonargparse.Namespace:
        try:
            return cli.parse(self.file, self.run.preset, arguments)
        except ValueError as error:
            others = {node.config for node in self.run.nodes.values() if isinstance(node, Stage)}
            limit = f" (--{self.config}.… limits a flag to this stage)" if len(others) > 1 else ""
            raise ValueError(f"{self.config}.yaml: {error}{limit}") from None

    @cached_property
    def fingerprint(self) -> str:
        """Of the parsed settings, but those that say on what and how it runs."""
        return fingerprint(self.parsed().as_dict(), self.seed, references(self.values()))


@dataclass(eq=False)
class Measurement(Node):
    """A function's look at finished nodes.

    Attributes:
        function: top-level, so that another process finds it by its name.
        nodes: what it looks at, by name.
        settings: plain values, or those of other nodes.
    """

    run: "Run"
    name: str
    seed: int
    function: Measure
    nodes: dict[str, Node]
    settings: dict[str, Any]

    def waits_for(self) -> list[Node]:
        """What it looks at, and what its settings need."""
        return list(dict.fromkeys([*self.nodes.values(), *nodes_in(self.settings)]))

    @property
    def function_name(self) -> str:
        """Module and name."""
        return f"{module_name(self.function)}:{self.function.__qualname__}"

    @cached_property
    def fingerprint(self) -> str:
        """Of the function's name, the settings and what it looks at."""
        plain = {key: stand_in(value) for key, value in self.settings.items()}
        seen = {name: node.fingerprint for name, node in self.nodes.items()}
        content = {"function": self.function_name, "settings": plain, "nodes": seen}
        later = {f"settings.{key}": value for key, value in self.settings.items()}
        return fingerprint(content, self.seed, references(later))


@dataclass
class Run:
    """One run of an experiment at one preset: what its command line says, and its nodes.

    Attributes:
        name: such as "matformer.matvit".
        folder: where the experiment's YAML files are.
        preset: "tiny", "small", "paper" or any other that the files have.
        seeds: 0, 1, …
        out: runs/<experiment>/<preset>.
        flags: settings that the user typed.
        options: the experiment's own, and --rows.
        nodes: by folder, in the order of their declaration.
    """

    name: str
    folder: Path
    preset: str
    seeds: range
    out: Path
    flags: Flags
    options: Namespace
    command: str = ""
    nodes: dict[Path, Node] = field(default_factory=dict)
    has_rows: bool = False

    def stage(
        self,
        name: str,
        config: str,
        seed: int = 0,
        varied: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        derived: Mapping[str, Callable[[jsonargparse.Namespace], Any]] | None = None,
    ) -> Stage:
        """Declare a training; see Stage.

        A value may be a Stage (its last checkpoint), `node / "file"`, or come from `best` or
        `value`: the stage then waits for the nodes behind it.
        """
        given = (dict(part or {}) for part in (varied, settings, derived))
        return self._add(Stage(self, name, config, seed, *given))

    def measure(
        self,
        name: str,
        seed: int,
        function: Measure,
        stages: Mapping[str, Node] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> Measurement:
        """Declare a measurement; see Measurement.

        A measurement may also make files for others, in `Measuring.folder`, and yield nothing.
        """
        return self._add(
            Measurement(self, name, seed, function, dict(stages or {}), dict(settings or {}))
        )

    def _add(self, node: Any) -> Any:
        before = self.nodes.setdefault(node.folder, node)
        if before is not node and before.fingerprint != node.fingerprint:
            raise ValueError(f"{node.title} is declared twice, with different settings")
        return before

    def best(
        self, stages: Sequence[Stage], metric: str, keys: Sequence[str], mode: str = "max"
    ) -> dict[str, Later]:
        """Settings of the stage with the best value of a metric that it logged, at any time.

        Args:
            stages: trials, which differ in the settings.
            metric: such as "val/accuracy".
            keys: of the settings, such as "model.lr".
            mode: "max" or "min".
        """

        def reader(key: str) -> Callable[[list[Finished]], Any]:
            def read(trials: list[Finished]) -> Any:
                pick = max if mode == "max" else min
                if any(metric not in trial.history for trial in trials):
                    known = ", ".join(trials[0].history)
                    raise ValueError(f"{metric} was not logged: expected one of {known}")
                best = pick(trials, key=lambda trial: pick(trial.history[metric]))
                return at(best.settings, key)

            return read

        return {
            key: Later(
                tuple(stages),
                reader(key),
                f"{key} of the {mode} {metric}",
                at(stages[0].parsed(), key),
            )
            for key in keys
        }

    def value(self, node: Node, read: Callable[[Finished], Any], what: str, like: Any) -> Later:
        """A value that is read from a finished node, such as a batch size from measured memory.

        Args:
            node: stage or measurement.
            read: gives the value, from `Finished.history` or `Finished.rows`.
            what: says what is read; part of the fingerprint.
            like: a value of the same type.
        """
        return Later((node,), lambda nodes: read(nodes[0]), what, like)

    def parsed(
        self,
        config: str,
        settings: Mapping[str, Any] | None = None,
        varied: Mapping[str, Any] | None = None,
    ) -> jsonargparse.Namespace:
        """The settings of a stage that would be declared so, the user's flags among them."""
        given = (dict(part or {}) for part in (varied, settings, None))
        return Stage(self, "", config, 0, *given).parsed()

    def datamodule(self, config: str, seed: int = 0) -> Any:
        """The DataModule of a file's stage."""
        data = self.parsed(config).data
        return type_of(data)(**{**data.init_args.as_dict(), "seed": seed})

    def grid(self, *configs: str) -> dict[str, Any]:
        """What the experiment varies at this preset; each file is laid over those before it."""
        merged: dict[str, Any] = {}
        for config in configs:
            file = self.folder / f"{config}.yaml"
            preset = self.preset if cli.presets(file) != [cli.PAPER] else cli.PAPER
            merged = cli.grid(file, preset, merged)
        return merged

    def rows(self, known: Iterable[str], default: Sequence[str] | None = None) -> list[str]:
        """Those of the known rows that --rows names; without it the default ones, or all.

        Raises:
            ValueError: if --rows names another.
        """
        self.has_rows, known = True, list(known)
        chosen = self.options.rows or list(default or known)
        if unknown := [row for row in chosen if row not in known]:
            raise ValueError(f"--rows has {unknown[0]!r}: expected some of {', '.join(known)}")
        return chosen

    def sibling(self, name: str) -> "Run":
        """Another experiment of the same command line: its finished nodes are used again."""
        out = self.out.parents[1] / folder_name(name) / self.preset
        return replace(self, name=name, out=out)

    def chosen(self) -> list[Node]:
        """The nodes that --only names and those they wait for; without it all.

        Raises:
            ValueError: if a pattern fits none.
        """
        patterns = self.options.only
        if not patterns:
            return list(self.nodes.values())
        wanted: dict[Node, None] = {}
        for pattern in patterns:
            fitting = [n for n in self.nodes.values() if fnmatch.fnmatch(n.name, pattern)]
            if not fitting:
                names = ", ".join(dict.fromkeys(node.name for node in self.nodes.values()))
                raise ValueError(f"--only {pattern} fits no part of the experiment: {names}")
            wanted.update(dict.fromkeys(part for node in fitting for part in _with_upstream(node)))
        return [node for node in self.nodes.values() if node in wanted]

    def check(self) -> None:
        """Parse every stage, so that a wrong flag is refused before anything trains.

        Raises:
            ValueError: naming the flag.
        """
        if self.options.rows and not self.has_rows:
            raise ValueError("--rows: this experiment has no rows to choose; --only names parts")
        self.flags.refuse_unknown({n.config for n in self.nodes.values() if isinstance(n, Stage)})
        for node in self.nodes.values():
            node.fingerprint  # noqa: B018  (parses)


@dataclass
class Experiment:
    """An experiment's parts.

    Attributes:
        name: such as "matformer.matvit"; recipes.<name> is its module.
        file: the module's __file__.
        config: its main file, whose presets it offers.
        description: shown by --help.
        declare: gives a run its nodes.
        report: paragraphs of Markdown, from the table alone; may draw plots into run.out.
        options: adds the experiment's own arguments to its command line.
    """

    name: str
    file: str
    config: str
    description: str
    declare: Callable[[Run], None]
    report: Callable[[pd.DataFrame, Run], list[str]]
    options: Callable[[ArgumentParser], None] = lambda parser: None

    @property
    def folder(self) -> Path:
        """Where its YAML files are."""
        return Path(self.file).parent


def folder_name(name: str) -> str:
    """The folder under runs/ of an experiment."""
    return name.replace(".", "-")


def module_name(function: Callable) -> str:
    """The module in which a function is, also where it is run as a script."""
    if function.__module__ != "__main__":
        return function.__module__
    spec = getattr(__import__("__main__"), "__spec__", None)
    return spec.name if spec else "__main__"


def nodes_in(values: Mapping[str, Any]) -> list[Node]:
    """The nodes behind the values of settings."""
    found: dict[Node, None] = {}
    for value in values.values():
        if isinstance(value, Node):
            found[value] = None
        elif isinstance(value, Artifact):
            found[value.node] = None
        elif isinstance(value, Later):
            found.update(dict.fromkeys(value.nodes))
    return list(found)


def stand_in(value: Any) -> Any:
    """A plain value for one that another node will give."""
    if isinstance(value, Later):
        return value.like
    return str((value / LAST).path) if isinstance(value, Stage) else _plain(value)


def resolved(value: Any, finished: Callable[[Node], Finished]) -> Any:
    """The value that other nodes, now finished, have given."""
    if isinstance(value, Later):
        return value.read([finished(node) for node in value.nodes])
    return stand_in(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Artifact):
        return str(value.path)
    return str(value) if isinstance(value, Path) else value


def references(values: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in a fingerprint for values of other nodes: how those were made.

    By key of the settings, and by the path of a file that is another node's.
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Later):
            found[key_of(key)] = [value.what, *(node.fingerprint for node in value.nodes)]
        elif isinstance(value, Node | Artifact):
            node = value if isinstance(value, Node) else value.node
            file = LAST if isinstance(value, Node) else value.file
            found[stand_in(value)] = [file, node.fingerprint]
    return found


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Settings as arguments of a command line."""
    return [f"--{key}={_as_argument(value)}" for key, value in values.items()]


def _as_argument(value: Any) -> str:
    plain = isinstance(value, dict | list | bool | type(None))
    return json.dumps(value) if plain else str(value)


def _with_upstream(node: Node) -> Iterator[Node]:
    for before in node.waits_for():
        yield from _with_upstream(before)
    yield node
