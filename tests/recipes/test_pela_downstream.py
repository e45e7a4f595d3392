"""The downstream experiments, from the command line to the report, on a few generated shapes."""

import importlib
import json

import lightning as L
import pytest

from lightning_modules.pela import PELA, checkpoint
from lightning_modules.pela.downstream import build_backbone
from recipes.pela import export

SCORES = {"segmentation": "mIoU", "detection": "mAP"}
ARGS = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4}


def main_of(name):
    return importlib.import_module(f"recipes.pela.{name}").main


@pytest.fixture(scope="module")
def repaired(tmp_path_factory):
    """Stands for what PELA's intermediate stage would give."""
    folder = tmp_path_factory.mktemp("pela") / "repaired"
    model, _ = build_backbone("vit_tiny_patch16_224", ARGS, ratio=3)
    return checkpoint.save(model, folder, "vit_tiny_patch16_224", {**ARGS, "num_classes": 0})


@pytest.mark.parametrize("name", SCORES)
def test_tiny_preset(name, repaired, tmp_path, monkeypatch):
    command = [
        *("--out", str(tmp_path), "--repaired", str(repaired), "--larger-batch", "8"),
        *("--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"),
        '--data.generate={"train": 8, "val": 4}',
    ]
    folder = main_of(name)(command).out
    metrics = json.loads((folder / "metrics.json").read_text())
    [rows] = metrics["seeds"]
    assert list(rows) == ["dense", "direct", "repaired", "larger_batch"]
    for row in rows.values():
        assert 0 <= row[SCORES[name]] <= 1 and row["seconds"] > 0
    for cost in ("parameters", "macs"):
        assert rows["dense"][cost] > rows["direct"][cost] > rows["repaired"][cost]
        assert rows["larger_batch"][cost] == rows["repaired"][cost]
    text = (folder / "report.md").read_text()
    assert "--repaired" in metrics["provenance"] and metrics["provenance"] in text
    assert "| low-rank, repaired (PELA) |" in text and "No repaired backbone" not in text

    def fail(args):
        raise AssertionError(f"a finished stage was trained again: {args}")

    monkeypatch.setattr("recipes.legacy.run_stage", fail)
    main_of(name)(command)
    assert json.loads((folder / "metrics.json").read_text())["seeds"] == metrics["seeds"]


def test_without_a_repaired_backbone_the_report_says_so(tmp_path):
    few = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]
    few.append('--data.generate={"train": 4, "val": 2}')
    folder = main_of("segmentation")(["--out", str(tmp_path), *few]).out
    assert "No repaired backbone was compared: `--repaired" in (folder / "report.md").read_text()


def test_export_writes_what_its_target_asks_for(repaired, tmp_path, capsys):
    for target in ("model.pt2", "folder"):
        export.main([str(repaired), str(tmp_path / target)])
        assert f"written: {tmp_path / target}" in capsys.readouterr().out
    assert checkpoint.read_plan(tmp_path / "folder") == checkpoint.read_plan(repaired)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        export.main([str(tmp_path / "no.ckpt"), str(tmp_path / "x")])


def test_export_reads_a_training_runs_checkpoint(tmp_path):
    module = PELA(
        num_classes=5,
        architecture="vit_tiny_patch16_224",
        model_args={**ARGS, "depth": 1},
        ratio=2.0,
    )
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.strategy.connect(module)
    module.configure_model()
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    export.main([str(tmp_path / "last.ckpt"), str(tmp_path / "folder")])
    plan = checkpoint.read_plan(tmp_path / "folder")
    assert plan["model_args"]["num_classes"] == 5 and plan["ranks"] == module.settings.ranks
    checkpoint.load(tmp_path / "folder")
