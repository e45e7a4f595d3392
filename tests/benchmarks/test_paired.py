"""What the benchmarks share."""

import pytest
import torch

from benchmarks import paired

CPU = torch.device("cpu")


def test_spread_names_the_median_and_both_ends():
    assert paired.spread([3.0, 1.0, 2.0]) == "2.000 (1.000–3.000)"


def test_the_command_line_that_benchmarks_share(capsys, monkeypatch):
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    parser = paired.command_line("vera_step", "One line.\n\nMore.", 8, 60, "size", threads=1)
    options = paired.parsed(parser, ["--quick", "--device", "cpu"])
    assert (options.repeats, options.device, threads) == (3, CPU, [1])
    assert paired.parsed(parser, ["--repeats", "5"]).repeats == 5
    assert parser.description == "One line."
    with pytest.raises(SystemExit):
        paired.parsed(parser, ["--repeats", "0"])
    assert "--repeats 0: expected at least 1" in capsys.readouterr().err
    first = paired.heading("vera_step", ["--only", "a b"], CPU)
    assert first.startswith("`python -m benchmarks.vera_step --only 'a b'` · ")
