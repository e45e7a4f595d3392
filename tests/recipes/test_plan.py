"""What a stage will take: counts against a real run, memory by hand, time by its formula."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from recipes import cli, stopwatch
from recipes import plan as planning
from recipes.plan import device_count, main, plan, sanity, saves, validations
from recipes.stopwatch import StageProfile, Stopwatch, batch_size, limited

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
MATVIT = str(RECIPES / "matformer" / "matvit.yaml")
MODEL = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
SMALL = [f"--model.model_args={json.dumps(MODEL)}", "--data.batch_size=64", "--data.classes=[3,5]"]


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(stopwatch, "QUICK", 0.0)
    monkeypatch.setattr(stopwatch, "EPOCHS", 1)


def trainer(**changes):
    settings = {
        "val_check_interval": None, "check_val_every_n_epoch": 1, "limit_val_batches": None,
        "accumulate_grad_batches": 1, "devices": "auto", "accelerator": "cpu", "num_nodes": 1,
        "limit_train_batches": None, "num_sanity_val_steps": None,
    }  # fmt: skip
    return Namespace(**{**settings, **changes})


class Falling(L.LightningModule):
    """Learns nothing, with a loss that falls all the same; each part takes the seconds given.

    They pass on its own clock, `now`, which a busy machine does not slow down.
    """

    def __init__(self, seconds=None):
        super().__init__()
        self.layer, self.seconds, self.now = torch.nn.Linear(1, 1), seconds or {}, 0.0

    @staticmethod
    def data(count):
        return DataLoader(TensorDataset(torch.ones(count, 1)), batch_size=2)

    def spend(self, part):
        self.now += self.seconds.get(part, 0)

    def training_step(self, batch, index):
        self.spend("step")
        return self.layer(batch[0]).sum()

    def validation_step(self, batch, index):
        self.spend("evaluation")
        if index == 0:
            self.spend("start of workers")
        self.log("loss", -float(self.current_epoch), batch_size=2)

    def on_validation_epoch_end(self):
        self.spend("validation")

    def on_train_epoch_end(self):
        self.spend("epoch")

    def on_save_checkpoint(self, checkpoint):
        self.spend("save")

    def on_fit_start(self):
        self.spend("setup")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


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
        assert made.profile.examples == len(run.datamodule.train_set)
        assert made.profile.batches == run.trainer.num_training_batches
        assert made.profile.evaluations == len(run.datamodule.val_set) / 500
        parameters = list(run.model.parameters())
        assert made.profile.parameters == (sum(p.numel() for p in parameters),) * 2
        states = run.trainer.optimizers[0].state.values()
        moments = sum(value.nbytes for state in states for value in state.values())
        assert made.memory["moments"] == moments > 0
        assert made.memory["weights"] == made.memory["gradients"]
        size = (tmp_path / "last.ckpt").stat().st_size
        assert made.profile.checkpoint == pytest.approx(size, rel=0.02)
        assert not made.extrapolated
        # a validation at the end of an epoch that is none of 32 is not due
        assert made.seconds["validation"] == 0
        parts = ("preparation", "training steps", "checkpoints")
        assert all(made.seconds[part] > 0 for part in parts)
        assert made.total == sum(made.seconds.values())

    def test_max_steps_end_it_and_a_long_batch_is_extrapolated(self, monkeypatch):
        monkeypatch.setattr(planning, "LONG", 0.0)
        settings = [*SMALL, "--trainer.max_steps=7", "--trainer.max_epochs=50"]
        made = plan(MATVIT, "tiny", settings)
        assert made.extrapolated and made.profile.batch == planning.SMALL
        assert made.updates == 7 and made.effective_batch == 64
        assert made.epochs == pytest.approx(7 / (made.profile.examples // 64))
        longest = 7 * 8 * made.profile.step  # if none of a step were independent of the batch
        assert 0 < made.seconds["training steps"] <= longest + 1e-9
        assert made.memory["activations"] == 8 * made.profile.memory["activations"]

    @pytest.mark.parametrize(
        ("fixed", "example", "sizes"),
        [(0.4, 0.02, [8, 32]), (0.05, 0.07, [8, 32]), (1.5, 0.1, [8, 2]), (0.05, 0.05, [8, 64])],
    )
    def test_what_does_not_depend_on_the_batch_is_not_scaled(
        self, monkeypatch, fixed, example, sizes
    ):
        """PELA's L_rwp takes as long for 8 examples as for 64."""
        asked = []

        def measure(path, preset, overrides, folder, batch=64):
            asked.append(batch)
            return StageProfile(examples=640, batches=640 // batch, batch=batch,
                                step=fixed + example * batch,
                                memory={"activations": batch})  # fmt: skip

        monkeypatch.setattr(planning, "measure", measure)
        made = plan(MATVIT, "tiny", [*SMALL, "--trainer.max_epochs=1"])
        assert asked == sizes
        assert made.seconds["training steps"] == pytest.approx(10 * (fixed + 64 * example))
        assert made.memory["activations"] == 64 and made.extrapolated == (sizes[-1] != 64)

    def test_a_larger_batch_that_seems_faster_is_noise(self, monkeypatch):
        """0.9 s for 8 examples and 0.8 s for 32: none of it is scaled."""
        steps = {8: 0.9, 32: 0.8}

        def measure(path, preset, overrides, folder, batch=64):
            return StageProfile(examples=640, batches=640 // batch, batch=batch, step=steps[batch],
                                memory={"activations": batch})  # fmt: skip

        monkeypatch.setattr(planning, "measure", measure)
        made = plan(MATVIT, "tiny", [*SMALL, "--trainer.max_epochs=1"])
        assert made.seconds["training steps"] == pytest.approx(10 * 0.8)

    def test_only_what_trains_has_gradients_and_moments(self):
        made = plan(str(RECIPES / "vera" / "images.yaml"), "tiny", ["--data.batch_size=8"])
        total, trained = made.profile.parameters
        memory = made.memory
        assert 0 < trained < total
        assert memory["weights"] == 4 * total and memory["gradients"] == 4 * trained
        assert 8 * trained <= memory["moments"] < 9 * trained + 400

    def test_multiply_adds_of_the_full_model(self):
        """By hand: patches; of 5 tokens qkv, products, projection, two layers; and the head."""
        settings = [*SMALL, "--model.fractions=null", "--trainer.callbacks=null"]
        made = plan(MATVIT, "tiny", settings)
        tokens, width = 5, 16
        block = tokens * width * (3 * width + width + 8 * width) + 2 * tokens**2 * width
        assert made.profile.macs == 4 * 3 * 64 * width + block + 2 * width


def test_the_profile_has_the_seconds_that_each_part_took(tmp_path, monkeypatch):
    """A run of another length is then the sum of them."""
    seconds = {
        "setup": 0.3, "step": 0.02, "epoch": 0.05, "evaluation": 0.04, "validation": 0.06,
        "save": 0.07,
    }  # fmt: skip
    falling = Falling({**seconds, "start of workers": 0.11})
    monkeypatch.setattr(stopwatch, "clock", lambda: falling.now)
    watch = Stopwatch(tmp_path, None, None)
    fitting = L.Trainer(
        max_epochs=9, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, accelerator="cpu", limit_train_batches=8, limit_val_batches=3,
        callbacks=[ModelCheckpoint(tmp_path, save_last=True), watch],
    )  # fmt: skip
    with pytest.raises(stopwatch.Measured):
        fitting.fit(falling, Falling.data(40), Falling.data(19))
    profile = watch.profile
    assert (profile.examples, profile.batches, profile.batch) == (40, 20, 2)
    assert profile.evaluations == 9.5
    seconds["validation"] += 0.11  # once a validation, in its first batch
    assert {part: getattr(profile, part) for part in seconds} == pytest.approx(seconds)


def test_limits_are_a_number_or_a_share():
    assert [limited(20, limit) for limit in (None, 3, 30, 0.5, 1.0)] == [20, 3, 20, 10, 20]


class TestTime:
    def test_is_the_sum_of_its_parts(self, monkeypatch):
        profile = StageProfile(
            examples=640, batches=10, batch=64, evaluations=3.0, setup=5.0, step=2.0, epoch=0.25,
            evaluation=1.0, validation=0.5, save=0.125, parameters=(1, 1),
            memory={"activations": 0},
        )  # fmt: skip
        monkeypatch.setattr(planning, "measure", lambda *_: profile)
        monkeypatch.setattr(planning, "LONG", 60.0)
        settings = [*SMALL, "--trainer.max_epochs=4", "--trainer.check_val_every_n_epoch=2"]
        made = plan(MATVIT, "tiny", settings, start=7.0)
        assert made.seconds == {
            "start of Python": 7.0,
            "preparation": 5.0 + 2 * 1.0 + 0.5,
            "training steps": 4 * 10 * 2.0,
            "around epochs": 4 * 0.25,
            "validation": 2 * (3 * 1.0 + 0.5),
            "checkpoints": 4 * 2 * 0.125,
        }
        twice = plan(MATVIT, "tiny", [*settings, "--trainer.devices=2"])
        assert twice.effective_batch == 128 and twice.updates == made.updates / 2
        assert twice.seconds["training steps"] == 4 * 5 * 2.0
        assert twice.seconds["validation"] == 2 * (1.5 * 1.0 + 0.5)
        few = plan(MATVIT, "tiny", [*settings, "--trainer.limit_train_batches=3"])
        assert few.updates == 40  # the profile's number of batches is limited already
        few = plan(
            MATVIT, "tiny", [*settings, "--trainer.limit_train_batches=3", "--trainer.devices=2"]
        )
        assert few.updates == 12

    def test_how_often_it_validates(self):
        assert validations(trainer(), 10, 100) == 10
        assert validations(trainer(check_val_every_n_epoch=4), 10, 100) == 2
        assert validations(trainer(val_check_interval=25), 10, 100) == 4
        assert validations(trainer(val_check_interval=0.5), 10, 100) == 20
        assert validations(trainer(limit_val_batches=0), 10, 100) == 0
        assert sanity(trainer()) == 2 and sanity(trainer(num_sanity_val_steps=0)) == 0

    @pytest.mark.parametrize(
        ("settings", "times", "count"),
        [
            ({}, {}, 2 * 4),
            ({"monitor": "loss"}, {}, 2 * 4),
            ({"save_top_k": 0}, {}, 1),
            ({"save_top_k": 0, "every_n_train_steps": 3}, {}, 2),
            ({"every_n_epochs": 2}, {}, 2 * 2),
            ({"every_n_train_steps": 3}, {}, 2 * 2),
            ({"save_on_train_epoch_end": False}, {"check_val_every_n_epoch": 2}, 2 * 2),
            ({"save_on_train_epoch_end": False}, {"check_val_every_n_epoch": 5}, 1),
            (
                {"save_on_train_epoch_end": False, "every_n_epochs": 2},
                {"check_val_every_n_epoch": 3},
                1,
            ),
            ({"save_on_train_epoch_end": True}, {"check_val_every_n_epoch": 2}, 2 * 4),
        ],
    )
    def test_how_often_it_saves_is_what_lightning_does(
        self, tmp_path, monkeypatch, settings, times, count
    ):
        """Four epochs of two steps, each with a lower loss."""
        saved = []
        monkeypatch.setattr(L.Trainer, "save_checkpoint", lambda self, path, *_: saved.append(path))
        checkpoint = ModelCheckpoint(**{"dirpath": tmp_path, "save_last": True, **settings})
        fitting = L.Trainer(
            max_epochs=4, logger=False, callbacks=[checkpoint], enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, accelerator="cpu", **times,
        )  # fmt: skip
        fitting.fit(Falling(), Falling.data(4), Falling.data(2))
        assert len(saved) == count
        defaults = {
            "save_top_k": 1, "save_last": True, "every_n_epochs": None, "monitor": None,
            "every_n_train_steps": None, "save_on_train_epoch_end": None,
        }  # fmt: skip
        assert saves(Namespace(**{**defaults, **settings}), trainer(**times), 4, 8) == count

    def test_it_saves_after_epochs_without_validation_too(self):
        """As `cli.RecipeCLI` has it; tests/recipes/test_cli.py counts the files."""
        sparse = trainer(check_val_every_n_epoch=2)
        usual = {"every_n_epochs": None, "every_n_train_steps": None}
        usual |= {"save_top_k": 1, "save_last": True, "save_on_train_epoch_end": None}
        assert saves(Namespace(**usual, monitor=None), sparse, 4, 8) == 2 * 4
        assert saves(Namespace(**usual, monitor="loss"), sparse, 4, 8) == 2 + 4

    def test_devices(self):
        for devices, count in (("auto", 1), (4, 4), ("3", 3), ([0, 2], 2), ("0,1", 2)):
            assert device_count(trainer(devices=devices)) == count
        assert device_count(trainer(devices=8, num_nodes=2)) == 16


def test_the_command_shows_it(capsys):
    main(["-c", MATVIT, "--preset", "tiny", *SMALL, "--trainer.max_epochs=1"])
    shown = capsys.readouterr().out
    assert "data: PairedDigitsData" in shown and "weights: random" in shown
    assert "updates" in shown and "time on this machine" in shown


def test_what_is_missing_is_listed_before_anything_runs(tmp_path, capsys):
    folder = str(RECIPES / "matformer" / "folder.yaml")
    wanted = ["--data.root", str(tmp_path / "no"), "--model.init_from", "no.safetensors"]
    with pytest.raises(ValueError, match="2 inputs of the stage are missing"):
        main(["-c", folder, *wanted])
    shown = capsys.readouterr().out
    assert f"missing: {tmp_path / 'no'} is not a folder" in shown
    assert "missing: model.init_from no.safetensors is not there" in shown


def test_batch_size_of_whatever_a_batch_is():
    x = torch.zeros(3, 2)
    assert batch_size(x) == batch_size((x, 1)) == batch_size({"a": {"b": x}}) == 3
