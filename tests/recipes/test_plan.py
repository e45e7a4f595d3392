"""What a stage will take: counts against a real run, memory by hand, time by its formula."""

import json
from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace

from recipes import cli
from recipes import plan as planning
from recipes.plan import Steps, batch_size, device_count, main, plan, saves, validations

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MATVIT = str(RECIPES / "matformer" / "matvit.yaml")
MODEL = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
SMALL = [f"--model.model_args={json.dumps(MODEL)}", "--data.batch_size=64", "--data.classes=[3,5]"]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(planning, "ENOUGH", 0.0)


def trainer(**changes):
    settings = {
        "val_check_interval": None, "check_val_every_n_epoch": 1, "limit_val_batches": None,
        "accumulate_grad_batches": 1, "devices": "auto", "accelerator": "cpu", "num_nodes": 1,
    }  # fmt: skip
    return Namespace(**{**settings, **changes})


class TestAgainstARun:
    def test_counts_are_those_of_the_run(self, tmp_path):
        settings = [*SMALL, "--trainer.max_epochs=3", "--trainer.accumulate_grad_batches=2"]
        made = plan(MATVIT, "tiny", settings)
        run = cli.main(
            [
                *("fit", "-c", MATVIT, "--preset", "tiny", *settings),
                *("--trainer.enable_progress_bar=false", f"--checkpoint.dirpath={tmp_path}"),
                f"--trainer.default_root_dir={tmp_path}",
            ]
        )
        assert made.updates == run.trainer.global_step
        assert made.epochs == 3 and made.effective_batch == 128
        assert made.steps.examples == len(run.datamodule.train_set)
        assert made.steps.batches == run.trainer.num_training_batches
        assert made.steps.val_batches == sum(run.trainer.num_val_batches)
        parameters = list(run.model.parameters())
        assert made.steps.parameters == (sum(p.numel() for p in parameters),) * 2
        states = run.trainer.optimizers[0].state.values()
        moments = sum(value.nbytes for state in states for value in state.values())
        assert made.steps.memory["moments"] == moments > 0
        assert made.steps.memory["weights"] == made.steps.memory["gradients"]
        assert not made.extrapolated and made.hours > 0

    def test_max_steps_end_it_and_a_long_batch_is_extrapolated(self, monkeypatch):
        monkeypatch.setattr(planning, "LONG", 0.0)
        settings = [*SMALL, "--trainer.max_steps=7", "--trainer.max_epochs=50"]
        made = plan(MATVIT, "tiny", settings)
        assert made.extrapolated and made.steps.batch == planning.SMALL
        assert made.updates == 7 and made.effective_batch == 64
        each_epoch = -(-made.steps.batches * planning.SMALL // 64)
        assert made.epochs == pytest.approx(7 / each_epoch)

    def test_only_what_trains_has_gradients_and_moments(self):
        made = plan(str(RECIPES / "vera" / "images.yaml"), "tiny", ["--data.batch_size=8"])
        total, trained = made.steps.parameters
        memory = made.steps.memory
        assert 0 < trained < total
        assert memory["weights"] == 4 * total and memory["gradients"] == 4 * trained
        assert 8 * trained <= memory["moments"] < 9 * trained + 400

    def test_multiply_adds_of_the_full_model(self):
        """By hand: patches; of 5 tokens qkv, products, projection, two layers; and the head."""
        settings = [*SMALL, "--model.fractions=null", "--trainer.callbacks=null"]
        made = plan(MATVIT, "tiny", settings)
        tokens, width = 5, 16
        block = tokens * width * (3 * width + width + 8 * width) + 2 * tokens**2 * width
        assert made.steps.macs == 4 * 3 * 16 * width + block + 2 * width


class TestTime:
    def test_is_the_sum_of_its_parts(self, monkeypatch):
        steps = Steps(
            examples=640, batches=10, batch=64, val_batches=3, step=2.0, validation=1.0,
            setup=5.0, save=0.5, parameters=(1, 1), memory={},
        )  # fmt: skip
        monkeypatch.setattr(planning, "measure", lambda *_: steps)
        settings = [*SMALL, "--trainer.max_epochs=4", "--trainer.check_val_every_n_epoch=2"]
        made = plan(MATVIT, "tiny", settings)
        assert made.hours * 3600 == pytest.approx(5 + 4 * 10 * 2.0 + 2 * 3 * 1.0 + 4 * 0.5)
        twice = plan(MATVIT, "tiny", [*settings, "--trainer.devices=2"])
        assert twice.effective_batch == 128 and twice.updates == made.updates / 2
        assert twice.hours * 3600 == pytest.approx(5 + 4 * 10 * 1.0 + 2 * 3 * 0.5 + 4 * 0.5)

    def test_how_often_it_validates_and_saves(self):
        assert validations(trainer(), 10, 100) == 10
        assert validations(trainer(check_val_every_n_epoch=4), 10, 100) == 2
        assert validations(trainer(val_check_interval=25), 10, 100) == 4
        assert validations(trainer(val_check_interval=0.5), 10, 100) == 20
        assert validations(trainer(limit_val_batches=0), 10, 100) == 0
        checkpoint = {"every_n_train_steps": None, "every_n_epochs": None, "monitor": None}
        assert saves(Namespace(**checkpoint), 10, 100) == 10
        assert saves(Namespace(**{**checkpoint, "monitor": "val/loss"}), 10, 100) == 20
        assert saves(Namespace(**{**checkpoint, "every_n_train_steps": 30}), 10, 100) == 3

    def test_devices(self):
        for devices, count in (("auto", 1), (4, 4), ("3", 3), ([0, 2], 2), ("0,1", 2)):
            assert device_count(trainer(devices=devices)) == count
        assert device_count(trainer(devices=8, num_nodes=2)) == 16


def test_the_command_shows_it(capsys):
    main(["-c", MATVIT, "--preset", "tiny", *SMALL, "--trainer.max_epochs=1"])
    shown = capsys.readouterr().out
    assert "data: DigitsData" in shown and "weights: random" in shown
    assert "updates" in shown and "time on this machine" in shown


def test_what_is_missing_is_listed_before_anything_runs(tmp_path, capsys):
    folder = str(RECIPES / "matformer" / "folder.yaml")
    wanted = ["--data.root", str(tmp_path / "no"), "--model.init_from", "no.safetensors"]
    with pytest.raises(ValueError, match="2 of the things that it reads cannot be had"):
        main(["-c", folder, *wanted])
    shown = capsys.readouterr().out
    assert f"missing: {tmp_path / 'no'} is not a folder" in shown
    assert "missing: model.init_from no.safetensors is not there" in shown


def test_batch_size_of_whatever_a_batch_is():
    x = torch.zeros(3, 2)
    assert batch_size(x) == batch_size((x, 1)) == batch_size({"a": {"b": x}}) == 3
