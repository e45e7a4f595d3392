"""VeRA's experiments on GLUE and on images, from the command line to the report, in few steps."""

import importlib
import json

import pytest
import torch
from PIL import Image

from recipes.legacy import Experiment, from_command_line
from recipes.vera import ablations, analysis, glue

SHORT = ["--trainer.limit_train_batches=2", "--trainer.limit_val_batches=2"]


def run(name, out):
    """The folder, the seeds' results and the report of a tiny run."""
    folder = importlib.import_module(f"recipes.vera.{name}").main(["--out", str(out), *SHORT]).out
    metrics = json.loads((folder / "metrics.json").read_text())
    text = (folder / "report.md").read_text()
    assert metrics["provenance"] in text and "| --- |" in text
    for plot in folder.glob("*.png"):
        assert f"({plot.name})" in text
        with Image.open(plot) as picture:
            assert min(picture.size) > 300
    return folder, metrics, text


def experiment(name, preset):
    config = "images" if name == "images" else "glue"
    return from_command_line(f"vera.{name}", glue.__file__, config, "", ["--preset", preset])


@pytest.fixture
def no_training(monkeypatch):
    """From its call on, a stage that is not finished is a failure."""

    def fail(args):
        raise AssertionError(f"a finished stage was trained again: {args}")

    return lambda: monkeypatch.setattr("recipes.legacy.run_stage", fail)


def test_images(tmp_path, no_training):
    folder, metrics, text = run("images", tmp_path)
    (seed,) = metrics["seeds"]
    assert list(seed) == ["head", "full", "lora", "vera"]
    tuned = {method: found["digits 5–9"]["tuned"] for method, found in seed.items()}
    assert tuned["head"] == 0 and tuned["vera"] == 4 * 2 * (64 + 64)
    assert tuned["lora"] == 4 * 4 * (64 + 3 * 64) and tuned["full"] > 10 * tuned["lora"]
    assert "ViT-L, VeRA | 87.5 | 79.2 | 99.2 | 78.6" in text and "images.png" in text
    start, tuned_head = (
        torch.load(folder / "seed0" / name / "checkpoints" / "last.ckpt", weights_only=True)
        for name in ("pretrain", "digits 5–9_head")
    )
    for name, value in start["state_dict"].items():  # every run begins with the same model
        assert name.startswith("model.head.") or torch.equal(tuned_head["state_dict"][name], value)
    no_training()
    assert run("images", tmp_path)[1]["seeds"] == metrics["seeds"]


def test_ablations(tmp_path):
    _, metrics, text = run("ablations", tmp_path)
    (seed,) = metrics["seeds"]
    found = seed["SST-2"]
    expected = ["vera_r4", "vera_r16", "lora_r1", "lora_r4", "only_d", "only_b", "unique"]
    assert list(found) == expected
    tuned = {row: values["tuned"] for row, values in found.items()}
    assert tuned["vera_r4"] == 4 * (32 + 4) and tuned["lora_r4"] == 4 * 4 * 2 * 32
    assert (tuned["only_d"], tuned["only_b"]) == (4 * 16, 4 * 32)
    assert tuned["unique"] == tuned["vera_r16"] == 4 * (32 + 16)
    assert "| only b | 128 |" in text and "ranks.png" in text


@pytest.mark.parametrize("preset", ["tiny", "small", "paper"])
def test_each_row_of_the_ablations_has_its_methods_settings(preset, monkeypatch):
    asked = []
    monkeypatch.setattr(Experiment, "stage", lambda self, *args: asked.append(args))
    grid = glue.read_grid(experiment("ablations", preset), "ablations_grid")
    plan = ablations.glue_grid(grid)
    for task in grid["tasks"]:
        for row in ablations.rows_of(grid, task):
            with pytest.raises(AttributeError, match="history"):  # of no result
                glue.train(experiment("ablations", preset), plan, row, task, 0)
            method = "lora" if row.startswith("lora") else "vera"
            overrides = asked[-1][3]
            assert overrides["model.method"] == method
            assert overrides["model.lr"] == grid["tasks"][task][method]["model.lr"]
            assert not set(overrides) & {"vera", "lora", *plan["methods"]}


def test_glue_and_the_analysis_of_its_models(tmp_path, no_training):
    folder, metrics, _ = run("glue", tmp_path)
    (seed,) = metrics["seeds"]
    assert set(seed) == set(glue.NAMES)
    for found in seed.values():
        assert set(found) == {"RTE", "STS-B"}
        assert found["RTE"]["heads"] > 0 and 0 <= found["RTE"]["score"] <= 1
    no_training()
    _, metrics, text = run("analysis", tmp_path)  # with glue's models
    (seed,) = metrics["seeds"]
    assert len(seed["layers"]) == 4
    for layer in seed["layers"].values():
        assert layer["b_moved"] > 0 and layer["d_moved"] > 0
        assert -1 <= layer["cosine"] <= 1 and 1 <= layer["stable_rank_lora"] <= 4
    assert seed["cost"]["vera"]["bytes"] < seed["cost"]["lora"]["bytes"] * 1.5
    assert set(metrics["fits"]["lora"]) == {"20", "40", "60", "80", "100"}
    assert "layers.png" in text and "fit.png" in text
    lora, vera = (
        analysis.load(folder / "seed0" / f"STS-B_{method}" / "checkpoints" / "last.ckpt")
        for method in analysis.METHODS
    )
    for name in seed["layers"]:  # the same start
        base = lora.get_submodule(name).base_layer.weight
        assert torch.equal(vera.get_submodule(name).weight, base)


@pytest.mark.parametrize("preset", ["tiny", "small", "paper"])
@pytest.mark.parametrize("name", ["images", "ablations", "analysis", "glue"])
def test_every_preset_has_its_grid(name, preset):
    assert glue.read_grid(experiment(name, preset), f"{name}_grid")
