"""A run that was killed and resumed equals the run that was not, to the bit.

Through the command line and the YAML, with everything random switched on: the order of the data,
augmentation, dropout, stochastic depth and the granularity of each step.
"""

import json

import pytest
import torch

from lightning_modules.matformer.nest import nesting_of
from tests.recipes import stage_runs
from tests.recipes.stage_runs import Killed, assert_same, in_one_process, logged

MODEL = {
    "img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2,
    "drop_path_rate": 0.2, "proj_drop_rate": 0.1, "pos_drop_rate": 0.1,
}  # fmt: skip
BATCHES = 5  # in an epoch: 1,298 images by 256
EPOCHS = 3


class Witness(stage_runs.Witness):
    """Writes down what every batch was and what came of it."""

    def __init__(self, folder: str, kill_at: int | None = None):
        super().__init__(folder, kill_at)
        self.seen: list[list] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        images, labels = batch
        layers = nesting_of(pl_module.model).layers
        drawn = [layer.granularity for layer in layers]
        numbers = (images.double().sum().item(), labels.double().std().item())
        self.seen.append([batch_idx, drawn, *numbers, outputs["loss"].item()])

    def record(self, trainer, pl_module):
        return {"seen": self.seen}


def fit(folder, *overrides, kill_at=None):
    """Run a stage; returns what it saw, its logged metrics by step, and its last checkpoint."""
    options = [
        f"--model.model_args={json.dumps(MODEL)}",
        "--model.warmup_steps=4",
        *("--data=datamodules.DigitsData", "--data.image_size=8", "--data.augmentation=light"),
        "--data.batch_size=256",
        f"--trainer.max_epochs={EPOCHS}",
        "--trainer.check_val_every_n_epoch=1",
        *overrides,
    ]
    record = in_one_process("matformer/matvit", folder, *options, witness=Witness, kill_at=kill_at)
    return record["seen"], logged(folder), torch.load(folder / "last.ckpt", weights_only=True)


EVERY_EPOCH = ["--checkpoint.every_n_train_steps=null", "--checkpoint.every_n_epochs=1"]
CASES = {
    # options, and the batches behind the last checkpoint of a run that is killed at its ninth
    "inside an epoch": ([], 8),
    "at the end of an epoch": (EVERY_EPOCH, 5),
    "with mixup": (["--data.mixup=0.5"], 8),
    "at the end of an epoch, under max_steps": (
        [
            *EVERY_EPOCH,
            "--trainer.max_epochs=-1",
            f"--trainer.max_steps={BATCHES * EPOCHS}",
            "--trainer.check_val_every_n_epoch=2",  # so that nothing validates at epoch 1's end
        ],
        5,
    ),
    # the epoch's five batches make three steps of 2, 2 and 1
    "with accumulated steps": (["--trainer.accumulate_grad_batches=2"], 7),
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
    assert any("val/accuracy_S" in row for row in metrics_later)
    assert resumed["global_step"] == whole["global_step"]
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(resumed[part], whole[part])
    if options == EVERY_EPOCH:
        with pytest.raises(ValueError, match="256 samples in an optimizer step and .* has 128"):
            fit(tmp_path / "other", *options, last, "--data.batch_size=128")
        with pytest.raises(ValueError, match="model.lr is 0.5, but the checkpoint's run had 0.00"):
            fit(tmp_path / "faster", *options, last, "--model.lr=0.5")


def test_a_run_that_max_steps_has_ended_inside_an_epoch_continues_there(tmp_path):
    """Lightning counts the epoch as complete: its other batches were left out without a word."""
    batches, _, whole = fit(tmp_path / "whole", *EVERY_EPOCH)
    first, _, _ = fit(tmp_path / "first", *EVERY_EPOCH, "--trainer.max_steps=8")
    last = f"--ckpt_path={tmp_path / 'first' / 'last.ckpt'}"
    later, _, resumed = fit(tmp_path / "resumed", *EVERY_EPOCH, last)
    assert len(first) == 8 and resumed["global_step"] == whole["global_step"]
    # the learning rates differ: the first run's schedule ended with its steps
    assert [seen[:-1] for seen in first + later] == [seen[:-1] for seen in batches]
