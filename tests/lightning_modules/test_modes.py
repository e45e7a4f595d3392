"""Eval mode for a while, and types that are precise enough."""

import pytest
import torch
from torch import nn

from lightning_modules.modes import evaluating, precise


def test_each_module_is_in_the_mode_it_was_in():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    model[1][1].eval()  # a frozen part
    other = nn.Dropout()
    with pytest.raises(KeyError), evaluating(model, other):
        assert not any(module.training for module in (*model.modules(), other))
        raise KeyError
    assert model.training and model[1].training and model[1][0].training and other.training
    assert not model[1][1].training


@pytest.mark.parametrize(
    ("given", "expected"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")],
)
def test_at_least_float32(given, expected):
    tensor = torch.ones(2, dtype=getattr(torch, given))
    assert precise(tensor).dtype == getattr(torch, expected)
