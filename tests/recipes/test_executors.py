"""Worker processes: what they see of the machine."""

import os
import time

import torch

from recipes.executors import LocalPool, Task, visible_gpus


def seen(seconds, on_progress):
    time.sleep(seconds)  # so that one process does not take both tasks
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_processes_get_the_gpus_in_turn(tmp_path):
    pool = LocalPool(2, threads=1, gpus=["3", "GPU-5"])
    try:
        tasks = [Task(seen, 4.0, tmp_path / f"{n}.log") for n in range(2)]
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
