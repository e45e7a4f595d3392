"""What is said of bad input, and after Ctrl-C."""

import os
import re
import runpy
import signal
import sys
from pathlib import Path

import lightning as L
import pytest
import timm
import torch
from torch.utils.data import DataLoader, Dataset

import recipes.__main__
from recipes import cli, predict
from recipes.ending import SayResume
from recipes.messages import console

MATVIT = Path(cli.__file__).parent / "matformer" / "matvit.yaml"


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


class Terminated(L.Callback):
    def on_train_batch_end(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_is_no_success(tmp_path, capsys):
    """A scheduler that ends a training early must not take it for finished."""
    stage = ["fit", "-c", str(MATVIT), "--preset", "tiny", f"--trainer.default_root_dir={tmp_path}"]
    with pytest.raises(SystemExit) as stop:
        console(lambda: cli.main([*stage, "--data.train_pairs=256"], [Terminated()]))
    assert stop.value.code == 143
    assert "ended by SIGTERM: the same command continues" in capsys.readouterr().err


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
    def interrupted(args, callbacks):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            sys.exit(1)  # as Lightning does

    monkeypatch.setattr(cli, "RecipeCLI", interrupted)
    with pytest.raises(SystemExit, match="the same command continues"):
        console(lambda: cli.main(["fit"]))


class PressCtrlC(L.Callback):
    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 6])
def test_an_interrupted_stage_names_its_last_checkpoint(at, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *args: None)  # Lightning switches Ctrl-C off
    main = recipes.__main__.main
    monkeypatch.setattr(
        recipes.__main__, "main", lambda callbacks: main(callbacks=[*callbacks, PressCtrlC(at)])
    )
    stage = ["fit", "-c", str(MATVIT), "--preset", "tiny", f"--trainer.default_root_dir={tmp_path}"]
    more = [
        "--data.train_pairs=256",
        "--checkpoint.every_n_train_steps=4",
        "--checkpoint.every_n_epochs=null",
    ]
    monkeypatch.setattr(sys, "argv", ["recipes", *stage, *more, "--trainer.max_epochs=4"])
    with pytest.raises(SystemExit, match="^interrupted$"):
        console(recipes.__main__.dispatch, resume="")
    said = capsys.readouterr().out
    if at == 0:
        assert "no checkpoint was written yet: the same command starts again" in said
    else:
        last = re.search(r"the same command with --ckpt_path (\S+)", said)[1]
        assert torch.load(last, weights_only=True)["global_step"] == 4


def test_an_interrupted_answer_promises_no_checkpoint(monkeypatch):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "main", interrupted)
    monkeypatch.setattr(sys, "argv", ["recipes", "predict", "--ckpt_path", "a.ckpt", "a.png"])
    with pytest.raises(SystemExit, match="^interrupted$"):
        runpy.run_path(recipes.__main__.__file__, run_name="__main__")


def test_an_interrupted_validation_names_no_checkpoint(capsys):
    trainer = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.state.fn = "validate"
    SayResume().on_exception(trainer, L.LightningModule(), KeyboardInterrupt())
    assert capsys.readouterr().out == ""
