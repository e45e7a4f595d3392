"""Fixtures of the tests of the runner."""

import pytest

from recipes import work
from recipes.runner import run_experiment
from tests.recipes.fake_trainings import Trainings, chain, experiment


@pytest.fixture
def trainings(monkeypatch):
    trainings = Trainings()
    monkeypatch.setattr(work, "run_stage", trainings)
    return trainings


@pytest.fixture
def go(tmp_path):
    return lambda *flags, declare=chain: run_experiment(
        experiment(declare), ["--out", str(tmp_path), *flags]
    )
