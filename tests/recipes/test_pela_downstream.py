"""The downstream experiments, from the command line to the report, on a few generated shapes."""

import importlib

import pytest
import torch

from lightning_modules import standalone
from lightning_modules.pela.downstream import build_backbone
from recipes.cli import parse
from recipes.nodes import LAST, Stage
from recipes.records import at, instance_of
from recipes.results import read
from recipes.runner import command_line
from tests.recipes.report_checks import check_reports_of_parts

SCORES = {"segmentation": "mIoU", "detection": "mAP"}
LONGER = {"segmentation": 1, "detection": 2}  # batches of 8 and 4 become 8
ARGS = {"img_size": 64, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4}


def module_of(name):
    return importlib.import_module(f"recipes.pela.{name}")


@pytest.fixture(scope="module")
def repaired(tmp_path_factory):
    """Stands for what PELA's intermediate stage would give."""
    folder = tmp_path_factory.mktemp("pela") / "repaired"
    model, _ = build_backbone("vit_tiny_patch16_224", ARGS, ratio=3)
    return standalone.save(model, folder)


@pytest.mark.parametrize("name", SCORES)
def test_tiny_preset(name, repaired, tmp_path, monkeypatch):
    if name == "detection":
        pytest.importorskip("pycocotools")
    command = [
        *("--out", str(tmp_path), "--repaired", str(repaired), "--larger-batch", "8"),
        *("--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"),
        '--data.generate={"train": 8, "val": 4}',
    ]
    run = module_of(name).main(command)
    folder = run.out
    table = read(folder)
    rows = table.pivot(index="row", columns="metric", values="value")
    assert list(table["row"].unique()) == ["dense", "direct", "repaired", "larger_batch"]
    assert rows[SCORES[name]].between(0, 1).all()
    for cost in ("parameters", "macs"):
        dense, direct, low, larger = (rows[cost][row] for row in table["row"].unique())
        assert dense > direct > low == larger
    for claim in module_of(name).CLAIMS:
        comparisons = [one for one in (claim.test, claim.gate) if one]
        assert comparisons and all(one.difference(table).n == 1 for one in comparisons), claim.name
    for node in run.nodes.values():
        if isinstance(node, Stage):
            saved = torch.load((node / LAST).path, weights_only=True, mmap=True)
            data = instance_of(node.parsed().data.as_dict())
            epochs = at(node.parsed(), "trainer.max_epochs")
            assert epochs == (LONGER[name] if node.name == "larger_batch" else 1)
            assert saved["global_step"] == epochs * len(data.train_dataloader())
    text = (folder / "report.md").read_text()
    assert "--repaired" in text and "smoke test" in text
    assert "| low-rank, repaired (PELA) |" in text and "No repaired backbone" not in text
    check_reports_of_parts(module_of(name).EXPERIMENT, run)

    def fail(args, callbacks=()):
        raise AssertionError(f"a finished stage was trained again: {args}")

    monkeypatch.setattr("recipes.work.run_stage", fail)
    module_of(name).main(command)
    assert read(folder).equals(table)


@pytest.mark.parametrize("name", SCORES)
def test_a_flag_reaches_every_stage_or_is_refused(name, repaired):
    module = importlib.import_module(f"recipes.pela.{name}")
    planned = command_line(module.EXPERIMENT, ["--repaired", str(repaired), "--model.lr", "0.5"])
    module.EXPERIMENT.declare(planned)
    stages = [node for node in planned.nodes.values() if isinstance(node, Stage)]
    assert [at(stage.parsed(), "model.lr") for stage in stages] == [0.5] * 3
    with pytest.raises(ValueError, match="--larger-batch 0: expected at least 1"):
        module.EXPERIMENT.declare(command_line(module.EXPERIMENT, ["--larger-batch", "0"]))
    refused = command_line(module.EXPERIMENT, ["--model.ratio", "4"])
    module.EXPERIMENT.declare(refused)
    with pytest.raises(ValueError, match=r"varies model\.ratio"):
        refused.check()


def test_backbones_are_compressed_as_the_released_code_does():
    """papers/pela.md: DeiT-B at κ 2, Swin-B at κ 1.5 with attn.proj kept; nothing more is given."""
    for name, preset, architecture, ratio, skip in (
        ("segmentation", "paper", "deit_base_patch16_224", 2.0, []),
        ("detection", "paper", "swin_base_patch4_window7_224", 1.5, ["attn.proj"]),
        ("detection", "detr", "deit_base_patch16_224", 2.0, []),
    ):
        model = parse(module_of(name).EXPERIMENT.folder / f"{name}.yaml", preset).model.init_args
        assert (model.architecture, model.ratio, model.skip or []) == (architecture, ratio, skip)
        assert model.pretrained


def test_without_a_repaired_backbone_the_report_says_so(tmp_path):
    few = ["--trainer.max_epochs=1", "--trainer.check_val_every_n_epoch=1"]
    few.append('--data.generate={"train": 4, "val": 2}')
    folder = module_of("segmentation").main(["--out", str(tmp_path), *few]).out
    assert "No repaired backbone was compared: `--repaired" in (folder / "report.md").read_text()
