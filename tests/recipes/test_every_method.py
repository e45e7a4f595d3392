"""Every method's stage: killed and resumed it ends as if nothing had happened, on one process and
on two (DDP and FSDP2), and its checkpoint loads under weights_only.

A stage is added by a line in STAGES. (MatFormer's own draws are in test_resume and
test_distributed.) Run as a script, this file is `python -m recipes` with a witness that the
command line can name: Lightning starts the second process by running the script again.
"""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import json
import shutil
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch
from torch.distributed.tensor import DTensor

from recipes.cli import main

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STAGES = {
    # stage → further options; its `tiny` preset has several epochs of a few batches
    "vera/glue": ["--data.limit=80"],
    "vera/e2e": ["--data.limit=80"],
    "self_distillation/images_finetune": ["--data.per_class=20", "--model.method=mars"],
    "self_distillation/text_adapt": [],
}
FSDP2 = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 1,
        "save_distributed_checkpoint": False,
    },
}
STEPS, KILLED_AT, RESUMED_AT = 8, 5, 4
TRANSPORT_CRASHES = 2  # torch 2.13's gloo: see test_distributed


class Killed(Exception):
    """Stands for a power cut."""


class Witness(L.Callback):
    """Writes down what each process lost and ended with; kills the run at a step if told to."""

    def __init__(self, folder: str, kill_at: int | None = None):
        self.folder, self.kill_at = Path(folder), kill_at
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.kill_at:
            raise Killed

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_train_end(self, trainer, pl_module):
        weights = {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
            for name, value in pl_module.named_parameters()
        }
        sharded = any(isinstance(value, DTensor) for value in pl_module.parameters())
        record = {"losses": self.losses, "weights": weights, "sharded": sharded}
        torch.save(record, self.folder / f"rank{trainer.global_rank}.pt")


def arguments(stage, folder, *options, witness, kill_at=None):
    callback = {
        "class_path": f"{witness}.Witness",
        "init_args": {"folder": str(folder), "kill_at": kill_at},
    }
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "", "version": ""},
    }
    base = RECIPES / stage
    return [
        *("fit", "-c", f"{base}.yaml", "-c", f"{base}.tiny.yaml"),
        *STAGES[stage],
        "--trainer.max_epochs=-1",
        f"--trainer.max_steps={STEPS}",
        "--trainer.limit_val_batches=2",
        "--trainer.enable_progress_bar=false",
        "--trainer.log_every_n_steps=1",
        f"--trainer.callbacks+={json.dumps(callback)}",
        f"--trainer.logger={json.dumps(logger)}",
        f"--trainer.default_root_dir={folder}",
        f"--checkpoint.dirpath={folder}",
        "--checkpoint.every_n_epochs=null",
        "--checkpoint.every_n_train_steps=2",
        "--checkpoint.save_top_k=-1",
        *options,
    ]


def in_one_process(stage, folder, *options, kill_at=None):
    folder.mkdir()
    main(arguments(stage, folder, *options, witness=__name__, kill_at=kill_at))
    return torch.load(folder / "rank0.pt", weights_only=True)


def in_two_processes(stage, folder, strategy, *options):
    two = ["--trainer.devices=2", f"--trainer.strategy={strategy}"]
    args = arguments(stage, folder, *two, *options, witness="__main__")
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


@pytest.fixture
def threads(monkeypatch, scratch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return scratch


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_run_continues_as_if_nothing_had_happened(stage, tmp_path):
    whole = in_one_process(stage, tmp_path / "whole")
    assert len(set(whole["losses"])) == STEPS
    with pytest.raises(Killed):
        in_one_process(stage, tmp_path / "killed", kill_at=KILLED_AT)
    torch.manual_seed(12345)  # another process would not be where this one is
    last = f"--ckpt_path={tmp_path / 'killed' / 'last.ckpt'}"
    resumed = in_one_process(stage, tmp_path / "resumed", last)
    assert resumed["losses"] == whole["losses"][RESUMED_AT:]
    assert_same(resumed["weights"], whole["weights"])
    one, other = (
        torch.load(tmp_path / run / "last.ckpt", weights_only=True) for run in ("whole", "resumed")
    )
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(one[part], other[part])


@pytest.mark.parametrize("strategy", ["ddp", json.dumps(FSDP2)], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_agree_and_resume_to_the_bit(stage, strategy, threads):
    whole = in_two_processes(stage, threads / "whole", strategy)
    assert whole[0]["sharded"] == (strategy != "ddp")
    assert whole[0]["losses"] != whole[1]["losses"]  # each has data of its own
    assert_same(whole[0]["weights"], whole[1]["weights"])
    [checkpoint] = (threads / "whole").glob(f"*step={RESUMED_AT}.ckpt")
    resumed = in_two_processes(stage, threads / "resumed", strategy, f"--ckpt_path={checkpoint}")
    for before, after in zip(whole, resumed, strict=True):
        assert after["losses"] == before["losses"][RESUMED_AT:]
        assert_same(after["weights"], before["weights"])


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


if __name__ == "__main__":
    main()
