"""Stages: skipped when finished, continued when killed, made anew when their settings change."""

import json
import runpy
import sys
from types import SimpleNamespace

import lightning as L
import pytest
import timm
import torch
from torch.utils.data import DataLoader, Dataset

from recipes import cli
from recipes import experiment as module
from recipes.cli import console
from recipes.experiment import Experiment, from_command_line, read_history


class Trainings:
    """Stands for recipes.cli.main: records its calls and leaves what a training leaves."""

    def __init__(self):
        self.calls, self.fails, self.interrupted = [], False, False
        self.beside_weights = {"optimizer_states": []}

    def __call__(self, args):
        self.calls.append(args)
        folder = next(a for a in args if a.startswith("--checkpoint.dirpath=")).split("=")[1]
        checkpoint = module.Path(folder) / "last.ckpt"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"state_dict": {}, **self.beside_weights}, checkpoint)
        log = checkpoint.parents[1] / f"log{len(self.calls)}"
        log.mkdir()
        (log / "metrics.csv").write_text(f"loss\n{len(self.calls)}\n")
        if self.fails:
            raise RuntimeError("killed")
        if self.interrupted:
            raise KeyboardInterrupt


@pytest.fixture
def trainings(monkeypatch):
    trainings = Trainings()
    monkeypatch.setattr(module, "run_stage", trainings)
    return trainings


@pytest.fixture
def experiment(tmp_path):
    folder = tmp_path / "recipe"
    folder.mkdir()
    (folder / "stage.yaml").write_text("trainer: {max_epochs: 8}\n")
    (folder / "stage.tiny.yaml").write_text("trainer: {max_epochs: 1}\n")
    return Experiment("paper.name", folder, "tiny", 1, tmp_path / "runs")


def test_finished_stage_is_skipped(experiment, trainings):
    first = experiment.stage("a", "stage")
    second = experiment.stage("a", "stage")
    assert len(trainings.calls) == 1
    assert first.checkpoint == second.checkpoint
    experiment.stage("a", "stage", seed=1)
    experiment.stage("b", "stage")
    assert len(trainings.calls) == 3


@pytest.mark.parametrize("how", ["exception", "ctrl-c"])
def test_killed_stage_continues_from_its_last_checkpoint(experiment, trainings, how):
    trainings.fails, trainings.interrupted = how == "exception", how == "ctrl-c"
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        experiment.stage("a", "stage")
    assert not any(a.startswith("--ckpt_path") for a in trainings.calls[0])
    trainings.fails = trainings.interrupted = False
    result = experiment.stage("a", "stage")
    assert f"--ckpt_path={result.checkpoint}" in trainings.calls[1]
    experiment.stage("a", "stage")
    assert len(trainings.calls) == 2


def test_a_killed_stage_that_kept_its_weights_only_starts_again(experiment, trainings):
    trainings.fails, trainings.beside_weights = True, {}
    with pytest.raises(RuntimeError):
        experiment.stage("a", "stage")
    trainings.fails = False
    result = experiment.stage("a", "stage")
    assert not any(a.startswith("--ckpt_path") for a in trainings.calls[1])
    assert result.metrics == {"loss": 2.0}  # and has no curves of the first attempt


def test_changed_settings_begin_anew(experiment, trainings):
    experiment.stage("a", "stage", overrides={"trainer.max_epochs": 2})
    experiment.stage("a", "stage", overrides={"trainer.max_epochs": 3})
    (experiment.folder / "stage.tiny.yaml").write_text("trainer: {max_epochs: 5}\n")
    experiment.stage("a", "stage", overrides={"trainer.max_epochs": 3})
    assert len(trainings.calls) == 3
    assert not any(a.startswith("--ckpt_path") for call in trainings.calls for a in call)


def test_on_what_it_runs_does_not_make_a_stage_another(experiment, trainings):
    experiment.stage("a", "stage")
    experiment.extra = ["--data.num_workers", "8", "--trainer.accelerator=gpu"]
    experiment.stage("a", "stage")
    assert len(trainings.calls) == 1
    experiment.extra += ["--model.lr", "8"]
    experiment.stage("a", "stage")
    assert len(trainings.calls) == 2
    assert (experiment.out / "seed0" / "a.old" / "checkpoints" / "last.ckpt").is_file()


def test_weights_in_a_folder_that_change_begin_anew(experiment, trainings, tmp_path):
    (tmp_path / "model.safetensors").write_text("weights")
    for time in (1, 1, 2):
        module.os.utime(tmp_path / "model.safetensors", ns=(time, time))
        experiment.stage("b", "stage", overrides={"model.init_args.init_from": tmp_path})
    assert len(trainings.calls) == 2


def test_new_weights_to_start_from_begin_anew(experiment, trainings, tmp_path):
    source = experiment.stage("a", "stage").checkpoint
    start = {"model.init_args.init_from": source}
    experiment.stage("b", "stage", overrides=start)
    experiment.stage("b", "stage", overrides=start)
    assert len(trainings.calls) == 2
    source.write_text("other weights")
    module.os.utime(source, ns=(1, 1))
    experiment.stage("b", "stage", overrides=start)
    assert len(trainings.calls) == 3


def test_what_the_experiment_computes_wins_over_the_users_arguments(experiment, trainings):
    experiment.extra = ["--trainer.max_epochs", "8"]
    experiment.stage("a", "stage", overrides={"trainer.max_epochs": 2, "trainer.callbacks": None})
    (call,) = trainings.calls
    assert call.index("--trainer.max_epochs=2") > call.index("--trainer.max_epochs")
    assert "--trainer.callbacks=null" in call
    assert call[:5] == [
        "fit",
        "-c",
        str(experiment.folder / "stage.yaml"),
        "-c",
        str(experiment.folder / "stage.tiny.yaml"),
    ]


def test_several_devices_train_in_a_process_of_their_own(experiment, trainings, monkeypatch):
    commands, code = [], 0

    def run(args):
        commands.append(args)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(module.subprocess, "run", run)
    experiment.extra = ["--trainer.devices", "2"]
    experiment.stage("a", "stage")
    assert not trainings.calls
    assert commands[0][1:4] == ["-m", "recipes", "fit"]
    code = 2
    with pytest.raises(SystemExit, match="2"):
        experiment.stage("b", "stage")
    assert not json.loads((experiment.out / "seed0" / "b" / "stage.json").read_text())["finished"]


def test_a_history_goes_through_all_sittings(tmp_path):
    for sitting, text in enumerate(["a,b\n1,\n,2\n", "a,c\n3,\n,4\n"]):
        folder = tmp_path / f"log{sitting}"
        folder.mkdir()
        (folder / "metrics.csv").write_text(text)
    assert read_history(tmp_path) == {"a": [1.0, 3.0], "b": [2.0], "c": [4.0]}


def test_command_line(experiment, capsys, monkeypatch):
    file = str(experiment.folder / "name.py")
    built = from_command_line(
        "paper.name",
        file,
        "stage",
        "About.",
        ["--preset", "paper", "--seeds", "2", "--data.root", "/d"],
    )
    assert (built.preset, built.seeds, built.extra) == ("paper", 2, ["--data.root", "/d"])
    assert str(built.out) == "runs/paper-name/paper"
    assert built.files("stage") == [experiment.folder / "stage.yaml"]
    with pytest.raises(SystemExit):
        from_command_line("paper.name", file, "stage", "About.", ["--preset", "huge"])
    assert "unknown preset 'huge': expected tiny, paper" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unknown preset 'huge': expected tiny, paper"):
        Experiment("n", experiment.folder, "huge", 1, experiment.out).files("stage")
    with pytest.raises(SystemExit):
        from_command_line("paper.name", file, "stage", "About.", ["--seeds", "0"])


def test_bad_input_is_one_line_on_the_console(capsys, monkeypatch):
    def fail():
        raise FileNotFoundError("/nowhere is not a folder: set --data.root")

    monkeypatch.delenv("RECIPES_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as stop:
        console(fail)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: /nowhere is not a folder: set --data.root\n")
    monkeypatch.setenv("RECIPES_TRACEBACK", "1")
    with pytest.raises(FileNotFoundError):
        console(fail)


class Broken(Dataset):
    """Its one image is none."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise OSError("a.png cannot be read: replace or remove it.")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: L.Trainer(accelerator="cuda", logger=False), "CUDAAccelerator` can not run on"),
        (
            lambda: timm.create_model("vit_tiny_patch16_224")(torch.zeros(1, 3, 160, 160)),
            "Input height (160) doesn't match model (224). Set data.image_size to the model's, or",
        ),
        (
            lambda: next(iter(DataLoader(Broken(), num_workers=1))),
            "error: a.png cannot be read: replace or remove it.\n(RECIPES",
        ),
    ],
)
def test_what_others_raise_is_said_as_briefly(wrong, said, capsys, monkeypatch):
    monkeypatch.delenv("RECIPES_TRACEBACK", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as stop:
        console(wrong)
    shown = capsys.readouterr().err
    assert stop.value.code == 2 and said in shown and "Traceback (" not in shown


def test_ctrl_c_says_how_to_go_on(monkeypatch):
    def interrupted(args):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)  # as Lightning does

    monkeypatch.setattr(cli, "RecipeCLI", interrupted)
    with pytest.raises(SystemExit, match="the same command continues"):
        console(lambda: cli.main(["fit"]))
    monkeypatch.setattr(sys, "argv", ["recipes", "fit"])
    with pytest.raises(SystemExit, match="the same command with --ckpt_path …/last.ckpt continues"):
        runpy.run_module("recipes", run_name="__main__")  # a stage by itself


def test_record_says_what_a_stage_was_made_from(experiment, trainings):
    experiment.stage("a", "stage")
    record = json.loads((experiment.out / "seed0" / "a" / "stage.json").read_text())
    assert record["finished"] and len(record["fingerprint"]) == 64
