"""The benchmark runs, and its ratios are what it says they are."""

import re

import pytest

from benchmarks import matformer_latency


def test_quick(capsys):
    matformer_latency.main(["--quick"])
    text = capsys.readouterr().out
    assert "`python -m benchmarks.matformer_latency --quick` ·" in text and "torch" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if " batch 2 |" in line]
    assert [row[1] for row in rows] == ["S", "M", "L", "XL", "S", "M", "L", "XL", "mean"]
    ratios = [float(cell) for row in rows for cell in row if re.fullmatch(r"\d+\.\d{3}", cell)]
    assert len(ratios) == 4 * 2 + 5 * 4 and all(ratio > 0 for ratio in ratios)


def test_submodels_with_other_multiply_adds_are_refused(monkeypatch):
    counts = iter([100, 99])
    monkeypatch.setattr(matformer_latency, "count_macs", lambda *_: next(counts))
    with pytest.raises(RuntimeError, match="S: 100 multiply-adds, natively 99"):
        matformer_latency.main(["--quick"])
