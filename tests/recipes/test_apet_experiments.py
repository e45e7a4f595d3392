"""APET's experiments from the command line to the report, at `tiny` and a few steps."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from datamodules.text_to_text import read_nq_open, write_nq_open
from datamodules.tokens import train_tokenizer
from lightning_modules.vera.method_args import ARGUMENTS
from recipes.apet.cells import (
    GRID,
    PET,
    Cell,
    at_random,
    best_rate,
    measure_at_rate,
    of_method,
    sampling_error,
    uncollapsed,
)
from recipes.apet.counts import thresholds
from recipes.apet.positions import budget_of, tuned_in
from recipes.apet.texts import text_score
from recipes.claims import judge
from recipes.cli import grid, presets
from recipes.experiment import Measuring, Run, Stage
from recipes.records import Finished, at, best_of
from recipes.results import Row, by_seed, tidy
from recipes.runner import command_line
from tests.recipes.report_checks import check_reports_of_parts

RATES = (0.00025, 0.001, 0.004, 0.016)  # at `small`
FULL_RATES = (0.000025, 0.0001, 0.0004, 0.0016)
EXPERIMENTS = ("scales", "positions", "counts", "transfer")
SHORT = ("--trainer.max_steps", "3", "--trainer.val_check_interval", "3", "--data.limit", "48")


def module_of(name):
    return importlib.import_module(f"recipes.apet.{name}")


def run(name, out, *flags):
    """A tiny run: its table and its report."""
    finished = module_of(name).main(["--out", str(out), *SHORT, *flags])
    table = pd.read_csv(finished.out / "results.csv", keep_default_na=False, na_values={"x": [""]})
    text = (finished.out / "report.md").read_text()
    assert "smoke test" in text
    check_reports_of_parts(module_of(name).EXPERIMENT, finished)
    return table, text


def declared(name, *flags):
    """An experiment's stages, declared and not run."""
    planned = command_line(module_of(name).EXPERIMENT, list(flags))
    module_of(name).EXPERIMENT.declare(planned)
    planned.check()
    return {node.name: node for node in planned.nodes.values() if isinstance(node, Stage)}


def values(table, metric, name):
    part = table[(table["metric"] == metric) & (table["set"] == name)]
    return dict(zip(part["row"], part["value"], strict=True))


def test_scales(tmp_path):
    models = "width-16,width-32,width-64"
    table, text = run("scales", tmp_path, "--models", models)
    for width in (16, 32, 64):
        name = f"SST-2, width-{width}"
        scores = values(table, "score", name)
        assert list(scores) == [*PET, "full", "majority"]
        assert set(values(table, "updates", name).values()) == {3}
        assert set(values(table, "examples", name).values()) == {48}
        assert set(values(table, "scored", name).values()) == {64}
        assert values(table, "tuned", name)["lora"] == 2 * 2 * 4 * 2 * width
        deviation = pd.Series([100 * scores[row] for row in PET]).std()
        assert values(table, "deviation", "SST-2")[f"width-{width}"] == pytest.approx(deviation)
        classes = values(table, "classes_predicted", name)
        alike = min(classes[row] for row in PET) == 1
        assert values(table, "uncollapsed", "SST-2")[f"width-{width}"] == (not alike)
        gain = 100 * (scores["full"] - scores["majority"])
        assert values(table, "gain", "SST-2")[f"width-{width}"] == pytest.approx(gain)
    assert "5.08, 3.63, 2.65" in text and "scales.png" in text


def test_a_gate_needs_full_fine_tuning_alone():
    """Guessing and the gain over it, at every seed, before any method's rate is searched."""
    flags = ["--preset", "small", "--seeds", "2", "--models", "MiniLM", "--tasks", "SST-2"]
    planned = command_line(module_of("scales").EXPERIMENT, [*flags, "--only", "* gain,* majority"])
    module_of("scales").EXPERIMENT.declare(planned)
    trained = [(n.seed, n.name) for n in planned.chosen() if isinstance(n, Stage)]
    trials = [(0, f"SST-2 MiniLM full lr {rate:g}") for rate in FULL_RATES]
    assert trained == [*trials, (1, "SST-2 MiniLM full")]


def test_scales_of_what_a_decoder_writes(tmp_path):
    """Questions are answered, an encoder leaves them out, and no answer scores 0."""
    flags = ("--models", "width-16,decoder-32", "--tasks", "questions", "--rows", "bitfit,full")
    table, text = run("scales", tmp_path, *flags)
    name = "questions, decoder-32"
    scores = values(table, "score", name)
    assert scores.keys() == {"bitfit", "full", "majority"} and scores["majority"] == 0
    assert all(0 <= score <= 1 for score in scores.values())
    assert not table["set"].str.contains("width-16").any()
    assert set(values(table, "examples", name).values()) == {48}
    written = tmp_path / "apet-scales/tiny/seed0/questions decoder-32 full score/outputs.txt"
    asked = read_nq_open(write_nq_open(tmp_path / "questions") / "dev.jsonl")
    different = {pair.text for pair in asked}
    assert values(table, "scored", name)["full"] == len(different)
    assert written.read_text().count("\n") == len(different)
    assert "| full |" in text
    # full fine-tuning and guessing alone say whether the task can be judged
    assert values(table, "gain", "questions") == {"decoder-32": 100 * scores["full"]}
    # the deviation is that of the paper's four methods, and of no fewer
    assert "deviation" not in set(table["metric"])
    assert "No standard deviation between methods: Prompt, LoRA, Adapter not trained." in text


def test_a_decoder_answers_by_label_words(tmp_path):
    flags = ("--models", "decoder-32", "--tasks", "SST-2", "--rows", "bitfit")
    table, _ = run("scales", tmp_path, *flags)
    assert 0 <= values(table, "score", "SST-2, decoder-32")["bitfit"] <= 1


def test_a_collapsed_training_shuts_the_gate():
    """One of four seeds' trainings answers everything alike: the deviation means nothing."""

    def node(classes):
        rows = pd.DataFrame({"metric": ["score", "classes_predicted"], "value": [0.5, classes]})
        return SimpleNamespace(rows=rows)

    assert uncollapsed({"lora": node(2.0), "bitfit": node(3.0)}) == 1
    assert uncollapsed({"lora": node(2.0), "bitfit": node(1.0)}) == 0
    [claim] = [c for c in module_of("scales").CLAIMS if c.name.endswith("MiniLM → bge-small")]

    def verdict(sound):
        lines = [
            [Row(row=row, set="SST-2", metric=metric, value=value) for row, metric, value in (
                ("MiniLM", "deviation", 9 + seed), ("bge-small", "deviation", 1),
                ("MiniLM", "gain", 30 + seed), ("bge-small", "gain", 30 + seed),
                ("MiniLM", "uncollapsed", one), ("bge-small", "uncollapsed", 1),
            )]
            for seed, one in enumerate(sound)
        ]  # fmt: skip
        parts = [tidy(rows, "apet.scales", "small", seed) for seed, rows in enumerate(lines)]
        return judge(claim, pd.concat(parts))

    assert verdict([1, 1, 1, 1])[0] == "supported"
    word, _, reason = verdict([1, 1, 0, 1])
    assert word == "not judged" and "collapsed of MiniLM): +0.75 of the seeds" in reason
    table = tidy([Row("MiniLM", "deviation", 1.0, "SST-2")], "apet.scales", "small", 0)
    reason = judge(claim, table)[2]
    assert reason.startswith("compute: its gate (full fine-tuning of MiniLM is")


def test_scores_of_texts():
    references = [["the Old man", "a cook"], ["my sister"]]
    assert text_score("f1", ["cook", "her sister"], references) == pytest.approx((1 + 0.5) / 2)
    rouge = text_score("rouge_l", ["the man", "my sister"], references)
    assert rouge == pytest.approx((2 * 1 * (2 / 3) / (5 / 3) + 1) / 2)
    # SQuAD 1.1's script: no words in common is 0, even where neither has any
    assert text_score("f1", ["The!", "", "my"], [["the"], [""], ["my"]]) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="'accuracy' does not score texts"):
        text_score("accuracy", [], [])


def test_widths_are_pretrained_on_the_same_text(tmp_path):
    """`small_widths` with a tokenizer and a text of the test's own."""
    sentences = ["the cook likes the lamp", "a waiter sells some bread", "my sister paints"] * 8
    (tmp_path / "text.txt").write_text("\n".join(sentences) + "\n")
    tokenizer = train_tokenizer(sentences, 300)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    finished = module_of("scales").main(
        [
            *("--preset", "small_widths", "--models", "width-64", "--tasks", "SST-2"),
            *("--rows", "full", "--out", str(tmp_path / "runs"), "--trainer.accelerator", "cpu"),
            *("--data.tokenizer", str(tmp_path / "tokenizer"), "--encoder.data.source=generated"),
            *("--pretrain.data.train", str(tmp_path / "text.txt"), "--encoder.data.limit", "48"),
            *("--encoder.trainer.max_steps", "3", "--encoder.trainer.val_check_interval", "3"),
            *("--pretrain.trainer.max_epochs", "2", "--pretrain.trainer.check_val_every_n_epoch=2"),
        ]
    )
    table = pd.read_csv(finished.out / "results.csv", keep_default_na=False)
    assert table[table["metric"] == "pretraining"]["row"].tolist() == ["width-64"]
    before, after = (
        torch.load(finished.out / f"seed0/{name}/checkpoints/last.ckpt", weights_only=True)
        for name in ("pretrain width-64", "SST-2 width-64 full lr 0.0005")
    )
    name = "model.bert.encoder.layer.0.output.dense.weight"
    change = (after["state_dict"][name] - before["state_dict"][name]).abs().max()
    assert 0 < change < 3 * 5e-4 * 1.1  # three steps of AdamW away from it
    assert "masked-LM loss" in (finished.out / "report.md").read_text()


def test_positions(tmp_path):
    table, text = run("positions", tmp_path, "--rows", "lora")
    assert "deviation" not in set(table["metric"])
    assert "No deviation over all four budgets: Prompt, BitFit, Adapter left out." in text
    for width in (16, 64):
        name = f"SST-2, width-{width}"
        tuned = values(table, "tuned", name)
        budget = 2 * 2 * 4 * 2 * width  # LoRA's
        assert {row: tuned[row] for row in tuned if row != "full"} == {
            "APET lora 0": budget,
            "APET lora 1": budget,
        }
        assert values(table, "budget", name) == {"lora": budget}
        scores = values(table, "score", name)
        drawn = pd.Series([100 * scores[f"APET lora {draw}"] for draw in (0, 1)])
        assert values(table, "spread", name)["lora"] == pytest.approx(drawn.std())


def test_every_rate_is_tried_on_the_first_draw_of_every_seed():
    """As often for every budget and model; each seed scores the trial with the rate chosen."""
    experiment = module_of("positions").EXPERIMENT
    # the models of `small` are there after `make weights` alone
    planned = command_line(experiment, ["--preset", "small_widths", "--seeds", "3"])
    experiment.declare(planned)
    nodes = {(node.seed, node.name): node for node in planned.nodes.values()}
    full = planned.grid(GRID)["rates"]["full"]
    rates = {"full": full, **{f"APET {row} 0": RATES for row in PET}}
    for model in ("width-64", "width-256"):
        for row, tried in rates.items():
            name = f"SST-2 {model} {row}"
            trials = [nodes[k, f"{name} lr {rate:g}"] for k in range(3) for rate in tried]
            for seed in range(3):
                assert (seed, name) not in nodes  # the first draw is not trained again
                measured = nodes[seed, f"{name} score"]
                assert list(measured.nodes.values()) == [one for one in trials if one.seed == seed]
                assert set(measured.waits_for()) == set(trials)
        for seed in range(3):
            drawn = nodes[seed, f"SST-2 {model} APET lora 1"]
            trials = [
                nodes[k, f"SST-2 {model} APET lora 0 lr {r:g}"] for k in range(3) for r in RATES
            ]
            tried = [node for node in drawn.waits_for() if node.name != f"pretrain {model}"]
            assert tried == trials


def test_the_rate_that_is_best_for_all_seeds_is_chosen():
    """0.01 is best for the first seed, and fails for the second."""
    experiment = module_of("positions").EXPERIMENT
    planned = command_line(experiment, ["--seeds", "2"])
    settings = planned.grid(GRID) | {"rates": {"encoder": [0.01, 0.001]}}
    first = tuple(Cell("width-16", "SST-2", "APET lora 0", at_random(9, k), k) for k in range(2))
    chosen = best_rate(planned, settings, replace(first[0], like=first))

    def finished(stage, history):
        one = Finished(Path(stage.name), stage.seed)
        one.settings, one.history = stage.parsed(), {"val/accuracy": history}
        return one

    scores = [[0.2, 0.9], [0.8], [0.5], [0.7]]  # of the last checkpoint: 0.7 and 0.75 in the mean
    trials = [finished(*pair) for pair in zip(chosen.nodes, scores, strict=True)]
    assert [(one.seed, at(one.settings, "model.lr")) for one in trials] == [
        (0, 0.01), (0, 0.001), (1, 0.01), (1, 0.001)
    ]  # fmt: skip
    assert chosen.read(trials) == 0.001
    assert best_rate(planned, settings, first[0]).read(trials[:2]) == 0.01
    with pytest.raises(ValueError, match="val/accuracy was not logged"):
        trials[3].history = {"val/loss": [1.0]}
        chosen.read(trials)


def test_the_score_is_that_of_the_rate_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr("recipes.apet.cells.measure_score", lambda m: iter(m.stages))
    run = command_line(module_of("positions").EXPERIMENT, [])
    trials = {}
    for rate in (0.01, 0.001):
        trials[f"at {rate}"] = Finished(tmp_path, 0)
        trials[f"at {rate}"].settings = run.parsed("encoder", {"model.lr": rate})
    assert list(measure_at_rate(Measuring(0, {"lr": 0.001}, trials, tmp_path))) == ["at 0.001"]


def test_a_longer_run_of_positions_keeps_the_trials_and_trains_what_they_choose_anew(
    tmp_path, monkeypatch, capsys
):
    """What one seed's trials chose is never mixed with what two seeds' trials choose."""
    module = module_of("positions")
    file = module.EXPERIMENT.folder / f"{GRID}.yaml"
    settings = grid(file, "tiny")
    settings["rates"] = {"encoder": [1e-2, 1e-3]}
    monkeypatch.setattr(Run, "grid", lambda run, *configs: settings)
    flags = ["--rows", "lora", "--models", "width-16", "--out", str(tmp_path), *SHORT]

    def trained(*more):
        capsys.readouterr()
        finished = module.main([*flags, *more])
        skipped = capsys.readouterr().out
        return finished, {
            f"{node.seed} {node.name}"
            for node in finished.nodes.values()
            if isinstance(node, Stage) and f"seed {node.seed}: {node.name}: finished" not in skipped
        }

    trials = {f"SST-2 width-16 APET lora 0 lr {rate}" for rate in (0.01, 0.001)}
    drawn = "SST-2 width-16 APET lora 1"
    assert trained()[1] == {*(f"0 {name}" for name in trials), f"0 {drawn}"}
    finished, names = trained("--seeds", "2")
    assert names == {*(f"1 {name}" for name in trials), f"0 {drawn}", f"1 {drawn}"}
    assert (tmp_path / f"apet-positions/tiny/seed0/{drawn}.old1").is_dir()
    table = pd.read_csv(finished.out / "results.csv", keep_default_na=False)
    scored = table[(table["metric"] == "lr") & table["row"].str.startswith("APET")]
    assert len(scored) == 4 and scored["value"].nunique() == 1  # both draws of both seeds
    # with one seed again, what its trials chose takes its place back
    assert trained()[1] == set()


def test_every_seed_draws_positions_of_its_own():
    stages = command_line(module_of("positions").EXPERIMENT, ["--seeds", "3", "--rows", "lora"])
    module_of("positions").EXPERIMENT.declare(stages)
    drawn = {
        (node.seed, node.name): at(node.parsed(), "model.method_args.seed")
        for node in stages.nodes.values()
        if isinstance(node, Stage) and "APET" in node.name and "width-16" in node.name
    }
    assert len(drawn) == len(set(drawn.values())) == 3 * 2


def test_a_measurement_over_four_budgets(tmp_path):
    """The root mean square of the budgets' standard deviations, and whether a draw collapsed."""
    chosen = ("--models", "width-16", "--trainer.max_steps", "2", "--trainer.val_check_interval=2")
    table, text = run("positions", tmp_path, *chosen)
    name = "SST-2, width-16"
    spreads = pd.Series(values(table, "spread", name))
    assert set(spreads.index) == set(PET)
    deviation = values(table, "deviation", "SST-2")["width-16"]
    assert deviation == pytest.approx((spreads**2).mean() ** 0.5)
    classes = values(table, "classes_predicted", name)
    alike = min(value for row, value in classes.items() if row != "full") == 1
    assert values(table, "uncollapsed", "SST-2")["width-16"] == (not alike)
    scores = values(table, "score", name)
    gain = 100 * (scores["full"] - scores["majority"])
    assert values(table, "gain", "SST-2")["width-16"] == pytest.approx(gain)
    assert "over the four budgets" in text and "positions.png" in text
    assert (tmp_path / "apet-positions/tiny/positions.png").is_file()


def test_the_plots_have_tasks_as_panels():
    lines = [
        Row("APET prompt 0", "score", 0.5, "RTE, A"), Row("APET prompt 1", "score", 0.6, "RTE, A"),
        Row("APET lora 0", "score", 0.7, "SST-2, B"), Row("full", "score", 0.8, "SST-2, B"),
    ]  # fmt: skip
    table = tidy(lines, "apet.positions", "small", 0)

    def points(shown):
        return shown[["set", "row", "x", "value"]].to_records(index=False).tolist()

    assert points(module_of("positions").by_budget(table, ["SST-2", "RTE"], ["A", "B"])) == [
        ("SST-2", "B", 2, 0.7), ("RTE", "A", 0, 0.5), ("RTE", "A", 0, 0.6)
    ]  # fmt: skip
    assert points(module_of("scales").by_model(table, ["RTE", "SST-2"], ["A", "B"])) == [
        ("RTE", "APET prompt 0", 0, 0.5), ("RTE", "APET prompt 1", 0, 0.6),
        ("SST-2", "APET lora 0", 1, 0.7), ("SST-2", "full", 1, 0.8),
    ]  # fmt: skip


def test_a_task_that_none_of_the_models_fits_is_refused():
    """It used to end with an empty report."""
    flags = ["--tasks", "questions", "--models", "width-16"]
    run = command_line(module_of("scales").EXPERIMENT, flags)
    module_of("scales").EXPERIMENT.declare(run)
    with pytest.raises(ValueError, match="nothing is left to run by .* --tasks questions"):
        run.check()


def test_a_panel_names_the_models_that_have_not_learnt_its_task():
    scales = module_of("scales")
    gains = {"A": (9.0, 9.1, 9.2), "B": (5.0, 6.0, 9.0)}  # B's interval contains five points
    table = pd.concat(
        tidy([Row(model, "gain", values[seed], "RTE") for model, values in gains.items()]
             + [Row("A", "gain", 9.0 + seed / 10, "SST-2")], "apet.scales", "small", seed)
        for seed in range(3)
    )  # fmt: skip
    remarks = scales.shut_gates(table, ["RTE", "SST-2", "MRPC"], ["A", "B", "C"])
    assert list(remarks) == ["RTE"]
    assert remarks["RTE"].startswith("gate shut: full fine-tuning of B\n")


def test_plots_know_which_trainings_collapsed():
    rows = [Row("APET lora 0", "score", 0.5, "RTE, A"), Row("full", "score", 0.5, "RTE, A")]
    rows += [replace(row, metric="classes_predicted", value=1) for row in rows]
    table = tidy(rows, "apet.positions", "small", 0)
    drawn = module_of("positions").by_budget(table, ["RTE"], ["A"])
    assert set(drawn["metric"]) == {"score", "classes_predicted"} and len(drawn) == 2
    assert len(module_of("scales").by_model(table, ["RTE"], ["A"])) == 4


def test_a_prompt_starts_from_the_training_s_seed():
    flags = ["--models", "MiniLM", "--tasks", "SST-2", "--rows", "prompt", "--seeds", "3"]
    run = command_line(module_of("scales").EXPERIMENT, ["--preset", "small", *flags])
    module_of("scales").EXPERIMENT.declare(run)
    seeds = {
        (node.seed, at(node.parsed(), "model.method_args.seed"))
        for node in run.nodes.values()
        if isinstance(node, Stage)
    }
    assert seeds == {(0, 0), (1, 1), (2, 2)}


def test_counts(tmp_path):
    table, text = run("counts", tmp_path)
    for width in (16, 64):
        assert values(table, "tuned", f"SST-2, width-{width}") == {
            "full": values(table, "tuned", f"SST-2, width-{width}")["full"],
            "1": 1,
            "30": 30,
            "1000": 1000,
        }
        scores = values(table, "score", f"SST-2, width-{width}")
        gain = 100 * (scores["full"] - scores["majority"])
        assert values(table, "gain", "SST-2")[f"width-{width}"] == pytest.approx(gain)
    points = table[table["metric"] == "curve"]
    assert sorted(points["x"].unique()) == [1, 30, 1000]
    assert len(points) == 6
    assert "of 1)" in text and "counts.png" in text
    reached = table[table["metric"].isin(["low reached", "high reached"])]
    assert len(reached) == 4
    for _, one in reached.iterrows():
        same = (table["metric"] == one["metric"].removesuffix(" reached")) & (
            table["row"] == one["row"]
        )
        assert same.sum() == one["value"]


def test_a_threshold_that_one_seed_misses_is_not_judged():
    """The claim would otherwise be tested on the seeds that reach it."""
    claim = module_of("counts").CLAIMS[0]

    def verdict(reached):
        parts = []
        for seed, one in enumerate(reached):
            rows = [
                Row(row=model, set="SST-2", metric=metric, value=value)
                for model, high in (("MiniLM", 5.0 + seed / 10), ("bge-small", 3.0))
                for metric, value in (("gain", 30 + seed), ("high reached", 1), ("high", high))
            ]
            if not one:
                rows = [r for r in rows if (r.row, r.metric) != ("bge-small", "high")]
                rows = [
                    replace(r, value=0) if (r.row, r.metric) == ("bge-small", "high reached") else r
                    for r in rows
                ]
            parts.append(tidy(rows, "apet.counts", "small", seed))
        return judge(claim, pd.concat(parts))

    assert verdict([True] * 4)[0] == "supported"
    word, _, reason = verdict([True, True, True, False])
    assert word == "not judged" and "full fine-tuning of bge-small): +0.75 of the seeds" in reason


@pytest.mark.parametrize("name", ["positions", "counts"])
def test_a_decoder_is_tuned_at_random_positions(name, tmp_path):
    """--models takes every model of the grid, and not only those of the preset's claims."""
    rows = ("--rows", "prompt") if name == "positions" else ()
    table, text = run(name, tmp_path, "--models", "decoder-32", *rows)
    tuned = values(table, "tuned", "SST-2, decoder-32")
    tuned.pop("full", None)
    expected = [4 * 32, 4 * 32] if rows else [1, 30, 1000]  # a prompt of four tokens
    assert list(tuned.values()) == expected
    assert "decoder-32" in text


@pytest.mark.parametrize("name", ["positions", "counts"])
def test_bloom_and_t5_run_at_paper(name, monkeypatch):
    """With the learning rates and label words of their families, a large and a small model each."""
    monkeypatch.setattr("recipes.apet.positions.budget_of", lambda *_: 121_216)  # needs the hub
    stages = declared(name, "--preset", "paper", "--tasks", "RTE")
    row = "APET bitfit 0" if name == "positions" else "6400"
    for model, rates in (
        ("BERT-small", [3e-4]), ("BERT-large", [3e-4]), ("BLOOM-560M", [3e-4, 5e-5]),
        ("BLOOM-7.1B", [3e-4, 5e-5]), ("T5-small", [1e-4, 1e-3, 1e-2]),
        ("T5-XXL", [1e-4, 1e-3, 1e-2]),
    ):  # fmt: skip
        trials = {
            at(stage.parsed(), "model.lr"): stage.parsed()
            for stage_name, stage in stages.items()
            if f"RTE {model} {row}" == stage_name.partition(" lr ")[0]
        }
        assert list(trials) == rates
        if not model.startswith("BERT"):
            assert at(trials[rates[0]], "data.label_words") == ["yes", "no"]
    # further sizes by --models
    assert any(
        "BLOOM-3B" in one for one in declared(name, "--preset", "paper", "--models=BLOOM-3B")
    )


@pytest.mark.parametrize("name", ["positions", "counts"])
def test_tasks_beyond_the_preset_s_own_are_taken(name):
    """Texts to generate too, where the model is no encoder."""
    models = ("--models", "width-16,decoder-32", "--rows", "bitfit")
    stages = declared(name, "--tasks", "questions", *models[: 4 if name == "positions" else 2])
    assert stages and all(one.startswith("questions decoder-32") for one in stages)


def test_transfer_takes_every_task_of_two_classes():
    stages = declared("transfer", "--preset", "small", "--tasks", "Rotten Tomatoes,RTE")
    assert {one.partition(" MiniLM")[0] for one in stages} == {"Rotten Tomatoes", "RTE"}
    with pytest.raises(ValueError, match="--tasks has 'MNLI': expected some of SST-2, IMDB"):
        declared("transfer", "--preset", "paper", "--tasks", "MNLI,RTE")


def test_transfer(tmp_path):
    table, text = run("transfer", tmp_path, "--rows", "lora")
    matrix = table[table["metric"] == "accuracy"]
    assert sorted(matrix["set"]) == [
        "MRPC → MRPC",
        "MRPC → SST-2",
        "SST-2 → MRPC",
        "SST-2 → SST-2",
    ]
    assert "| source | SST-2 | MRPC |" in text


def test_a_transfer_counts_above_the_test_part_s_sampling_error():
    """One example of RTE's 277 above the commonest class, with every seed, is no transfer."""
    [claim] = module_of("transfer").CLAIMS

    def verdict(right):
        parts = [
            tidy(
                [
                    Row("lora", "accuracy", (right + seed % 2) / 277, "MRPC → RTE"),
                    Row("lora", "accuracy", (200 + seed % 2) / 277, "RTE → RTE"),
                ],
                "apet.transfer", "small", seed,
            )
            for seed in range(4)
        ]  # fmt: skip
        return judge(claim, pd.concat(parts))[0]

    assert verdict(147) == "refuted" and verdict(170) == "supported"
    assert sampling_error(0.5, 100) == pytest.approx(0.0822, abs=1e-4)


def test_the_trials_of_seed_0_are_its_trainings():
    chosen = ("--models", "MiniLM,bge-small", "--tasks", "SST-2", "--rows", "lora,full")
    stages = declared("scales", "--preset", "small", "--seeds", "2", *chosen)
    assert {name.removeprefix("SST-2 ") for name in stages} == {
        f"{model} {row}"
        for model in ("MiniLM", "bge-small")
        for row in (
            *(f"lora lr {rate}" for rate in RATES),
            *(f"full lr {rate:g}" for rate in FULL_RATES),
            "lora",
            "full",
        )
    }
    run = stages["SST-2 MiniLM lora"].run
    [first, second] = [n for n in run.nodes.values() if n.name == "SST-2 MiniLM lora score"]
    assert [node.name for node in first.waits_for()] == [
        f"SST-2 MiniLM lora lr {rate}" for rate in RATES
    ]
    [tuned] = second.waits_for()
    assert tuned.name == "SST-2 MiniLM lora" and tuned.seed == 1
    assert [trial.seed for trial in tuned.waits_for()] == [0] * len(RATES)
    with pytest.raises(ValueError, match="--models has 'BERT-base': expected some of MiniLM, bge"):
        declared("scales", "--preset", "small", "--models", "BERT-base")


def test_the_plot_of_counts_has_thresholds_as_counts_and_levels_as_series():
    lines = [
        Row("MiniLM", "curve", 0.6, "SST-2", x=100), Row("MiniLM", "full", 0.8, "SST-2"),
        Row("MiniLM", "guessing", 0.5, "SST-2"), Row("MiniLM", "high", 2.0, "SST-2"),
    ]  # fmt: skip
    levels = {"full fine-tuning": ("full", "MiniLM"), "guessing": ("guessing", "MiniLM")}
    table = module_of("counts").with_levels(tidy(lines, "apet.counts", "small", 0), levels)
    assert by_seed(table, "high", {"row": "MiniLM"}).tolist() == [100]  # 10²
    assert by_seed(table, "curve", {"row": "full fine-tuning"}).tolist() == [0.8]
    assert by_seed(table, "curve", {"row": "guessing"}).tolist() == [0.5]
    assert by_seed(table, "curve", {"row": "MiniLM", "x": 100}).tolist() == [0.6]


def test_the_best_trial_counts():
    def trial(name, values):
        finished = Finished(Path(name), 0)
        finished.history = {"val/accuracy": values}
        return finished

    trials = [trial("a", [0.5, 0.7]), trial("b", [0.8, 0.6]), trial("c", [0.75])]
    assert best_of(trials, "val/accuracy").folder == Path("c")  # b was better before it got worse
    assert best_of(trials, "val/accuracy", "min").folder == Path("b")
    assert best_of(trials, "val/accuracy", at_end=False).folder == Path("b")
    assert best_of(trials, "val/accuracy", "min", at_end=False).folder == Path("a")


def test_counts_train_nothing_but_the_budget():
    """A new classifier that trained in full would beat guessing with no parameter of the budget."""
    stages = declared("counts", "--preset", "small", "--seeds", "2", "--models", "MiniLM")
    trial, drawn = (stages[f"SST-2 MiniLM 10{name}"].parsed() for name in (" lr 0.001", ""))
    assert at(trial, "model.heads") == at(drawn, "model.heads") == []
    assert at(trial, "model.method_args.seed") == 0 and at(drawn, "model.method_args.seed") == 1


CURVE = {10: 0.50, 100: 0.70, 1000: 0.65, 10_000: 0.89}


# 1.6449 standard errors of 1,000 examples: guessing counts as up to LOW, full fine-tuning from HIGH
LOW, HIGH = 0.5 + 1.6449 * (0.25 / 1000) ** 0.5, 0.9 - 1.6449 * (0.09 / 1000) ** 0.5


@pytest.mark.parametrize(
    ("curve", "low", "high"),
    [
        (CURVE, 1 + (LOW - 0.50) / 0.20, 3 + (HIGH - 0.65) / 0.24),
        ({10: 0.5, 100: 0.5}, None, None),  # guesses at every count
        # falls back in between
        ({10: 0.9, 100: 0.5, 1000: 0.9}, 2 + (LOW - 0.5) / 0.4, 2 + (HIGH - 0.5) / 0.4),
        ({10: 0.9, 100: 0.9}, 1, 1),
        ({100: 0.2, 400: 1.0}, 2 + 0.60206 * (LOW - 0.2) / 0.8, 2 + 0.60206 * (HIGH - 0.2) / 0.8),
        ({10: 0.9, 100: HIGH - 0.001}, 1, None),  # its end is below
    ],
)
def test_a_threshold_is_where_the_curve_crosses_and_stays(curve, low, high):
    """On a straight line over log₁₀ of the count; log₁₀ 4 = 0.60206."""
    found = thresholds(curve, guess=0.5, full=0.9, examples=1000)
    assert found == {"low": pytest.approx(low, abs=1e-5), "high": pytest.approx(high, abs=1e-5)}


def test_a_curve_that_equals_full_has_reached_it():
    """Where nothing is wrong there is no sampling error; guessing itself is not above guessing."""
    curve = {10: 0.0, 100: 1.0}
    # the line leaves guessing at 10 and is level with full fine-tuning at 100
    assert thresholds(curve, guess=0.0, full=1.0, examples=9) == {"low": 1, "high": 2}


def test_the_thresholds_follow_from_the_table_alone(tmp_path):
    table, text = run("counts", tmp_path, "--models", "width-16", "--seeds", "2")
    for seed in (0, 1):
        part = table[(table["seed"] == seed) & (table["row"] == "width-16")]
        curve = part[part["metric"] == "curve"].set_index("x")["value"].to_dict()
        known = part[part["x"].isna()].set_index("metric")["value"]
        examples = int(known["scored"])
        assert examples == 64
        for name, one in thresholds(curve, known["guessing"], known["full"], examples).items():
            assert known.get(name) == (None if one is None else pytest.approx(one))
    assert "| model | task | low | 95 % | high | 95 % |" in text


def test_the_thresholds_uncertainty_is_reported(tmp_path):
    parts = [
        tidy([Row("width-16", "low", low, "SST-2")], "apet.counts", "tiny", seed)
        for seed, low in enumerate((1.0, 2.0))
    ]
    planned = command_line(module_of("counts").EXPERIMENT, ["--seeds", "2", "--out", str(tmp_path)])
    text = "\n".join(module_of("counts").report(pd.concat(parts), planned))
    # t(0.975, 1) = 12.706, times 0.7071 / √2
    assert (
        "| width-16 | SST-2 | 1.50 ± 0.71 (2 of 2) | -4.85 to 7.85 | not reached (0 of 2) |  |"
        in text
    )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_flag_reaches_every_stage_or_is_refused(name):
    for stage in declared(name, "--model.lr", "0.5", "--data.batch_size", "7").values():
        assert at(stage.parsed(), "model.lr") == 0.5
        assert at(stage.parsed(), "data.batch_size") == 7
    with pytest.raises(ValueError, match=r"varies model\.method"):
        declared(name, "--model.method", "full")


def test_the_paper_s_settings():
    """Batch 32, no warm-up, 3e-4 for BERT, 128 or 256 tokens; the budgets' ranks and widths."""
    file = module_of("scales").EXPERIMENT.folder / f"{GRID}.yaml"
    assert set(presets(file)) == {"paper", "small", "small_widths", "tiny"}
    settings = grid(file, "paper")
    assert settings["methods"]["lora"]["model.rank"] == 8
    assert settings["methods"]["lora"]["model.method_args"] == {"alpha": 16}
    assert settings["methods"]["adapter"]["model.rank"] == 24
    assert settings["methods"]["prompt"]["model.rank"] == 100
    # Fig. 2, from small to large
    assert list(settings["models"]) == [
        *(f"BERT-{size}" for size in ("small", "base", "large")),
        *(f"BLOOM-{size}" for size in ("560M", "1.1B", "1.7B", "3B", "7.1B")),
        *(f"T5-{size}" for size in ("small", "base", "large", "XL", "XXL")),
    ]
    chosen = ("--models", "BERT-base,T5-base", "--tasks", "SST-2,RTE,SAMSum")
    stages = declared("scales", "--preset", "paper", "--rows", "lora", *chosen)
    stage = stages["SST-2 BERT-base lora"].parsed()
    assert at(stage, "model.lr") == 3e-4
    assert at(stage, "model.warmup") == 0
    assert at(stage, "data.batch_size") == 32
    assert at(stage, "data.max_length") == 128
    assert at(stages["RTE BERT-base lora"].parsed(), "data.max_length") == 256
    assert not any("SAMSum BERT" in name for name in stages)
    trials = [stages[f"SAMSum T5-base lora lr {rate}"].parsed() for rate in ("0.0001", "0.01")]
    assert [at(trial, "model.lr") for trial in trials] == [1e-4, 1e-2]
    assert at(trials[0], "data.encoder_decoder") and at(trials[0], "data.max_length") == 256
    assert at(trials[0], "data.target_length") == 128
    # full fine-tuning has its family's learning rates too
    full = declared("scales", "--preset", "paper", "--rows", "full", "--tasks", "SST-2")
    rates = {
        model: {at(stage.parsed(), "model.lr") for name, stage in full.items() if model in name}
        for model in ("BERT-large", "BLOOM-560M", "T5-small")
    }
    assert rates["BERT-large"] == {3e-4} and rates["BLOOM-560M"] == {3e-4, 5e-5}
    assert rates["T5-small"] == {1e-4, 1e-3, 1e-2}


def test_t5_s_bitfit_runs_at_paper():
    """It is told which layers get a bias."""
    chosen = ("--models", "T5-small", "--tasks", "RTE", "--rows", "bitfit")
    stage = declared("scales", "--preset", "paper", *chosen)["RTE T5-small bitfit lr 0.001"]
    arguments = stage.parsed().model.init_args.method_args
    assert "SelfAttention.q" in arguments["layers"]
    assert set(arguments) <= set(ARGUMENTS["bitfit"])


def test_every_method_has_as_many_trials_at_small_and_prompt_has_rates_of_its_own():
    stages = declared("scales", "--preset", "small", "--models", "MiniLM", "--tasks", "SST-2")
    rates = {
        method: [
            at(stage.parsed(), "model.lr")
            for name, stage in stages.items()
            if name.startswith(f"SST-2 MiniLM {method} lr")
        ]
        for method in (*PET, "full")
    }
    assert rates.pop("prompt") == [4e-3, 1.6e-2, 6.4e-2, 2.56e-1]
    assert rates.pop("full") == list(FULL_RATES)
    assert all(of_others == [2.5e-4, 1e-3, 4e-3, 1.6e-2] for of_others in rates.values())


def bert_of(layers, width):
    return BertForSequenceClassification(
        BertConfig(
            num_hidden_layers=layers, hidden_size=width, num_attention_heads=width // 64,
            intermediate_size=4 * width,
        )
    )  # fmt: skip


def bloom_of(layers, width):
    config = BloomConfig(vocab_size=250880, n_layer=layers, hidden_size=width, n_head=width // 64)
    return BloomForCausalLM(config)


def t5_of(layers, width, hidden, heads, **further):
    sizes = {"vocab_size": 32128, "num_layers": layers, **further}
    config = T5Config(
        d_model=width, d_kv=64, d_ff=hidden, num_heads=heads, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


SIZES = {  # of the released code, but for BitFit of T5-XXL, see the next test
    "BERT-small": (bert_of, (4, 512), 51_200, 23_040, 65_536, 200_896),
    "BERT-base": (bert_of, (12, 768), 76_800, 102_144, 294_912, 903_744),
    "BERT-large": (bert_of, (24, 1024), 102_400, 271_360, 786_432, 2_409_600),
    "BLOOM-560M": (bloom_of, (24, 1024), 102_400, 272_384, 786_432, 2_409_600),
    "BLOOM-1.1B": (bloom_of, (24, 1536), 153_600, 408_576, 1_179_648, 3_613_824),
    "BLOOM-7.1B": (bloom_of, (30, 4096), 409_600, 1_359_872, 3_932_160, 12_043_680),
    "T5-small": (t5_of, (8, 512, 1024, 6), 51_200, 121_216, 229_376, 803_584),
    "T5-base": (t5_of, (12, 768, 2048, 12), 76_800, 270_208, 589_824, 1_807_488),
    "T5-XXL": (t5_of, (24, 4096, 10240, 64), 409_600, 2_497_920, 6_291_456, 19_269_888),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_methods_have_the_released_sizes(name):
    settings = grid(module_of("scales").EXPERIMENT.folder / f"{GRID}.yaml", "paper")
    build, shape, *sizes = SIZES[name]
    for method, size in zip(PET, sizes, strict=True):
        with torch.device("meta"):
            model = build(*shape)
            heads = ["classifier"] if build is bert_of else []
            assert tuned_in(model, heads, of_method(settings, method, name)) == size


def test_the_released_bitfit_of_t5_xxl_is_that_of_a_smaller_model():
    """Its 2,444,644 fit one decoder block less, and 32,100 outputs, the tokenizer's tokens."""
    settings = grid(module_of("scales").EXPERIMENT.folder / f"{GRID}.yaml", "paper")
    with torch.device("meta"):
        model = t5_of(24, 4096, 10240, 64, num_decoder_layers=23, vocab_size=32100)
        assert tuned_in(model, [], of_method(settings, "bitfit", "T5-XXL")) == 2_444_644


def test_a_decoder_s_budget_is_its_language_model_s():
    """Not that of `LabelWords` around it, which embeds no tokens and so takes no prompt."""
    run = command_line(module_of("positions").EXPERIMENT, [])
    assert budget_of(run, run.grid(GRID), "decoder-32", "prompt") == 4 * 32


@pytest.mark.parametrize("name", ["scales", "positions", "counts"])
def test_every_preset_trains_the_models_that_its_claims_compare(name):
    file = module_of("scales").EXPERIMENT.folder / f"{GRID}.yaml"
    for claim in module_of(name).CLAIMS:
        settings = grid(file, claim.preset)
        models = settings["models"] if name == "scales" else settings[name]["models"]
        compared = claim.test if isinstance(claim.test, tuple) else (claim.test,)
        assert {side for one in compared for side in (one.a, one.b)} <= set(models)
    assert {claim.preset for claim in module_of(name).CLAIMS} == {"small", "small_widths", "paper"}
    ends = {claim.name.replace(",", " →").rpartition(": ")[2] for claim in module_of(name).CLAIMS}
    assert {"BLOOM-560M → BLOOM-7.1B", "T5-small → T5-XXL"} <= ends
