"""VeRA's experiments on GLUE and on images: from the command line to the report, at `tiny`.

The tables say what each stage saw (examples, updates) and what was scored; flags reach every stage
or are refused; the paper's presets have the paper's settings.
"""

import importlib

import pandas as pd
import pytest
import torch
import transformers
from PIL import Image

from lightning_modules.tuning import trainable, tune
from lightning_modules.vera import add_vera, scores
from recipes.cli import grid, presets
from recipes.experiment import Stage
from recipes.machine import OthersAtWork
from recipes.records import at, instance_of
from recipes.results import Row, by_seed, tidy
from recipes.runner import command_line
from recipes.vera import ablations, methods
from tests.recipes.report_checks import check_reports_of_parts

EXPERIMENTS = ("glue", "images", "ablations", "analysis", "e2e", "instruct")


def module_of(name):
    return importlib.import_module(f"recipes.vera.{name}")


def run(name, out, *flags):
    """A tiny run: its Run, its table and its report."""
    finished = module_of(name).main(["--out", str(out), *flags])
    table = pd.read_csv(finished.out / "results.csv", keep_default_na=False, na_values={"x": [""]})
    text = (finished.out / "report.md").read_text()
    assert "smoke test" in text
    for plot in finished.out.glob("*.png"):
        assert f"({plot.name})" in text
        with Image.open(plot) as picture:
            assert min(picture.size) > 300
    check_reports_of_parts(module_of(name).EXPERIMENT, finished)
    return finished, table, text


def declared(name, *flags):
    """An experiment's stages by name and seed, declared and not run."""
    experiment = module_of(name).EXPERIMENT
    planned = command_line(experiment, list(flags))
    experiment.declare(planned)
    return {node.name: node for node in planned.nodes.values() if isinstance(node, Stage)}


def value(table, metric, row, name):
    return by_seed(table, metric, {"row": row, "set": name})[0]


def values_of(table, metric, name):
    part = table[(table["metric"] == metric) & (table["set"] == name)]
    return dict(zip(part["row"], part["value"], strict=True))


def test_glue(tmp_path):
    rows = ("head", "lora", "vera", "vblora", "full")
    _, table, text = run("glue", tmp_path, "--rows", ",".join(rows), "--data.limit", "64")
    for task in ("RTE", "STS-B"):
        assert list(values_of(table, "score", task)) == ["head", "lora", "vera", "vblora", "full",
                                                         "majority"]  # fmt: skip
        # two epochs of four batches of sixteen; scored on all 64 development examples
        assert set(values_of(table, "examples", task).values()) == {64}
        assert set(values_of(table, "updates", task).values()) == {8}
        assert set(values_of(table, "scored", task).values()) == {64}
        assert values_of(table, "tuned", task)["vera"] == 4 * (32 + 16)
        assert values_of(table, "tuned", task)["head"] == 0
        for row in ("lora", "vera", "vblora"):
            score, head = (value(table, "score", name, task) for name in (row, "head"))
            thousands = value(table, "tuned", row, task) / 1000
            points = value(table, "points per 1K", row, task)
            assert points == pytest.approx(100 * (score - head) / thousands)
    assert value(table, "score", "majority", "STS-B") == 0
    assert "| VeRA | 192 |" in text and "glue.png" in text and "85.9 | 91.7" in text


def test_the_majority_class_is_that_of_the_training_part(tmp_path):
    _, table, _ = run("glue", tmp_path, "--rows", "head", "--trainer.limit_train_batches", "1")
    [stage] = [s for n, s in declared("glue", "--rows", "head").items() if n == "RTE_head"]
    data = instance_of(stage.parsed().data.as_dict())
    train, scored = (
        torch.tensor([example.label for example in data.examples(part)])
        for part in ("train", "val")
    )
    expected = (scored == train.mode().values).float().mean().item()
    assert value(table, "score", "majority", "RTE") == pytest.approx(expected)


def test_images(tmp_path):
    finished, table, text = run("images", tmp_path)
    name = "digits 5–9"
    tuned = values_of(table, "tuned", name)
    assert tuned["head"] == 0 and tuned["vera"] == 4 * 2 * (64 + 64)
    assert tuned["lora"] == 4 * 4 * (64 + 3 * 64) and tuned["full"] > 10 * tuned["lora"]
    # ten images of each of five classes, ten epochs of five batches; all test images are scored
    assert set(values_of(table, "examples", name).values()) == {50}
    assert set(values_of(table, "updates", name).values()) == {50}
    data = instance_of(finished.parsed("images").data.as_dict())
    assert set(values_of(table, "scored", name).values()) == {len(data.test_set)} != {50}
    assert values_of(table, "score", name)["chance"] == 0.2
    assert "ViT-L, VeRA | 87.5 | 79.2 | 99.2 | 78.6" in text and "images.png" in text
    start, tuned_head = (
        torch.load(finished.out / "seed0" / name / "checkpoints" / "last.ckpt", weights_only=True)
        for name in ("pretrain", "digits 5–9_head")
    )
    for key, weights in start["state_dict"].items():  # every run begins with the same model
        assert key.startswith("model.head.") or torch.equal(tuned_head["state_dict"][key], weights)


def test_trials_are_judged_on_images_that_are_not_scored():
    """The trials validate on held-out training images, and as many as the others train."""
    stages = declared("images")
    trial = stages["digits 5–9_vera_lr0.02"]
    data = trial.parsed().data.init_args
    assert data.val_per_class == 10 and at(trial.parsed(), "model.lr") == 0.02
    chosen = stages["digits 5–9_vera"]
    assert {node.name for node in chosen.waits_for()} == {
        "digits 5–9_vera_lr0.02", "digits 5–9_vera_lr0.05", "pretrain"
    }  # fmt: skip


FEW = ("--data.limit", "32", "--rows", "vera_r4,lora_r1", "--trainer.max_epochs", "1")


@pytest.mark.parametrize("alone", [True, False])
def test_times_are_left_out_where_other_programs_ran(alone, tmp_path, monkeypatch):
    monkeypatch.setattr(OthersAtWork, "absent", lambda self: alone)
    _, table, text = run("ablations", tmp_path, *FEW)
    assert set(values_of(table, "seconds per update", "SST-2")) == (
        {"vera_r4", "lora_r1"} if alone else set()
    )
    assert ("at equal time" in text) == alone
    assert "| majority class |" in text and "**Variants**" not in text


def test_times_are_of_the_computation_that_trained(tmp_path, monkeypatch):
    """In the stage's precision, by which VeRA's cheaper way is chosen, and its attention."""
    computed = set()

    def loss_of(logits, targets):
        computed.add((logits.dtype, torch.backends.cuda.flash_sdp_enabled()))
        return scores.loss_of(logits, targets)

    monkeypatch.setattr(ablations, "loss_of", loss_of)
    run("ablations", tmp_path, *FEW, "--trainer.precision", "bf16-mixed")
    assert computed == {(torch.bfloat16, False)}


def test_rows_are_timed_from_records_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(OthersAtWork, "absent", lambda self: True)
    first, _, _ = run("ablations", tmp_path / "first", *FEW, "--only", "SST-2_*")

    def fail(*args, **kwargs):
        raise AssertionError("a stage was trained again")

    monkeypatch.setattr("recipes.work.run_stage", fail)
    records = ("--records", str(first.out / "records.zip"))
    _, table, _ = run("ablations", tmp_path / "second", *FEW, *records)
    assert set(values_of(table, "seconds per update", "SST-2")) == {"vera_r4", "lora_r1"}


@pytest.mark.parametrize(("name", "preset"), [("ablations", "small"), ("glue", "paper")])
def test_a_plot_has_the_medians_that_the_report_s_table_has(name, preset, tmp_path, monkeypatch):
    notes = []
    monkeypatch.setattr("recipes.plots.save_plot", lambda figure, path, note: notes.append(note))
    experiment = module_of(name).EXPERIMENT
    given = command_line(experiment, ["--preset", preset, "--seeds", "3", "--out", str(tmp_path)])
    rows = ("lora_r8", "vera_r384", "majority", "lora", "vera", "full")
    table = pd.concat(
        tidy(
            [Row(row, metric, value + seed, task) for row in rows for task in ("STS-B", "RTE")
             for metric, value in (("score", 0.5), ("tuned", 100))],
            experiment.name, preset, seed,
        )
        for seed in range(3)
    )  # fmt: skip
    text = "\n".join(experiment.report(table, given))
    assert "median over seeds and, in brackets, lowest and highest" in text
    assert [note.partition(" seeds")[0] for note in notes] == ["medians of 3"]


def test_ablations(tmp_path, monkeypatch):
    monkeypatch.setattr(OthersAtWork, "absent", lambda self: True)  # beside other tests
    _, table, text = run("ablations", tmp_path, "--data.limit", "64")
    tuned = values_of(table, "tuned", "SST-2")
    assert set(tuned) == {
        "vera_r4", "vera_r16", "default", "lora_r1", "lora_r4", "only_d", "only_b", "unique"
    }  # fmt: skip
    assert tuned["vera_r4"] == 4 * (32 + 4) and tuned["lora_r4"] == 4 * 4 * 2 * 32
    assert (tuned["only_d"], tuned["only_b"]) == (4 * 16, 4 * 32)
    assert tuned["unique"] == tuned["vera_r16"] == tuned["default"] == 4 * (32 + 16)
    assert set(values_of(table, "updates", "SST-2").values()) == {4 * 4}
    pace = values_of(table, "seconds per update", "SST-2")
    assert set(pace) == set(tuned) - {"default"} and min(pace.values()) > 0
    curve = table[(table["metric"] == "score by updates") & (table["row"] == "vera_r4")]
    assert list(curve["x"]) == [4, 8, 12, 16]  # after each of four epochs
    assert "| only b | 128 |" in text and "at equal time" in text
    assert "| SST-2 − VeRA, rank 16 |" in text and "| LoRA, rank 1 | 256 |" in text


def test_the_analysis_takes_the_models_of_glue(tmp_path):
    flags = ("--data.limit", "64")
    finished, table, _ = run("analysis", tmp_path, *flags)
    assert sorted(node.name for node in (tmp_path / "vera-glue/tiny/seed0").iterdir()) == [
        "STS-B_lora", "STS-B_vera"
    ]  # fmt: skip
    moved = table[table["metric"] == "d_moved"]
    assert set(moved["row"]) == {"query", "value"} and (moved["value"] > 0).all()
    # Appendix D: the queries of both layers, at one rank for both methods
    cosine = table[(table["metric"] == "cosine") & (table["row"] == "LoRA · VeRA")]
    assert list(cosine["x"]) == [1, 2] and cosine["value"].abs().max() <= 1
    ranks = table[table["metric"] == "stable rank"]
    assert ranks["value"].between(1, 8).all()
    mean = by_seed(table, "mean cosine", {"row": "LoRA · VeRA"})[0]
    assert mean == pytest.approx(cosine["value"].mean())
    fits = table[table["metric"] == "error"]
    assert set(fits[fits["row"] == "lora"]["x"]) == {20, 40, 60, 80, 100}
    for name in ("STS-B_lora", "STS-B_vera"):
        [stage] = [n for n in finished.nodes.values() if n.name == name and n.run is finished]
        assert stage.parsed().model.init_args["rank"] == 8


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_learning_rate_reaches_every_stage(name):
    stages = declared(name, "--model.weight_decay", "0.125").values()
    assert {at(stage.parsed(), "model.weight_decay") for stage in stages} == {0.125}


def test_a_flag_wins_over_the_grid_or_is_refused():
    for stage in declared("glue", "--model.lr", "0.02", "--model.rank", "3").values():
        assert (at(stage.parsed(), "model.lr"), at(stage.parsed(), "model.rank")) == (0.02, 3)
    for name, flag, key in (
        ("ablations", ("--model.rank", "3"), "model.rank"),
        ("glue", ("--model.method", "full"), "model.method"),
        ("glue", ("--data.task", "CoLA"), "data.task"),
        ("images", ("--model.lr", "0.5"), "model.lr"),  # its trials vary it
    ):
        with pytest.raises(ValueError, match=f"this experiment varies {key}; choose rows with --r"):
            for stage in declared(name, *flag).values():
                stage.parsed()


# The paper's settings, task by task: epochs, VeRA's learning rate, the head's (Table 8).
TABLE_8 = {
    "paper": {
        "SST-2": (60, 4e-3, 4e-3), "MRPC": (30, 1e-2, 4e-3), "CoLA": (80, 1e-2, 1e-2),
        "QNLI": (25, 1e-2, 4e-3), "RTE": (160, 4e-3, 1e-2), "STS-B": (80, 1e-2, 1e-2),
    },
    "large": {
        "SST-2": (10, 1e-2, 6e-3), "MRPC": (40, 3e-2, 3e-3), "CoLA": (40, 1e-2, 6e-3),
        "QNLI": (20, 1e-2, 2e-4), "RTE": (40, 2e-2, 2e-3), "STS-B": (20, 2e-2, 2e-3),
    },
}  # fmt: skip
# LoRA's (Hu et al., 2022, Table 9): batch, longest text, epochs, learning rate.
LORA_TABLE_9 = {
    "paper": {
        "SST-2": (16, 512, 60, 5e-4), "MRPC": (16, 512, 30, 4e-4), "CoLA": (32, 512, 80, 4e-4),
        "QNLI": (32, 512, 25, 4e-4), "RTE": (32, 512, 80, 5e-4), "STS-B": (16, 512, 40, 4e-4),
    },
    "large": {
        "SST-2": (4, 128, 10, 4e-4), "MRPC": (4, 512, 20, 3e-4), "CoLA": (4, 128, 20, 2e-4),
        "QNLI": (4, 512, 10, 2e-4), "RTE": (8, 512, 20, 4e-4), "STS-B": (8, 512, 30, 2e-4),
    },
}  # fmt: skip


def budget_of(settings):
    """A parsed stage's entries of LORA_TABLE_9."""
    data = settings.data.init_args
    lr = settings.model.init_args.lr
    return data.batch_size, data.max_length, settings.trainer.max_epochs, lr


@pytest.mark.parametrize(
    ("preset", "model", "rank", "batch", "length", "alpha"),
    [
        ("paper", "FacebookAI/roberta-base", 1024, 64, 512, 8),
        ("large", "FacebookAI/roberta-large", 256, 128, 128, 16),
    ],
)
def test_glue_has_the_papers_settings(preset, model, rank, batch, length, alpha):
    stages = declared("glue", "--preset", preset)
    for task, (epochs, lr, head_lr) in TABLE_8[preset].items():
        vera, head = (stages[f"{task}_{row}"].parsed() for row in ("vera", "head"))
        h = vera.model.init_args
        assert (h.architecture, h.pretrained, h.rank, h.method) == (model, True, rank, "vera")
        assert (vera.trainer.max_epochs, h.lr, h.head_lr) == (epochs, lr, head_lr)
        assert (h.warmup, h.schedule, h.method_args) == (0.06, "linear", None)
        data = vera.data.init_args
        assert (data.task, data.batch_size, data.max_length) == (task, batch, length)
        assert (data.val_fraction, data.limit, data.eval_limit) == (0, None, None)
        # the head alone has VeRA's own hyperparameters (Appendix B)
        assert (head.trainer.max_epochs, head.model.init_args.head_lr) == (epochs, head_lr)
        assert head.data.init_args.batch_size == batch
        lora = stages[f"{task}_lora"].parsed()
        h = lora.model.init_args
        assert budget_of(lora) == LORA_TABLE_9[preset][task] and h.head_lr == h.lr
        assert (h.rank, h.method_args) == (8, {"alpha": alpha})


def test_images_have_the_papers_settings():
    stages = declared("images", "--preset", "paper")
    rates = {  # VeRA's and its head's, ViT-B and ViT-L
        "CIFAR-100": ((2e-2, 4e-3), (4e-2, 2e-3)),
        "Food-101": ((4e-2, 4e-2), (4e-2, 2e-3)),
        "Flowers-102": ((4e-2, 4e-3), (4e-2, 2e-3)),
        "RESISC45": ((7e-2, 5e-3), (7e-2, 3e-3)),
    }
    for name, of_both in rates.items():
        for size, expected in zip(("ViT-B", "ViT-L"), of_both, strict=True):
            vera, lora, head = (
                stages[f"{size}, {name}_{row}"].parsed() for row in ("vera", "lora", "head")
            )
            h, data = vera.model.init_args, vera.data.init_args
            assert (h.lr, h.head_lr) == expected and h.rank == 256
            assert ("large" if size == "ViT-L" else "base") in h.architecture
            assert (h.weight_decay, h.schedule, vera.trainer.max_epochs) == (0.01, "linear", 10)
            assert data.per_class == 10 and data.val_per_class is None
            assert lora.model.init_args.rank == 8 and lora.data.init_args.per_class == 10
            assert head.trainer.max_epochs == 10
            if name == "RESISC45":  # of 700 images of a class all but 10 + 10 are scored
                assert round(700 * data.val_fraction) == 680
    trials = [stage for stage in stages.values() if "_lora_lr" in stage.name]
    assert len(trials) == 8 * 3
    assert all(stage.parsed().data.init_args.val_per_class == 10 for stage in trials)


def test_ablations_have_the_papers_settings():
    stages = declared("ablations", "--preset", "paper")
    ranks = {"vera": [1, 4, 16, 64, 256, 1024], "lora": [1, 2, 4, 8, 16, 32, 64]}
    for method, expected in ranks.items():
        for rank in expected:
            h = stages[f"RTE_{method}_r{rank}"].parsed().model.init_args
            assert (h.method, h.rank, h.architecture) == (method, rank, "FacebookAI/roberta-large")
    vera = stages["RTE_vera_r256"].parsed()
    assert (vera.model.init_args.lr, vera.model.init_args.head_lr) == (2e-2, 2e-3)
    assert (vera.trainer.max_epochs, vera.data.init_args.batch_size) == (40, 128)
    assert vera.data.init_args.max_length == 128
    for rank in ranks["lora"]:
        lora = stages[f"RTE_lora_r{rank}"].parsed()
        assert lora.model.init_args.method_args == {"alpha": 16}
        assert budget_of(lora) == LORA_TABLE_9["large"]["RTE"]
    for row, arguments in {
        "only_d": {"train": ["d"]}, "only_b": {"train": ["b"]}, "unique": {"shared": False},
        "kaiming_normal": {"init": "kaiming_normal"}, "uniform": {"init": "uniform"},
        "d_1e-7": {"d_init": 1e-7}, "d_1.0": {"d_init": 1.0},
    }.items():  # fmt: skip
        for task in ("MRPC", "RTE"):
            assert stages[f"{task}_{row}"].parsed().model.init_args.method_args == arguments


def test_the_similarity_is_of_rank_64_on_all_queries():
    stages = declared("analysis", "--preset", "paper")
    for stage in stages.values():
        if stage.run.name == "vera.analysis":
            h = stage.parsed().model.init_args
            assert (h.rank, h.targets) == (64, ["query"])


def test_every_method_has_as_many_trials_on_a_held_out_part():
    plan = module_of("glue").EXPERIMENT
    rows = grid(plan.folder / "glue_grid.yaml", "small")["tuning"]["trials"]
    assert {len(values) for trials in rows.values() for values in trials.values()} == {4}
    assert set(rows) == {"head", "bitfit", "lora", "vera", "full"}
    stages = declared("glue", "--preset", "small_bge", "--rows", "vera,scratch")
    assert len(stages) == 5 * (4 + 1 + 1)
    for name in ("RTE_vera", "RTE_vera_lr0.01", "CoLA_scratch"):
        settings = stages[name].parsed()
        data, trial = settings.data.init_args, "_lr" in name
        assert data.val_fraction == 0.1 and data.eval_limit is None
        assert settings.trainer.limit_val_batches == (16 if trial else 0)
        assert settings.model.init_args.pretrained == ("scratch" not in name)


def test_variants_have_the_trials_of_their_method():
    stages = declared("ablations", "--preset", "small")
    trials = {name for name in stages if "_lr" in name}
    trained = {name for name in stages if name.startswith("STS-B_")} - trials
    assert trained >= {"STS-B_only_d", "STS-B_unique", "STS-B_lora_r8", "STS-B_randlora_r96"}
    for name in trained:
        assert sum(trial.startswith(f"{name}_lr") for trial in trials) == 3, name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_random_matrices_are_drawn_by_the_seed(name):
    """Else no interval over seeds covers another draw of A and B."""
    methods_seen = set()
    for stage in declared(name, "--preset", "small", "--seeds", "2").values():
        h = stage.parsed().model.init_args
        methods_seen.add(h.method)
        drawn = (h.method_args or {}).get("seed", 0)
        assert drawn == (stage.seed if h.method in ("vera", "randlora") else 0), stage.name
        if stage.name in ("STS-B_unique", "STS-B_only_d"):
            assert len(h.method_args) == 2, stage.name
    assert "vera" in methods_seen


@pytest.mark.parametrize(("preset", "width"), [("small", 384), ("paper", 1024)])
def test_claims_at_equal_parameters_compare_rows_that_tune_as_many(preset, width):
    stages = declared("ablations", "--preset", preset)
    claims = [one for one in ablations.CLAIMS if one.preset == preset]
    assert len(claims) == {"small": 3, "paper": 1}[preset]
    for claim in claims:
        counts = []
        for row in (claim.test.a, claim.test.b):
            h = stages[f"{claim.test.where['set']}_{row}"].parsed().model.init_args
            layer = transformers.BertConfig(
                hidden_size=width, num_attention_heads=4, num_hidden_layers=6, vocab_size=8
            )
            model = transformers.BertModel(layer)
            if h.method == "vera":
                add_vera(model, rank=h.rank, targets=["query", "value"])
            else:
                arguments = h.method_args or {}
                tune(model, h.method, rank=h.rank, targets=["query", "value"], **arguments)
            counts.append(sum(tensor.numel() for tensor in trainable(model).values()))
        assert counts[0] == counts[1], claim.name


def test_claims_on_table_6_cite_the_mean_that_they_test():
    """Before, some cited RTE alone, although the paper's preset tests the mean of two tasks."""
    variants = grid(ablations.EXPERIMENT.folder / "ablations_grid.yaml")["variants"]
    claims = [one for one in ablations.CLAIMS if one.where.startswith("Table 6")]
    for claim in claims:
        (row,) = {claim.test.a, claim.test.b} - {"default"}
        tested = [task for task, rows in variants.items() if row in rows]
        assert tested == ["MRPC", "RTE"] and claim.test.mean_over == "set"
        assert claim.where == "Table 6, mean of MRPC and RTE", claim.name
    numbers = {one.name: one.number for one in claims}
    assert len(numbers) == 6 and numbers["ablations: b alone"] == "72.95 and 88.15"
    assert numbers["ablations: Kaiming normal"] == "86.30 and 88.15"


@pytest.mark.parametrize("preset", ["small", "paper"])
def test_fits_are_said_to_be_of_random_matrices(preset):
    """Before, the ledger named the model and the data that the other claims are measured on."""
    analysis = module_of("analysis")
    [claim] = (one for one in analysis.CLAIMS if one.where.startswith("Appendix E"))
    fit = grid(analysis.EXPERIMENT.folder / "analysis_grid.yaml", preset)["fit"]
    size = fit["size"]
    assert claim.measured_on == f"{fit['targets']} random {size} × {size} matrices a seed"


PRESETS = [
    (name, preset)
    for name in EXPERIMENTS
    for preset in presets(module_of(name).EXPERIMENT.folder / f"{name}_grid.yaml")
]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_every_preset_is_declared(name, preset):
    """Some stages of each are parsed: all rows and sets in turn."""
    stages = list(declared(name, "--preset", preset).values())
    assert stages
    for stage in stages[:: max(1, len(stages) // 8)]:
        stage.parsed()


def test_what_a_grid_says_later_wins():
    plan = {
        "common": {"model.lr": 1, "data.limit": 5},
        "rows": {"a": {"model.lr": 3, "model.rank": 2}, "b": {"model.method": "a"}},
        "sets": {"t": {"model.lr": 2, "data.task": "t", "a": {"model.rank": 4}, "b": {}}},
    }
    assert methods.settings_of(plan, "a", "t") == {
        "model.lr": 3, "data.limit": 5, "data.task": "t", "model.rank": 4, "model.method": "a"
    }  # fmt: skip
    assert methods.settings_of(plan, "b", "t")["model.lr"] == 2
