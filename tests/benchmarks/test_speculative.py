"""The benchmark of speculative decoding compares what it says, and refuses a text that differs."""

import cpu_torchvision  # noqa: F401

import pytest
import torch

from benchmarks import speculative


def test_quick_compares_every_kind_of_draft(capsys):
    rows = speculative.main(["--quick", "--draft-tokens", "2", "--layers", "2"])
    names = [row[0] for row in rows]
    assert names[:2] == ["XL alone", "XL alone, transformers"]
    for part in ("shared cache", "caches apart", "assisted generation", "first 2 layers"):
        assert any(part in name for name in names)
    for name, speedup, predicted, acceptance, cost, _, same in rows:
        assert float(speedup) > 0 and same == "yes"
        assert (cost != "") == ("k = 2" in name)
        assert (acceptance != "") == (predicted != "")
    assert "python -m benchmarks.speculative --quick" in capsys.readouterr().out


def test_a_text_that_differs_stops_it(monkeypatch):
    def other(model, ids, draft, *args, **kwargs):
        return torch.zeros(1, 24, dtype=torch.long) + (draft is not None)

    monkeypatch.setattr(speculative, "speculative_generate", other)
    with pytest.raises(RuntimeError, match="writes another text"):
        speculative.main(["--quick"])
