"""PELA's stage interrupted, and in two processes: the same as uninterrupted, and as one.

Run as a script, this file is `python -m recipes` with a witness that the YAML below can name:
Lightning starts the second process by running the script again.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import json
import shutil
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import timm
import torch
from torch.distributed.tensor import DTensor

from recipes.cli import main

PELA = Path(__file__).resolve().parents[2] / "recipes" / "pela"
MODEL = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
NOISE = {"drop_path_rate": 0.2, "proj_drop_rate": 0.1}
FSDP2 = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 1,
        "save_distributed_checkpoint": False,
    },
}
# torch 2.13's gloo segfaults now and then while sharded tensors are gathered, see
# test_distributed.py
TRANSPORT_CRASHES = 2
RESUMED_AT = 4  # of 2 · 5 batches: inside the first epoch


def teacher_weights():
    """Of the dense model: a teacher that any change of shows."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **MODEL)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.state_dict()


class Killed(Exception):
    """Stands for a power cut."""


class Witness(L.Callback):
    """Writes down what came of each batch, and kills the run at a batch if told to."""

    def __init__(self, folder: str, kill_at: int | None = None):
        self.folder, self.kill_at = Path(folder), kill_at
        self.losses: list[float] = []
        self.wrapped: list[str] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.kill_at:
            raise Killed

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        teacher = pl_module.teacher
        assert not teacher.training and not any(p.requires_grad for p in teacher.parameters())
        for name, value in teacher_weights().items():
            assert torch.equal(teacher.state_dict()[name], value), name
        # DistributedDataParallel, where there is one: its parameters are its buckets'
        held = {id(p) for p in trainer.strategy.model.parameters()}
        assert not held & {id(p) for p in teacher.parameters()}
        self.wrapped.append(type(trainer.strategy.model).__name__)

    def on_train_end(self, trainer, pl_module):
        parameters = dict(pl_module.named_parameters())
        weights = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            for name, value in parameters.items()
        }
        record = {
            "losses": self.losses,
            "weights": weights,
            "wrapped": self.wrapped[0],
            "sharded": any(isinstance(value, DTensor) for value in parameters.values()),
        }
        torch.save(record, self.folder / f"rank{trainer.global_rank}.pt")


def arguments(folder, dense, *overrides, batch, noise=True, witness=__name__, kill_at=None):
    callback = {
        "class_path": f"{witness}.Witness",
        "init_args": {"folder": str(folder), "kill_at": kill_at},
    }
    return [
        *("fit", "-c", str(PELA / "deit_b.yaml"), "-c", str(PELA / "deit_b.tiny.yaml")),
        f"--model.init_args.model_args={json.dumps(MODEL | (NOISE if noise else {}))}",
        f"--model.init_args.init_from={dense}",
        # forms of the losses whose gradients no other part could hide
        "--model.init_args.setting=paper",
        "--model.init_args.p=2.0",
        "--model.init_args.beta=1.0",
        "--model.init_args.warmup_steps=2",
        f"--data.init_args.batch_size={batch}",
        "--trainer.max_epochs=2",
        "--trainer.check_val_every_n_epoch=2",
        "--trainer.enable_progress_bar=false",
        "--trainer.logger=false",
        f"--trainer.callbacks+={json.dumps(callback)}",
        f"--trainer.default_root_dir={folder}",
        f"--checkpoint.dirpath={folder}",
        "--checkpoint.every_n_epochs=null",
        "--checkpoint.every_n_train_steps=2",
        "--checkpoint.save_top_k=-1",
        *overrides,
    ]


def in_one_process(folder, dense, *overrides, **settings):
    folder.mkdir()
    main(arguments(folder, dense, *overrides, batch=256, **settings))
    return torch.load(folder / "rank0.pt", weights_only=True)


def in_two_processes(folder, dense, strategy, *overrides, noise=True):
    two = ["--trainer.devices=2", f"--trainer.strategy={strategy}"]
    args = arguments(folder, dense, *two, *overrides, batch=128, noise=noise, witness="__main__")
    for _ in range(TRANSPORT_CRASHES + 1):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, __file__, *args], capture_output=True, text=True, timeout=240
        )
        if done.returncode >= 0 and "gloo/transport" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    file = tmp_path_factory.mktemp("dense") / "dense.pt"
    torch.save(teacher_weights(), file)
    return file


@pytest.fixture
def threads(monkeypatch, scratch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return scratch


def test_a_killed_run_continues_as_if_nothing_had_happened(dense, tmp_path):
    whole = in_one_process(tmp_path / "whole", dense)
    assert len(whole["losses"]) == 10
    with pytest.raises(Killed):
        in_one_process(tmp_path / "killed", dense, kill_at=RESUMED_AT + 1)
    torch.manual_seed(12345)  # another process would not be where this one is
    last = f"--ckpt_path={tmp_path / 'killed' / 'last.ckpt'}"
    resumed = in_one_process(tmp_path / "resumed", dense, last)
    assert resumed["losses"] == whole["losses"][RESUMED_AT:]
    assert_equal(resumed["weights"], whole["weights"])
    one, other = (
        torch.load(tmp_path / run / "last.ckpt", weights_only=True) for run in ("whole", "resumed")
    )
    assert one["hyper_parameters"] == other["hyper_parameters"]
    for mine, theirs in zip(
        one["optimizer_states"][0]["state"].values(),
        other["optimizer_states"][0]["state"].values(),
        strict=True,
    ):
        assert_equal(mine, theirs)


def test_resuming_at_another_ratio_is_refused(dense, tmp_path):
    with pytest.raises(Killed):
        in_one_process(tmp_path / "killed", dense, kill_at=RESUMED_AT + 1)
    last = f"--ckpt_path={tmp_path / 'killed' / 'last.ckpt'}"
    with pytest.raises(ValueError, match="another model: its ratio is 2.0, this run's is 3.0"):
        in_one_process(tmp_path / "resumed", dense, last, "--model.init_args.ratio=3.0")


@pytest.fixture(scope="module")
def alone(dense, tmp_path_factory):
    """The same training in one process, without noise that each process would draw for itself."""
    return in_one_process(tmp_path_factory.mktemp("alone") / "run", dense, noise=False)


@pytest.mark.parametrize("strategy", ["ddp", json.dumps(FSDP2)], ids=["ddp", "fsdp2"])
def test_two_processes_compute_what_one_does(strategy, alone, dense, threads):
    two, other = in_two_processes(threads / "two", dense, strategy, noise=False)
    assert two["sharded"] == (strategy != "ddp")
    if strategy == "ddp":
        assert two["wrapped"] == "DistributedDataParallel"
    assert two["losses"] != other["losses"]  # each has data of its own
    assert_equal(two["weights"], other["weights"])
    for name, value in alone["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, atol=1e-3, rtol=1e-3, msg=name)
    mean = (torch.tensor(two["losses"]) + torch.tensor(other["losses"])) / 2
    torch.testing.assert_close(mean, torch.tensor(alone["losses"]), atol=1e-4, rtol=1e-4)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


if __name__ == "__main__":
    main()
