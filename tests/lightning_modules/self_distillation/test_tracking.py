"""Distances and fingerprints of weights."""

import copy

import pytest
import torch
from torch import nn

from lightning_modules.self_distillation import distance, fingerprint


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


def test_a_student_begins_where_the_original_does():
    original = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).bfloat16()
    student = copy.deepcopy(original)
    assert fingerprint(student.state_dict()) == fingerprint(original.state_dict())
    with torch.no_grad():
        student[0].weight[0, 0] = torch.nextafter(
            student[0].weight[0, 0], torch.tensor(9.0).bfloat16()
        )
    assert fingerprint(student.state_dict()) != fingerprint(original.state_dict())


def test_a_fingerprint_knows_names_shapes_and_types():
    values = torch.arange(4.0)
    states = [
        {"a": values},
        {"b": values},
        {"a": values.reshape(2, 2)},
        {"a": values.view(torch.int32)},
    ]
    assert len({fingerprint(state) for state in states}) == 4
    two = {"a": values, "b": values + 1}
    assert fingerprint(two) == fingerprint(dict(reversed(two.items())))
    assert fingerprint({"a": values.reshape(2, 2).T}) != fingerprint({"a": values.reshape(2, 2)})


def test_bad_input():
    with pytest.raises(ValueError, match="no names in common: a, … and b"):
        distance({"a": torch.zeros(1)}, {"b": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"a is \(2,\) now and was \(1,\)"):
        distance({"a": torch.zeros(2)}, {"a": torch.zeros(1)})
