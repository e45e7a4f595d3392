"""Two processes: the same draws, the same weights, the same numbers as one."""

import json
import subprocess
import sys

import pytest
import torch

from lightning_modules.matformer import MatViT, set_granularity
from lightning_modules.matformer.nest import GRANULARITIES, nesting_of
from recipes.cli import main
from tests.recipes import stage_runs
from tests.recipes.stage_runs import assert_same, logged, under_both_strategies

MATVIT = "matformer/matvit"
MODEL = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
NOISE = {"drop_path_rate": 0.2, "proj_drop_rate": 0.1, "pos_drop_rate": 0.1}
EPOCHS, BATCHES = 2, 5  # 1,298 images by 256
RESUMED_AT = 6  # steps: inside the second epoch


def images():
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(module):
    """Of every granularity; dropout is off."""
    module.eval()
    found = []
    for name in GRANULARITIES:
        set_granularity(module.model, name)
        found.append(module(images()))
    return torch.stack(found)


class Witness(stage_runs.Witness):
    """Writes down what each process drew, too."""

    def __init__(self, folder: str, kill_at: int | None = None):
        super().__init__(folder, kill_at)
        self.drawn: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.drawn.append(nesting_of(pl_module.model).layers[0].granularity)

    def record(self, trainer, pl_module):
        record = super().record(trainer, pl_module)
        return {**record, "drawn": self.drawn, "logits": logits(pl_module)}


def options(batch, noise=False):
    return [
        f"--model.model_args={json.dumps(MODEL | (NOISE if noise else {}))}",
        "--model.warmup_steps=2",
        "--model.weight_decay=1.0",  # so that an idle tail that moves is far off
        *("--data=datamodules.DigitsData", "--data.image_size=8", "--data.augmentation=light"),
        f"--data.batch_size={batch}",
        f"--trainer.max_epochs={EPOCHS}",
        f"--trainer.check_val_every_n_epoch={EPOCHS}",
    ]


def in_two_processes(folder, strategy, *overrides, noise=False):
    overrides = (*options(128, noise), *overrides)
    return stage_runs.in_two_processes(MATVIT, folder, strategy, *overrides, witness=Witness)


@under_both_strategies
def test_two_processes_agree_and_resume_to_the_bit(strategy, tmp_path):
    whole = in_two_processes(tmp_path / "whole", strategy, noise=True)
    assert whole[0]["sharded"] == (strategy != "ddp")
    assert len(whole[0]["drawn"]) == EPOCHS * BATCHES and set(whole[0]["drawn"]) == {0, 1, 2, 3}
    assert whole[0]["drawn"] == whole[1]["drawn"]
    assert whole[0]["losses"] != whole[1]["losses"]  # each has data of its own
    assert_same(whole[0]["weights"], whole[1]["weights"])

    [checkpoint] = (tmp_path / "whole").glob(f"*step={RESUMED_AT}.ckpt")
    resumed = in_two_processes(
        tmp_path / "resumed", strategy, f"--ckpt_path={checkpoint}", noise=True
    )
    for before, after in zip(whole, resumed, strict=True):
        assert after["drawn"] == before["drawn"][RESUMED_AT:]
        assert after["losses"] == before["losses"][RESUMED_AT:]
        assert_same(after["weights"], before["weights"])

    one, other = (
        torch.load(tmp_path / run / "last.ckpt", weights_only=True) for run in ("whole", "resumed")
    )
    assert_same(one["state_dict"], other["state_dict"])
    mine, theirs = (run["optimizer_states"][0]["state"] for run in (one, other))
    assert_same(mine, theirs)

    # a checkpoint of two processes is anyone's: here one process, and no strategy
    loaded = MatViT.load_from_checkpoint(tmp_path / "whole" / "last.ckpt", weights_only=True)
    torch.testing.assert_close(logits(loaded), whole[0]["logits"])

    # 499 images: one of the two processes has a padded batch, which must not count
    _, *validation = stage_runs.arguments(MATVIT, tmp_path / "alone", *options(128, noise=True))
    last = f"--ckpt_path={tmp_path / 'whole' / 'last.ckpt'}"
    metrics = main(["validate", *validation, last]).trainer.callback_metrics
    assert len(metrics) == 17
    *_, two = logged(tmp_path / "whole", "val/")
    for name, value in metrics.items():
        assert value.item() == pytest.approx(float(two[name]), abs=1e-5), name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same training in one process, with idle slices frozen and moving."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {
        policy: stage_runs.in_one_process(
            MATVIT, folder / policy, *options(256), f"--model.idle_tail={policy}", witness=Witness
        )
        for policy in ("frozen", "moving")
    }
    [checkpoint] = (folder / "frozen").glob(f"*step={RESUMED_AT}.ckpt")
    return {**runs, "checkpoint": checkpoint}


@under_both_strategies
def test_two_processes_compute_what_one_does(strategy, alone, tmp_path):
    """The same 256 images a step, the same clipping, the same idle slices left alone."""
    two, _ = in_two_processes(tmp_path / "two", strategy)
    frozen, moving = alone["frozen"], alone["moving"]
    assert two["drawn"] == frozen["drawn"]
    torch.testing.assert_close(two["logits"], frozen["logits"], atol=1e-3, rtol=1e-3)
    for name, tail in {
        "model.blocks.1.mlp.fc1.weight": (slice(8, None),),
        "model.blocks.1.mlp.fc2.weight": (slice(None), slice(8, None)),
    }.items():
        found, expected, moved = (run["weights"][name][tail] for run in (two, frozen, moving))
        assert (found - expected).abs().max() < 0.05 * (moved - expected).abs().max(), name

    last = f"--ckpt_path={alone['checkpoint']}"
    resumed, _ = in_two_processes(tmp_path / "resumed", strategy, last)
    assert resumed["drawn"] == frozen["drawn"][RESUMED_AT:]
    torch.testing.assert_close(resumed["logits"], frozen["logits"], atol=1e-3, rtol=1e-3)


def test_the_command_line_starts_the_second_process_itself(scratch, monkeypatch):
    """As other tests have it done for them: what comes out is the same."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    two = ["--trainer.devices=2", "--trainer.strategy=ddp", *options(128)]
    args = stage_runs.arguments(MATVIT, scratch, *two, witness=Witness)
    command = [sys.executable, "-m", "recipes", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "sync_dist" not in done.stderr  # Lightning's advice is for metrics that are not reduced
    for rank, expected in enumerate(in_two_processes(scratch / "forked", "ddp")):
        assert_same(torch.load(scratch / f"rank{rank}.pt", weights_only=True), expected)
