"""PELA's league without training, from the command line to the report, on random weights."""

import cpu_torchvision  # noqa: F401

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_modules.counting import count_parameters
from lightning_modules.pela import compress, plan_of
from recipes.claims import NOT_JUDGED, REFUTED, SUPPORTED, judge
from recipes.experiment import Measuring
from recipes.pela import language
from recipes.results import Row, by_seed, read, tidy
from recipes.runner import command_line
from tests.recipes.report_checks import check_reports_of_parts

FLAGS = ["--seeds", "2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The tiny preset's, in a folder in which its token files are, too."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = language.main(FLAGS)
        done.out = folder / done.out
        yield done


@pytest.fixture(scope="module")
def table(run):
    return read(run.out)


def value(table, row, metric, x=None, seed=1):
    return by_seed(table, metric, {"row": row, "x": x})[seed]


def given(run, row, seed=1):
    """What a measurement of the run was given."""
    kind = language.kind_of(row)
    node = next(n for n in run.nodes.values() if n.name == kind and n.seed == seed)
    return Measuring(seed, node.settings, {}, run.out)


@torch.no_grad()
def loss_of(model, samples):
    """Over all tokens of the windows, written out."""
    total, count = 0.0, 0
    for sample in samples:
        scores = model(sample["input_ids"]).logits[0, :-1].double().log_softmax(-1)
        labels = sample["labels"][0, 1:]
        kept = labels != -100
        total -= float(scores[kept].gather(1, labels[kept, None]).sum())
        count += int(kept.sum())
    return total / count


@pytest.mark.parametrize("row", ["plain", "whitened_energy", "asvd"])
def test_a_row_is_the_compressed_decoder_on_the_test_windows(run, table, row):
    m = given(run, row)
    data, model = language.corpus(m), language.decoder(m)
    batches = language.calibration(data, m)
    factors, ranks = language.LOW_RANK[row]
    for ratio in (1.5, 3.0):
        small = compress(copy.deepcopy(model), batches, ratio, ranks, factors)
        loss = loss_of(small, language.windows(data, m))
        assert value(table, row, "loss", ratio) == pytest.approx(loss, abs=1e-4)
        assert value(table, row, "perplexity", ratio) == pytest.approx(math.exp(loss), rel=1e-3)
        assert value(table, row, "parameters", ratio) == count_parameters(small)
    dense = loss_of(model, language.windows(data, m))
    assert value(table, "dense", "loss") == pytest.approx(dense, abs=1e-4)
    assert value(table, "chance", "loss") == pytest.approx(math.log(259))


def test_every_row_has_as_many_parameters(table):
    dense = value(table, "dense", "parameters")
    per_neuron = 2 * 3 * 32  # two layers, three matrices
    for ratio in (1.5, 3.0):
        plain = value(table, "plain", "parameters", ratio)
        assert value(table, "asvd", "parameters", ratio) == plain < dense
        assert value(table, "whitened", "parameters", ratio) == plain
        assert 0 <= plain - value(table, "whitened_energy", "parameters", ratio) < 32 + 128
        assert 0 <= plain - value(table, "pruned", "parameters", ratio) < per_neuron


def test_what_is_pruned_are_the_least_important_neurons():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    mlp = model.model.layers[0].mlp
    silent = torch.randperm(32)[:20]
    with torch.no_grad():
        mlp.down_proj.weight[:, silent] = 0
    ids = torch.randint(40, (2, 12))
    # κ 1.5: ranks 5 and 7 save 4 · (256 - 160) + 3 · (512 - 336) weights, 19 neurons of 48 each;
    # κ 6 would take more than all neurons
    [small] = language.prune_each(model, [1.5, 6.0], [{"input_ids": ids}]).values()
    assert small.config.intermediate_size == small.model.layers[0].mlp.up_proj.out_features == 13
    torch.testing.assert_close(small(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)
    assert mlp.up_proj.out_features == 32


def test_calibration_and_test_text_are_apart_and_each_seed_has_its_own(run):
    seen = {}
    for seed in (0, 1):
        m = given(run, "whitened", seed)
        data = language.corpus(m)
        batches, samples = language.calibration(data, m), language.windows(data, m)
        assert len(batches) == 8 and len(samples) == 4
        assert all(batch["input_ids"].shape == (1, 64) for batch in batches)
        held_out = data.stream("test")
        border = data.stream("train")._places[-1]
        assert len(held_out) + border == len(data.token_file("train").tokens)
        seen[seed] = [tuple(sample["input_ids"][0].tolist()) for sample in samples]
        # the windows of seed k follow each other, from window 4 k on
        assert torch.equal(
            samples[0]["input_ids"][0], held_out.read(seed * 4 * 63, seed * 4 * 63 + 64)
        )
        drawn = sorted(tuple(batch["input_ids"][0].tolist()) for batch in batches)
        assert len(set(drawn)) == 8
        seen["drawn", seed] = drawn
    assert not set(seen[0]) & set(seen[1]) and seen["drawn", 0] != seen["drawn", 1]


def test_seeds_that_would_score_the_same_windows_are_refused(run):
    """An interval over seeds that repeat one another has no width and proves nothing."""
    m = given(run, "plain")
    data = language.corpus(m)
    there = len(data.samples("test"))

    def windows(seed, count):
        return language.windows(data, replace(m, seed=seed, settings={"windows": count}))

    assert len(windows(0, None)) == len(windows(0, there + 1)) == there
    for count in (None, there, there + 1):
        with pytest.raises(ValueError, match=f"seed 1 has no test windows.*{there} that.*seeds 1,"):
            windows(1, count)
    assert len(windows(there // 4 - 1, 4)) == 4
    with pytest.raises(ValueError, match=f"each seed scores 4 of.*--seeds {there // 4}, or lower"):
        windows(there // 4, 4)


def test_too_many_seeds_are_refused_before_anything_runs(run, monkeypatch):
    """It came to light at the turn of the first seed without windows, hours later."""
    seeds = len(language.corpus(given(run, "plain")).samples("test")) // 4
    said = f"seed {seeds} has no test windows of its own.*run at most --seeds {seeds}, or lower"
    with pytest.raises(FileNotFoundError, match=said):
        language.main(["--seeds", str(seeds + 1), "--out", "elsewhere"])
    assert not Path("elsewhere").exists()
    monkeypatch.delattr(language, "corpus")
    assert not run.missing()  # the texts of what is finished are not read again


def test_paper_leaves_windows_for_other_seeds():
    """WikiText-2 has 127 windows of 2,048 of SmolLM2's tokens to calibrate on, 153 to score."""
    grid = command_line(language.EXPERIMENT, ["--preset", "paper"]).grid("language_grid")
    assert grid["data"]["length"] == 2048
    assert 2 * grid["calibration_windows"] <= 127 and 5 * grid["test_windows"] <= 153


def test_the_report_says_what_was_compressed(run):
    text = (run.out / "report.md").read_text()
    assert "A smoke test" in text and "llama: " in text and "κ 3" in text
    assert (run.out / "loss.png").stat().st_size > 5000
    check_reports_of_parts(language.EXPERIMENT, run)
    small = command_line(language.EXPERIMENT, ["--preset", "small"])
    assert small.grid("language_grid")["note"] == "4-bit weights, dequantised"


def test_the_plot_s_legend_is_in_the_order_in_which_its_curves_end(run, table, monkeypatch):
    drawn = []
    monkeypatch.setattr("recipes.plots.save_plot", lambda figure, *_: drawn.append(figure))
    language.report(table, run)
    axis = drawn[0].axes[0]
    ends = {line.get_label(): line.get_ydata()[-1] for line in axis.lines}
    shown = [text.get_text() for text in axis.get_legend().get_texts()]
    assert shown == sorted(ends, key=lambda title: -ends[title]) and len(shown) == 7


def test_another_decoder_brings_its_tokenizer():
    run = command_line(language.EXPERIMENT, ["--preset", "small", "--decoder", "some/where"])
    language.declare(run)
    for node in run.nodes.values():
        assert node.settings["decoder"] == {
            "architecture": "some/where", "model_args": {}, "pretrained": True
        }  # fmt: skip
        assert node.settings["data"]["tokenizer"] == "some/where"
        assert node.settings["data"]["test"] == "wikitext2/test.txt"


def measured(dense=3.8, plain=17.8, asvd=9.0, whitened=6.3, energy=6.0, pruned=7.0):
    """A table of three seeds as SmolLM2 was measured before: log of 45.9, 6e7 and 568."""
    noise = np.random.default_rng(0)
    losses = {
        "plain": plain, "asvd": asvd, "whitened": whitened,
        "whitened_energy": energy, "pruned": pruned,
    }  # fmt: skip

    def rows():
        yield Row("chance", "loss", math.log(49152))
        yield Row("dense", "loss", dense + noise.normal(0, 0.01))
        for row, loss in losses.items():
            for x in (1.2, 1.5, 2.0, 3.0):
                yield Row(row, "loss", loss + x / 10 + noise.normal(0, 0.01), x=x)

    return pd.concat([tidy(rows(), "pela.language", "small", seed) for seed in range(3)])


def test_claims_on_numbers_like_those_measured_before():
    verdicts = {claim.name: judge(claim, measured())[0] for claim in language.CLAIMS}
    assert set(verdicts.values()) == {SUPPORTED}
    worse = {claim.name: judge(claim, measured(whitened=18.5))[0] for claim in language.CLAIMS}
    assert worse["whitened factors"] == worse["whitened < asvd"] == REFUTED
    shut = {judge(claim, measured(dense=9.0))[0] for claim in language.CLAIMS}
    assert shut == {NOT_JUDGED}


def test_plans_have_no_more_than_the_ratio_allows(run):
    m = given(run, "plain")
    model = language.decoder(m)
    dense = {name: layer for name, layer in model.named_modules() if name.endswith("_proj")}
    plan = plan_of(compress(copy.deepcopy(model), ratio=3.0))
    assert plan.keys() == dense.keys()  # the head is tied or kept, the rest is low-rank
    assert all(
        rank * sum(dense[name].weight.shape) * 3 <= dense[name].weight.numel()
        for name, rank in plan.items()
    )
