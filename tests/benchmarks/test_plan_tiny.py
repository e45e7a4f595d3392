"""The benchmark of predictions: its table from what its processes say, and the memory by hand."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import plan_tiny
from recipes import stopwatch
from recipes.cli import parse


class Wide(L.LightningModule):
    """One layer, whose activations and gradients are known in bytes."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 1024, bias=False)

    def training_step(self, batch, index):
        return self.layer(batch[0]).relu().sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0, momentum=0.9)


def test_the_largest_rise_is_that_of_one_step():
    peak = plan_tiny.Peak()
    data = DataLoader(TensorDataset(torch.ones(512, 256)), batch_size=32)
    trainer = L.Trainer(
        logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, callbacks=[peak], max_epochs=1,
    )  # fmt: skip
    with pytest.raises(stopwatch.Measured):
        trainer.fit(Wide(), data)
    weights, outputs = 4 * 256 * 1024, 4 * 32 * 1024
    # weights, momentum and the gradients of the step before; what the forward pass keeps
    assert 3 * weights + outputs <= peak.peak < 4.2 * weights + 4 * outputs


def test_the_table_is_made_of_what_the_processes_say(monkeypatch, capsys):
    said = {
        "plan": {"seconds": 12.0, "updates": 30, "memory": 2**20},
        "fit": {"seconds": 10.0, "updates": 30},
        "peak": {"peak": 2**21},
    }
    calls = []

    def child(kind, stage, preset):
        calls.append((kind, stage, preset))
        return said[kind]

    monkeypatch.setattr(plan_tiny, "child", child)
    plan_tiny.main(["--quick"])
    out = capsys.readouterr().out
    assert "1.200 (1.200–1.200) | 30 | 30 | 1.0 | 2.0 |" in out
    stage = "matformer/matvit --trainer.max_steps=30"
    assert calls == [(kind, stage, "tiny") for kind in ("plan", "fit", "peak")]


@pytest.mark.parametrize("stage", plan_tiny.STAGES)
def test_every_stage_parses(stage):
    name, *flags = stage.split()
    assert parse(f"{plan_tiny.ROOT}/recipes/{name}.yaml", "tiny", flags).trainer
