"""The experiments on MatViT, from the command line to the report, on a few digits."""

import importlib
import json

import pytest
from PIL import Image

from recipes.matformer import finetune_grid, heads, matvit, probabilities, retrieval

SIZES = {"S", "M", "L", "XL"}
PLOTS = {
    "matvit": "accuracy.png",
    "retrieval": "retrieval.png",
    "finetune_grid": "finetune_grid.png",
    "probabilities": "probabilities.png",
    "heads": "accuracy.png",
}
ROWS = {
    "matvit": {*matvit.NESTED, "independent"},
    "retrieval": set(retrieval.FAMILIES),
    "finetune_grid": set(finetune_grid.TABLE_7),
    "probabilities": {probabilities.name(row) for row in probabilities.TABLE_6},
    "heads": set(heads.PARTS),
}


def main_of(name):
    return importlib.import_module(f"recipes.matformer.{name}").main


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all, so that the stages they share are trained once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("name", PLOTS)
def test_tiny_preset(name, out, monkeypatch):
    command = ["--out", str(out), "--trainer.max_epochs=4", "--data.per_class=32"]
    folder = main_of(name)(command).out
    metrics = json.loads((folder / "metrics.json").read_text())
    check(name, metrics["seeds"])
    text = (folder / "report.md").read_text()
    assert (
        text.count("| --- |") >= 1 and f"({PLOTS[name]})" in text and metrics["provenance"] in text
    )
    with Image.open(folder / PLOTS[name]) as plot:
        assert min(plot.size) > 300

    def fail(args):
        raise AssertionError(f"a finished stage was trained again: {args}")

    monkeypatch.setattr("recipes.legacy.run_stage", fail)
    main_of(name)(command)
    assert json.loads((folder / "metrics.json").read_text())["seeds"] == metrics["seeds"]


def check(name, seeds):
    """The rows that the experiment promises, each with numbers that can be."""
    (scores,) = seeds
    assert set(scores) == ROWS[name]
    for row, sizes in scores.items():
        assert set(sizes) == {"XL"} if row == "MatViT → ViT" else set(sizes) >= SIZES
        for label, found in sizes.items():
            assert 0 < found["parameters"] <= sizes["XL"]["parameters"]
            assert 0 < found["macs"] <= sizes["XL"]["macs"]
            if name == "retrieval":
                assert 0 <= found["adaptive"] <= 1
                assert ("traditional" in found) == (label in SIZES)
            else:
                assert 0 <= found["accuracy"] <= 1 and 0 < found["loss"] < 20
                assert 0 <= found["agreement"] <= 1 and -1e-6 < found["kl"] < 20
        if name == "retrieval":  # XL's queries and documents are the same in both modes
            assert sizes["XL"]["adaptive"] == sizes["XL"]["traditional"]
        else:
            assert sizes["XL"]["agreement"] == 1


@pytest.mark.parametrize("name", PLOTS)
def test_unknown_preset(name, capsys):
    with pytest.raises(SystemExit):
        main_of(name)(["--preset", "tinny"])
    message = capsys.readouterr().err
    assert "unknown preset 'tinny': expected tiny, small, paper" in message


@pytest.mark.parametrize("name", PLOTS)
def test_help(name, capsys):
    with pytest.raises(SystemExit):
        main_of(name)(["--help"])
    shown = capsys.readouterr().out
    assert f"python -m recipes.matformer.{name} " in shown and "--preset paper" in shown


def test_documents_are_the_training_images_as_evaluation_sees_them():
    import torch

    from datamodules import DigitsData

    data = DigitsData(batch_size=64, eval_batch_size=100, augmentation="light", seed=1)
    images, labels = (torch.cat(part) for part in zip(*retrieval.documents(data), strict=True))
    plain = DigitsData(augmentation="none", seed=1).train_set
    assert len(images) == len(plain)
    for place in (0, 7, len(plain) - 1):
        assert torch.equal(images[place], plain[place][0]) and labels[place] == plain[place][1]
