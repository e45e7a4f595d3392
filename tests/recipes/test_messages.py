"""What is said of bad input, and after Ctrl-C."""

import os
import runpy
import signal
import sys
from pathlib import Path

import lightning as L
import pytest
import timm
import torch
from torch.utils.data import DataLoader, Dataset

from recipes import cli
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
    monkeypatch.setattr(sys, "argv", ["recipes", "fit"])
    with pytest.raises(SystemExit, match="the same command with --ckpt_path …/last.ckpt continues"):
        runpy.run_module("recipes", run_name="__main__")  # a stage by itself
