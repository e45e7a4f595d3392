"""The experiments on self-distillation, from the command line to the report, in a few steps."""

import importlib
import json

import pytest
from PIL import Image

from recipes.self_distillation import theory

ROWS = {
    "images": ["finetune", "mars", "further", "self_distillation", "rounds_2"],
    "text": ["finetune", "self_distillation", "without_mae"],
}
ADAPTATIONS = {
    "images": ["further", "distil", "distil_2"],
    "text": ["further", "distil", "without_mae"],
}
METRIC = {"images": "accuracy", "text": "f1"}


def main_of(name):
    return importlib.import_module(f"recipes.self_distillation.{name}").main


@pytest.mark.parametrize("name", ROWS)
def test_tiny_preset(name, tmp_path, monkeypatch):
    command = [
        "--out", str(tmp_path), "--rows", ",".join(ROWS[name]), "--trainer.max_steps=4",
        "--trainer.val_check_interval=4",
    ]  # fmt: skip
    folder = main_of(name)(command).out
    metrics = json.loads((folder / "metrics.json").read_text())
    ((found,),) = (seed.values() for seed in metrics["seeds"])
    assert list(found["rows"]) == ROWS[name]
    for row in found["rows"].values():
        assert 0 <= row["test"][METRIC[name]] <= 1
        assert row["gap"] == pytest.approx(row["test"]["loss"] - row["train"]["loss"])
        assert row["distance"] > 0 and row["seconds"]["fine-tuning"] > 0
    # every student began with the original, whatever its teacher
    assert list(found["adaptations"]) == ADAPTATIONS[name]
    assert {one["start"] for one in found["adaptations"].values()} == {metrics["original"]}
    assert len({one["distance"] for one in found["adaptations"].values()}) == 3
    text = (folder / "report.md").read_text()
    assert text.count("| yes |") == 3 and "| no |" not in text
    assert metrics["provenance"] in text and "--rows" in metrics["provenance"]
    assert ("new texts" in text) == (name == "text")
    with Image.open(folder / "analyses.png") as plot:
        assert min(plot.size) > 300

    def fail(args):
        raise AssertionError(f"a finished stage was trained again: {args}")

    monkeypatch.setattr("recipes.experiment.run_stage", fail)
    main_of(name)(command)
    assert json.loads((folder / "metrics.json").read_text()) == metrics


@pytest.mark.parametrize("name", ROWS)
def test_unknown_row(name, tmp_path):
    with pytest.raises(ValueError, match="--rows has 'fine': expected some of finetune, recadam"):
        main_of(name)(["--out", str(tmp_path), "--rows", "fine"])


@pytest.mark.parametrize("name", ROWS)
def test_grids_name_what_is_there(name):
    from pathlib import Path

    import yaml

    files = sorted(Path(theory.__file__).parent.glob(f"{name}_grid*.yaml"))
    assert len(files) >= 4
    for file in files:
        grid = yaml.safe_load(file.read_text())
        assert set(grid["metrics"]) == set(grid["sets"])
        assert set(grid.get("default", [])) <= set(grid["rows"])
        used = {row["from"] for row in grid["rows"].values() if "from" in row}
        taught = {one["teacher"] for one in grid["adaptations"].values() if "teacher" in one}
        assert used | taught == set(grid["adaptations"])


def test_theory(tmp_path):
    folder = theory.main(["--out", str(tmp_path), "--problems", "3"])
    problems = json.loads((folder / "metrics.json").read_text())["problems"]
    assert len(problems) == 3
    for found in problems:
        assert max(found["lemma_1"]) < 1e-11 and found["without_ridge"] < 1e-11
        assert theory.falls(found["zeta"]) and theory.falls(found["psi"])
        assert all(d <= psi for d, psi in zip(found["distance"], found["psi"], strict=True))
        # the first round takes B off besides
        zeta = [value**2 for value in found["zeta"]]
        assert zeta[0] - zeta[1] > found["extra_drop"] > 0
    assert "(theory.png)" in (folder / "report.md").read_text()
    assert (folder / "theory.png").is_file()
