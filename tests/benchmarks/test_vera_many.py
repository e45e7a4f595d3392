"""The benchmark runs, and refuses candidates that do not compute the same."""

import contextlib

import pytest
import torch

from benchmarks import vera_many
from benchmarks.vera_step import Case
from lightning_modules.vera import Adapters

# peft would rather have A and B in each of the files than draw them again.
pytestmark = pytest.mark.filterwarnings("ignore:Specified to not (save|load) vera_A")

CPU = torch.device("cpu")
TINY = Case(3, 4, layers=2, hidden=32)


@pytest.fixture(autouse=True)
def three_rows(monkeypatch):
    monkeypatch.setattr(vera_many, "ROWS", 3)


def test_quick(capsys):
    vera_many.main(["--quick", "--repeats", "1", "--seconds", "0"])
    text = capsys.readouterr().out
    assert "`python -m benchmarks.vera_many --quick --repeats 1 --seconds 0` ·" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if " tokens |" in line]
    assert [row[:2] for row in rows] == [
        ["1 × 16 tokens", "32"],
        ["3 × 4 tokens", "32"],
        ["3 × 4 tokens", "32"],
        ["3 × 4 tokens", "16"],
    ]


@pytest.mark.parametrize("rank", [8, 16])
def test_multiply_adds(rank):
    row = vera_many.many(TINY, rank, [4], 1, 0, CPU)[0]
    tokens, width = TINY.tokens, 32
    linear = TINY.layers * 12 * width**2 * tokens
    attention = TINY.layers * 2 * tokens * 4 * width
    head = 3 * (width**2 + 2 * width)
    base = linear + attention + head
    adapters = TINY.layers * 2 * 2 * tokens * rank * width
    assert row[4] == "1.000"
    assert row[6] == f"{(base + adapters) / base:.3f}"


def test_rows_that_differ_from_peft(monkeypatch):
    """A batch through the base alone is fast, and wrong."""
    monkeypatch.setattr(Adapters, "rows", lambda self, names: contextlib.nullcontext())
    with pytest.raises(RuntimeError, match="rank 8, 4 tokens: the batch and peft disagree"):
        vera_many.many(TINY, 8, [4], 1, 0, CPU)


def test_a_merged_model_with_other_multiply_adds(monkeypatch):
    monkeypatch.setattr(vera_many, "merge", lambda model: model)
    with pytest.raises(RuntimeError, match="multiply-adds merged"):
        vera_many.merged(TINY, 8, 1, 0, CPU)
