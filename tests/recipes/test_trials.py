"""The report's section on trials."""

import pytest

from recipes.trials import at_an_edge
from tests.recipes.fake_trainings import look


def lines(run):
    """The cells of the section's table, without its header."""
    text = (run.out / "report.md").read_text()
    table = text.partition("## Settings chosen in trials")[2]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return rows[2:], table


def test_what_was_tried_and_taken_and_whether_it_chooses_anything(go, trainings):
    """The stand-in's loss is the number of its call; its accuracy never changes."""

    def declare(run):
        def trials(name):
            return [
                run.stage(f"{name}{i}", "matvit", varied={"model.lr": 10.0**-i}) for i in (1, 2, 3)
            ]

        rate = run.best(trials("t"), "loss", ["model.lr"], mode="min")
        for seed in (0, 1):
            run.stage("final", "matvit", seed, settings={"trainer.max_epochs": 1, **rate})
            run.stage("other", "matvit", seed, settings={"trainer.max_epochs": 2, **rate})
        both = ["model.lr", "model.weight_decay"]
        tied = run.best(trials("u"), "val/accuracy", both)
        last = run.stage("last", "matvit", settings={"trainer.max_epochs": 3, **tied})
        run.measure("look", 0, look, {"last": last})
        odd = run.best(trials("t"), "val/odd", ["model.lr"])
        run.stage("next", "matvit", settings={"trainer.max_epochs": 4, **odd})

    rows, text = lines(go(declare=declare))
    tied = "0.1, 0.05: 0.5; 0.01, 0.05: 0.5; 0.001, 0.05: 0.5"
    assert rows == [
        ["final and 1 more", "lr", "0.1: 1; 0.01: 2; 0.001: 3", "loss", "0.1 †"],
        ["last", "lr, weight_decay", tied, "val/accuracy", "0.1, 0.05 ‡"],
        ["next", "lr", "0.1: 1; 0.01: diverged; 0.001: 3", "val/odd", "0.001 †"],
    ]
    assert "† the lowest or highest that was tried" in text and "‡ the best trials are" in text


def test_without_trials_there_is_no_section(go, trainings):
    assert "Settings chosen" not in (go().out / "report.md").read_text()


@pytest.mark.parametrize(
    ("value", "tried", "expected"),
    [
        (1, [1, 2, 3], True),
        (2.0, [1.0, 2.0, 3.0], False),
        (3, [1, 2, 3], True),
        (1, [1, 2], False),
        ("a", ["a", "b", "c"], False),
    ],
)
def test_an_edge_needs_three_numbers(value, tried, expected):
    assert at_an_edge(value, tried) == expected
