"""The experiments on MatViT: what each stage trains and on how much, and the tiny runs."""

import copy
import math
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from lightning_modules.backbones import build_vision
from lightning_modules.matformer import MatViT, granularity, importance, nest
from lightning_modules.matformer.mix_and_match import ORDERS
from lightning_modules.weights import load_weights
from recipes.claims import NOT_JUDGED, SUPPORTED, judge
from recipes.cli import parse, presets
from recipes.experiment import Measuring
from recipes.matformer import (
    finetune_grid,
    heads,
    matvit,
    matvit_measures,
    probabilities,
    retrieval,
)
from recipes.matformer.starts import BATCHES, write_slices
from recipes.nodes import finished
from recipes.records import read_history, read_record
from recipes.results import Row, read, select, tidy
from recipes.runner import command_line
from tests.recipes.report_checks import check_reports_of_parts

SIZES = ["S", "M", "L", "XL"]
MODULES = {
    module.EXPERIMENT.name.split(".")[1]: module
    for module in (matvit, retrieval, finetune_grid, probabilities, heads)
}
PLOTS = {
    "matvit": ["accuracy.png"],
    "retrieval": ["adaptive.png", "traditional.png"],
    "finetune_grid": ["finetune_grid.png"],
    "probabilities": ["probabilities.png"],
    "heads": ["accuracy.png"],
}
ROWS = {
    "matvit": {*matvit.ROWS, *ORDERS, "search", "ends", "least_slope"} - {"unsorted", "scratch"}
    | {"chance"},
    "retrieval": {*retrieval.FAMILIES, "chance"},
    "finetune_grid": {*finetune_grid.ROWS, "pretrain", "chance"},
    "probabilities": {*map(probabilities.name, probabilities.TABLE_6), "chance"},
    "heads": {*heads.PARTS, "chance"},
}
EPOCHS = 4  # of a nested stage in the tiny runs; an independent model has a quarter
SHORT = [
    f"--trainer.max_epochs={EPOCHS}",
    "--trainer.check_val_every_n_epoch=1",
    "--data.per_class=64",
]


def declared(name, *arguments):
    experiment = MODULES[name].EXPERIMENT
    run = command_line(experiment, [*arguments])
    experiment.declare(run)
    return run


def stages(run):
    """The settings of each stage."""
    return {node.name: node.parsed() for node in run.nodes.values() if hasattr(node, "config")}


@pytest.mark.parametrize("preset", presets(matvit.EXPERIMENT.folder / "matvit.yaml"))
def test_the_baselines_have_their_full_budget(preset):
    """Appendix B.3: X epochs for each independent model, 4X for what samples."""
    file = matvit.EXPERIMENT.folder / "matvit.yaml"
    found = stages(declared("matvit", "--preset", preset))
    total, batch = (
        parse(file, preset).trainer.max_epochs,
        parse(file, preset).data.init_args.batch_size,
    )
    for name, settings in found.items():
        alone = name.startswith("independent")
        if "trial" in name:  # half of the epochs, on held-out training images
            whole = found[name.split(" trial")[0]].trainer.max_epochs
            assert settings.trainer.max_epochs == max(1, whole // 2)
            assert settings.data.init_args.val_per_class == 20
            continue
        assert settings.trainer.max_epochs == total // (4 if alone or name == "joint" else 1), name
        assert settings.data.init_args.batch_size == batch
        assert settings.trainer.accumulate_grad_batches == (4 if name == "dynabert" else 1)
        assert (settings.model.init_args.fractions is None) == alone
        assert settings.model.init_args.warmup_steps == found["matvit"].model.init_args.warmup_steps
        assert settings.model.init_args.split_batch == (name == "dynabert")
        joint = {"joint": "sum", "dynabert": "mean"}  # the released code sums
        assert settings.model.init_args.joint == joint.get(name)
    if preset == "paper":
        assert total == 1200


def test_the_paper_preset_is_the_reference_codes():
    settings = parse(matvit.EXPERIMENT.folder / "matvit.yaml")
    model, data = settings.model.init_args, settings.data.init_args
    assert (model.lr, model.weight_decay, model.warmup_steps) == (1e-3, 0.1, 10000)
    assert (model.betas, model.decay_vectors, model.head_bias) == ([0.9, 0.999], True, -6.9)
    assert (model.loss, model.schedule, settings.trainer.gradient_clip_val) == (
        "sigmoid", "cosine", 1.0,
    )  # fmt: skip
    assert set(model.model_args.values()) == {0.1} and len(model.model_args) == 3
    assert (data.image_size, data.crop_pct, data.mixup) == (224, 0.875, 0.5)
    assert data.batch_size * 8 == 2048


def test_probabilities_are_table_6_s():
    """papers/matformer.md, of S / M / L / XL; equal ones are those of `matvit` itself."""
    assert set(probabilities.TABLE_6) == {
        (0.44, 0.31, 0.15, 0.10), (0.31, 0.27, 0.22, 0.20), (0.25, 0.25, 0.25, 0.25),
        (0.20, 0.22, 0.24, 0.34), (0.17, 0.20, 0.22, 0.41),
    }  # fmt: skip
    found = stages(declared("probabilities", "--preset", "paper"))
    drawn = {
        name: one.trainer.callbacks[0].init_args.probabilities
        for name, one in found.items()
        if name != "matvit"
    }
    assert drawn == {
        "p44_31_15_10": [0.44, 0.31, 0.15, 0.10], "p31_27_22_20": [0.31, 0.27, 0.22, 0.20],
        "p20_22_24_34": [0.20, 0.22, 0.24, 0.34], "p17_20_22_41": [0.17, 0.20, 0.22, 0.41],
    }  # fmt: skip
    assert not found["matvit"].trainer.callbacks


def test_the_pretraining_is_big_vision_s():
    """configs/vit_i21k.py for L/16 ("medium2"); decay by default on kernels, in optax.py."""
    settings = parse(matvit.EXPERIMENT.folder / "pretrain.yaml")
    model, data = settings.model.init_args, settings.data.init_args
    assert (model.lr, model.weight_decay, model.warmup_steps) == (1e-3, 0.1, 10000)
    assert (model.decay_vectors, model.loss, model.head_bias) == (False, "sigmoid", -10.0)
    assert (data.mixup, data.mixup_prob) == (0.5, 1.0)  # Beta(.5, .5), at every batch
    assert (data.image_size, data.crop_pct) == (224, 0.875)  # 256 to 224
    assert data.batch_size * 16 == 4096 and settings.trainer.max_epochs == 4 * 300


def test_randaugment_applies_both_operations_always():
    from timm.data.auto_augment import rand_augment_transform

    policy = parse(matvit.EXPERIMENT.folder / "matvit.yaml").data.init_args.auto_augment
    augment = rand_augment_transform(policy, {})
    assert augment.num_layers == 2 and {operation.prob for operation in augment.ops} == {1.0}


def test_independent_models_are_as_wide_as_the_granularities():
    found = stages(declared("matvit", "--preset", "paper", "--rows", "independent"))
    ratios = [
        found[f"independent_{size}"].model.init_args.model_args["mlp_ratio"] for size in SIZES
    ]
    assert ratios == [0.5, 1.0, 2.0, 4.0]
    found = stages(
        declared("matvit", "--rows", "independent", '--model.model_args={"mlp_ratio": 8}')
    )
    assert found["independent_S"].model.init_args.model_args["mlp_ratio"] == 1.0


def test_pretrained_models_start_from_sorted_slices():
    run = declared("matvit", "--preset", "small")
    found = {name: one.model.init_args.init_from for name, one in stages(run).items()}
    folder = run.out / "seed0" / "sorted ffn"
    for size in SIZES:
        for name in (f"independent_{size}", f"independent_{size} trial 1"):
            assert found[name] == str(folder / f"{size}.safetensors")
    assert found["matvit"] == found["dynabert"] == str(folder / "XL.safetensors")
    assert found["unsorted"] == "weights/dinov2-vit-s14-depth9"
    run = declared("heads", "--preset", "small")
    heads_at_small = stages(run)["heads"].model.init_args
    assert heads_at_small.fractions == [2 / 6, 3 / 6, 5 / 6, 1]  # ViT-S has six heads
    assert heads_at_small.init_from.endswith("sorted heads/XL.safetensors")
    (sorting,) = (node for node in run.nodes.values() if node.name == "sorted heads")
    sliced = sorting.settings["model"]  # before, the feed-forward's fractions: not whole heads
    with torch.device("meta"):
        model = build_vision(sliced["architecture"], 0, sliced["model_args"] or {})
    assert nest(model, sliced["fractions"], sorting.settings["part"]).nesting.layers[0].widths == (
        2, 3, 5, 6,
    )  # fmt: skip
    with pytest.raises(ValueError, match="--rows has 'unsorted'"):  # nothing to sort from scratch
        declared("matvit", "--rows", "unsorted")


@pytest.mark.parametrize("part", ["ffn", "heads"])
def test_a_slice_is_what_the_nested_model_uses(part, tmp_path):
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
    torch.manual_seed(0)
    plain = build_vision("vit_tiny_patch16_224", 0, arguments).eval()
    save_file(plain.state_dict(), tmp_path / "vit.safetensors")
    settings = {
        "model": {
            "architecture": "vit_tiny_patch16_224", "model_args": arguments,
            "init_from": str(tmp_path / "vit.safetensors"), "fractions": [0.25, 0.5, 0.75, 1.0],
        },
        "data": {"class_path": "datamodules.PairedDigitsData", "init_args": {"image_size": 16}},
        "part": part,
    }  # fmt: skip
    assert not write_slices(Measuring(0, settings, {}, tmp_path))
    images = torch.randn(3, 3, 16, 16)
    largest = build_vision("vit_tiny_patch16_224", 0, arguments).eval()
    load_weights(largest, tmp_path / "XL.safetensors")
    name = "blocks.0.mlp.fc1.weight" if part == "ffn" else "blocks.0.attn.qkv.weight"
    assert not torch.equal(largest.state_dict()[name], plain.state_dict()[name])
    assert torch.allclose(largest(images), plain(images), atol=1e-5)  # sorted, the same function
    nest(largest, settings["model"]["fractions"], part)
    small = {**arguments, "mlp_ratio": 1.0}
    if part == "ffn":
        alone = build_vision("vit_tiny_patch16_224", 0, small).eval()
        load_weights(alone, tmp_path / "S.safetensors")
        with granularity(largest, "S"):
            assert torch.allclose(alone(images), largest(images), atol=1e-5)


def test_a_limit_on_steps_keeps_the_budgets():
    found = stages(declared("matvit", "--trainer.max_steps=40"))
    limits = {name: settings.trainer.max_steps for name, settings in found.items()}
    assert limits.pop("matvit") == limits.pop("per_layer") == 40 and set(limits.values()) == {10}
    with pytest.raises(ValueError, match="trainer.max_steps is 3, expected 4 or more"):
        declared("matvit", "--trainer.max_steps=3").check()
    unlimited = stages(declared("matvit", "--trainer.check_val_every_n_epoch=null"))
    assert {settings.trainer.max_steps for settings in unlimited.values()} == {-1}
    assert {settings.trainer.check_val_every_n_epoch for settings in unlimited.values()} == {None}


def test_only_feed_forward_layers_have_independent_models_of_their_sizes():
    with pytest.raises(ValueError, match="model.part"):
        declared("matvit", "--model.part=heads").check()


def test_an_experiment_on_nested_models_refuses_to_nest_nothing():
    for name in ("matvit", "retrieval"):
        with pytest.raises(
            ValueError, match="matvit: model.fractions is null, expected the widths"
        ):
            declared(name, "--model.fractions=null")


def test_epochs_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="trainer.max_epochs 10 must be a multiple of 4"):
        declared("matvit", "--trainer.max_epochs=10").check()


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all, so that the stages they share are trained once."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("name", PLOTS)
def test_tiny_preset(name, out, monkeypatch):
    command = ["--out", str(out), *SHORT]
    monkeypatch.setattr(matvit_measures, "BETWEEN", 1)
    monkeypatch.setattr(retrieval, "BETWEEN", 1)
    run = MODULES[name].main(command)
    table = read(run.out)
    assert set(table.row) == ROWS[name]
    check_numbers(name, table)
    check_updates(run)
    text = (run.out / "report.md").read_text()
    assert "Chance, " in text and "A smoke test" in text and "| --- |" in text
    for plot in PLOTS[name]:
        assert f"({plot})" in text
        with Image.open(run.out / plot) as picture:
            assert min(picture.size) > 300
    check_reports_of_parts(MODULES[name].EXPERIMENT, run)

    def fail(args, callbacks=()):
        raise AssertionError(f"a finished stage was trained again: {args}")

    monkeypatch.setattr("recipes.work.run_stage", fail)
    assert read(MODULES[name].main(command).out).equals(table)


def check_numbers(name, table):
    """Each with what it can be; where there are several sizes, the largest costs most."""
    for row, part in select(table, {"metric": "parameters"}).groupby("row"):
        sizes = part.set_index("set").value
        assert set(sizes.index) >= ({"XL"} if row == "matvit_vit" else set(SIZES))
        assert sizes.max() == sizes["XL"] and sizes.is_unique
    bounds = {"accuracy": 1, "agreement": 1, "adaptive": 1, "traditional": 1, "loss": 20, "kl": 20}
    for metric, part in table.groupby("metric"):
        # a difference, and what may be worse than always predicting the mean
        least = {"above the line": -1, "predictor_explained": -math.inf}.get(metric, -1e-6)
        assert part.value.between(least, bounds.get(metric, math.inf)).all(), metric
    rated, sized = (select(table, {"metric": one}) for one in ("lr", "parameters"))
    assert {*zip(rated["row"], rated["set"], strict=True)} == {
        *zip(sized["row"], sized["set"], strict=True)
    }
    largest = select(table, {"metric": "agreement", "set": "XL"}).value
    assert (largest == 1).all()
    chance = select(table, {"row": "chance"}).value
    assert np.allclose(chance, 0.1, atol=1e-3 if name == "retrieval" else 0)  # of ten digits
    if name == "retrieval":  # XL's queries and documents are the same in both modes
        xl = select(table, {"set": "XL"}).set_index(["row", "metric"]).value
        assert all(xl[row, "adaptive"] == xl[row, "traditional"] for row in retrieval.FAMILIES)


def check_updates(run):
    """Every stage made the updates that its examples, batch and epochs give, and no fewer."""
    for node in run.nodes.values():
        if not hasattr(node, "config"):
            continue
        settings = node.parsed()
        plain = settings.model.init_args.fractions is None
        epochs = EPOCHS // 4 if plain or node.name == "joint" else EPOCHS
        assert settings.trainer.max_epochs == epochs, node.name
        classes = len(settings.data.init_args.classes or range(10))
        batches = 64 * classes // settings.data.init_args.batch_size
        state = torch.load(node.folder / "checkpoints" / "last.ckpt", weights_only=True)
        updates = math.ceil(batches / settings.trainer.accumulate_grad_batches)
        assert state["global_step"] == updates * epochs, node.name
        assert read_record(node.folder)["finished"]


def test_sorting_changes_the_order_and_not_the_function(out):
    run = finetune_grid.main(["--out", str(out), *SHORT])
    checkpoint = run.out / "seed0" / "pretrain_XL" / "checkpoints" / "last.ckpt"
    plain = MatViT.load_from_checkpoint(checkpoint).model.eval()
    in_order = copy.deepcopy(plain)
    file = run.out / "seed0" / "sorted" / finetune_grid.SORTED
    assert not load_weights(in_order, file).missing
    first = plain.blocks[0].mlp.fc1.weight
    assert not torch.equal(in_order.blocks[0].mlp.fc1.weight, first)
    images = torch.randn(4, 3, 8, 8, device=first.device)
    assert torch.allclose(in_order(images), plain(images), atol=1e-5)
    (pretrained,) = (n for n in run.nodes.values() if n.name == "pretrain_XL")
    batches = islice(finished(pretrained).datamodule().train_dataloader(), BATCHES)
    scores = importance(in_order, (images.to(first.device) for images, _ in batches))["ffn"]
    for values in scores.values():
        assert torch.allclose(values, values.sort(descending=True).values, rtol=1e-4)
    started = [n for n in run.nodes.values() if n.name == "finetune_sorted_matvit"]
    assert [n.parsed().model.init_args.init_from for n in started] == [str(file)]


def test_fine_tuning_has_big_vision_s_settings():
    """papers/matformer.md, "Settings from the reference code" (L/16), of ViT -> ViT and MatViT."""
    settings = stages(declared("finetune_grid", "--preset", "paper"))
    for name, epochs in (("finetune_vit_vit_XL", 8), ("finetune_vit_matvit", 32)):
        model, data, trainer = (settings[name][part] for part in ("model", "data", "trainer"))
        model, data = model.init_args, data.init_args
        assert (model.optimizer, model.momentum, model.lr) == ("sgd", 0.9, 0.01), name
        assert (model.loss, model.weight_decay, model.schedule) == ("softmax", 0.0, "cosine"), name
        assert (data.image_size, trainer.max_epochs) == (384, epochs), name
        assert trainer.gradient_clip_val == 1.0, name


def test_the_grid_says_whether_its_plain_trainings_have_learnt():
    nodes = {node.name: node for node in declared("finetune_grid").nodes.values()}
    assert {*nodes["training of pretrain"].nodes} == {"XL"}
    assert {*nodes["training of vit_vit"].nodes} == {*SIZES}


def test_what_is_scored_is_the_validation_part(out):
    """The accuracy in the table is the one that validation logged at the end of training."""
    run = matvit.main(["--out", str(out), *SHORT])
    table = read(run.out)
    for row, stage, size, suffix in (
        ("matvit", "matvit", "S", "_S"),
        ("matvit", "matvit", "XL", "_XL"),
        ("independent", "independent_S", "S", ""),
    ):
        history = read_history(run.out / "seed0" / stage)
        (scored,) = select(table, {"row": row, "set": size, "metric": "accuracy"}).value
        assert scored == pytest.approx(history[f"val/accuracy{suffix}"][-1], abs=1e-6)
        (trained,) = (node.parsed() for node in run.nodes.values() if node.name == stage)
        (rate,) = select(table, {"row": row, "set": size, "metric": "lr"}).value
        assert rate == trained.model.init_args.lr


def test_the_search_learns_on_other_images_than_it_is_judged_on():
    from datamodules import DigitsData

    data = DigitsData(batch_size=64, eval_batch_size=600, seed=1)
    learn, judge = (next(iter(loader))[0] for loader in matvit_measures.halves(data.val_set, 600))
    assert len(learn) + len(judge) == len(data.val_set) and abs(len(learn) - len(judge)) <= 1
    learned = {image.numpy().tobytes() for image in learn}
    twice = sum(image.numpy().tobytes() in learned for image in judge)
    assert twice <= 2  # the set holds a few equal digits


def test_the_orders_are_judged_on_the_second_half(monkeypatch):
    """`score` sees the first half while the predictor learns, the second one afterwards."""
    seen = []

    class Stop(Exception):
        pass

    def record(models, loader, reference, what):
        seen.append(loader)
        if len(seen) == 3:
            raise Stop
        return {model.label: {"loss": float(len(model.label))} for model in models}

    from recipes.experiment import Measuring

    first, second = object(), object()
    data = type("Data", (), {"image_size": 8, "val_set": None, "eval_batch_size": 1})()
    import timm

    vit = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
    model = nest(timm.create_model("vit_tiny_patch16_224", num_classes=3, **vit))
    monkeypatch.setattr(matvit_measures, "halves", lambda samples, batch_size: (first, second))
    monkeypatch.setattr(Measuring, "model", lambda self, name: model)
    monkeypatch.setattr(matvit_measures, "score", record)
    monkeypatch.setattr(Measuring, "datamodule", lambda self, name: data)
    with pytest.raises(Stop):
        list(matvit_measures.measure_orders(Measuring(0, {}, {}, None)))
    assert seen == [first, second, second]


def paper_like(gap, rising=0.01, predicts=0.9):
    """A table in which all that the paper says of images holds.

    `gap` is XL's gain over S, `rising` what independent models gain in their last quarter,
    `predicts` the share of the variance that the search's predictor explains.
    """
    skewed = [probabilities.name(row) for row in probabilities.TABLE_6]
    gains = {  # of accuracy, at S and at XL
        "matvit": (0.02, 0.02), "independent": (0, 0), "dynabert": (-0.02, -0.02),
        "per_layer": (-0.02, -0.02), "unsorted": (-0.02, 0),
        "vit_vit": (0, 0), "vit_matvit": (-0.02, 0),
        "matvit_matvit": (0, 0), "matvit_vit": (0, 0),
        skewed[0]: (0.02, -0.02), skewed[2]: (0, 0), skewed[4]: (-0.02, 0.02),
    }  # fmt: skip
    noise, tables = np.random.default_rng(0), []
    for seed in range(4):
        lines, orders = [], []
        for row, gain in gains.items():
            for place, size in enumerate(SIZES):
                more = gap * place / 3 + gain[place == 3] + noise.normal(0, 1e-4)
                lines.append(Row(row, "accuracy", 0.7 + more, size))
                lines.append(Row(row, "loss", 1 - more, size))
        for row, agreement in {"matvit": 0.8, "independent": 0.7}.items():
            lines.append(Row(row, "agreement", agreement + noise.normal(0, 1e-4), "S"))
        for size in SIZES:
            for quarter, value in enumerate((0.4, 0.5, 0.6, 0.6 + rising), start=1):
                value += noise.normal(0, 1e-4)
                for row in ("independent", "pretrain", "vit_vit"):
                    lines.append(Row(row, "val_accuracy", value, size, x=quarter))
        lines.append(Row("matvit", "above the line", noise.normal(0, 1e-4)))
        orders.append(Row("search", "predictor_explained", predicts + noise.normal(0, 1e-3)))
        for place, row in enumerate(("increase", "search", "decrease", "least_slope", "ends")):
            for size in ("S*2+M*2", "S*3+XL"):
                orders.append(Row(row, "loss", 1 + 0.01 * place + noise.normal(0, 1e-4), size))
        tables.append(tidy(lines, "", "small", seed))
        tables.append(tidy(orders, "", "small", seed, "orders"))
    return pd.concat(tables)


@pytest.mark.parametrize(("gap", "word"), [(0.1, SUPPORTED), (-0.02, NOT_JUDGED)])
def test_every_claim_is_judged_where_size_matters(gap, word):
    table = paper_like(gap)
    for claim in (*matvit.CLAIMS, *probabilities.CLAIMS, *finetune_grid.CLAIMS):
        found, _, reason = judge(claim, table)
        assert found == word, claim.name
        assert not reason if word == SUPPORTED else "gate is shut (XL of the row" in reason, (
            claim.name
        )


def test_independent_models_that_still_learn_fast_are_no_baseline():
    table = paper_like(gap=0.1, rising=0.05)
    grid = {claim.name for claim in finetune_grid.CLAIMS}
    claims = [*matvit.CLAIMS, *finetune_grid.CLAIMS]
    shut = [claim.name for claim in claims if judge(claim, table)[0] == NOT_JUDGED]
    beside = ["MatViT S agrees with XL", "ViT → MatViT keeps XL"]
    assert set(shut) == {*beside, *grid, *(f"MatViT {size} ≥ independent {size}" for size in SIZES)}


def test_a_search_whose_predictor_explains_little_is_no_rival():
    table = paper_like(gap=0.1, predicts=0.4)
    [shut] = (claim for claim in matvit.CLAIMS if judge(claim, table)[0] == NOT_JUDGED)
    assert shut.name == "Mix'n'Match > search"
    assert "the gate is shut (the search's predictor" in judge(shut, table)[2]


def test_an_encoder_that_knows_nothing_finds_the_commonest_class_most():
    documents, queries = ([(None, label) for label in labels] for labels in ([0, 0, 0, 1], [0, 1]))
    data = SimpleNamespace(
        train_set=SimpleNamespace(items=documents),
        val_set=SimpleNamespace(items=queries),
        num_classes=2,
    )
    assert retrieval.chance(data) == (3 / 4 + 1 / 4) / 2
    data.val_set.items = [(None, 0)]
    assert retrieval.chance(data) == 3 / 4


def test_from_scratch_is_trained_as_an_independent_xl_is():
    """As long, and with trials of its own; only when it is asked for."""
    assert "scratch" not in stages(declared("matvit", "--preset", "small"))
    run = declared("matvit", "--preset", "small", "--rows", "independent,scratch")
    found = stages(run)
    scratch, alone = found["scratch"], found["independent_XL"]
    assert scratch.model.init_args.init_from is None and scratch.model.init_args.fractions is None
    assert scratch.trainer.max_epochs == alone.trainer.max_epochs == 2
    tried = {
        name: [one.model.init_args.lr for title, one in found.items() if f"{name} trial" in title]
        for name in ("scratch", "independent_XL")
    }
    assert len(tried["scratch"]) == len(tried["independent_XL"]) == 6
    assert max(tried["scratch"]) > max(tried["independent_XL"])
    with pytest.raises(ValueError, match="--rows has 'scratch'"):  # all of it is from scratch
        declared("matvit", "--rows", "scratch")


@pytest.mark.parametrize("name", PLOTS)
def test_unknown_preset(name):
    with pytest.raises(ValueError, match="unknown preset 'tinny': .* has tiny, small, paper"):
        MODULES[name].main(["--preset", "tinny"])


@pytest.mark.parametrize("name", PLOTS)
def test_help(name, capsys):
    with pytest.raises(SystemExit):
        MODULES[name].main(["--help"])
    shown = capsys.readouterr().out
    assert f"python -m recipes.matformer.{name} " in shown and "--preset paper" in shown


def test_documents_are_the_training_images_as_evaluation_sees_them():
    from datamodules import DigitsData

    data = DigitsData(batch_size=64, eval_batch_size=100, augmentation="light", seed=1)
    images, labels = (torch.cat(part) for part in zip(*retrieval.documents(data), strict=True))
    plain = DigitsData(augmentation="none", seed=1).train_set
    assert len(images) == len(plain)
    for place in (0, 7, len(plain) - 1):
        assert torch.equal(images[place], plain[place][0]) and labels[place] == plain[place][1]
