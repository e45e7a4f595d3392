"""Every experiment: a flag reaches the config of each of its stages, or is refused by name."""

import importlib
import re
from pathlib import Path

import pytest

from recipes.cli import parse
from recipes.experiment import Experiment
from recipes.nodes import Stage
from recipes.runner import command_line

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
NAMES = [
    f"{file.parent.name}.{file.stem}"
    for file in sorted(RECIPES.glob("*/*.py"))
    if re.search(r"^EXPERIMENT\b", file.read_text(encoding="utf-8"), re.M)
]
FLAGS = {  # flag → its value in a parsed stage
    "--model.lr=0.0123": lambda s: s.model.init_args.lr == 0.0123,
    "--data.batch_size=12": lambda s: s.data.init_args.batch_size % 12 == 0,  # 4 × 12: DynaBERT
    "--trainer.gradient_clip_val=0.77": lambda s: s.trainer.gradient_clip_val == 0.77,
}
VARIED = {  # the experiments at `tiny` that vary the setting themselves, and refuse its flag
    "--model.lr=0.0123": {"self_distillation.images", "self_distillation.text", "vera.images"},
    "--data.batch_size=12": {"pela.vision"},
    "--trainer.gradient_clip_val=0.77": set(),
}
# they train nothing, and refuse every flag
WITHOUT_SETTINGS = {"pela.language", "pela.sizes", "self_distillation.theory"}


def experiment_of(name: str) -> Experiment:
    """The experiment of a module."""
    return importlib.import_module(f"recipes.{name}").EXPERIMENT


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", NAMES)
def test_a_flag_reaches_every_stage_or_is_refused(name, flag):
    experiment = experiment_of(name)
    try:
        run = command_line(experiment, [flag])
        experiment.declare(run)
        run.check()
    except ValueError as refused:
        key = flag.partition("=")[0].removeprefix("--")
        if name in WITHOUT_SETTINGS:
            assert str(refused) == f"{flag}: this experiment trains nothing that has settings"
        else:
            assert name in VARIED[flag]
            assert str(refused) == f"this experiment varies {key}; choose rows with --rows"
        return
    assert name not in VARIED[flag] | WITHOUT_SETTINGS
    for node in run.nodes.values():
        if isinstance(node, Stage):
            assert FLAGS[flag](node.parsed()), node.name


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_flag_is_refused_before_anything_trains(name):
    experiment = experiment_of(name)
    with pytest.raises(ValueError, match="no_such"):
        run = command_line(experiment, ["--model.no_such=1"])
        experiment.declare(run)
        run.check()
        raise AssertionError("accepted")


@pytest.mark.parametrize("name", NAMES)
def test_the_help_names_a_stage_of_the_experiment(name, capsys):
    experiment = experiment_of(name)
    with pytest.raises(SystemExit):
        command_line(experiment, ["--help"])
    named = re.search(r"--(\w+)\.model\.lr 1e-3.* -c (\S+) --model.help", capsys.readouterr().out)
    run = command_line(experiment, [])
    experiment.declare(run)
    stages = {node.config for node in run.nodes.values() if isinstance(node, Stage)}
    if stages:
        assert named and named[1] in stages and parse(named[2]).model.class_path
    else:
        assert named is None
