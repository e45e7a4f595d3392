"""Curves of a single stage: CSV and TensorBoard, early stopping and the learning rate by flags."""

import csv

import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from recipes import cli
from tests.recipes.stage_runs import RECIPES


class WithoutFolder(DummyLogger):
    """Says "." of its folder, as that of Weights & Biases does."""

    save_dir = "."


def fit(folder, *options):
    """A few epochs of MatViT on digits."""
    cli.main(
        [
            *("fit", "-c", str(RECIPES / "matformer" / "matvit.yaml"), "--preset", "tiny"),
            *("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"),
            *("--trainer.check_val_every_n_epoch=1", "--trainer.log_every_n_steps=1"),
            *(f"--trainer.default_root_dir={folder}", f"--checkpoint.dirpath={folder}"),
            *("--trainer.enable_progress_bar=false", *options),
        ]
    )


def test_a_table_always_and_tensorboard_beside_it(tmp_path):
    fit(tmp_path, "--trainer.max_epochs=2")
    fit(tmp_path, "--trainer.max_epochs=1")
    for version in (0, 1):
        [logs] = [tmp_path / "lightning_logs" / f"version_{version}"]
        assert (logs / "metrics.csv").is_file()
        assert len(list(logs.glob("events.out.tfevents.*"))) == 1


def test_a_logger_that_is_named_is_the_only_one(tmp_path):
    fit(tmp_path, "--trainer.max_epochs=1", "--trainer.logger=CSVLogger",
        f"--trainer.logger.save_dir={tmp_path}", "--trainer.logger.name=own")  # fmt: skip
    assert (tmp_path / "own" / "version_0" / "metrics.csv").is_file()
    assert not (tmp_path / "lightning_logs").exists()


@pytest.mark.parametrize("logger", ["false", f"{__name__}.WithoutFolder"])
def test_without_a_log_the_settings_lie_beside_the_checkpoints(scratch, logger):
    """Lightning's own callback writes config.yaml into the current folder then."""
    flags = ["--trainer.max_epochs=1", f"--trainer.logger={logger}"]
    flags.append("--trainer.default_root_dir=null")
    fit("run", *flags, "--checkpoint.dirpath=run")
    assert sorted(path.name for path in scratch.iterdir()) == ["run"]
    assert (scratch / "run" / "config.yaml").is_file()
    fit("run", *flags, "--checkpoint.dirpath=null")
    assert (scratch / "checkpoints" / "config.yaml").is_file()
    assert sorted(path.name for path in scratch.iterdir()) == ["checkpoints", "run"]


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_scoring_without_a_log_leaves_nothing_behind(scratch, verb):
    """Before, it wrote checkpoints/config.yaml, or over that of a training in this folder."""
    cli.main(
        [
            *(verb, "-c", str(RECIPES / "matformer" / "matvit.yaml"), "--preset", "tiny"),
            *("--trainer.limit_val_batches=1", "--trainer.limit_test_batches=1"),
            *("--trainer.enable_progress_bar=false", "--trainer.logger=false"),
        ]
    )
    assert not list(scratch.iterdir())


def test_early_stopping_and_the_learning_rate_by_flags(tmp_path):
    fit(tmp_path, "--trainer.max_epochs=30",
        "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/accuracy",
        "--trainer.callbacks.mode=max",
        "--trainer.callbacks.patience=1", "--trainer.callbacks.min_delta=100",
        "--trainer.callbacks+=LearningRateMonitor")  # fmt: skip
    file = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    rows = list(csv.DictReader(file.open()))
    epochs = {int(row["epoch"]) for row in rows if row.get("epoch")}
    assert max(epochs) == 1  # no accuracy rises by 100: it stops after two epochs
    assert any(row.get("lr-AdamW/pg1") or row.get("lr-AdamW") for row in rows)
