"""The benchmark runs, and the multiply-adds and bytes it prints are those of the step."""

import re

import pytest
import torch

from benchmarks import vera_step
from benchmarks.vera_step import LORA_RANK, Case

CPU = torch.device("cpu")


def test_quick(capsys):
    vera_step.main(["--quick", "--repeats", "1", "--seconds", "0"])
    text = capsys.readouterr().out
    assert "`python -m benchmarks.vera_step --quick --repeats 1 --seconds 0` ·" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "64 tokens" in line]
    times, excesses, peaks = rows[:2], rows[2:6], rows[6:]
    assert [row[1] for row in times] == [row[1] for row in peaks] == ["32", "16"]
    assert [row[2] for row in excesses] == ["ours", "peft's"] * 2
    assert all(re.fullmatch(r"\d+\.\d{3} \(\d+\.\d{3}–\d+\.\d{3}\)", row[2]) for row in times)
    assert all(float(row[5]) < 1 for row in peaks)  # peft keeps x Aᵀ and its product by B


@pytest.mark.parametrize(("batch", "rank"), [(1, 8), (2, 32), (8, 16)])
def test_multiply_adds(batch, rank):
    """Beyond what the same base costs: query and value of two layers, 32 → 32."""
    case = Case(batch, 16, layers=2, hidden=32)
    models = {
        "lora": vera_step.lora(case),
        "peft": vera_step.peft_vera(case, rank),
        "ours": vera_step.our_vera(case, rank),
    }
    macs = {
        name: vera_step.macs_of(vera_step.training_step(model, case, CPU))[0]
        for name, model in models.items()
    }
    tokens, width = case.tokens, 32
    product = tokens * rank * width  # x Aᵀ; as many by B, and both once more backward
    # The first layer's input needs no gradient. Those of LoRA's A and B are two more products.
    peft = 2 * (3 + 4) * product
    lora = 2 * (5 + 6) * tokens * LORA_RANK * width
    delta = rank * width**2
    dense = delta + min(2 * product, tokens * width**2 + delta)
    # Mᵀ b, one vector by one matrix, is counted too; it decides nothing.
    ours = 2 * sum(
        factored if factored <= dense else dense + rank * width
        for factored in (3 * product, 4 * product)
    )
    assert macs["peft"] - macs["lora"] == peft - lora
    assert macs["ours"] - macs["lora"] == ours - lora


def test_peak_bytes():
    kept = torch.ones(250)  # 1,000 bytes that stand before

    def call():
        first = kept * 2
        second = first + 1
        del first
        return (second * 3).sum()

    peak, result = vera_step.peak_bytes(call, CPU)
    assert 2000 <= peak < 2200  # two at once, and a few scalars
    assert result == 250 * 9
    assert vera_step.peak_bytes(call, CPU)[0] == peak


def test_a_step_learns_and_leaves_no_gradient():
    case = Case(4, 16, layers=1, hidden=32)
    model = vera_step.our_vera(case, 8)
    step = vera_step.training_step(model, case, CPU)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved >= {"roberta.encoder.layer.0.attention.self.query.vera_b"}
    assert all(p.requires_grad for n, p in model.named_parameters() if n in moved)
    assert all(p.grad is None for p in model.parameters())


def test_models_that_train_other_numbers_are_refused(monkeypatch):
    monkeypatch.setattr(vera_step, "our_vera", lambda case, rank: vera_step.lora(case))
    with pytest.raises(RuntimeError, match="rank 32: ours trains"):
        vera_step.main(["--quick"])
