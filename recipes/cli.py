"""One training stage from one YAML file: fit, validate, test or predict.

python -m recipes fit -c recipes/matformer/matvit.yaml
python -m recipes fit -c recipes/matformer/matvit.yaml --preset tiny
python -m recipes fit -c recipes/matformer/matvit.yaml --ckpt_path runs/…/last.ckpt   (continue)
python -m recipes fit -c recipes/matformer/matvit.yaml --trainer.devices 8 --trainer.strategy ddp

A stage's file has the paper's settings at the top. Below them, `presets:` lists the settings that
each preset changes; they override the top as a second -c would. A preset with `extends: NAME`
overrides the preset of that name.
"""

import inspect
import operator
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, get_args

import lightning as L
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from callbacks.resuming import Resuming
from callbacks.seeding import SeedEveryStep
from datamodules.loading import listed
from lightning_modules.weights import read_checkpoint
from recipes.agreement import RANDOM, agree, imply_ranks, other_normalisation, weights_of
from recipes.attention import plain_attention
from recipes.flags import key_of
from recipes.fsdp2 import FSDP2
from recipes.messages import refused, shortened

PAPER = "paper"  # the preset without overrides: the top of the file
LOW = re.compile("loss|error|mae|perplexity")  # in the names of metrics of which less is better
SUMMARY = "One training stage from one YAML file, such as recipes/matformer/matvit.yaml."
SYNOPSIS = "-c FILE [--preset NAME] [--SETTING VALUE ...]"
USAGE = (
    "-c FILE names the stage's YAML, --preset NAME one of the presets in it, and any setting of it "
    "can be given too: --model.lr 1e-3 --data.root DIR --trainer.devices 8. --model.help and "
    "--data.help list the settings of the classes that the file names, --print_config all of them "
    "as they would run."
)

# an experiment passes each stage's arguments itself, so Lightning's advice to use sys.argv is moot
warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
# this warning is about Lightning's code: a user can do nothing about it
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
# the modules log what torchmetrics has reduced over all devices already
warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True")


def _integers_first(function: Callable) -> None:
    """Have jsonargparse try int before float for each parameter that takes both.

    It tries types in their order, but typing considers Union[int, float] and Union[float, int]
    equal and may hand out either, depending on which libraries are installed. Floats first would
    read `trainer.limit_train_batches: 1`, one batch, as 1.0, all of them.
    """
    annotations = inspect.unwrap(function).__annotations__
    for name, hint in annotations.items():
        kinds = get_args(hint)
        if {int, float} <= set(kinds):
            others = [kind for kind in kinds if kind not in (int, float)]
            annotations[name] = reduce(operator.or_, [int, float, *others])


_integers_first(L.Trainer.__init__)


class Parser(LightningArgumentParser):
    """A parser that raises WrongSetting instead of printing its usage and exiting."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise WrongSetting."""
        raise WrongSetting(message) from ex


class WrongSetting(ValueError):
    """jsonargparse refused a setting; the message nests those of the parsers of each class."""


class SaveConfig(SaveConfigCallback):
    """Writes config.yaml into the logger's folder; if no logger has one, a training's checkpoints'.

    In the second case Lightning's SaveConfigCallback would write into the current folder. What only
    scores or predicts has no checkpoints of its own, and then leaves nothing behind.
    """

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write config.yaml, on the first rank."""
        kinds = CSVLogger | TensorBoardLogger
        file_loggers = [one for one in trainer.loggers if isinstance(one, kinds)]
        if not file_loggers and stage != TrainerFn.FITTING:
            return
        dirpath = getattr(trainer.checkpoint_callback, "dirpath", None)
        folder = Path(dirpath or Path(trainer.default_root_dir, "checkpoints"))
        if file_loggers:
            folder = Path(file_loggers[0].log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, folder / "config.yaml", skip_unset=False, overwrite=True)


class RecipeCLI(LightningCLI):
    """LightningCLI with the settings that all recipes share.

    Added keys: `checkpoint` (Lightning's ModelCheckpoint; last.ckpt is always written, also after
    epochs that are not validated, and with `monitor` the best one beside it) and `seeding`
    (reproducible noise, see SeedEveryStep). `seed_everything` is the only seed of a run: it also
    sets the seeds of the data and of SeedEveryStep.

    Args:
        args: the command line.
        callbacks: further callbacks, in addition to those of the YAML file.
    """

    def __init__(self, args: Sequence[str], callbacks: Sequence[L.Callback] = ()):
        self.args, self.further_callbacks = list(args), callbacks
        super().__init__(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            # True would put every argument, init_from too, into the checkpoint's hyperparameters
            load_from_checkpoint_support=False,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            parser_class=Parser,
            parser_kwargs={
                "prog": "python -m recipes",
                "description": f"{SUMMARY} {USAGE}",
                # jsonargparse's own usage would list each setting, and not --preset (see expanded)
                **{
                    verb: {"description": USAGE, "usage": f"python -m recipes {verb} {SYNOPSIS}"}
                    for verb in self.subcommands()
                },
            },
            args=self.args,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The verbs: the one that the command line begins with, or all, of which --help tells."""
        verbs = LightningCLI.subcommands()
        return {verb: verbs[verb] for verb in self.args[:1] if verb in verbs} or verbs

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the keys and links that all stages share."""
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(SeedEveryStep, "seeding")
        parser.set_defaults({"checkpoint.save_last": True})
        parser.link_arguments("seed_everything", "seeding.seed", compute_fn=int)
        parser.link_arguments("seed_everything", "data.init_args.seed", compute_fn=int)
        parser.link_arguments(
            "data",
            "model.init_args.num_classes",
            compute_fn=self.count_classes,
            apply_on="instantiate",
        )

    def count_classes(self, data: Any) -> int | None:
        """The data's number of classes, or the model's own setting if the data have no classes.

        Before a training their names are printed, to be compared with those that were meant.

        The data are asked only for a model that has the setting: images without labels, which are
        enough for self-distillation, refuse to say it.
        """
        model = self.config.get(self.subcommand, self.config).model.init_args
        if "num_classes" not in model:
            return None
        count = getattr(data, "num_classes", model.num_classes)
        if self.subcommand == "fit" and (names := getattr(data, "class_names", None)):
            rank_zero_info(f"classes: {listed(names)}")
        return count

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and turn jsonargparse's error into one sentence.

        Raises:
            ValueError: for a wrong argument.
        """
        with _in_one_sentence():
            super().parse_arguments(parser, args)
        _refuse_nested(self.config[self.config.subcommand], self.args)

    def before_instantiate_classes(self) -> None:
        """Fill in settings that follow from others; warn if model and data disagree."""
        settings = self.config.get(self.subcommand, self.config)
        agree(settings)
        # a folder that already has a last.ckpt must not get a last-v1.ckpt beside the stale one
        settings.checkpoint.enable_version_counter = False
        if settings.checkpoint.monitor is None:
            settings.checkpoint.save_on_train_epoch_end = _saved_at_epoch_end(settings)
        if warning := other_normalisation(settings):
            rank_zero_warn(warning)
        monitor = settings.checkpoint.monitor
        if monitor and settings.checkpoint.mode == "min" and not LOW.search(monitor):
            rank_zero_warn(
                f"checkpoint.mode is min, so the checkpoint with the lowest {monitor} is kept as "
                "the best: set --checkpoint.mode max if more is better"
            )
        if settings.get("ckpt_path") and Path(settings.ckpt_path).is_file():
            # a clearer error than Lightning's if it is broken
            imply_ranks(settings, read_checkpoint(settings.ckpt_path))
        weights = weights_of(settings) or ""
        if not settings.ckpt_path and weights.startswith(RANDOM):
            if self.subcommand == "fit":
                rank_zero_info(weights)
            else:
                rank_zero_warn(f"{weights}; set --ckpt_path to use what has been trained")

    def instantiate_classes(self) -> None:
        """Build data and model; turn jsonargparse's error into one sentence.

        Raises:
            ValueError: for a value that a class refuses.
        """
        try:
            super().instantiate_classes()
        except ValueError as error:
            if message := refused(str(error)):
                raise ValueError(message) from error
            raise

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Build the trainer; last.ckpt is the newest checkpoint even if `monitor` is set.

        With `monitor`, Lightning writes last.ckpt only when the monitored value has improved.

        Raises:
            ValueError: if the strategy is Lightning's own for FSDP2.
        """
        if self._get(self.config_init, "trainer.logger") in (None, True):
            kwargs["logger"] = loggers(self._get(self.config_init, "trainer.default_root_dir"))
        trainer: Any = super().instantiate_trainer(**kwargs)
        strategy = trainer.strategy
        if isinstance(strategy, ModelParallelStrategy) and not isinstance(strategy, FSDP2):
            raise ValueError(
                "trainer.strategy is Lightning's ModelParallelStrategy, which can load moments "
                "into the wrong parameters when a run resumes: use --trainer.strategy fsdp2"
            )
        trainer.callbacks.extend(self.further_callbacks)
        checkpoint = trainer.checkpoint_callback
        if checkpoint is not None and checkpoint.monitor is not None and checkpoint.save_last:
            checkpoint.save_last = False
            settings = self.config.get(self.subcommand, self.config)
            changes = {"monitor": None, "filename": "last", "save_last": None, "save_top_k": 1}
            changes["save_on_train_epoch_end"] = _saved_at_epoch_end(settings)
            copy = ModelCheckpoint(**{**settings.checkpoint.as_dict(), **changes})
            trainer.callbacks.append(copy)
        trainer.callbacks += [Resuming(), SaveEnd()]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the verb with the quickest attention."""
        with plain_attention(self.trainer, self.datamodule):
            super()._run_subcommand(subcommand)

    def _parse_ckpt_path(self) -> None:
        """Keep the YAML's settings on resume.

        Lightning would silently replace them with the checkpoint's hyperparameters; the modules
        compare the two instead and refuse another model's checkpoint.
        """


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Turn jsonargparse's error into a ValueError of one sentence."""
    try:
        yield
    except WrongSetting as error:
        raise ValueError(shortened(str(error))) from error


def _refuse_nested(settings: Namespace, args: Sequence[str]) -> None:
    """Refuse a flag for an entry of a dict within a dict: --model.sizes.text.vocab_size.

    jsonargparse would take its value as text, and drop the other entries.

    Raises:
        ValueError: naming the flag, and the one to give instead.
    """
    for argument in args:
        names = key_of(argument.partition("=")[0].lstrip("-")).split(".")
        place: Any = settings
        for depth, name in enumerate(names):
            place = place.get("init_args", place) if isinstance(place, Namespace) else place
            if isinstance(place, dict) and depth + 1 < len(names) and argument.startswith("--"):
                outer, inner = ".".join(names[: depth + 1]), ".".join(names[depth + 1 :])
                raise ValueError(
                    f"--{outer}.{inner} is one entry of {outer}: give all of its entries as "
                    f"--{outer} '{{{inner}: VALUE, …}}'"
                )
            if not isinstance(place, Namespace | dict) or name not in place:
                break
            place = place[name]


class SaveEnd(L.Callback):
    """Brings last.ckpt up to date when training ends.

    With checkpoint.every_n_train_steps Lightning leaves it at the last multiple of that number.
    """

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save again if steps followed the last save."""
        for one in trainer.checkpoint_callbacks:
            if not isinstance(one, ModelCheckpoint) or one.monitor is not None:
                continue
            path = one.last_model_path or one.best_model_path
            behind = one._last_global_step_saved != trainer.global_step
            if behind and Path(path).name == "last.ckpt":
                trainer.save_checkpoint(path)


def _saved_at_epoch_end(settings: Namespace) -> bool | None:
    """ModelCheckpoint's save_on_train_epoch_end for last.ckpt; None leaves it to Lightning.

    By default Lightning saves nothing after an epoch without validation.
    """
    chosen = settings.checkpoint.save_on_train_epoch_end
    if chosen is None and (settings.trainer.check_val_every_n_epoch or 1) > 1:
        return True
    return chosen


def loggers(folder: str | None) -> list[Logger]:
    """The default loggers of a run: CSV, and TensorBoard if it is installed.

    Args:
        folder: holds lightning_logs/version_0, …; the current folder when None.
    """
    table = CSVLogger(folder or ".")
    if find_spec("tensorboard") is None:
        return [table]
    return [table, TensorBoardLogger(folder or ".", version=table.version)]


class _ParseOnly(RecipeCLI):
    """Parses a command line without building or running anything."""

    def _set_seed(self) -> None:
        """Do not seed the random number generators."""

    def before_instantiate_classes(self) -> None:
        """Print no warnings."""

    def instantiate_classes(self) -> None:
        """Stop before anything is built."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Stop before anything is run."""


class _FitParser(_ParseOnly):
    """Builds the parser of `fit`, without those of the other verbs, and parses nothing."""

    def setup_parser(self, *_: Any) -> None:
        """Build it."""
        self._subcommand_method_arguments: dict[str, list[str]] = {}
        self.parser = self._prepare_subcommand_parser(L.Trainer, "fit")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse nothing."""
        self.config = Namespace(subcommand="fit")


@cache
def _fit_parser() -> LightningArgumentParser:
    """The parser of `fit`: an experiment parses hundreds of stages as it starts, all with it."""
    return _FitParser([]).parser


def parse(path: str | Path, preset: str = PAPER, overrides: Sequence[str] = ()) -> Namespace:
    """Parse a stage's file at a preset, with defaults filled in; nothing is built or run.

    Args:
        path: YAML file of the stage, such as recipes/matformer/matvit.yaml.
        preset: one of `presets(path)`.
        overrides: further command-line arguments.

    Raises:
        ValueError: for an unknown preset, setting or value, in one sentence.
    """
    return _parse(tuple(layers(path, preset)), tuple(overrides)).clone()


@lru_cache(maxsize=4096)
def _parse(texts: tuple[str, ...], overrides: tuple[str, ...]) -> Namespace:
    configs = [part for text in texts for part in ("-c", text)]
    with _in_one_sentence():
        settings = _fit_parser().parse_args([*configs, *overrides])
    _refuse_nested(settings, overrides)
    agree(settings)
    return settings


def layers(path: str | Path, preset: str = PAPER) -> list[str]:
    """A file as YAML texts, each overriding those before: its top, then the preset's overrides.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file has no such preset.
    """
    return list(_layers(path, _read(path), preset))


@lru_cache(maxsize=256)
def _layers(path: str | Path, content: str, preset: str) -> tuple[str, ...]:
    top, parts = _top_and_presets(path, content)
    texts: list[str] = []
    while preset != PAPER:
        if preset not in parts:
            known = ", ".join([*parts, PAPER])
            raise ValueError(f"unknown preset {preset!r}: {path} has {known}")
        part = parts[preset]
        extended = _pop(part, "extends")
        texts.insert(0, yaml.serialize(part))
        preset = PAPER if extended is None else extended.value
    return (yaml.serialize(top), *texts)


def _read(path: str | Path) -> str:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not there: expected the YAML file of a stage")
    return Path(path).read_text(encoding="utf-8")


def presets(path: str | Path) -> list[str]:
    """The names of a file's presets; the last is "paper", the top without overrides."""
    return [*_top_and_presets(path, _read(path))[1], PAPER]


def grid(
    path: str | Path, preset: str = PAPER, under: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What an experiment varies at a preset, from a grid file (a file with presets, but no stage).

    A preset's key replaces the top's; `rows+:` adds its entries to those of `rows`, by name.

    Args:
        path: the file, such as recipes/vera/glue_grid.yaml.
        preset: one of `presets(path)`.
        under: another grid, which this one overrides.
    """
    merged = under or {}
    for text in layers(path, preset):
        merged = override(merged, yaml.safe_load(text) or {})
    return merged


def override(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`under` overridden by `over`: a key replaces, `key+` adds its entries to those of `key`."""
    merged = dict(under)
    for key, value in over.items():
        if key.endswith("+"):
            key = key.removesuffix("+")
            value = {**merged.get(key, {}), **value}
        merged[key] = value
    return merged


def _top_and_presets(
    path: str | Path, content: str
) -> tuple[yaml.MappingNode, dict[str, yaml.MappingNode]]:
    """A file's top, and its presets by name, as YAML nodes.

    Nodes keep each scalar as it is written (1e-3); jsonargparse interprets it.
    """
    try:
        top = yaml.compose(content)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{path}, line {line}: this is no YAML ({error.problem})") from error
    if not isinstance(top, yaml.MappingNode):
        raise ValueError(f"{path} is no mapping of settings: expected the YAML file of a stage")
    parts = _pop(top, "presets")
    if parts is None:
        return top, {}
    return top, {name.value: part for name, part in parts.value}


def _pop(node: yaml.MappingNode, key: str) -> Any:
    """Remove a key and return its value; None if it is not there."""
    for place, (name, value) in enumerate(node.value):
        if name.value == key:
            del node.value[place]
            return value
    return None


def expanded(args: Sequence[str]) -> list[str]:
    """A command line in which `-c FILE --preset NAME` is replaced by the YAML texts it names.

    Raises:
        ValueError: if the preset is named without a file that has any.
    """
    given = [part for one in args for part in _split(one)]
    preset = None
    if "--preset" in given:
        place = given.index("--preset")
        if place + 1 == len(given):
            raise ValueError("--preset has no value: expected the name of a preset")
        preset = given[place + 1]
        del given[place : place + 2]
    result: list[str] = []
    files: list[str] = []
    used = False
    for before, argument in zip(["", *given], given, strict=False):
        if before in ("-c", "--config") and "\n" not in argument:
            applied = preset if preset and presets(argument) != [PAPER] else PAPER
            used |= applied == preset
            files.append(argument)
            first, *later = layers(argument, applied)
            result += [first, *(part for text in later for part in ("-c", text))]
        else:
            result.append(argument)
    if preset not in (None, PAPER) and not used:
        where = f"{', '.join(files)} has no presets" if files else "no -c FILE is given"
        raise ValueError(f"--preset {preset}: {where}")
    return result


def _split(argument: str) -> list[str]:
    """Split `--config=FILE` or `--preset=NAME` into two arguments; keep any other as it is."""
    option, equals, value = argument.partition("=")
    return [option, value] if equals and option in ("-c", "--config", "--preset") else [argument]


def with_classes(args: Sequence[str]) -> list[str]:
    """Add the class that the YAML names to a --model.help or --data.help without a value."""
    bare = [
        (place, argument)
        for place, argument in enumerate(args)
        if argument in ("--model.help", "--data.help")
        and (place + 1 == len(args) or args[place + 1].startswith("-"))
    ]
    if not bare:
        return list(args)
    rest = [one for place, one in enumerate(args) if (place, one) not in bare]
    settings = _ParseOnly(rest).config[rest[0]]
    result = list(args)
    for place, argument in reversed(bare):
        chosen = settings[argument[2:].partition(".")[0]]
        result.insert(place + 1, chosen.class_path)
    return result


def main(args: Sequence[str] | None = None, callbacks: Sequence[L.Callback] = ()) -> RecipeCLI:
    """Run one stage; the command line is sys.argv unless args are given.

    Raises:
        ValueError: a setting is wrong; the message names it.
        KeyboardInterrupt: after Ctrl-C.
    """
    args = with_classes(expanded(sys.argv[1:] if args is None else args))
    torch.set_float32_matmul_precision("high")
    try:
        return RecipeCLI(args, callbacks)
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning turns Ctrl-C into an exit
            raise KeyboardInterrupt from None
        raise
