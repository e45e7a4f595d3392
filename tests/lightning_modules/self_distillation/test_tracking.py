"""Distances of weights."""

import pytest
import torch

from lightning_modules.self_distillation import distance


def test_distance_is_over_what_both_have():
    start = {"a": torch.zeros(2, 2), "b": torch.ones(1), "steps": torch.tensor(3)}
    now = {"a": torch.full((2, 2), 2.0), "b": torch.tensor([-2.0]), "steps": torch.tensor(9)}
    assert distance(now, start) == 5  # √(4·4 + 9)
    assert distance(now | {"head": torch.ones(7)}, start) == 5
    assert distance(start, start) == 0


def test_every_process_goes_through_the_tensors_in_the_same_order():
    class Asked(dict):
        def __getitem__(self, name):
            asked.append(name)
            return super().__getitem__(name)

    asked = []
    weights = Asked({name: torch.ones(1) for name in "dbeacf"})
    distance(weights, dict(weights))
    assert asked == list("abcdef")


def test_bad_input():
    with pytest.raises(ValueError, match="no names in common: a, … and b"):
        distance({"a": torch.zeros(1)}, {"b": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"a is \(2,\) now and was \(1,\)"):
        distance({"a": torch.zeros(2)}, {"a": torch.zeros(1)})
