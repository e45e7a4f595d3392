"""The benchmark runs; what it compares is what it says."""

import re

import pytest
import torch

from benchmarks import pela_speed
from lightning_modules.counting import count_parameters


def test_quick(capsys, monkeypatch):
    monkeypatch.setattr(pela_speed, "peak_memory", lambda name, *_: 2 if "low" in name else 4)
    monkeypatch.setattr(pela_speed.Case, "build", small(pela_speed.Case.build))
    pela_speed.main(["--quick"])
    text = capsys.readouterr().out
    assert "`python -m benchmarks.pela_speed --quick` ·" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "| vit_tiny" in line]
    assert len(rows) == 4 + len(pela_speed.SYSTEMS) + 1
    assert [row[1] for row in rows[:4]] == 2 * ["the paper's", "multiples of 16"]
    assert float(rows[0][3]) < float(rows[1][3])  # ranks are rounded down
    for row in rows[:4]:
        expected, found, share = map(float, row[3:6])
        assert share == pytest.approx(found / expected, abs=2e-3)
        assert row[6] == ("met" if found >= 0.9 * expected else "missed")
    assert [row[6] for row in rows[4:8]] == ["1.000", "1.000", "0.500", "0.500"]
    assert all(re.fullmatch(r"\d+\.\d{3}", row[3]) for row in rows[4:8])
    assert rows[-1][1] == "48"


def small(build):
    """Few layers are enough to see that it runs."""

    def built(self, *arguments):
        self.model_args["depth"] = 1
        return build(self, *arguments)

    return built


def test_lora_is_on_the_layers_that_pela_factorises():
    case, device = pela_speed.QUICK, torch.device("cpu")
    sizes = {name: pela_speed.system(name, case, device) for name in pela_speed.SYSTEMS}
    dense, _, low_rank, _ = map(count_parameters, sizes.values())
    assert low_rank < dense
    for name in ("dense, LoRA", "low-rank, LoRA"):
        trained = {n for n, p in sizes[name].named_parameters() if p.requires_grad}
        assert all("lora_" in n or "modules_to_save" in n for n in trained)
        wrapped = {n.split("blocks.0.")[1].split(".lora")[0] for n in trained if "blocks.0" in n}
        layers = {"attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"}
        parts = {f"{n}.{p}" for n in layers for p in "uv"} if name.startswith("low") else layers
        assert wrapped == parts


def test_peak_memory_sees_the_optimizers_state():
    case, device = pela_speed.Case("vit_tiny_patch16_224", 1), torch.device("cpu")
    weights = 4 * count_parameters(case.build(False, device))
    peak = pela_speed.peak_memory("dense, all weights", case, device)
    assert 4 * weights < peak < 40 * weights  # weight, gradient and two moments; activations
