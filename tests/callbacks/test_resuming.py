"""What a run that goes on must have in common with the one before; see also test_resume.py."""

import cpu_torchvision  # noqa: F401

from types import SimpleNamespace

import pytest
from lightning.pytorch.trainer.states import TrainerFn

from callbacks.resuming import Resuming

MODULE = SimpleNamespace(hparams={})


def trainer(batch_size, devices=1, accumulated=1, doing=TrainerFn.FITTING):
    return SimpleNamespace(
        datamodule=SimpleNamespace(batch_size=batch_size), world_size=devices,
        accumulate_grad_batches=accumulated, state=SimpleNamespace(fn=doing),
    )  # fmt: skip


def test_the_samples_of_a_step_are_those_of_all_devices_and_batches():
    checkpoint = {}
    Resuming().on_save_checkpoint(trainer(4, 2, 3), MODULE, checkpoint)
    for same in (trainer(24), trainer(8, 3), trainer(6, 1, 4)):
        Resuming().on_load_checkpoint(same, MODULE, checkpoint)
    for other in (trainer(4), trainer(4, 2), trainer(4, 1, 3)):
        with pytest.raises(ValueError, match="had 24 samples in an optimizer step and this run"):
            Resuming().on_load_checkpoint(other, MODULE, checkpoint)


def test_what_does_not_train_on_or_does_not_tell_is_let_through():
    checkpoint = {"samples_per_step": 24}
    Resuming().on_load_checkpoint(trainer(4, doing=TrainerFn.VALIDATING), MODULE, checkpoint)
    Resuming().on_load_checkpoint(trainer(None), MODULE, checkpoint)
    Resuming().on_load_checkpoint(trainer(4), MODULE, {})  # of before this was saved
