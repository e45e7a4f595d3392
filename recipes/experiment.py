"""What an experiment declares: stages, measurements, and what each of them waits for.

A stage is one call of `python -m recipes fit`; a measurement is a function of finished stages that
yields rows of the experiment's table. Both are nodes, which recipes/runner.py executes.

    def declare(run):
        for seed in run.seeds:
            dense = run.stage("dense", "dense", seed, settings={"model.lr": 1e-3})
            low = run.stage("low", "repair", seed, varied={"model.init_from": dense})
            run.measure("sizes", seed, measure_sizes, {"dense": dense, "low": low})

A stage's settings come from, each overriding those before: the paper, the preset, `settings`, the
user's flags, `varied`, `derived`. A flag that names a setting in `varied` is refused.
"""

import fnmatch
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonargparse
import pandas as pd

from recipes import cli
from recipes.flags import Flags
from recipes.nodes import Later, Measure, Measurement, Measuring, Node, Stage, unfinished
from recipes.records import Finished, at, best_of, scores_of

__all__ = ["Experiment", "Measuring", "Run"]


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
        options: the parsed arguments that are no settings, such as --rows and --only.
        command: the command line, for the report.
        nodes: by folder, in the order of their declaration.
        has_rows: whether the experiment has rows that --rows can choose.
        measured_on: models and data of the preset, in words; see `Experiment`.
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
    measured_on: str = ""

    def stage(
        self,
        name: str,
        config: str,
        seed: int = 0,
        varied: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        derived: Mapping[str, Callable[[jsonargparse.Namespace], Any]] | None = None,
        prepared: Sequence[str] = (),
    ) -> Stage:
        """Declare a training; see Stage.

        A value may be a Stage (its last checkpoint), `node / "file"`, or come from `best` or
        `value`: the stage then waits for the nodes behind it.
        """
        given = (dict(part or {}) for part in (varied, settings, derived))
        return self._add(Stage(self, name, config, seed, *given, prepared=tuple(prepared)))

    def measure(
        self,
        name: str,
        seed: int,
        function: Measure,
        stages: Mapping[str, Node] | None = None,
        settings: Mapping[str, Any] | None = None,
        missing: str | Callable[[], str] = "",
    ) -> Measurement:
        """Declare a measurement; see Measurement.

        A measurement may also write files for other nodes into `Measuring.folder` and yield
        nothing.
        """
        return self._add(
            Measurement(
                self, name, seed, function, dict(stages or {}), dict(settings or {}), missing
            )
        )

    def _add(self, node: Any) -> Any:
        declared = self.nodes.setdefault(node.folder, node)
        if declared is not node and declared.fingerprint != node.fingerprint:
            raise ValueError(f"{node.title} is declared twice, with different settings")
        return declared

    def best(
        self,
        stages: Sequence[Stage],
        metric: str | Sequence[str],
        keys: Sequence[str],
        mode: str = "max",
        at_end: bool = True,
    ) -> dict[str, Later]:
        """Values of settings in the best of several trials, by a metric.

        Args:
            stages: the trials, which differ in these settings; those that have them in common, of
                several seeds, count by their mean.
            metric: a logged metric, such as "val/accuracy"; or several, whose mean counts.
            keys: the settings, such as "model.lr".
            mode: "max" or "min".
            at_end: whether the last or the best value of each trial counts, see `best_of`.

        Raises:
            ValueError: when the value is read, if a trial has not logged the metric.
        """

        def reader(key: str) -> Callable[[list[Finished]], Any]:
            def read(trials: list[Finished]) -> Any:
                for name in [metric] if isinstance(metric, str) else metric:
                    if any(name not in trial.history for trial in trials):
                        known = ", ".join(trials[0].history)
                        raise ValueError(f"{name} was not logged: expected one of {known}")
                return at(best_of(trials, metric, mode, at_end, keys).settings, key)

            return read

        def scores(trials: list[Finished]) -> list[tuple[Finished, float]]:
            return scores_of(trials, metric, mode, at_end, keys)

        return {
            key: Later(
                tuple(stages),
                reader(key),
                f"{key} of the {mode} {metric}",
                at(stages[0].parsed(), key),
                metric if isinstance(metric, str) else " + ".join(metric),
                scores,
            )
            for key in keys
        }

    def best_candidate(
        self,
        name: str,
        config: str,
        candidates: Sequence[Mapping[str, Any]],
        metric: str,
        varied: Mapping[str, Any],
        settings: Mapping[str, Any],
        at_end: bool = True,
    ) -> dict[str, Later]:
        """Try each candidate (a set of settings) with seed 0, and take the settings of the best.

        Args:
            name: name of the trials, to which "trial 1", "trial 2", … is appended.
            config: their YAML file, without the ending.
            candidates: sets of settings, all with the same keys.
            metric: as for `best`; larger is better.
            varied: settings of all trials, as for `stage`.
            settings: likewise.
            at_end: as for `best`.
        """
        trials = [
            self.stage(f"{name} trial {number}", config, 0, {**varied, **candidate}, settings)
            for number, candidate in enumerate(candidates, 1)
        ]
        return self.best(trials, metric, list(candidates[0]), at_end=at_end)

    def value(self, node: Node, read: Callable[[Finished], Any], what: str, like: Any) -> Later:
        """A value that is read from a finished node, such as a batch size from measured memory.

        Args:
            node: stage or measurement.
            read: returns the value, from `Finished.history` or `Finished.rows`.
            what: describes the value; part of the fingerprint.
            like: a value of the same type, used until the node is finished.
        """
        return Later((node,), lambda nodes: read(nodes[0]), what, like)

    def parsed(
        self,
        config: str,
        settings: Mapping[str, Any] | None = None,
        varied: Mapping[str, Any] | None = None,
    ) -> jsonargparse.Namespace:
        """The settings that a stage declared with these arguments has, user's flags included."""
        given = (dict(part or {}) for part in (varied, settings, None))
        return Stage(self, "", config, 0, *given).parsed()

    def grid(self, *configs: str) -> dict[str, Any]:
        """What the experiment varies at this preset; each file overrides those before it."""
        merged: dict[str, Any] = {}
        for config in configs:
            file = self.folder / f"{config}.yaml"
            preset = self.preset if cli.presets(file) != [cli.PAPER] else cli.PAPER
            merged = cli.grid(file, preset, merged)
        return merged

    def rows(self, known: Iterable[str], default: Sequence[str] | None = None) -> list[str]:
        """The known rows that --rows names; without --rows the default ones, or all.

        Raises:
            ValueError: if --rows names another.
        """
        self.has_rows, known = True, list(known)
        chosen = self.options.rows or list(default or known)
        if unknown := [row for row in chosen if row not in known]:
            raise ValueError(f"--rows has {unknown[0]!r}: expected some of {', '.join(known)}")
        return chosen

    def sibling(self, name: str) -> "Run":
        """A run of another experiment with this command line, to reuse its finished nodes."""
        out = self.out.parents[1] / folder_name(name) / self.preset
        return replace(self, name=name, out=out)

    def chosen(self) -> list[Node]:
        """The nodes that --only names and those they wait for; without --only all.

        Raises:
            ValueError: if a pattern fits no node.
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

    def missing(self) -> list[str]:
        """Why measurements that have to run cannot read their data, each reason once."""
        to_do = (node for node in unfinished(self.chosen()) if isinstance(node, Measurement))
        given = dict.fromkeys(node.missing for node in to_do)  # several may share a function
        reasons = (one() if callable(one) else one for one in given)
        return list(dict.fromkeys(reason for reason in reasons if reason))

    def check(self) -> None:
        """Parse every stage, so that a wrong flag is refused before anything trains.

        Raises:
            ValueError: a flag is wrong; the message names it; or nothing is left to run.
        """
        if self.options.rows and not self.has_rows:
            raise ValueError(
                "--rows: this experiment has no rows to choose; choose parts with --only"
            )
        if not self.nodes:
            raise ValueError(
                f"nothing is left to run by `{self.command}`: what its flags choose does not go "
                "together, such as a task that is answered in words with models that only "
                "classify; leave one of them out"
            )
        self.flags.refuse_unknown({n.config for n in self.nodes.values() if isinstance(n, Stage)})
        for node in self.nodes.values():
            node.fingerprint  # noqa: B018  (parses)


@dataclass
class Experiment:
    """An experiment, as its module declares it.

    Attributes:
        name: such as "matformer.matvit"; recipes.<name> is its module.
        file: the module's __file__.
        config: name of its main YAML file, whose presets the command line offers.
        description: shown by --help.
        declare: adds the stages and measurements to a run.
        report: returns the report's Markdown paragraphs, computed from the table alone; may draw
            plots into run.out.
        options: adds the experiment's own arguments to its command line.
        measured_on: models and data in words, by preset, for reports; {sets} and {models} stand for
            those that the table has: "SST-2, MiniLM" in its column `set` is a set and a model.
    """

    name: str
    file: str
    config: str
    description: str
    declare: Callable[[Run], None]
    report: Callable[[pd.DataFrame, Run], list[str]]
    options: Callable[[ArgumentParser], None] = lambda parser: None
    measured_on: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where its YAML files are."""
        return Path(self.file).parent

    @property
    def stage_file(self) -> Path | None:
        """The main YAML file; if that is a grid, images_grid.yaml, the first other images_*.yaml.

        None for a grid of measurements alone, which has no such stage.
        """
        files = sorted(self.folder.glob(f"{self.config.removesuffix('grid')}*.yaml"))
        return next((file for file in files if not file.stem.endswith("_grid")), None)


def folder_name(name: str) -> str:
    """The folder under runs/ of an experiment."""
    return name.replace(".", "-")


def _with_upstream(node: Node) -> Iterator[Node]:
    for before in node.waits_for():
        yield from _with_upstream(before)
    yield node
