"""MatLM's experiments from the command line to the report, and what their checkpoints write."""

import cpu_torchvision  # noqa: F401

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from datamodules import corpus, tokens
from datamodules.tokens import train_tokenizer
from lightning_modules.backbones import build_text
from lightning_modules.counting import count_parameters
from lightning_modules.matformer import MatLM, nest, set_granularity
from lightning_modules.matformer.mix_and_match import ORDERS
from lightning_modules.matformer.nest import Nesting, nesting_of
from lightning_modules.matformer.speculative import LONGEST_DRAFT, speculative_generate
from recipes import generate
from recipes.claims import NOT_JUDGED, REFUTED, SUPPORTED, judge
from recipes.cli import parse
from recipes.experiment import Measuring
from recipes.experiment_plan import fill, grouped
from recipes.export import export
from recipes.matformer import (
    convergence,
    elastic,
    matlm,
    matlm_measures,
    matlm_report,
    scaling,
)
from recipes.matformer.submodels import ladder
from recipes.nodes import device, finished
from recipes.predict import Predictor
from recipes.records import read_record
from recipes.results import Row, read, tidy, write
from recipes.runner import command_line
from tests.recipes.report_checks import check_reports_of_parts

BUDGETS = ("M", "M*3+L*1", "M*1+L*3", "L*2+XL*2")  # Table 5's, of four layers
ROWS = "matlm,joint,per_layer,heads,independent,independent heads,p .17/.20/.22/.41,decoding"
SMALLER = ["--trainer.max_steps=8", "--data.max_bytes=60000", "--data.eval_tokens=1500"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder for all runs, in which they also keep their token files."""
    return tmp_path_factory.mktemp("runs")


def run(experiment, out, *flags):
    cache = f"--data.cache={out / 'corpora'}"
    return experiment.main(["--out", str(out), *SMALLER, cache, *flags])


@pytest.fixture(scope="module")
def trained(out):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matlm_measures, "ROUNDS", 1)
        alone = SimpleNamespace(absent=lambda: True)
        patch.setattr(matlm_measures, "OthersAtWork", lambda: alone)
        return run(matlm, out, "--rows", ROWS)


def values(table, metric):
    """By row and set."""
    lines = table[table["metric"] == metric]
    return {(line.row, line.set): line.value for line in lines.itertuples()}


def test_every_row_has_its_tokens_and_its_sizes(trained):
    table = read(trained.out)
    alone = {"independent", "independent heads"}
    rows = {"matlm", "joint", "per_layer", "heads", *alone, "p .17/.20/.22/.41"}
    tokens, loss = values(table, "tokens"), values(table, "loss")
    for row in rows:
        for size in ("S", "M", "L", "XL"):
            # 8 steps of 8 blocks of 64 tokens are 4X
            assert tokens[row, size] == (1024 if row in alone else 4096)
            assert 0 < loss[row, size] < 7
    assert (
        set(values(table, "lr").values()) == {3e-3} and values(table, "lr").keys() == tokens.keys()
    )
    assert values(table, "perplexity")["matlm", "S"] == pytest.approx(np.exp(loss["matlm", "S"]))
    assert values(table, "agreement")["matlm", "XL"] == 1
    d, inner = 32, {"S": 16, "M": 32, "L": 64, "XL": 128}
    parameters = values(table, "non_embedding")
    for row in ("matlm", "independent"):
        for size, neurons in inner.items():
            assert parameters[row, size] == 4 * (4 * d * d + 2 * d * neurons)
    for row in ("heads", "independent heads"):
        for heads, size in enumerate(("S", "M", "L", "XL"), start=1):
            assert parameters[row, size] == 4 * (4 * d * d * heads // 4 + 2 * d * 128)


def test_all_granularities_cost_what_the_paper_says(trained):
    table = read(trained.out)
    cost = values(table, "cost of all sizes")
    assert cost["matlm", ""] == pytest.approx(31 / 12)
    [claim] = (one for one in matlm.CLAIMS if one.name == "cost of training")
    assert judge(claim, table)[0] == SUPPORTED
    dearer = table.assign(value=table["value"].where(table["row"] != "matlm", 2.6))
    assert judge(claim, dearer)[0] == REFUTED
    assert "costs 2.58 times as much" in (trained.out / "report.md").read_text()


@pytest.mark.parametrize("made_by", ["trained", "made_elastic"])
def test_the_prediction_without_context_knows_how_often_each_token_occurs(made_by, request):
    made = request.getfixturevalue(made_by)
    found = values(read(made.out), "loss")["unigram", ""]
    stage = next(node for node in made.nodes.values() if node.name in ("matlm", "elastic"))
    data = finished(stage).datamodule()
    counts = Counter(data.stream("train").read(0, 10**9).tolist())
    total = sum(counts.values()) + 259
    scored = data.stream("val").read(0, 10**9).tolist()[1:]  # the first is no label
    by_hand = -np.mean([np.log((counts[token] + 1) / total) for token in scored])
    assert len(scored) == 1499 and found == pytest.approx(by_hand, rel=1e-5)
    assert 2 < found < np.log(259)
    assert f"the loss is {found:.2f} and" in (made.out / "report.md").read_text()


def test_the_report_says_how_many_tokens_each_independent_model_saw(trained):
    table = read(trained.out)
    ratios = values(matlm_report.tokens_a_parameter(table), "tokens a parameter")
    size = values(table, "non_embedding")["independent", "S"]
    assert ratios["independent", "S"] == 1024 / size
    curve = [Row("independent", "val_loss", 3 - x / 10, "S", x=x) for x in range(1, 5)]
    table = pd.concat([table, tidy(curve, "matformer.matlm", "tiny", 0)])
    text = "\n".join(matlm.report(table, trained))
    line = next(one for one in text.split("\n") if one.startswith("| S | ") and "-0.100" in one)
    assert f"| {1024 / size:.1f} | 2.600 | -0.100 |" in line


def test_each_training_made_the_updates_that_are_due(trained):
    def updates(name):
        file = trained.out / "seed0" / name / "checkpoints" / "last.ckpt"
        return torch.load(file, weights_only=True, mmap=True)["global_step"]

    assert updates("matlm") == updates("per_layer") == updates("heads") == 8
    assert updates("joint") == updates("independent_S") == updates("independent_XL") == 2


def parsed(*flags):
    """The settings of the stages of the paper's 78M, by name."""
    rows = ["--rows", "matlm,joint,independent"]
    declared = command_line(matlm.EXPERIMENT, ["--preset", "78M", *rows, *flags])
    matlm.EXPERIMENT.declare(declared)
    return {node.name: node.parsed() for node in declared.nodes.values() if hasattr(node, "config")}


def test_the_optimiser_is_that_of_the_reference_code():
    """papers/matformer.md, "Settings from the reference code" (MatLM, a fork of OLMo)."""
    settings = parsed()["matlm"]
    model = settings.model.init_args
    assert (model.lr, tuple(model.betas), model.weight_decay) == (1e-3, (0.9, 0.95), 0.01)
    assert model.schedule == "cosine_warmup_with_min_lr"
    assert model.schedule_args == {"min_lr_rate": 0.1, "warmup_lr_rate": 0.1}
    assert (settings.trainer.gradient_clip_val, settings.trainer.precision) == (1.0, "bf16-mixed")


@pytest.mark.parametrize("drawn", [
    [0.44, 0.31, 0.15, 0.10], [0.31, 0.27, 0.22, 0.20],
    [0.20, 0.22, 0.24, 0.34], [0.17, 0.20, 0.22, 0.41],
])  # fmt: skip
def test_granularities_are_drawn_as_in_table_6(drawn):
    row = "p " + "/".join(f"{p:.2f}"[1:] for p in drawn)
    (settings,) = parsed("--rows", row).values()
    (sampling,) = (
        one.init_args
        for one in settings.trainer.callbacks
        if one.class_path.endswith("GranularitySampling")
    )
    assert sampling.probabilities == drawn


# Table 4: d_model and tokens.
TABLE_4 = {
    "78M": (256, 10e9), "180M": (512, 20e9), "310M": (768, 30e9), "463M": (1024, 40e9),
    "paper": (1536, 80e9),
}  # fmt: skip


@pytest.mark.parametrize("preset", TABLE_4)
def test_sizes_are_table_4_s(preset):
    settings = parse(matlm.EXPERIMENT.folder / "matlm.yaml", preset)
    model, data, trainer = settings.model.init_args, settings.data.init_args, settings.trainer
    width, tokens = TABLE_4[preset]
    sizes = model.model_args
    assert sizes["hidden_size"] == width and sizes["intermediate_size"] == 4 * width
    assert [sizes[f"num_{name}"] for name in (
        "hidden_layers", "attention_heads", "key_value_heads"
    )] == [16, 16, 16]  # fmt: skip
    assert sizes["vocab_size"] == data.vocab_size == 256_000
    assert sizes["max_position_embeddings"] == data.length == 1024
    assert model.fractions == {"ffn": [0.125, 0.25, 0.5, 1.0]}  # 0.5, 1, 2, 4 times d_model
    batch = data.batch_size * 8 * trainer.accumulate_grad_batches * data.length
    assert batch == 2**20 and abs(trainer.max_steps * batch - tokens) < batch  # "1M tokens"


@pytest.mark.parametrize(("flags", "full", "quarter"), [
    ([], 4000, 1000), (["--model.warmup_steps=0.1"], 0.1, 0.1),
])  # fmt: skip
def test_fewer_steps_have_the_same_share_of_warmup(flags, full, quarter):
    for name, settings in parsed(*flags).items():
        shorter = name != "matlm"
        assert settings.trainer.max_steps == (2384 if shorter else 9537), name
        assert settings.model.init_args.warmup_steps == (quarter if shorter else full), name


def test_tokens_are_those_of_all_devices():
    settings = parsed("--trainer.devices=8", "--trainer.num_nodes=2")["matlm"]
    stage = SimpleNamespace(settings=settings)
    measuring = Measuring(0, {}, {"model": stage}, Path())
    assert matlm_measures.tokens(measuring, "model") == 9537 * 16 * 16 * 8 * 1024


def test_reports_say_how_many_tokens_are_scored(trained, made_elastic):
    for folder in (trained.out, made_elastic.out):
        # the first of the 1,500 has nothing before it
        assert set(values(read(folder), "tokens scored").values()) == {1499}
        assert "1,499 tokens from the beginning of" in (folder / "report.md").read_text()
        assert "in disjoint windows of 64 tokens" in (folder / "report.md").read_text()
    check_reports_of_parts(elastic.EXPERIMENT, made_elastic)


@pytest.mark.parametrize(("row", "named"), [("elastic", True), ("dense", False)])
def test_the_report_on_a_decoder_names_the_folders_that_exist(row, named, tmp_path):
    flags = ["--rows", row, "--data.eval_stride=16", "--out", str(tmp_path)]
    started = command_line(elastic.EXPERIMENT, flags)
    lines = [
        Row(row, metric, 3.0 + place, "XL")
        for place, metric in enumerate(("loss", "perplexity", "parameters", "tokens a second"))
    ]
    table = tidy(lines, "matformer.elastic", "tiny", 0)
    text = "\n".join(elastic.report(table, started))
    assert ("slices.json" in text) is ("sizes of elastic" in text) is named
    assert "in windows 16 tokens apart of 64 tokens" in text
    assert ("| tokens a second |" in text) is named and "other programs" not in text
    untimed = "\n".join(elastic.report(table[table["metric"] != "tokens a second"], started))
    assert "tokens a second |" not in untimed
    assert ("Tokens a second, of one sequence, are not measured" in untimed) is named


def test_points_of_the_scaling_law_are_granularities():
    """Of all presets in the table, without the Mix'n'Match sizes between them."""
    lines = [
        Row("matlm", metric, value, size)
        for place, size in enumerate(("S", "S*2+M*2", "M", "XL", "XL d32"))
        for metric, value in {"loss": 3 - place, "non_embedding": place + 1, "tokens": 9}.items()
    ]
    presets = [tidy(lines, "matformer.matlm", preset, 0) for preset in ("78M", "180M")]
    found = scaling.points(pd.concat(presets), "matlm")
    assert sorted(zip(found["preset"], found["set"], strict=True)) == [
        (preset, size) for preset in ("180M", "78M") for size in ("M", "S", "XL", "XL d32")
    ]


def test_orders_cost_the_same_and_search_is_within_the_budget(trained):
    table = read(trained.out)
    neurons, loss = values(table, "hidden neurons"), values(table, "loss at budget")
    for budget in BUDGETS:
        orders = ORDERS if "*" in budget else ["increase"]  # of four M there is one order
        same = {neurons[order, budget] for order in orders}
        assert len(same) == 1
        assert neurons["search", budget] <= min(same)
        assert all(0 < loss[name, budget] < 7 for name in (*orders, "search"))
    assert {name for _, name in loss} == set(BUDGETS) and ("decrease", "M") not in loss
    slopes = values(table, "loss by slope")
    names = {name for _, name in slopes}
    assert len(names) == 2 and slopes.keys() == {
        (row, name) for row in ("ends", "least_slope") for name in names
    }
    for name in names:  # of like size, and least slope is never the larger
        assert 0.75 <= neurons["least_slope", name] / neurons["ends", name] <= 1
    assert 0 <= values(table, "acceptance")["matlm", ""] <= 1


@pytest.mark.parametrize("disturbed", [False, True])
def test_decoding_is_timed_in_turn_with_each_xl(trained, monkeypatch, disturbed):
    """Each candidate writes once, and by the clock of this test the n-th takes n seconds."""
    nodes = {node.name: node for node in trained.nodes.values()}
    names = {"model": "matlm", "S": "independent_S", "XL": "independent_XL"}
    stages = {name: finished(nodes[node]) for name, node in names.items()}
    models = {name: stage.module(device()).model for name, stage in stages.items()}
    monkeypatch.setattr(Measuring, "model", lambda self, name: models[name])
    written = {}

    def write(verifier, text, draft, new, k, share, eos_token_id):
        assert (text.shape, new, eos_token_id) == ((1, 32), 16, [])
        known = verifier in models.values()  # the others are extracted
        layers = nesting_of(verifier).layers if verifier is models["model"] else ()
        sizes = {layer.granularity for layer in layers}
        who = verifier if known else count_parameters(verifier)
        written[list(written)[-1]] = (who, sizes, draft, k, share)

    def in_turn(candidates, most, seconds, where):
        for name, candidate in candidates.items():
            written[name] = ()
            candidate()
        return [{name: float(n) for n, name in enumerate(candidates, start=1)}]

    lengths = {"S": 3, models["S"]: 2}
    monkeypatch.setattr(matlm_measures, "draft_length", lambda model, draft, *_: lengths[draft])
    monkeypatch.setattr(matlm_measures, "rounds", in_turn)
    monkeypatch.setattr(matlm_measures, "speculative_generate", write)
    monkeypatch.setattr(matlm_measures.OthersAtWork, "absent", lambda self: not disturbed)
    measuring = Measuring(0, {}, stages, trained.out)
    found = {(one.row, one.metric): one.value for one in matlm_measures.measure_decoding(measuring)}
    speed = {"matlm": 1 / 3, "matlm, caches apart": 1 / 4, "independent": 5 / 6}
    expected = {(row, "speed-up"): value for row, value in speed.items()}
    expected["matlm", "time saved by S"] = -1.0  # with the second, S, beside the first
    assert found == (dict.fromkeys(expected) if disturbed else expected)
    nested, alone = models["model"], models["XL"]
    assert written == {
        "XL": (nested, {3}, None, 0, False),
        "S": (count_parameters(models["S"]), set(), None, 0, False),
        "matlm": (nested, {3}, "S", 3, True),
        "matlm, caches apart": (nested, {3}, "S", 3, False),
        "XL alone": (alone, set(), None, 0, False),
        "independent": (alone, set(), models["S"], 2, False),
    }


def test_the_draft_length_is_the_best_for_acceptance_and_cost(monkeypatch):
    """XL accepts all that it drafts itself, which pays only where that costs nothing."""
    model = nest(
        build_text("starcoder2", "causal", DECODER), {"ffn": [1 / 8, 1 / 4, 1 / 2, 1.0]}
    ).eval()
    ids = torch.randint(model.config.vocab_size, (2, 8))
    assert matlm_measures.draft_length(model, "XL", ids, 8) == 1
    monkeypatch.setattr(matlm_measures, "relative_cost", lambda *_: 0.0)
    assert matlm_measures.draft_length(model, "XL", ids, 8) == LONGEST_DRAFT


def test_the_report_is_made_of_the_table(trained):
    text = (trained.out / "report.md").read_text()
    assert "| times as fast as XL alone |" in text and "Timed one text at a time" in text
    table = read(trained.out)
    untimed = table[~table["metric"].isin(["speed-up", "time saved by S"])]
    assert "No times: they take the row `decoding`" in "".join(matlm.report(untimed, trained))
    assert text.count("| --- |") == 7 and "loss.png" in text and "A smoke test" in text
    assert (trained.out / "loss.png").stat().st_size > 5000
    check_reports_of_parts(matlm.EXPERIMENT, trained)


def test_a_finished_run_trains_nothing(trained, out, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a finished stage was trained again")

    monkeypatch.setattr("recipes.work.run_stage", fail)
    again = run(matlm, out, "--rows", ROWS)
    assert read_record(again.out / "seed0" / "matlm")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--trainer.max_steps=-1", "trainer.max_steps is -1, expected 4 or more"),
        ('--model.fractions={"ffn": [0.25, 0.5, 1.0]}', "expected one axis.* each of S, M, L, XL"),
        ('--model.fractions={"depth": [0.25, 0.5, 0.75, 1.0]}', "expected one axis, ffn or heads"),
        (
            '--model.fractions={"ffn": [0.25, 0.5, 0.75, 1.0], "heads": [0.25, 0.5, 0.75, 1.0]}',
            "expected one axis, ffn or heads",
        ),
        ("--model.architecture=gpt2", "gpt2 takes no intermediate_size from model.model_args"),
        ("--model.model_args=null", "takes no hidden_size, num_attention_heads, intermediate_size"),
        ('--model.fractions={"heads": [0.25, 0.5, 0.75, 1.0]}', r"has \[\] for ffn"),
    ],
)
def test_budgets_and_sizes_that_have_no_independent_models_are_refused(flag, said):
    for row in ("independent", "widths"):
        with pytest.raises(ValueError, match=said):
            started = command_line(matlm.EXPERIMENT, ["--rows", row, flag])
            matlm.declare(started)
            started.check()


def test_joint_training_sees_as_many_tokens_in_batches_that_fit():
    """Four batches a step, one after another, with as many tokens as the other rows (B.4)."""
    started = command_line(matlm.EXPERIMENT, ["--preset", "78M", "--rows", "matlm,joint"])
    matlm.declare(started)
    found = {node.name: node.parsed() for node in started.nodes.values() if hasattr(node, "config")}
    joint, sampled = found["joint"], found["matlm"]
    assert joint.data.init_args.batch_size == sampled.data.init_args.batch_size
    assert joint.trainer.accumulate_grad_batches == 4 * sampled.trainer.accumulate_grad_batches
    assert joint.trainer.max_steps == sampled.trainer.max_steps // 4


def test_every_training_chooses_its_rate_on_text_that_no_table_scores(out):
    rows = "matlm,joint,heads,independent"
    started = command_line(matlm.EXPERIMENT, ["--preset", "small", "--rows", rows, "--seeds", "2"])
    matlm.declare(started)
    stages = {(node.seed, node.name): node for node in started.nodes.values()}
    trained = [
        "matlm",
        "joint",
        "heads",
        *(f"independent_{size}" for size in ("S", "M", "L", "XL")),
    ]
    for name in trained:
        full = stages[0, name].parsed()
        trials = [stages[0, f"{name} trial {number}"].parsed() for number in range(1, 5)]
        assert len({one.model.init_args.lr for one in trials}) == 4
        for trial in trials:
            assert trial.trainer.max_steps == full.trainer.max_steps // 4
            assert trial.model.init_args.warmup_steps == full.model.init_args.warmup_steps // 4
            updates = trial.trainer.val_check_interval / trial.trainer.accumulate_grad_batches
            assert updates == trial.trainer.max_steps  # validated once, at the end
            data, scored = trial.data.init_args, trial.trainer.limit_val_batches
            first = scored * data.eval_batch_size * data.length / data.max_bytes
            assert first < data.val_fraction - full.data.init_args.val_fraction
        for seed in (0, 1):  # trials are those of seed 0
            waited = {node.name for node in stages[seed, name].waits_for()}
            assert waited == {f"{name} trial {number}" for number in range(1, 5)}
    assert (1, "matlm trial 1") not in stages


def test_every_row_of_an_elastic_decoder_chooses_its_rate_on_text_that_no_table_scores(tmp_path):
    """The dense decoder too; before, all rows shared a rate that nobody had tuned."""
    (tmp_path / "mine.txt").write_text("a line of text")
    for flags in ([], [f"--elastic.data.val={tmp_path / 'mine.txt'}"]):
        arguments = ["--preset", "small", "--out", str(tmp_path), "--seeds", "2", *flags]
        started = command_line(elastic.EXPERIMENT, arguments)
        elastic.declare(started)
        stages = {(node.seed, node.name): node for node in started.nodes.values()}
        for row in elastic.ROWS:
            full = stages[0, row].parsed()
            trials = [stages[0, f"{row} trial {number}"] for number in range(1, 5)]
            assert len({one.parsed().model.init_args.lr for one in trials}) == 4
            for trial in (one.parsed() for one in trials):
                assert trial.trainer.max_steps == full.trainer.max_steps // 4
                assert trial.trainer.limit_val_batches == 1.0  # all of the held-out text
                assert trial.trainer.val_check_interval == trial.trainer.max_steps
                assert trial.data.init_args.train == full.data.init_args.train
                assert trial.data.init_args.val is None is not full.data.init_args.val
                assert trial.model.init_args.fractions == full.model.init_args.fractions
            for seed in (0, 1):  # trials are those of seed 0, from its decoder
                waited = {(node.seed, node.name) for node in stages[seed, row].waits_for()}
                assert waited == {(seed, "prepared"), *((0, one.name) for one in trials)}
            for trial in trials:
                assert [(n.seed, n.name) for n in trial.waits_for()] == [(0, "prepared")]


def test_trials_on_a_set_of_the_datasets_library_leave_its_validation_split_to_the_tables(tmp_path):
    """Before, they chose the rate on the split that the tables score."""
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": "a line of text"}) + "\n")
    data = ["--data.source=datasets", f"--data.train={tmp_path}"]
    started = command_line(
        matlm.EXPERIMENT, ["--preset", "small", "--rows", "matlm", "--seeds", "1", *data]
    )
    matlm.declare(started)
    stages: dict[str, Any] = {node.name: node for node in started.nodes.values()}
    names = ["matlm", *(f"matlm trial {number}" for number in range(1, 5))]
    held_out = [stages[name].parsed().data.init_args.val for name in names]
    assert held_out == [None, *["train"] * 4]


@pytest.mark.parametrize("preset", ["small", "medium", "78M", "paper"])
def test_independent_models_validate_in_every_quarter(preset, out):
    started = command_line(matlm.EXPERIMENT, ["--preset", preset, "--rows", "independent"])
    matlm.declare(started)
    stages = {node.name: node for node in started.nodes.values()}
    trainer = stages["independent_S"].parsed().trainer
    batches = trainer.max_steps * trainer.accumulate_grad_batches
    rest = (batches // 4) % trainer.val_check_interval
    assert trainer.limit_val_batches != 0 and rest < trainer.val_check_interval / 100


@pytest.mark.parametrize(("count", "quarters"), [(4, [1, 2, 3, 4]), (10, [2, 5, 8, 10]), (3, [])])
def test_the_validation_loss_after_each_quarter(count, quarters):
    stage = SimpleNamespace(history={"val/loss": list(range(1, count + 1))})
    given = SimpleNamespace(stages={"S": stage}, settings={"metric": "val/loss"})
    rows = list(convergence.measure_training(given))
    assert {row.metric for row in rows} <= {"val_loss"}
    assert [row.value for row in rows] == quarters
    assert [row.x for row in rows] == [1, 2, 3, 4][: len(quarters)]


def paper_like(gap, falling=0.0, predicts=0.9, saves=0.5):
    """A table in which all that the paper says holds.

    `gap` is XL's gain over S, `falling` the last fall of the independent models' validation loss,
    `predicts` the share of the variance that the search's predictor explains, `saves` the share of
    XL's time that S saves.
    """
    noise = np.random.default_rng(0)
    rows = {"matlm": 0.0, "joint": 0.01, "per_layer": 0.02, "independent": 0.03}
    rows |= {"heads": 0.005, "independent heads": 0.0}
    skewed = "p .17/.20/.22/.41"
    tables = []
    for seed in range(4):
        lines = []
        for place, size in enumerate(("XL", "L", "M", "S")):
            loss = 2.8 + gap * place / 3
            of_size = {row: loss + more * (place > 0) for row, more in rows.items()}
            of_size["per_layer"] = loss + 0.02
            of_size[skewed] = loss - 0.02 + 0.02 * place
            for row, value in of_size.items():
                lines.append(Row(row, "loss", value + noise.normal(0, 1e-4), size))
        for row, agreement in {"matlm": 0.8, "independent": 0.7}.items():
            lines.append(Row(row, "agreement", agreement + noise.normal(0, 1e-4), "S"))
            lines.append(Row(row, "kl", 1 - agreement + noise.normal(0, 1e-4), "S"))
            lines.append(Row(row, "acceptance", agreement + noise.normal(0, 1e-4)))
        speed = {"matlm": 1.16, "matlm, caches apart": 1.14, "independent": 1.10}
        for row, value in speed.items():
            lines.append(Row(row, "speed-up", value + noise.normal(0, 1e-4)))
        lines.append(Row("matlm", "time saved by S", saves + noise.normal(0, 1e-4)))
        for row in ("independent", "independent heads"):
            for size in ("S", "M", "L", "XL"):
                for quarter, loss in enumerate((4, 3.5, 3, 3 - falling), start=1):
                    value = loss + noise.normal(0, 1e-4)
                    lines.append(Row(row, "val_loss", value, size, x=quarter))
        lines += [
            Row("matlm", "cost of all sizes", 31 / 12),
            Row("paper", "cost of all sizes", 2.58),
        ]
        lines.append(Row("matlm", "below the line", noise.normal(0, 1e-4)))
        explained = predicts + noise.normal(0, 1e-3)
        lines.append(Row("search", "predictor_explained", explained))
        for budget in BUDGETS:
            for place, name in enumerate(("increase", "search", "decrease")):
                value = 3 + 0.01 * place + noise.normal(0, 1e-4)
                lines.append(Row(name, "loss at budget", value, budget))
        for place, name in enumerate(("least_slope", "ends")):
            value = 3 + 0.01 * place + noise.normal(0, 1e-4)
            lines.append(Row(name, "loss by slope", value, "S*2+XL*2"))
        tables.append(tidy(lines, "matformer.matlm", "small", seed))
    return pd.concat(tables)


@pytest.mark.parametrize(("gap", "word"), [(0.1, SUPPORTED), (-0.02, NOT_JUDGED)])
def test_every_claim_is_judged_where_size_matters(gap, word):
    table = paper_like(gap)
    for claim in matlm.CLAIMS:
        counted = claim.name == "cost of training"  # it needs no gate
        expected = SUPPORTED if counted else word if claim.test else NOT_JUDGED
        assert judge(claim, table)[0] == expected, claim.name
        assert claim.test or claim.reason


def test_nothing_is_judged_beside_models_that_still_learn():
    table = paper_like(0.1, falling=0.2)
    tested = [one for one in matlm.CLAIMS if one.test]
    shut = {one.name for one in tested if judge(one, table)[0] == NOT_JUDGED}
    assert shut == {
        "XL as good", "small sizes better", "consistency", "heads", "drafts",
        "speculative decoding",
    }  # fmt: skip
    table = paper_like(0.1)
    without_m = table[(table["metric"] != "val_loss") | (table["set"] != "M")]
    [claim] = (one for one in matlm.CLAIMS if one.name == "XL as good")
    assert "its gate (the loss of M" in judge(claim, without_m)[2]


def test_a_search_whose_predictor_explains_little_is_no_rival():
    assert not [
        one for one in matlm.CLAIMS if one.test and judge(one, paper_like(0.1))[0] != SUPPORTED
    ]
    table = paper_like(0.1, predicts=0.4)
    [shut] = (one for one in matlm.CLAIMS if one.test and judge(one, table)[0] == NOT_JUDGED)
    assert shut.name == "no search needed"
    assert "the gate is shut (the search's predictor" in judge(shut, table)[2]


def test_where_s_is_hardly_faster_drafts_are_not_judged_by_their_speed():
    table = paper_like(0.1, saves=0.2)
    shut = {one.name for one in matlm.CLAIMS if one.test and judge(one, table)[0] == NOT_JUDGED}
    assert shut == {"speculative decoding", "shared cache"}
    slower = paper_like(0.1)
    alone = (slower["metric"] == "speed-up") & (slower["row"] != "matlm")
    slower.loc[alone, "value"] -= 0.2  # slower than XL alone, and still faster than independent
    [claim] = (one for one in matlm.CLAIMS if one.name == "speculative decoding")
    assert judge(claim, slower)[0] == REFUTED


@pytest.mark.parametrize(
    ("layers", "mixes"),
    [
        (16, [[1] * 16, [1] * 12 + [2] * 4, [1] * 5 + [2] * 11, [2] * 8 + [3] * 8]),  # Table 5
        (4, [[1] * 4, [1, 1, 1, 2], [1, 2, 2, 2], [2, 2, 3, 3]]),
        (2, [[1, 1], [1, 2], [2, 3]]),  # a quarter of two layers is none: M comes once
    ],
)
def test_budgets_are_table_5_s_as_near_as_the_layers_allow(layers, mixes):
    assert matlm_measures.budgets(layers) == mixes


def test_the_text_that_is_scored_is_named():
    """At `small` it is wikitext2's test text; before, the report called it the validation text."""
    started = command_line(elastic.EXPERIMENT, ["--preset", "small"])
    data = started.parsed("elastic").data.init_args
    scored = tidy([Row("elastic", "tokens scored", 9, "XL")], "matformer.elastic", "small", 0)
    said = elastic.scored_text(scored, data)
    assert said.startswith("9 tokens from the beginning of wikitext2/test.txt, each")
    data.val = ["a.txt", "b.txt"]
    assert "of a.txt, b.txt, each" in elastic.scored_text(scored, data)


def test_widths_give_a_scaling_law(tmp_path):
    folder = run(matlm, tmp_path, "--rows", "widths").out
    sizes = {one for _, one in values(read(folder), "loss") if " d" in one}
    assert {"S d8", "XL d8", "S d16", "XL d24", "XL d32"} <= sizes
    assert "## Scaling law" in (folder / "report.md").read_text()


def test_runs_of_other_sizes_and_tokens_are_fitted_together(tmp_path, capsys):
    """Also two runs of one preset with other steps, which are not averaged; not two texts."""
    folders = [tmp_path / "short", tmp_path / "long"]
    for seen, folder in zip((1e9, 1e11), folders, strict=True):
        lines = [
            Row(row, metric, value, size)
            for size, count in {"S": 1e6, "M": 4e6, "S*2+M*2": 2e6, "XL": 1e8}.items()
            for row, law in {"matlm": (20, -0.12, 1.1), "independent": (9, -0.1, 0.8)}.items()
            for metric, value in {
                "loss": scaling.law(count * seen, *law), "non_embedding": count, "tokens": seen,
            }.items()
        ]  # fmt: skip
        write(folder / "results.csv", tidy(lines, "matformer.matlm", "small", 0))
    scaling.main([*map(str, folders), "--out", str(tmp_path)])
    text = (tmp_path / "scaling.md").read_text()
    assert text in capsys.readouterr().out and (tmp_path / "scaling.png").is_file()
    assert re.search(r"\| MatLM \(sampled\) \| 6 \| 20 ± \S+ \| -0.12 ± \S+ \| 1.1 ±", text)
    assert re.search(r"\| independent \| 6 \| 9 ± \S+ \| -0.1 ± \S+ \| 0.8 ±", text)
    table = read(folders[0])
    for folder, loss in zip(folders, (3.2, 3.3), strict=True):
        unigram = tidy([Row("unigram", "loss", loss)], "matformer.matlm", "small", 0)
        write(folder / "results.csv", pd.concat([read(folder), unigram]))
    with pytest.raises(ValueError, match=r"is 3.2 in \S+/short, 3.3 in \S+/long: expected runs on"):
        scaling.main([*map(str, folders), "--out", str(tmp_path)])
    write(tmp_path / "results.csv", table[table["row"] == "matlm"])
    scaling.main([str(tmp_path), "--out", str(tmp_path)])
    assert "| independent | 0 models: expected four or more" in capsys.readouterr().out
    write(tmp_path / "results.csv", tidy([Row("full", "loss", 1.0)], "apet.scales", "small", 0))
    with pytest.raises(ValueError, match="is of apet.scales: expected runs of matformer.matlm"):
        scaling.main([str(tmp_path)])


def test_the_law_is_found_again():
    compute = np.geomspace(1e10, 1e16, 12)
    noise = np.random.default_rng(0).normal(0, 1e-3, 12)
    found = scaling.fit(compute, scaling.law(compute, 21.6, -0.13, 1.33) + noise)
    for value, error, true in zip(found.values, found.errors, (21.6, -0.13, 1.33), strict=True):
        assert abs(value - true) < 4 * error and 0 < error < 0.2 * abs(true)
    assert found.rmse == pytest.approx(1e-3, rel=0.5)
    with pytest.raises(ValueError, match="3 models: expected four or more"):
        scaling.fit(compute[:3], compute[:3])
    with pytest.raises(ValueError, match="1 values of N·D: expected three or more"):
        scaling.fit(np.full(6, 1e12), np.linspace(2, 3, 6))
    small = scaling.fit(compute, scaling.law(compute, 0.5, -0.1, 0.01))
    assert small.values == pytest.approx((0.5, -0.1, 0.01), rel=0.02)


def test_a_checkpoint_writes_text_by_itself(trained, capsys):
    file = trained.out / "seed0" / "matlm" / "checkpoints" / "last.ckpt"
    plain = generate.main([str(file), "--prompt", "def main(", "--tokens", "20"])
    drafted = generate.main([str(file), "--prompt", "def main(", "--tokens", "20", "--draft", "S"])
    assert plain == drafted
    assert "of the drafted tokens accepted" in capsys.readouterr().err
    # `predict` writes the same text
    written = Predictor(file, max_new_tokens=20)(["def main("])
    assert [one.label for one in written] == [plain.strip()]
    assert len(generate.main([str(file), "--prompt", "def "])) == 124  # what 128 positions allow
    short = ["--draft-layers", "2", "--draft-tokens", "adaptive", "--granularity", "L"]
    short += ["--draft-vocabulary", "128"]
    generate.main([str(file), "--prompt", "a", "--tokens", "5", *short])


def test_a_text_can_begin_with_a_bos_token(trained, tmp_path, monkeypatch):
    file, seen = trained.out / "seed0" / "matlm" / "checkpoints" / "last.ckpt", []

    def decode(model, ids, *arguments, **more):
        seen.append(ids.tolist()[0])
        return speculative_generate(model, ids, *arguments, **more)

    monkeypatch.setattr(generate, "speculative_generate", decode)
    for more in ([], ["--bos"]):
        generate.main([str(file), "--prompt", "def main(", "--tokens", "2", *more])
    _, tokenizer = generate.load(str(file))
    assert seen[1] == [tokenizer.bos_token_id, *seen[0]]
    export(Predictor(file, device="cpu"), tmp_path / "S", None, "S")
    config = tmp_path / "S" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bos_token": None}))
    with pytest.raises(ValueError, match="has no BOS token: leave --bos out"):
        generate.main([str(tmp_path / "S"), "--bos", "--prompt", "def "])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.ckpt", "--prompt", "a"], "nowhere.ckpt is not there"),
        (["CKPT", "--prompt", ""], "the prompt is empty"),
        (["CKPT", "--prompt", "a", "--draft", "tiny"], "unknown granularity 'tiny'"),
        (["CKPT", "--prompt", "a", "--stop", ""], "--stop '' is in every text"),
        (["CKPT", "--prompt", "a", "--sample", "--temperature", "nan"], "temperature is nan"),
        (["CKPT", "--prompt", "a", "--seed", "1"], "--seed 1 has no effect without --sample"),
        (["CKPT", "--prompt", "a", "--draft-tokens", "2"], "--draft-tokens 2 has no effect"),
        (
            ["CKPT", "--prompt", "a", "--draft", "S", "--draft-tokens", "²"],
            "draft_tokens is '²', expected",
        ),
        (["CKPT", "--prompt", "a" * 120, "--draft", "S"], "more than the 128 positions"),
        (["CKPT", "--prompt", "a", "--granularity", "0,1"], "has 2 entries"),
        (["CKPT", "--prompt", "a", "--granularity", "S", "--draft", "L"], "larger than the verif"),
    ],
)
def test_what_cannot_be_written_is_said(trained, arguments, said):
    file = str(trained.out / "seed0" / "matlm" / "checkpoints" / "last.ckpt")
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        generate.main([*(file if one == "CKPT" else one for one in arguments), "--tokens", "20"])


def test_predict_continues_a_long_prompt_where_it_ends(trained):
    file = trained.out / "seed0" / "matlm" / "checkpoints" / "last.ckpt"
    prompt = "".join(f"{letter} = {letter} + 1; " for letter in "abcdefghi")
    [written] = Predictor(file, max_new_tokens=20)([prompt])
    alone = generate.main([str(file), "--prompt", prompt, "--tokens", "20"])
    assert written.label == alone.strip()
    with pytest.raises(ValueError, match="A prompt of 99 .* more than the 128 positions"):
        Predictor(file, max_new_tokens=40)([prompt])


def test_a_folder_without_a_language_model_s_head_writes_no_text(tmp_path):
    config = BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks weights of a language .*: cls\.predictions\.bias"):
        generate.load(str(tmp_path))


def test_another_file_is_no_checkpoint_of_matlm(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match="does not say what it was trained on"):
        generate.load(str(tmp_path / "other.ckpt"))


def test_predict_and_export_take_its_checkpoints(trained, tmp_path):
    file = trained.out / "seed0" / "matlm" / "checkpoints" / "last.ckpt"
    ids = torch.randint(259, (1, 9))
    [answer] = Predictor(file, granularity="S", max_new_tokens=8, device="cpu")(["def f(x):"])
    assert isinstance(answer.label, str)
    export(Predictor(file, device="cpu"), tmp_path / "S", None, "S")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "S")
    model = MatLM.load_from_checkpoint(file, map_location="cpu").model.eval()
    set_granularity(model, "S")
    assert torch.allclose(small(ids).logits, model(ids).logits, atol=1e-5)


@pytest.fixture(scope="module")
def made_elastic(out):
    return run(elastic, out, "--elastic.trainer.max_steps=4")


def test_nothing_undoes_the_sorting():
    axes = {"ffn": [0.25, 0.5, 0.75, 1.0], "heads": [0.25, 0.5, 0.75, 1.0]}
    flag = f"--elastic.model.fractions={json.dumps(axes)}"
    started = command_line(elastic.EXPERIMENT, ["--rows", "elastic,unsorted", flag])
    elastic.declare(started)
    started.check()
    prepared = next(node for node in started.nodes.values() if node.name == "prepared")
    assert prepared.settings["parts"] == ["ffn", "heads"]
    started = command_line(elastic.EXPERIMENT, ["--elastic.model.init_from=other.safetensors"])
    elastic.declare(started)
    with pytest.raises(ValueError, match=r"model\.init_from"):
        started.check()


def test_a_decoder_of_the_user_s_is_made_elastic_and_planned(tmp_path):
    """The flag that the docstring names: `prepare` reads it, and the plan measures that decoder."""
    decoder = build_text("starcoder2", "causal", {**DECODER, "num_hidden_layers": 3})
    decoder.save_pretrained(tmp_path / "mine")
    train_tokenizer([], 259).save_pretrained(tmp_path / "mine")
    (tmp_path / "text.txt").write_text("a line of text\n" * 200)
    flags = ["--preset", "small", "--out", str(tmp_path), "--rows", "elastic,dense"]
    for key, value in {
        "model.architecture": tmp_path / "mine", "data.tokenizer": tmp_path / "mine",
        "model.fractions": '{"ffn": [0.5, 1.0]}', "data.train": tmp_path / "text.txt",
        "data.val": tmp_path / "text.txt", "data.length": 16, "data.cache": tmp_path / "corpora",
    }.items():  # fmt: skip
        flags.append(f"--elastic.{key}={value}")
    started = command_line(elastic.EXPERIMENT, flags)
    elastic.declare(started)
    started.check()
    nodes = {node.name: node for node in started.nodes.values()}
    assert nodes["prepared"].settings["architecture"] == str(tmp_path / "mine")
    for row, fractions in {"elastic": {"ffn": [0.5, 1.0]}, "dense": None}.items():
        arguments = nodes[row].parsed().model.init_args
        assert arguments.architecture == str(nodes["prepared"].folder / "sorted")
        assert arguments.fractions == fractions
    [group, _] = groups = grouped([nodes["elastic"], nodes["dense"]], tmp_path / "plan")
    (tmp_path / "plan").mkdir()
    fill(group, groups)
    assert group.plan is not None, group.unknown
    assert any("mine" in line for line in group.reads)
    # where the decoder is trained here, the flag would have no effect
    started = command_line(elastic.EXPERIMENT, [f"--elastic.model.architecture={tmp_path}"])
    elastic.declare(started)
    with pytest.raises(ValueError, match=r"varies model\.architecture"):
        started.check()


def of_another_tokenizer(folder: Path) -> dict[str, Any]:
    """Settings of a CorpusData on a text and a tokenizer that it writes there."""
    train_tokenizer([], 259).save_pretrained(folder / "other")
    (folder / "text.txt").write_text("a line of text\n" * 200)
    return {
        "source": "files", "train": str(folder / "text.txt"), "length": 16,
        "tokenizer": str(folder / "other"), "cache": str(folder / "corpora"),
    }  # fmt: skip


@pytest.mark.parametrize("where", ["in a folder", "on the hub"])
def test_a_decoder_with_another_tokenizer_is_not_prepared(tmp_path, where, monkeypatch):
    """Its exports would carry the data's tokenizer, which their embedding was not made for."""
    build_text("starcoder2", "causal", DECODER).save_pretrained(tmp_path / "mine")
    train_tokenizer(["some words of another text"] * 9, 280).save_pretrained(tmp_path / "mine")
    data = of_another_tokenizer(tmp_path)
    name = str(tmp_path / "mine")
    if where == "on the hub":
        name, load = "someone/mine", tokens.load_tokenizer
        known = {name: str(tmp_path / "mine")}
        monkeypatch.setattr(tokens, "load_tokenizer", lambda one: load(known.get(one, one)))
    settings = {"data": data, "architecture": name, "model_args": {}}
    measuring: Any = SimpleNamespace(settings=settings, stages={}, seed=0, folder=tmp_path / "out")
    with pytest.raises(ValueError, match="mine has another tokenizer, of 2.. tokens, than the dat"):
        list(elastic.prepare(measuring))


@pytest.mark.parametrize("where", ["in a folder", "on the hub"])
def test_a_decoder_without_a_tokenizer_is_prepared_with_the_data_s(tmp_path, where, monkeypatch):
    """One on the hub ended in an error that asked to correct data.tokenizer, which was right."""
    build_text("starcoder2", "causal", DECODER).save_pretrained(tmp_path / "mine")
    data = of_another_tokenizer(tmp_path)
    name = str(tmp_path / "mine")
    if where == "on the hub":
        name, known, build = "someone/mine", {"someone/mine": name}, elastic.build_text
        monkeypatch.setattr(
            elastic, "build_text", lambda one, *a, **kw: build(known[one], *a, **kw)
        )
    settings = {
        "data": data, "architecture": name, "model_args": {}, "batches": 1, "parts": ["ffn"],
    }  # fmt: skip
    measuring: Any = SimpleNamespace(settings=settings, stages={}, seed=0, folder=tmp_path / "out")
    said = "no tokenizer of the model .*mine can be loaded .* data's, '.*other', .*--data.tokenizer"
    with pytest.warns(UserWarning, match=said):
        list(elastic.prepare(measuring))
    assert len(corpus.load_tokenizer(str(tmp_path / "out" / "sorted"))) == 259


DECODER = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("starcoder2", {"max_position_embeddings": 12}),
        ("mistral", {"sliding_window": 8}),
        ("bloom", {"n_layer": 2, "n_head": 2, "max_position_embeddings": None}),
    ],
)
def test_any_decoder_s_speed_is_measured(kind, sizes, monkeypatch):
    monkeypatch.setattr(elastic, "OthersAtWork", lambda: SimpleNamespace(absent=lambda: True))
    model = build_text(kind, "causal", {**DECODER, **sizes}).to(device()).eval()
    windows = [{"input_ids": torch.arange(32)}]
    data = SimpleNamespace(length=32, samples=lambda part: windows)
    assert elastic.tokens_a_second(model, data, 64) > 0


def test_the_ladder_of_a_nested_depth_has_its_uniform_sizes():
    model = nest(build_text("starcoder2", "causal", DECODER), {"depth": [0.5, 1.0]})
    assert ladder(model, 3) == [[0], [1]]


def test_an_experiment_on_nested_models_refuses_to_nest_nothing():
    for module, name in {elastic: "elastic", matlm: "matlm"}.items():
        started = command_line(module.EXPERIMENT, [f"--{name}.model.fractions=null"])
        with pytest.raises(
            ValueError, match="model.fractions is null, expected the widths to nest"
        ):
            module.declare(started)


def test_sorting_changes_the_order_and_not_the_function(made_elastic):
    table = read(made_elastic.out)
    loss = values(table, "loss")
    assert loss["as it stands", "XL"] == pytest.approx(loss["untouched", "XL"], abs=1e-5)
    assert loss["sorted, untrained", "XL"] == pytest.approx(loss["untouched", "XL"], abs=1e-5)
    assert loss["sorted, untrained", "S"] != loss["as it stands", "S"]
    for row in ("elastic", "distilled", "unsorted"):
        assert {size for one, size in loss if one == row} >= {"S", "M", "L", "XL", "S*2+M*2"}
    assert ("dense", "XL") in loss and ("dense", "S") not in loss
    for row in ("elastic", "unsorted"):  # what the claims read
        assert loss[row, "half"] == loss[row, "L"]


def test_scores_before_fine_tuning_wait_for_no_fine_tuning(out):
    """Before, they waited for the first row's, whose DataModule they took."""
    made = run(elastic, out / "before", "--only", "untrained")
    assert {"unigram", "untouched", "sorted, untrained"} <= set(read(made.out)["row"])
    assert not (made.out / "seed0" / "elastic").exists()


def test_scores_of_another_text_are_not_taken_up(monkeypatch):
    """The text is that of the installed packages, which no setting names."""

    def fingerprints(digest):
        monkeypatch.setattr(corpus, "python_digest", lambda max_bytes: digest)
        flags = ["--elastic.model.architecture", "starcoder2"]
        started = command_line(elastic.EXPERIMENT, flags)
        grid = {**started.grid("elastic_grid"), "base": None}  # else the stage's hash has the text
        monkeypatch.setattr(started, "grid", lambda name: grid)
        elastic.declare(started)
        nodes = started.nodes.values()
        return {node.name: node.fingerprint for node in nodes if node.name in named}

    named = {"prepared", "untrained"}
    first, second = fingerprints("one"), fingerprints("two")
    assert set(first) == named and all(first[name] != second[name] for name in named)


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ({"ffn": (1 / 8, 1 / 4, 1 / 2, 1)}, "L"),
        ({"ffn": (1 / 4, 1 / 2, 3 / 4, 1)}, "M"),
        ({"ffn": (1 / 4, 1 / 3, 3 / 4, 1)}, None),
        ({"ffn": (1 / 4, 1 / 2, 1, 1), "depth": (1 / 2, 1 / 2, 1 / 2, 1)}, None),
    ],
)
def test_claims_on_half_read_the_size_that_has_half(axes, name):
    """Before, they read L, whatever its width."""
    assert elastic.half_of(Nesting(axes, [])) == name


def test_the_decoder_itself_stands_beside_the_largest_size():
    """Beside three or five sizes, which are numbered, the dense rows stood alone as XL."""
    for count, name in ((3, "2"), (4, "XL"), (5, "4")):
        fractions = {"ffn": [2.0**-place for place in reversed(range(count))]}
        nested = nest(build_text("starcoder2", "causal", DECODER), fractions)
        assert elastic.largest(fractions) == nesting_of(nested).names[-1] == name


def test_claims_read_the_largest_of_any_number_of_sizes(out):
    """Before, they read XL, which is the largest of four sizes alone."""
    flags = ["--elastic.model.fractions={ffn: [0.5, 1.0]}", "--elastic.trainer.max_steps=1"]
    made = run(elastic, out / "two", "--rows", "elastic,unsorted,dense", *flags)
    table = read(made.out)
    for claim in elastic.CLAIMS:
        assert claim.test.difference(table).n == claim.gate.difference(table).n == 1
    assert elastic.CLAIMS[1].test.title == "loss of dense and of elastic XL or full"
    loss = values(table, "loss")
    assert loss["elastic", "full"] == loss["elastic", "1"] != loss["elastic", "half"]


def test_slices_name_the_widths_of_every_size(made_elastic):
    folder = made_elastic.out / "seed0" / "sizes of elastic"
    slices = {one["name"]: one for one in json.loads((folder / "slices.json").read_text())}
    assert set(slices["S*2+M*2"]["widths"].values()) == {16, 32}
    assert slices["S"]["parameters"] < slices["S*2+M*2"]["parameters"] < slices["XL"]["parameters"]
    assert slices["S"]["loss"] == pytest.approx(values(read(folder), "loss")["elastic", "S"])


LOAD = """
import cpu_torchvision  # a cure for this environment; the folder needs nothing of it
import pathlib, runpy, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
loader = pathlib.Path(sys.argv[1], "load.py")
if loader.exists():
    model = runpy.run_path(str(loader))["load"](sys.argv[1])
else:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = AutoTokenizer.from_pretrained(sys.argv[1])("import os", return_tensors="pt").input_ids
torch.save((ids, model(ids).logits), sys.argv[2])
assert not any(name.startswith(("recipes", "lightning_modules")) for name in sys.modules)
"""


@pytest.mark.parametrize(("size", "chosen"), [("S", "S"), ("L*2+XL*2", [2, 2, 3, 3])])
def test_exports_load_where_this_repository_is_not(made_elastic, tmp_path, size, chosen):
    seed = made_elastic.out / "seed0"
    folder = seed / "sizes of elastic" / size
    assert (folder / "load.py").exists() == ("*" in size)
    command = [sys.executable, "-I", "-c", LOAD, str(folder)]
    subprocess.run([*command, str(tmp_path / "logits.pt")], check=True, cwd=tmp_path)
    ids, logits = torch.load(tmp_path / "logits.pt")
    checkpoint = seed / "elastic" / "checkpoints" / "last.ckpt"
    model = MatLM.load_from_checkpoint(checkpoint, map_location="cpu").model.eval()
    set_granularity(model, chosen)
    assert torch.allclose(model(ids.to(model.device)).logits.cpu(), logits, atol=1e-5)


def test_exports_write_text_until_any_of_their_end_tokens(made_elastic, capsys, tmp_path):
    sizes = made_elastic.out / "seed0" / "sizes of elastic"
    mixed = ["--prompt", "import os", "--tokens", "1", "--draft", str(sizes / "S")]
    assert generate.main([str(sizes / "L*2+XL*2"), *mixed]) is not None
    assert "; none of the drafted tokens accepted" in capsys.readouterr().err
    shutil.copytree(sizes / "S", tmp_path / "renamed")
    tokens_of = json.loads((tmp_path / "renamed" / "tokenizer.json").read_text())
    vocabulary = tokens_of["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "renamed" / "tokenizer.json").write_text(json.dumps(tokens_of))
    with pytest.raises(ValueError, match="tokens of the draft .*renamed are not those of .*XL"):
        generate.main([str(sizes / "L*2+XL*2"), *mixed[:-1], str(tmp_path / "renamed")])
    shutil.copytree(sizes / "L*2+XL*2", tmp_path / "another")
    (tmp_path / "another" / "load.py").write_text("raise SystemExit('it must not run')")
    with pytest.raises(ValueError, match=r"load.py is not what .* so it is not run: export the"):
        generate.main([str(tmp_path / "another"), *mixed])
    shutil.copytree(sizes / "S", tmp_path / "S")
    prompt = ["--prompt", "import os", "--tokens", "8"]
    text = generate.main([str(tmp_path / "S"), *prompt])
    config = tmp_path / "S" / "generation_config.json"
    every = {**json.loads(config.read_text()), "eos_token_id": [2, *range(3, 259)]}
    config.write_text(json.dumps(every))
    assert len(text) > len(generate.main([str(tmp_path / "S"), *prompt])) == 1


def test_two_exports_draft_for_each_other(made_elastic):
    folder = made_elastic.out / "seed0" / "sizes of elastic"
    large, small = (AutoModelForCausalLM.from_pretrained(folder / size) for size in ("XL", "S"))
    ids = torch.randint(259, (2, 10))
    alone = speculative_generate(large, ids, None, 20, draft_tokens=0)
    assert torch.equal(speculative_generate(large, ids, small, 20), alone)
