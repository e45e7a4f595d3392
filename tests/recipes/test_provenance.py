"""What a report says of where its numbers come from."""

from types import SimpleNamespace

import pytest

from recipes import provenance
from recipes.records import write_record
from recipes.results import Row, tidy
from recipes.work import timed


@pytest.fixture
def run(tmp_path):
    nodes = {name: SimpleNamespace(folder=tmp_path / name) for name in ("a", "b", "not begun")}
    return SimpleNamespace(
        command="python -m recipes.vera.glue --seeds 2", nodes=nodes, measured_on=""
    )


def table(preset):
    return tidy([Row("head", "score", 1.0)], "vera.glue", preset, seed=0)


def made(run, name, monkeypatch, **changed):
    """Execute a node at another time and commit."""
    node = run.nodes[name]
    if not node.folder.exists():
        write_record(node.folder, {"fingerprint": "x", "finished": False, "seconds": 0.0})
    there = {**ORIGIN, **changed}
    monkeypatch.setattr("recipes.work.origin", lambda: there)
    with timed(node.folder):
        pass


ORIGIN = {"device": "A CPU, 2 cores", "torch": "2.0", "date": "2026-01-01", "commit": "aaaaaaa"}


def test_the_commits_are_those_that_measured_not_the_one_that_reports(run, monkeypatch):
    made(run, "a", monkeypatch)
    made(run, "b", monkeypatch, commit="bbbbbbb", date="2026-01-02")
    made(run, "b", monkeypatch, commit="bbbbbbb", date="2026-01-02")  # resumed: said once
    assert provenance.provenance(run, table("small")) == (
        "`python -m recipes.vera.glue --seeds 2` · 1 seed · A CPU, 2 cores · torch 2.0 · "
        "2026-01-01, 2026-01-02 · commit aaaaaaa, bbbbbbb"
    )


def test_an_origin_that_was_not_recorded_is_not_made_up(run):
    """Before, it was the machine and the commit that wrote the report."""
    write_record(run.nodes["a"].folder, {"fingerprint": "x", "finished": True, "seconds": 0.0})
    line = provenance.provenance(run, table("small"))
    assert line == (
        "`python -m recipes.vera.glue --seeds 2` · 1 seed · "
        "device, versions, date and commit were not recorded"
    )


def test_models_and_data_stand_above_the_command(run):
    rows = [Row("MiniLM", "score", 1.0, "SST-2, MiniLM"), Row("MiniLM", "score", 1.0, "RTE")]
    run.measured_on = "{models}, {sets}"
    text = provenance.provenance(run, tidy(rows, "apet.scales", "small", seed=0))
    assert text.startswith("Measured on MiniLM, SST-2, RTE.\n\n`python -m recipes.vera.glue")
    run.command += " --encoder.model.architecture other"
    text = provenance.provenance(run, tidy(rows, "apet.scales", "small", seed=0))
    assert text.startswith("Measured on MiniLM, SST-2, RTE (but see the flags of the command).")
    rows = [Row(name, "score", 1.0, f"RTE, {name}") for name in ("MiniLM", "bge-small", "SmolLM2")]
    text = provenance.provenance(run, tidy(rows, "apet.scales", "small", seed=0))
    assert text.startswith("Measured on MiniLM, bge-small and SmolLM2, RTE (but")


def test_a_smoke_test_says_so(run):
    assert provenance.provenance(run, table("tiny")).startswith("**A smoke test**")
