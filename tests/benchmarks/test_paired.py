"""Candidates take turns, and a ratio is taken within each round."""

import pytest
import torch

from benchmarks import paired

CPU = torch.device("cpu")


def test_rounds_are_in_turns_and_at_least_three():
    called = []
    candidates = {name: (lambda name=name: called.append(name)) for name in "ab"}
    measured = paired.rounds(candidates, 5, 0.0, CPU)
    assert called == ["a", "b"] * 4  # the first round warms up
    assert [list(took) for took in measured] == [["a", "b"]] * 3
    assert len(paired.rounds(candidates, 2, 0.0, CPU)) == 2


def test_a_ratio_is_taken_within_each_round():
    measured = [{"a": 1.0, "b": 2.0}, {"a": 10.0, "b": 10.0}, {"a": 1.0, "b": 3.0}]
    assert paired.ratio(measured, "b", "a") == 2.0


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
