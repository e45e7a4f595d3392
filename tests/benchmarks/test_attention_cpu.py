"""The benchmark runs, and compares the two ways of computing attention."""

import torch

from benchmarks import attention_cpu


def test_quick(capsys, monkeypatch):
    seen = []

    def attention(tokens):
        return lambda: seen.append(torch.backends.cuda.flash_sdp_enabled())

    monkeypatch.setattr(attention_cpu, "attention", attention)
    attention_cpu.main(["--quick"])
    text = capsys.readouterr().out
    assert "`python -m benchmarks.attention_cpu --quick` ·" in text
    assert "| a step of ViT-S/14, 26 tokens | " in text and "| attention, 26 tokens | " in text
    assert seen == [True, False] * 4
