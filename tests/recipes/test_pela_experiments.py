"""PELA's vision experiment, from the command line to the report, on a few digits."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file

from datamodules import DigitsData
from lightning_modules.pela import PELA, Classifier
from recipes import results
from recipes.claims import judge
from recipes.cli import grid, parse, presets
from recipes.experiment import Measuring
from recipes.nodes import Stage
from recipes.pela import measures, vision
from recipes.pela.study import TREATMENTS, Study, fraction_of, slice_of
from recipes.records import instance_of
from recipes.results import Row, tidy
from recipes.runner import command_line, run_experiment
from tests.recipes.report_checks import check_reports_of_parts

FILE = vision.__file__.replace("vision.py", "deit_b.yaml")
GRID = yaml.safe_load(Path(FILE).with_name("vision_grid.yaml").read_text())
COMMAND = ["--trainer.max_epochs=2", "--data.per_class=16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tiny preset's run."""
    out = tmp_path_factory.mktemp("runs")
    run_experiment(vision.EXPERIMENT, ["--out", str(out), *COMMAND])
    return out / "pela-vision" / "tiny"


@pytest.fixture(scope="module")
def table(folder):
    return results.read(folder)


def value(table, row, metric="accuracy", **where):
    lines = results.select(
        table, {"set": "deit_b κ 2", "row": row, "metric": metric, "x": None, **where}
    )
    assert len(lines) == 1, (row, metric)
    return lines["value"].iloc[0]


def config_of(folder, name):
    [file] = (folder / "seed0" / name).glob("log0/config.yaml")
    return yaml.safe_load(file.read_text())


@torch.no_grad()
def accuracy(module, images):
    pairs = [images[i] for i in range(len(images))]
    logits = module.eval()(torch.stack([x for x, _ in pairs]))
    return (logits.argmax(-1) == torch.tensor([y for _, y in pairs])).float().mean().item()


# stage → epochs, each over 16 images of each digit
SEEN = {
    "deit_b-dense": 2,
    "deit_b-trial-dense": 2,
    "deit_b-trial-both-0": 1,
    "deit_b-k2-control": 2,
    "deit_b-k2-scratch": 2,
    "deit_b-k2-both": 2,
    "deit_b-k2-whitened": 2,
    "deit_b-k2-pruned": 2,
    "deit_b-k2-lora": 2,
    "deit_b-sweep-k4": 1,
    "finetune-dense": 2,
    "finetune-pela": 2,
}


@pytest.mark.parametrize("name", SEEN)
def test_what_each_stage_saw(name, folder):
    """Updates, examples, and on which images it was scored."""
    content = torch.load(folder / "seed0" / name / "checkpoints" / "last.ckpt", weights_only=True)
    config = config_of(folder, name)["data"]["init_args"]
    epochs, batch = SEEN[name], config["batch_size"]
    assert config["per_class"] == 16
    assert config["val_per_class"] == (20 if "trial" in name else None)
    assert content["epoch"] == epochs - 1  # counted from 0
    assert content["global_step"] == epochs * len(DigitsData(**config).train_dataloader())
    assert epochs * (160 // batch) <= content["global_step"] <= epochs * -(-160 // batch)


def test_scratch_is_low_rank_from_random_weights_and_control_from_the_dense_ones(folder, table):
    starts = {
        row: config_of(folder, f"deit_b-k2-{row}")["model"]["init_args"]
        for row in ("scratch", "control")
    }
    assert starts["scratch"]["init_from"] is None and not starts["scratch"]["pretrained"]
    assert starts["control"]["init_from"].endswith(".ckpt")
    assert {one["ratio"] for one in starts.values()} == {2.0}
    sizes = results.select(table, {"metric": "parameters", "row": list(starts)})["value"]
    assert len(sizes) == 2 and sizes.nunique() == 1


def test_trials_are_scored_on_training_images_put_aside(folder):
    reported = {x.numpy().tobytes() for x, _ in DigitsData(image_size=8).val_set}
    config = config_of(folder, "deit_b-trial-both-0")["data"]["init_args"]
    data = DigitsData(**config)
    aside = {x.numpy().tobytes() for x, _ in data.val_set}
    assert not aside & reported and len(data.val_set) == 200
    assert not aside & {x.numpy().tobytes() for x, _ in data.train_set}
    checkpoint = folder / "seed0" / "deit_b-trial-both-0" / "checkpoints" / "last.ckpt"
    logged = (folder / "seed0" / "deit_b-trial-both-0").glob("log0/metrics.csv")
    text = next(logged).read_text().splitlines()
    place = text[0].split(",").index("val/accuracy")
    found = [line.split(",")[place] for line in text[1:] if line.split(",")[place]]
    module = PELA.load_from_checkpoint(checkpoint)
    assert float(found[-1]) == pytest.approx(accuracy(module, data.val_set), abs=1e-3)


def test_the_rows_are_scored_on_the_validation_images(folder, table):
    data = DigitsData(image_size=8)
    for row, kind in (("control", Classifier), ("both", PELA)):
        checkpoint = folder / "seed0" / f"deit_b-k2-{row}" / "checkpoints" / "last.ckpt"
        found = accuracy(kind.load_from_checkpoint(checkpoint), data.val_set)
        assert value(table, row) == pytest.approx(found, abs=1e-3)


def test_sizes_and_settings(table):
    dense = value(table, "dense", "parameters")
    low_rank = value(table, "direct", "parameters")
    for row in ("control", "both", "whitened"):
        assert value(table, row, "parameters") == low_rank < 0.55 * dense
        assert value(table, row, "macs") == value(table, "direct", "macs")
    assert value(table, "pruned", "parameters") == pytest.approx(low_rank, rel=0.02)
    assert value(table, "lora", "parameters") == dense
    assert value(table, "lora", "macs") == value(table, "dense", "macs")
    trials = [(0.3, 1.0), (3.0, 10.0)]
    assert (value(table, "both", "alpha"), value(table, "both", "beta")) in trials
    assert value(table, "direct", "before") == value(table, "direct")


def test_other_tables(table):
    blocks = results.select(table, {"metric": "similarity", "set": "deit_b", "row": "both"})
    assert list(blocks["x"]) == [1, 2, 3, 4]
    for row in ("direct", "both"):
        points = results.select(table, {"set": "deit_b sweep", "row": row, "metric": "accuracy"})
        assert list(points["x"]) == [4]
    cost = {"set": "deit_b", "metric": "fixed"}
    fixed = {row: value(table, row, **cost) for row in ("dense", "low_rank", "repair")}
    assert fixed["low_rank"] < fixed["dense"]
    assert fixed["repair"] == fixed["low_rank"] + 4 * value(table, "dense", "parameters")
    assert value(table, "pela_plus", "fitting_batch", set="other images") >= 64
    for row in ("dense", "pela", "pela_plus"):
        assert 0 <= value(table, row, set="other images") <= 1


def test_report(folder):
    text = (folder / "report.md").read_text()
    assert "A smoke test" in text and "| + both (PELA) |" in text
    run = command_line(vision.EXPERIMENT, ["--out", str(folder.parents[1]), *COMMAND])
    check_reports_of_parts(vision.EXPERIMENT, run)
    for picture in ("deit_b_k2", "deit_b_similarity"):
        assert f"({picture}.png)" in text and (folder / f"{picture}.png").is_file()


def test_the_sweep_is_drawn_from_two_ratios_on_and_left_out_without_repair(
    folder, table, tmp_path, monkeypatch
):
    run = replace(command_line(vision.EXPERIMENT, COMMAND), out=tmp_path)
    one = vision.sweep(table, run)
    assert "| 4 |" in one[2] and not list(tmp_path.iterdir())
    points = results.select(table, {"set": "deit_b sweep"})
    drawn = []
    monkeypatch.setattr(vision, "curves", lambda part, *_, **given: drawn.append((part, given)))
    two = vision.sweep(pd.concat([table, points.assign(x=6.0)]), run)
    assert two[-1] == "![accuracy against ratio](deit_b_sweep.png)"
    [(part, given)] = drawn
    assert given["baselines"] == ["dense", "chance"]
    for row in given["baselines"]:  # once a seed, not once for each ratio's table
        assert len(results.select(part, {"row": row, "metric": "accuracy"})) == 1
    monkeypatch.undo()
    vision.sweep(pd.concat([points, points.assign(x=6.0)]), run)  # of a run with --only "*sweep*"
    assert (tmp_path / "deit_b_sweep.png").is_file()
    assert not vision.sweep(points[points["row"] == "direct"], run)


def test_what_comes_out_is_a_timm_model(folder):
    low_rank = folder / "seed0" / "deit_b-low-rank" / "low_rank"
    repaired = runpy.run_path(str(low_rank / "load.py"))["load"]()
    module = PELA.load_from_checkpoint(
        folder / "seed0" / "deit_b-k2-both" / "checkpoints" / "last.ckpt"
    ).eval()
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(repaired(images), module(images))


def test_claims_read_the_table(table):
    words = {claim.name: judge(claim, table)[0] for claim in vision.CLAIMS}
    assert words["LoRA"] in ("not judged", "undecided")  # one seed of a smoke test
    assert words["memory"] in ("supported", "refuted")


def test_a_flag_that_is_varied_is_refused(tmp_path):
    for key in ("model.ratio", "model.init_from"):
        with pytest.raises(ValueError, match=f"varies {key}; choose rows with --rows"):
            run_experiment(vision.EXPERIMENT, ["--out", str(tmp_path), f"--{key}=3", "--plan"])
    # a stage whose class has no such setting is named
    with pytest.raises(ValueError, match=r"model.alpha is no setting.*limits a flag to this stage"):
        run_experiment(vision.EXPERIMENT, ["--out", str(tmp_path), "--model.alpha=3", "--plan"])


def test_a_flag_reaches_rows_of_every_class():
    """The rows' classes are what varies, not what is set of them."""
    rows = {"control", "both", "tinybert", "nested", "lora"}
    flags = ["--rows", ",".join(rows), "--model.lr=0.0123"]
    run = command_line(vision.EXPERIMENT, flags)
    vision.EXPERIMENT.declare(run)
    kinds = set()
    for node in run.nodes.values():
        row = node.name.removeprefix("deit_b-k2-")
        if isinstance(node, Stage) and row in rows:
            settings = node.parsed().model
            assert settings.init_args.lr == 0.0123
            kinds.add(settings.class_path.rpartition(".")[2])
    assert kinds == {"Classifier", "PELA", "Distillation", "MatViT", "LoRA"}


def test_rows_have_titles_and_trials_are_rows():
    assert set(TREATMENTS) <= set(vision.ROWS)
    trials = GRID["presets"]["small"]["trials"]
    assert set(trials) == {"dense", *(one.tuned_as for one in TREATMENTS.values())}
    assert {len(one) for one in trials.values()} == {6}  # an equal budget


def test_the_dense_model_is_tuned_on_held_out_images_and_rows_start_from_it(tmp_path):
    flags = ["--preset", "small", "--rows", "both", "--out", str(tmp_path)]
    run = command_line(vision.EXPERIMENT, flags)
    vision.declare(run)  # nothing is trained
    nodes = {folder.name: node for folder, node in run.nodes.items()}
    trial = nodes["deit_b-trial-dense-0"].settings
    assert trial["model.lr"] == 1.25e-5
    assert trial["data.val_per_class"] == 20  # not the images that are reported
    for dense in ("deit_b-trial-dense", "deit_b-dense"):
        names = {node.name for node in nodes[dense].waits_for()}
        assert names == {f"deit_b-trial-dense-{number}" for number in range(6)}


def test_a_perturbation_that_is_not_felt_is_not_judged():
    """In the first published table L_rwp had 0.2 to 2 % of the gradient."""
    claim = next(one for one in vision.CLAIMS if one.name == "weight perturbation")
    scores = {"dense": 0.6, "chance": 0.02, "direct": 0.1, "control": 0.4, "rwp": 0.3}
    for share, verdict in ((0.016, "not judged"), (0.2, "refuted")):
        rows = [Row(row, "accuracy", value, "deit_b κ 2") for row, value in scores.items()]
        rows.append(Row("rwp", "share_perturbation", share, "deit_b κ 2"))
        parts = [tidy(rows, "pela.vision", "small", seed) for seed in range(3)]
        assert judge(claim, pd.concat(parts))[0] == verdict


@pytest.mark.parametrize("name", ["repair", "LoRA"])
def test_a_dense_model_that_has_not_learnt_what_it_can_judges_nothing(name):
    """LoRA trains the dense model on: its lead may be what that training gives."""
    claim = next(one for one in vision.CLAIMS if one.name == name)
    scores = {"dense": 0.6, "chance": 0.02, "direct": 0.1, "both": 0.4, "lora": 0.65}
    for continued, verdict in ((0.66, "not judged"), (0.6, "refuted")):
        rows = [
            Row(row, "accuracy", value, "deit_b κ 2")
            for row, value in {**scores, "continued": continued}.items()
        ]
        parts = [tidy(rows, "pela.vision", "small", seed) for seed in range(3)]
        assert judge(claim, pd.concat(parts))[0] == verdict


@pytest.mark.parametrize("preset", ["small", "paper"])
def test_fig_4_is_judged_at_every_ratio_of_the_sweep(preset):
    [claim] = [one for one in vision.CLAIMS if one.where == "Fig. 4" and one.preset == preset]
    sweep = grid(Path(FILE).with_name("vision_grid.yaml"), preset)["sweep"]
    assert [test.where["x"] for test in claim.test] == sweep
    assert f"κ {', '.join(f'{x:g}' for x in sweep)})" in claim.sentence


def test_every_model_of_the_paper_has_the_baselines_of_table_1(tmp_path, monkeypatch):
    declared = set()
    for name in ("measure", "measure_untrained", "sweep", "finetune"):
        monkeypatch.setattr(Study, name, lambda *args, **settings: None)
    monkeypatch.setattr(Study, "dense_weights", lambda self, label: "dense.safetensors")
    monkeypatch.setattr(Study, "row", lambda self, *row: declared.add((self.name, *row)))
    run = command_line(vision.EXPERIMENT, ["--preset", "paper", "--out", str(tmp_path)])
    monkeypatch.setattr(run, "measure", lambda *args: None)
    vision.declare(run)
    for model, ratio in (("deit_b", 2.0), ("deit3_l", 2.0), ("swin_b", 1.5)):
        for row in ("tinybert", "maskalign", "lora", "tome"):
            # the paper leaves ToMe out for Swin, and maskalign() refuses it
            left_out = model == "swin_b" and row in ("maskalign", "tome")
            assert ((model, row, ratio) in declared) != left_out


@pytest.mark.parametrize(("ratio", "name"), [(1.5, "L"), (2.0, "M"), (3.0, None)])
def test_a_slice_has_as_many_parameters(ratio, name):
    assert slice_of(ratio, [0.125, 0.25, 0.5, 1.0]) == name
    width = 384
    block = 4 * width**2 + fraction_of(ratio) * 8 * width**2
    assert block == pytest.approx(12 * width**2 / ratio)


@pytest.fixture(scope="module")
def looking(tmp_path_factory):
    """What a measurement of the tiny preset is given."""
    config = parse(FILE, "tiny", ["--data.batch_size=8", "--data.eval_batch_size=100"])
    given = {"model": config.model.as_dict(), "data": config.data.as_dict()}
    return Measuring(0, given, {}, tmp_path_factory.mktemp("node"))


def test_a_nested_model_starts_with_its_neurons_sorted(looking, tmp_path):
    """Its small slices are then the neurons that `pruned` keeps, as `recipes.matformer` does it."""
    flags = ["--preset", "small", "--rows", "nested,pruned", "--out", str(tmp_path)]
    run = command_line(vision.EXPERIMENT, flags)
    vision.declare(run)
    nodes = {folder.name: node for folder, node in run.nodes.items()}
    for row, name in (("nested", "XL"), ("pruned", "M")):
        for label in (f"deit_b-k2-{row}", f"deit_b-trial-{row}-0"):
            starts = [one for one in nodes[label].waits_for() if one.name.endswith(f"{row}-start")]
            assert [one.settings["slice"] for one in starts] == [name]
    written = {}
    for name in ("XL", "M"):
        given = {**looking.settings, "fractions": [0.125, 0.25, 0.5, 1.0], "slice": name}
        folder = tmp_path / name
        folder.mkdir()
        torch.manual_seed(0)  # build() has no weights to start from here
        assert not list(measures.make_sorted(Measuring(0, given, {}, folder)))
        written[name] = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    dense = measures.build(looking).model
    images = torch.randn(2, 3, 8, 8)
    before, moved = (
        dense(images),
        not torch.equal(dense.blocks[0].mlp.fc1.weight, written["XL"]["blocks.0.mlp.fc1.weight"]),
    )
    dense.load_state_dict(written["XL"])
    assert moved and torch.allclose(dense(images), before, atol=1e-5)
    for key, part in written["M"].items():
        whole = written["XL"][key]
        assert torch.equal(part, whole[tuple(slice(side) for side in part.shape)])


def test_similarity_is_the_mean_cosine_of_all_pairs(looking):
    torch.manual_seed(0)
    model = measures.build(looking).model
    images = torch.randn(60, 3, 8, 8).to(next(model.parameters()))
    found = measures.similarity(model, [(images[:40], None), (images[40:], None)])
    with torch.no_grad():
        x = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        for one, block in zip(found, model.blocks, strict=True):
            x = block(x)
            vectors = torch.nn.functional.normalize(x.mean(1).double(), dim=-1)
            cosines = vectors @ vectors.T
            pairs = ~torch.eye(60, dtype=torch.bool)
            assert one == pytest.approx(cosines.cpu()[pairs].mean().item(), abs=1e-6)


def test_what_a_step_costs(looking):
    """Counted on a CPU: four times the weights, and activations that grow with the batch."""
    plain = {"alpha": 0.0, "beta": 0.0}
    small = measures.step_cost(measures.build(looking, **plain), measures.data_of(looking))
    larger = json.loads(json.dumps(looking.settings["data"], default=list))
    larger["init_args"]["batch_size"] = 32
    data = instance_of(larger)
    large = measures.step_cost(measures.build(looking, **plain), data)
    weights = sum(p.numel() for p in measures.build(looking).model.parameters())
    assert small["fixed"] == large["fixed"] == 4 * 4 * weights
    if not torch.cuda.is_available():
        activations = [cost["peak"] - cost["fixed"] for cost in (small, large)]
        assert activations[1] == pytest.approx(4 * activations[0], rel=0.02)
    assert 0 < small["seconds"] < 10


def test_paper_presets_are_the_released_code():
    """papers/pela.md: epochs, batch, learning rate, decay, κ, α, β; warm-up, drop-path, clip."""
    expected = {
        "deit_b": (50, 64, 6.25e-5, 0.05, 2.0, 1.0, 0.0, "blocks", []),
        "deit3_l": (20, 16, 3.125e-5, 0.1, 2.0, 1.0, 0.0, "blocks", []),
        "swin_b": (50, 64, 1.25e-5, 0.05, 1.5, 1.0, 1.0, "pooled", ["attn.proj"]),
    }
    # one epoch of 1,281,167 images in batches of 4 × 64 or 4 × 16, for Swin three
    rest = {
        "deit_b": (5004, 0.1, None), "deit3_l": (20018, 0.45, None), "swin_b": (15012, 0.5, 5.0),
    }  # fmt: skip
    for name, numbers in expected.items():
        config = parse(FILE.replace("deit_b", name))
        h, data = config.model.init_args, config.data.init_args
        found = (config.trainer.max_epochs, data.batch_size, h.lr, h.weight_decay, h.ratio)
        assert (*found, h.alpha, h.beta, h.features, h.skip) == numbers
        clip = config.trainer.gradient_clip_val
        assert (h.warmup_steps, h.model_args["drop_path_rate"], clip) == rest[name]
        losses = (h.setting, h.p, h.epsilon, h.schedule)  # also of DeiT's rows with L_rwp
        assert losses == ("released", float("inf"), 0.0, "cosine")
        assert (data.mixup, data.cutmix, data.label_smoothing, data.random_erasing) == (
            0.8, 1.0, 0.1, 0.25,
        )  # fmt: skip
        assert data.auto_augment == "rand-m9-mstd0.5-inc1"


def test_lora_has_a_learning_rate_of_its_own_and_the_sweep_reaches_a_tenth(tmp_path, monkeypatch):
    """papers/pela.md gives neither the rate nor the sweep's epochs: a higher one, and fewer."""
    monkeypatch.setattr(Study, "dense_weights", lambda self, label: "dense.safetensors")
    flags = ["--preset", "paper", "--rows", "both,lora", "--out", str(tmp_path)]
    run = command_line(vision.EXPERIMENT, flags)
    vision.declare(run)
    stages = {node.name: node for node in run.nodes.values() if isinstance(node, Stage)}
    released = {"deit_b": (6.25e-5, 50), "deit3_l": (3.125e-5, 20), "swin_b": (1.25e-5, 50)}
    for name, (lr, epochs) in released.items():
        label = f"{name}-k{1.5 if name == 'swin_b' else 2:g}"
        both, lora = (stages[f"{label}-{row}"].parsed() for row in ("both", "lora"))
        assert both.model.init_args.lr == lr < lora.model.init_args.lr
        assert both.trainer.max_epochs == lora.trainer.max_epochs == epochs
    sweep = {name: one for name, one in stages.items() if "-sweep-" in name}
    assert "deit_b-sweep-k10" in sweep and "deit_b-sweep-k2" in sweep
    for stage in sweep.values():
        settings = stage.parsed()
        assert settings.trainer.max_epochs < 50 and settings.model.init_args.lr == 6.25e-5


@pytest.mark.parametrize("preset", presets(FILE))
def test_the_sweep_trains_for_fewer_epochs(preset):
    share = grid(Path(FILE).with_name("vision_grid.yaml"), preset)["sweep_share"]
    epochs = parse(FILE, preset).trainer.max_epochs
    assert 1 <= round(share * epochs) < epochs
