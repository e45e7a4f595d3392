"""The teacher is there while training runs, never changes, and leaves no trace.

Under DDP and FSDP2: tests/recipes/test_every_method.py.
"""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from callbacks.frozen_teacher import FrozenTeacher


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
        )


class Pupil(L.LightningModule):
    """Imitates its teacher; writes down what it finds of it."""

    def __init__(self):
        super().__init__()
        self.model = network(seed=1)
        self.teacher = None
        self.answers = []
        self.found = {}

    def build_teacher(self):
        return network(seed=0)

    def training_step(self, batch, batch_idx):
        assert self.training and not self.teacher.training  # Lightning has called train()
        answer = self.teacher(batch[0])
        assert not answer.requires_grad
        self.answers.append(answer)
        wrapped = self.trainer.strategy.model  # DistributedDataParallel where there are several
        self.found = {
            "parameters": len(list(wrapped.parameters())),
            "modules": [name for name, _ in wrapped.named_modules() if "teacher" in name],
            "state": [name for name in wrapped.state_dict() if "teacher" in name],
            "unchanged": same(self.teacher, network(seed=0)),
            "dtype": str(self.teacher[0].weight.dtype),
        }
        return F.mse_loss(self.model(batch[0]), answer)

    def validation_step(self, batch, batch_idx):
        assert self.teacher is not None and not self.teacher.training

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def same(one, other):
    return all(
        torch.equal(a, b)
        for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


def data():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=8)


def trainer(folder, callbacks=True, **settings):
    return L.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[FrozenTeacher()] if callbacks else [], **settings,
    )  # fmt: skip


STUDENT = len(list(network(0).parameters()))
TRACELESS = {
    "parameters": STUDENT,
    "modules": [],
    "state": [],
    "unchanged": True,
    "dtype": "torch.float32",
}


def test_it_teaches_and_leaves_no_trace(tmp_path):
    pupil = Pupil()
    before = pupil.state_dict().keys()
    runner = trainer(tmp_path, max_epochs=2)
    runner.fit(pupil, data(), data())
    assert pupil.found == TRACELESS
    assert pupil.teacher is None  # released
    checkpoint = torch.load(next(tmp_path.glob("**/*.ckpt")), weights_only=True)
    assert checkpoint["state_dict"].keys() == before == pupil.state_dict().keys()
    [optimizer] = checkpoint["optimizer_states"]
    assert len(optimizer["state"]) == STUDENT
    expected = network(seed=0).eval()(next(iter(data()))[0])
    for epoch in (0, 4):  # eval mode: no dropout, and statistics that stay as they are
        torch.testing.assert_close(pupil.answers[epoch], expected)


def test_a_resumed_run_has_the_same_teacher(tmp_path):
    torch.manual_seed(0)
    whole, start, rest = Pupil(), Pupil(), Pupil()
    for pupil in (whole, start, rest):
        pupil.model[3].p = 0.0
    trainer(tmp_path / "whole", max_epochs=3, enable_checkpointing=False).fit(whole, data())
    runner = trainer(tmp_path / "start", max_epochs=2)
    runner.fit(start, data())
    checkpoint = runner.checkpoint_callback.best_model_path
    trainer(tmp_path / "rest", max_epochs=3).fit(rest, data(), ckpt_path=checkpoint)
    assert len(rest.answers) == 4
    assert torch.equal(torch.stack(rest.answers), torch.stack(whole.answers[8:]))
    assert same(rest.model, whole.model) and not same(rest.model, start.model)


def test_the_teacher_has_the_trainers_precision(tmp_path):
    pupil = Pupil()
    trainer(tmp_path, max_steps=1, precision="64-true", enable_checkpointing=False).fit(
        pupil.double(), torch.utils.data.DataLoader(list(data().dataset), batch_size=8)
    )
    assert pupil.found["dtype"] == "torch.float64"


def test_it_is_released_when_training_breaks_off(tmp_path):
    class Breaking(Pupil):
        def training_step(self, batch, batch_idx):
            assert self.teacher is not None
            raise RuntimeError("power cut")

    pupil = Breaking()
    with pytest.raises(RuntimeError, match="power cut"):
        trainer(tmp_path, max_epochs=1).fit(pupil, data())
    assert pupil.teacher is None


def test_a_module_that_builds_no_teacher(tmp_path):
    class Untaught(L.LightningModule):
        def configure_optimizers(self):
            return None

        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ValueError, match=r"Untaught has no build_teacher\(\): remove FrozenTe"):
        trainer(tmp_path, max_epochs=1).fit(Untaught(), data())
