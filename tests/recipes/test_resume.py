"""A run that was killed and resumed equals the run that was not, to the bit.

Through the command line and the YAML, with everything random switched on: the order of the data,
augmentation, dropout, stochastic depth and the granularity of each step.
"""

import csv
import json
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_modules.matformer.nest import nesting_of
from recipes.cli import main

MATFORMER = Path(__file__).resolve().parents[2] / "recipes" / "matformer"
MODEL = {
    "img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2,
    "drop_path_rate": 0.2, "proj_drop_rate": 0.1, "pos_drop_rate": 0.1,
}  # fmt: skip
BATCHES = 5  # in an epoch: 1,298 images by 256
EPOCHS = 3


class Killed(Exception):
    """Stands for a power cut."""


class Witness(L.Callback):
    """Sees what every batch was and what came of it, and kills the run at a batch if told to."""

    def __init__(self, kill_at: int | None = None):
        self.kill_at = kill_at
        self.seen: list[tuple] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.kill_at:
            raise Killed

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        images, labels = batch
        layers = nesting_of(pl_module.model).layers
        drawn = [layer.granularity for layer in layers]
        numbers = (images.double().sum().item(), labels.double().std().item())
        self.seen.append((batch_idx, drawn, *numbers, outputs["loss"].item()))


def fit(folder: Path, *overrides: str, kill_at: int | None = None):
    """Run a stage; returns what it saw, its logged metrics by step, and its last checkpoint."""
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "", "version": ""},
    }
    witness = {"class_path": f"{__name__}.Witness", "init_args": {"kill_at": kill_at}}
    trainer = main(
        [
            "fit",
            *("-c", str(MATFORMER / "matvit.yaml"), "-c", str(MATFORMER / "matvit.tiny.yaml")),
            f"--model.init_args.model_args={json.dumps(MODEL)}",
            "--model.init_args.warmup_steps=4",
            "--data.init_args.batch_size=256",
            f"--trainer.max_epochs={EPOCHS}",
            "--trainer.check_val_every_n_epoch=1",
            "--trainer.log_every_n_steps=1",
            "--trainer.enable_progress_bar=false",
            f"--trainer.callbacks+={json.dumps(witness)}",
            f"--trainer.logger={json.dumps(logger)}",
            f"--trainer.default_root_dir={folder}",
            f"--checkpoint.dirpath={folder}",
            *overrides,
        ]
    ).trainer
    [witness] = [one for one in trainer.callbacks if isinstance(one, Witness)]
    with (folder / "metrics.csv").open(newline="") as rows:
        metrics = list(csv.DictReader(rows))
    return witness.seen, metrics, torch.load(folder / "last.ckpt", weights_only=True)


EVERY_2_STEPS = ["--checkpoint.every_n_epochs=null", "--checkpoint.every_n_train_steps=2"]
CASES = {
    # options, and the batches behind the last checkpoint of a run that is killed at its ninth
    "inside an epoch": (EVERY_2_STEPS, 8),
    "at the end of an epoch": ([], 5),
    "with mixup": ([*EVERY_2_STEPS, "--data.init_args.mixup=0.5"], 8),
    # the epoch's five batches make three steps of 2, 2 and 1
    "with accumulated steps": ([*EVERY_2_STEPS, "--trainer.accumulate_grad_batches=2"], 7),
}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_continues_as_if_nothing_had_happened(case, tmp_path):
    options, resumed_at = CASES[case]
    seen, metrics, whole = fit(tmp_path / "whole", *options)
    assert len(seen) == BATCHES * EPOCHS and len({str(drawn) for _, drawn, *_ in seen}) == 4

    with pytest.raises(Killed):
        fit(tmp_path / "killed", *options, kill_at=8)
    torch.manual_seed(12345)  # another process would not be where this one is
    last = f"--ckpt_path={tmp_path / 'killed' / 'last.ckpt'}"
    seen_later, metrics_later, resumed = fit(tmp_path / "resumed", *options, last)

    assert seen_later == seen[resumed_at:]
    assert metrics_later == metrics[-len(metrics_later) :]
    assert any(row["val/accuracy_S"] for row in metrics_later)
    assert resumed["global_step"] == whole["global_step"]
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(resumed[part], whole[part])


def assert_same(one, other):
    """Equal to the bit, through dicts and lists."""
    if torch.is_tensor(one):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other
