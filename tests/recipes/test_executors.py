"""Worker processes: what they see of the machine."""

import os
import signal
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException

from recipes.executors import LocalPool, Task, sigterm_raises, visible_gpus


def seen(begun, on_progress):
    (begun / str(os.getpid())).touch()
    while len(list(begun.iterdir())) < 2:  # so that one process does not take both tasks
        time.sleep(0.05)
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_processes_get_the_gpus_in_turn(tmp_path):
    pool = LocalPool(2, threads=1, gpus=["3", "GPU-5"])
    try:
        (begun := tmp_path / "begun").mkdir()
        tasks = [Task(seen, begun, tmp_path / f"{n}.log") for n in range(2)]
        futures = [pool.submit(task, lambda text: None) for task in tasks]
        assert {future.result(timeout=120) for future in futures} == {"3", "GPU-5"}
    finally:
        pool.stop()


def test_names_of_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert visible_gpus() == ["4", "7"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert visible_gpus() == []


def test_sigterm_ends_a_training_after_its_step(tmp_path):
    """Not within it, where a checkpoint may be half written."""
    begun, ended = [], []

    class Kill(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            begun.append(batch_idx)
            os.kill(os.getpid(), signal.SIGTERM)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            ended.append(batch_idx)

    trainer = L.Trainer(
        max_steps=3, accelerator="cpu", logger=False, callbacks=[Kill()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    with sigterm_raises(), pytest.raises(SIGTERMException):
        trainer.fit(BoringModel())
    assert begun == ended == [0]
