"""PELA's experiments, from the command line to the report, on a few digits."""

import json

import pytest
import torch
from PIL import Image

from datamodules import DigitsData
from lightning_modules.pela import PELA, factorize, plan_of
from lightning_modules.pela.checkpoint import load as load_folder
from recipes.cli import parse
from recipes.pela import tables, vision
from recipes.pela.compressed import build, similarity, step_cost, whiten

CONFIG = vision.__file__.replace("vision.py", "deit_b.yaml")


@pytest.fixture(scope="module")
def tiny():
    """The main stage of the preset, and its data."""
    return parse(CONFIG, "tiny"), DigitsData(batch_size=8, eval_batch_size=100, val_fraction=0.9)


def test_tiny_preset(tmp_path, monkeypatch):
    monkeypatch.setattr(vision, "SWEEP", (2.0, 3.0))
    monkeypatch.setattr(vision, "TABLE", ())
    monkeypatch.setattr(vision, "BETA", 100.0)  # of two steps L_rwp would be too small to show
    command = ["--out", str(tmp_path), "--trainer.max_epochs=1", "--data.per_class=16"]
    folder = vision.main(command).out
    metrics = json.loads((folder / "metrics.json").read_text())
    [found] = metrics["seeds"]
    assert set(found) == {"deit_b", "swin_b"}
    for name, result in found.items():
        check(result)
        with Image.open(folder / f"{name}_similarity.png") as plot:
            assert min(plot.size) > 300
    text = (folder / "report.md").read_text()
    assert metrics["provenance"] in text
    for label in (*tables.ROWS.values(), *tables.RIVALS.values(), *tables.COSTS.values()):
        assert f"| {label} |" in text
    check_whole(found["deit_b"])
    for picture in ("deit_b_sweep.png", "deit_b_similarity.png", "swin_b_similarity.png"):
        assert f"({picture})" in text and (folder / picture).is_file()

    # what comes out is a plain timm model with low-rank layers, which loads by itself
    repaired = load_folder(folder / "seed0" / "deit_b-k2-both" / "low_rank").eval()
    module = PELA.load_from_checkpoint(
        folder / "seed0" / "deit_b-k2-both" / "checkpoints" / "last.ckpt"
    ).eval()
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(repaired(images), module(images))

    def fail(args):
        raise AssertionError(f"a finished stage was trained again: {args}")

    monkeypatch.setattr("recipes.legacy.run_stage", fail)
    again = vision.Study(vision_experiment(command), "swin_b", 0).run(whole=False)
    assert again == found["swin_b"]


def vision_experiment(command):
    from recipes.legacy import from_command_line

    return from_command_line("pela.vision", vision.__file__, "deit_b", "", command)


def check(result):
    """The rows that the experiment promises, each with numbers that can be."""
    dense = result["dense"]
    for rows in result["table"].values():
        assert set(rows) == set(tables.ROWS)
        for found in rows.values():
            assert 0 <= found["accuracy"] <= 1 and 0 < found["loss"] < 20
            assert found["parameters"] == rows["direct"]["parameters"] < dense["parameters"]
            assert found["macs"] == rows["direct"]["macs"] < dense["macs"]
        losses = [found["loss"] for found in rows.values()]
        assert len(set(losses)) == len(losses)  # each was another training
    for values in result["similarity"].values():
        assert len(values) == 4 and all(-1 <= value <= 1 for value in values)
    assert len({tuple(values) for values in result["similarity"].values()}) == 3


def check_whole(result):
    dense, low_rank = result["dense"], result["table"]["2"]["both"]
    assert list(result["sweep"]) == ["2", "3"]
    assert result["sweep"]["2"]["both"] == low_rank
    for plan, found in result["allocation"].items():
        assert found["both"]["parameters"] == found["direct"]["parameters"], plan
        assert found["both"]["parameters"] <= low_rank["parameters"], plan
        assert found["both"]["parameters"] > 0.95 * low_rank["parameters"], plan
    rivals = result["rivals"]
    for name in ("tinybert", "maskalign"):
        assert rivals[name]["macs"] == low_rank["macs"]
    for name in ("tome", "tome_direct"):
        assert rivals[name]["parameters"] == dense["parameters"]
        assert 0.5 * dense["macs"] < rivals[name]["macs"] <= 1.02 * low_rank["macs"]
    for name in ("lora", "dense"):
        assert rivals[name]["macs"] == dense["macs"]
        assert rivals[name]["parameters"] == dense["parameters"]
        assert rivals[name]["loss"] != dense["loss"]
    cost = result["cost"]
    assert cost["low_rank"]["fixed"] < cost["dense"]["fixed"]
    assert cost["repair"]["fixed"] == cost["low_rank"]["fixed"] + 4 * dense["parameters"]
    downstream = result["finetune"]
    assert downstream["pela"]["parameters"] < downstream["dense"]["parameters"]


def test_similarity_is_the_mean_cosine_of_all_pairs(tiny):
    config, data = tiny
    torch.manual_seed(0)
    model = build(config, 10, ratio=None).model
    images = torch.cat([x for x, _ in data.val_dataloader()])[:60].to(next(model.parameters()))
    found = similarity(model, [(images[:40], None), (images[40:], None)], "test")
    with torch.no_grad():
        x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        for value, block in zip(found, model.blocks, strict=True):
            x = block(x)
            vectors = torch.nn.functional.normalize(x.mean(1).double(), dim=-1)
            cosines = vectors @ vectors.T
            pairs = ~torch.eye(60, dtype=torch.bool)
            assert value == pytest.approx(cosines.cpu()[pairs].mean().item(), abs=1e-6)


def test_whitened_factors_fit_the_data_better(tiny, tmp_path):
    config, data = tiny
    torch.manual_seed(0)
    dense = build(config, 10, ratio=None).model
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state = {name: value.clone() for name, value in dense.state_dict().items()}
    whiten(dense, 4.0, ["head"], data, tmp_path)

    def fresh():
        model = build(config, 10, ratio=None).model
        model.load_state_dict(state)
        return model

    dense, plain = fresh(), factorize(fresh(), 4.0)
    whitened = load_folder(tmp_path, fresh()).eval()
    assert plan_of(whitened) == plan_of(plain)
    images = torch.cat([x for x, _ in data.train_dataloader()]).to(next(dense.parameters()))
    with torch.no_grad():
        # the first layer's input is the same in all three
        x = dense.blocks[0].norm1(dense._pos_embed(dense.patch_embed(images)))
        target = dense.blocks[0].attn.qkv(x)
        errors = [(m.blocks[0].attn.qkv(x) - target).norm() for m in (whitened, plain)]
    assert errors[0] < 0.9 * errors[1]


def test_what_a_step_costs(tiny):
    """Counted on a CPU: four times the weights, and activations that grow with the batch."""
    config, data = tiny
    plain = {"ratio": None, "alpha": 0.0, "beta": 0.0}
    small = step_cost(build(config, 10, **plain), data)
    large = step_cost(build(config, 10, **plain), DigitsData(batch_size=32, eval_batch_size=100))
    weights = sum(p.numel() for p in build(config, 10, **plain).model.parameters())
    assert small["fixed"] == large["fixed"] == 4 * 4 * weights
    if not torch.cuda.is_available():
        activations = [cost["peak"] - cost["fixed"] for cost in (small, large)]
        assert activations[1] == pytest.approx(4 * activations[0], rel=0.02)
    assert 0 < small["seconds"] < 10


def test_unknown_preset(capsys):
    with pytest.raises(SystemExit):
        vision.main(["--preset", "tinny"])
    assert "unknown preset 'tinny': expected tiny, small, paper" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit):
        vision.main(["--help"])
    shown = capsys.readouterr().out
    assert "python -m recipes.pela.vision " in shown and "--preset paper" in shown
