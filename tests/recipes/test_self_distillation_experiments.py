"""The experiments on self-distillation, from the command line to the report, in a few steps."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from PIL import Image
from torchmetrics.classification import MulticlassF1Score
from transformers import BertConfig, BertModel, BertTokenizer

from lightning_modules.self_distillation import Adaptation, Finetuning
from lightning_modules.weights import fingerprint, read_state_dict
from recipes import cli
from recipes.claims import judge
from recipes.experiment import Stage
from recipes.records import Finished, flattened
from recipes.results import Row, by_seed, read, select, tidy
from recipes.runner import command_line
from recipes.self_distillation import measures, report, theory
from tests.recipes.report_checks import check_reports_of_parts


def experiment(name):
    return importlib.import_module(f"recipes.self_distillation.{name}")


def declared(name, *arguments):
    """The nodes of a command line, without running any."""
    run = command_line(experiment(name).EXPERIMENT, list(arguments))
    experiment(name).EXPERIMENT.declare(run)
    return run


def stages(run):
    """Every stage's settings, by name."""
    return {
        node.name: flattened(node.parsed().as_dict())
        for node in run.nodes.values()
        if isinstance(node, Stage)
    }


# Table 9, and what the released code adds for images.
TABLE_9 = {
    "images": {
        "adapt": {
            "model.lr": 1.5e-4, "model.weight_decay": 0.01, "data.batch_size": 64,
            "trainer.max_steps": 20000, "trainer.max_epochs": -1, "model.warmup": 0.0,
            "model.betas": [0.9, 0.95], "model.mae_args.ratio": 0.75,
            "model.mae_args.masking": "exact", "model.mae_args.norm_pix": True,
            "model.reduction": "sum", "data.augmentation": "none", "data.image_size": 224,
            "model.architecture": "facebook/vit-mae-base", "trainer.gradient_clip_val": None,
        },
        "finetune": {
            "model.lr": 1e-4, "model.weight_decay": 0.01, "data.batch_size": 32,
            "trainer.max_steps": 10000, "trainer.max_epochs": -1, "model.warmup": 500,
            "trainer.gradient_clip_val": 1.0, "data.augmentation": "light",
            "data.image_size": 224, "model.architecture": "vit_base_patch16_224.mae",
        },
    },
    "text": {
        "adapt": {
            "model.lr": 1e-4, "model.weight_decay": 0.01, "data.batch_size": 128,
            "trainer.max_epochs": 100, "trainer.max_steps": -1, "model.mae_args.ratio": 0.15,
            "model.mae_args.as_mask": 0.8, "model.mae_args.as_random": 0.1,
            "model.reduction": "sum", "model.architecture": "FacebookAI/roberta-base",
        },
        "finetune": {
            "model.lr": 2e-5, "model.weight_decay": 0.01, "data.batch_size": 16,
            "trainer.max_epochs": 10, "trainer.max_steps": -1,
            "model.architecture": "FacebookAI/roberta-base",
        },
    },
}  # fmt: skip
# What a row changes of Table 9, besides where its weights come from.
CHANGES = {
    "further_x2": {"images": {"trainer.max_steps": 40000}, "text": {"trainer.max_epochs": 200}},
    "supcon": {"images": {"model.lr": 1e-3}, "text": {"model.lr": 1e-3}},
}


def test_no_setting_is_chosen_on_test_images():
    """Trials hold training images out; what is reported trains on all, as many as the paper's."""
    found = stages(declared("images", "--preset", "paper", "--rows", "mars"))
    for name in ("Aircraft", "CUB", "DTD", "Dogs", "Flowers"):
        trial, reported = found[f"{name} mars trial 1"], found[f"{name} mars"]
        assert trial["data.val_fraction"] == 0.1 and reported["data.val_fraction"] == 0
        assert reported.get("data.train_on_val") is (
            None if name in ("CUB", "Dogs") else True  # the others have a validation part
        )
    assert (reported := found["Dogs mars"])["data.val"] is None and reported["data.test"] == "val"


def test_data_without_validation_hold_out_a_tenth_to_choose_on():
    found = stages(declared("images", "--preset", "sizes", "--rows", "finetune,mars"))
    shares = {name: one["data.val_fraction"] for name, one in found.items() if "adapt" not in name}
    assert {share for name, share in shares.items() if "trial" in name} == {0.1}
    assert {share for name, share in shares.items() if "trial" not in name} == {0.0}
    found = stages(declared("images", "--preset", "steps", "--rows", "further", "--select", "best"))
    tuned = [one for name, one in found.items() if "adapt" not in name and name != "original"]
    assert {one["data.val_fraction"] for one in tuned} == {0.1}
    with pytest.raises(ValueError, match="varies the steps of adaptations, and the rows mars have"):
        declared("images", "--preset", "steps", "--rows", "further,mars")


def test_unlabelled_data_are_for_adaptations(scratch):
    found = stages(declared("images", "--unlabelled", "other", "--rows", "further"))
    data = {name: one["data.class_path"] for name, one in found.items()}
    assert {kind for name, kind in data.items() if "adapt" in name} == {
        "datamodules.ImageFolderData"
    }
    assert "ImageFolderData" not in data["original"]  # it has the grid's own data
    with pytest.raises(ValueError, match="the row supcon adapts with labels: leave it out"):
        declared("images", "--unlabelled", "other", "--rows", "further,supcon")


@pytest.mark.parametrize("every, expected", [(None, [2, 4, 6]), (1, [10 / 3, 20 / 3, 10])])
def test_when_a_training_was_validated(every, expected):
    trainer = SimpleNamespace(
        check_val_every_n_epoch=every, val_check_interval=4, accumulate_grad_batches=2
    )
    assert measures.check_steps(trainer, 3, 10) == pytest.approx(expected)


@pytest.mark.parametrize("kind", TABLE_9)
def test_the_paper_preset_is_table_9(kind):
    """Every stage of every row, so that no baseline has another budget than the method."""
    rows = "finetune,r3f,supcon,further,further_x2,self_distillation,match_all,mars"
    run = declared(kind, "--preset", "paper", "--rows", rows)
    names = stages(run)
    sets = {"images": 6, "text": 4}[kind]
    assert len(names) == sets * (8 + 5 + 4)  # fine-tunings, adaptations, MARS's candidates
    for name, settings in names.items():
        adapts = " adapt " in name
        expected = dict(TABLE_9[kind]["adapt" if adapts else "finetune"])
        row = next((row for row in CHANGES if name.endswith(row)), "")
        if bool(row) and (row == "further_x2") == adapts:
            expected |= CHANGES[row][kind]
        assert {key: settings[key] for key in expected} == expected, name
        match = settings.get("model.match")
        default = {"images": "cls", "text": "all"}[kind]
        assert match == (("all" if "match_all" in name else default) if adapts else None)
        distils = name.endswith(("adapt distil", "adapt match_all"))
        assert settings.get("model.distil") == ("hidden" if distils else None)
        if distils:
            assert settings["model.teacher_from"].endswith("adapt further/checkpoints/last.ckpt")
        if adapts:  # every student begins with the original
            assert settings["model.init_from"].endswith("seed0/original/original.ckpt")
        if "trial" in name:
            assert settings["trainer.limit_val_batches"] == 1.0
        if name.endswith(" r3f"):
            assert settings["model.method_args.noise"] == "normal"


def test_figures_1_and_3():
    steps = stages(declared("images", "--preset", "steps"))
    lengths = {
        name: settings["trainer.max_steps"] for name, settings in steps.items() if " adapt " in name
    }
    assert sorted(set(lengths.values())) == [5000, 10000, 20000, 40000, 60000]
    assert all(name.endswith(f" {length} steps") for name, length in lengths.items())
    assert len(lengths) == 2 * 5 and "CUB without adaptation" in steps
    grid = declared("images", "--preset", "sizes", "--rows", "finetune").grid(
        "shared_grid", "images_grid"
    )
    per_class = [one["data.per_class"] for one in grid["sets"].values()]
    assert [100 * (one or 500) for one in per_class] == [
        1000, 2500, 5000, 10000, 20000, 30000, 40000, 50000
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["images", "text"])
def test_twice_the_steps_of_each_point_of_a_curve(kind):
    run = declared(kind, "--preset", "small_steps", "--rows", "further,further_x2")
    found = stages(run)
    points = [steps for steps in run.grid("shared_grid", f"{kind}_grid")["steps"] if steps]
    for steps in points:
        for adaptation, times in (("further", 1), ("further_x2", 2)):
            [name] = [one for one in found if one.endswith(f" adapt {adaptation} {steps} steps")]
            lengths = found[name]["trainer.max_steps"], found[name]["trainer.max_epochs"]
            assert lengths == (times * steps, -1), name


@pytest.mark.parametrize("kind", ["images", "text"])
def test_a_flag_reaches_its_stages_or_is_refused(kind, capsys):
    rows = ["--rows", "finetune,self_distillation"]
    given = ["--adapt.model.lr", "0.5", "--finetune.model.lr=0.25", "--model.weight_decay=0.125"]
    for name, settings in stages(declared(kind, *rows, *given)).items():
        adapts = name == "original" or " adapt " in name
        assert settings["model.lr"] == (0.5 if adapts else 0.25), name
        assert settings["model.weight_decay"] == 0.125
    with pytest.raises(ValueError, match="varies model.distil; choose rows with --rows"):
        declared(kind, *rows, "--adapt.model.distil", "l2").check()
    with pytest.raises(ValueError, match="set for each stage by the experiment: give --init"):
        declared(kind, "--model.init_from", "x.ckpt")
    with pytest.raises(ValueError, match="--rows has 'fine': expected some of scratch, finetune"):
        declared(kind, "--rows", "fine")
    with pytest.raises(SystemExit):
        command_line(experiment(kind).EXPERIMENT, ["--help"])
    shown = capsys.readouterr().out
    for option in ("--rows", "--select", "--unlabelled", "--decoder_steps", "--init_from"):
        assert option in shown


@pytest.mark.parametrize(
    ("test", "accuracy", "f1"),
    [
        ([2, 2, 1], 2 / 3, 0.8 / 2),  # classes 0 and 3 are neither in the test part nor predicted
        ([0, 1, 2, 3], 1 / 4, 0.4 / 4),
        ([0, 1, 3], 0, 0),
    ],
)
def test_the_largest_class_is_scored_as_the_other_rows_are(test, accuracy, f1):
    parts = {"train": [2, 0, 2, 1, 3], "test": test}
    data = SimpleNamespace(
        num_classes=4, examples=lambda part: [SimpleNamespace(label=one) for one in parts[part]]
    )
    m = SimpleNamespace(datamodule=lambda stage: data, settings={"set": "texts"})
    scores = {row.metric: row.value for row in measures.majority(m)}
    assert scores == pytest.approx({"accuracy": accuracy, "f1": f1})
    metric = MulticlassF1Score(4, average="macro")
    assert metric(torch.full([len(test)], 2), torch.tensor(test)).item() == pytest.approx(f1)


def finished(run, name):
    node = next(node for node in run.nodes.values() if node.name == name)
    return Finished(node.folder, 0, str(node.file), run.preset, tuple(node.arguments()))


def test_tiny_images(tmp_path, monkeypatch):
    """What each stage saw, what it began with, and on which images it was scored."""
    command = [
        "--out", str(tmp_path), "--rows", "scratch,finetune,mars,self_distillation",
        "--adapt.trainer.max_steps=5", "--adapt.trainer.val_check_interval=5",
        "--finetune.trainer.max_steps=7", "--finetune.trainer.val_check_interval=7",
    ]  # fmt: skip
    run = experiment("images").main(command)
    table, name = read(run.out), "digits 5–9"
    rows = ["scratch", "finetune", "mars", "self_distillation"]
    updates = {
        node.name: torch.load(node.folder / "checkpoints" / "last.ckpt", weights_only=True)
        for node in run.nodes.values()
        if isinstance(node, Stage)
    }
    adaptations = ["original", f"{name} adapt further", f"{name} adapt distil"]
    trials = [f"{name} mars trial 1", f"{name} mars trial 2"]
    assert {stage: found["global_step"] for stage, found in updates.items()} == {
        **dict.fromkeys(adaptations, 5), **dict.fromkeys(trials, 7),
        **{f"{name} {row}": 7 for row in rows},
    }  # fmt: skip
    # every student began with the original, whatever its teacher
    original = fingerprint(read_state_dict(finished(run, "original").checkpoint))
    assert {updates[one]["start"] for one in adaptations[1:]} == {original}
    assert (by_seed(table, "begins_with_original", {"row": "distil"}) == 1).all()
    tuned = finished(run, f"{name} self_distillation")
    data = tuned.datamodule()
    sizes = {part: len(getattr(data, f"{part}_set")) for part in ("train", "val", "test")}
    assert sizes["train"] == 5 * 30
    for part, size in sizes.items():
        assert (select(table, {"metric": f"{part}_examples"})["value"] == size).all()
    for row in rows:  # the score is the last checkpoint's, on the test part
        stage = finished(run, f"{name} {row}")
        module = Finetuning.load_from_checkpoint(stage.checkpoint).eval()
        with torch.no_grad():
            answers = torch.cat([module(x).argmax(1) == y for x, y in data.test_dataloader()])
        here = {"row": row, "set": name}
        assert by_seed(table, "accuracy", here)[0] == pytest.approx(answers.float().mean().item())
        loss, train = (by_seed(table, metric, here)[0] for metric in ("loss", "train_loss"))
        assert by_seed(table, "gap", here)[0] == pytest.approx(loss - train)
        assert 1 <= by_seed(table, "classes_predicted", here)[0] <= 5
    # MARS's radius is the better one on validation, with the first at a tie
    scores = [max(finished(run, one).history["val/accuracy"]) for one in trials]
    radii = [finished(run, one).settings.model.init_args.method_args["radius"] for one in trials]
    chosen = updates[f"{name} mars"]["hyper_parameters"]["method_args"]["radius"]
    assert radii == [0.5, 1.0] and chosen == radii[scores.index(max(scores))]
    for claim in experiment("images").CLAIMS:  # its metrics and rows are the table's
        judge(claim, table)
    text = (run.out / "report.md").read_text()
    assert "smoke test" in text and "| largest class |" in text and "(rounds.png)" in text
    assert "72.74 ± 0.57" in text and "mae.png" in text
    check_reports_of_parts(experiment("images").EXPERIMENT, run)

    def fail(*arguments):
        raise AssertionError(f"a finished stage was trained again: {arguments}")

    monkeypatch.setattr("recipes.work.run_stage", fail)
    experiment("images").main(command)
    assert read(run.out).equals(table)


def test_tiny_text(tmp_path):
    command = [
        "--out", str(tmp_path), "--rows", "self_distillation,predictions", "--trainer.max_steps=4",
        "--trainer.val_check_interval=4",
    ]  # fmt: skip
    run = experiment("text").main(command)
    table = read(run.out)
    here = {"set": "generated", "row": "self_distillation"}
    examples = [by_seed(table, f"{part}_examples", here)[0] for part in ("train", "val", "test")]
    assert examples == [160, 48, 96]
    assert set(select(table, {"metric": "updates"})["row"]) == {"further", "distil", "predictions"}
    assert (select(table, {"metric": "updates"})["value"] == 4).all()
    assert (select(table, {"metric": "begins_with_original"})["value"] == 1).all()
    assert len(by_seed(table, "new_f1", here)) == 1  # texts that are not in training too
    check_reports_of_parts(experiment("text").EXPERIMENT, run)
    # the score is the last checkpoint's, on the test part, which is not the validation part
    stage = finished(run, "generated self_distillation")
    module, data = Finetuning.load_from_checkpoint(stage.checkpoint).eval(), stage.datamodule()
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                module({k: v for k, v in batch.items() if k != "labels"}),
                batch["labels"],
                reduction="none",
            )
            for batch in data.test_dataloader()
        ]
    assert len(torch.cat(losses)) == 96
    assert by_seed(table, "loss", here)[0] == pytest.approx(torch.cat(losses).mean().item(), 2e-6)
    distil = finished(run, "generated adapt distil")
    assert Adaptation.load_from_checkpoint(distil.checkpoint).match == "all"


def test_by_how_much_each_round_shortens_the_distance(tmp_path):
    command = [
        "--out", str(tmp_path), "--rows", "further,self_distillation,rounds_2",
        "--adapt.trainer.max_steps=3", "--adapt.trainer.val_check_interval=3",
        "--finetune.trainer.max_steps=2", "--finetune.trainer.val_check_interval=2",
    ]  # fmt: skip
    table = read(experiment("images").main(command).out)
    fall = select(table, {"metric": "distance_fall"}).set_index("x")["value"]
    far = [by_seed(table, "distance", {"row": row})[0] for row in command[3].split(",")]
    assert dict(fall) == {1.0: pytest.approx(far[0] - far[1]), 2.0: pytest.approx(far[1] - far[2])}


def test_a_curve_of_steps(tmp_path, monkeypatch):
    """Fig. 1: every point has its own adaptations, of that many steps; 0 has none."""
    command = [
        "--out", str(tmp_path), "--rows", "further", "--finetune.trainer.max_steps=2",
        "--finetune.trainer.val_check_interval=2",
    ]  # fmt: skip
    plain = cli.grid
    monkeypatch.setattr(cli, "grid", lambda *given: {**plain(*given), "steps": [0, 2, 4]})
    run = experiment("images").main(command)
    table = read(run.out)
    points = select(table, {"metric": "accuracy", "row": "further"})
    assert sorted(points["x"]) == [0, 2, 4]
    adapted = select(table, {"metric": "updates", "row": "further"})
    assert sorted(zip(adapted["x"], adapted["value"], strict=True)) == [(2, 2), (4, 4)]
    assert "(steps%20digits%205–9.png)" in (run.out / "report.md").read_text()


VIT = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}
DECODER = {"depth": 1, "width": 8, "heads": 2}


def write_images(folder, classes, count):
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            shade = 60 + 100 * label + number
            Image.new("RGB", (8, 8), (shade, 128, 255 - shade)).save(
                folder / name / f"{number}.png"
            )


def classify(report, capsys):
    """What the lines in a report print."""
    lines = report.partition("```python\n")[2].partition("```")[0]
    capsys.readouterr()
    exec(lines, {})
    return capsys.readouterr().out.splitlines()[-1]


def test_your_own_images(scratch, capsys):
    write_images(Path("mine"), ["cat", "dog"], 15)
    write_images(Path("other"), ["."], 15)
    write_images(Path("other/some"), ["more"], 5)
    encoder = timm.create_model("vit_tiny_patch16_224", num_classes=0, **VIT)
    torch.save(encoder.state_dict(), "encoder.pt")
    command = [
        "--preset", "own", "--data.root", "mine", "--unlabelled", "other", "--data.image_size=8",
        "--data.num_workers=0", "--data.batch_size=8", "--trainer.accelerator=cpu",
        "--model.architecture", "vit_tiny_patch16_224", "--model.model_args", json.dumps(VIT),
        "--init_from", "encoder.pt", "--adapt.model.decoder_args", json.dumps(DECODER),
        "--adapt.trainer.max_steps=3", "--adapt.trainer.val_check_interval=2",
        "--finetune.trainer.max_steps=4", "--finetune.trainer.val_check_interval=2",
        "--rows", "self_distillation", "--decoder_steps", "3",
    ]  # fmt: skip
    run = experiment("images").main(command)
    table = read(run.out)
    assert (select(table, {"metric": "begins_with_original"})["value"] == 1).all()
    folder = run.out / "seed0" / "your images self_distillation scores"
    parts = json.loads((folder / "split.json").read_text())["parts"]
    assert [parts[part]["examples"] for part in ("train", "val", "test")] == [24, 6, 6]
    assert parts["val"] == parts["test"]
    adapted = finished(run, "your images adapt further").datamodule()
    assert [len(adapted.train_set), len(adapted.val_set)] == [16, 4]
    report = (run.out / "report.md").read_text()
    assert "best on the validation part" in report and "no test part of its own" in report
    Image.new("RGB", (30, 20)).save("new.jpg")
    assert classify(report, capsys) in ("cat", "dog")


def test_your_own_texts_declare_what_they_need(scratch):
    words = ["good", "bad", "film", "plot", "a", "the"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "max_position_embeddings": 24}
    config = BertConfig(vocab_size=len(vocabulary), **sizes)
    BertModel(config).save_pretrained("bert")  # as MiniLM, without a masked-LM head
    BertTokenizer(vocab=dict(zip(vocabulary, range(99), strict=False))).save_pretrained("bert")
    rows = [f"the {words[i % 2]},{words[2 + i % 3]},{['yes', 'no'][i % 2]}\n" for i in range(40)]
    Path("my.csv").write_text("said,of,what\n" + "".join(rows))
    Path("test.csv").write_text("said,of,what\n" + "".join(rows[:6]))
    Path("texts.txt").write_text("a good film\nthe bad plot\n" * 10)
    command = [
        "--preset", "own", "--data.train", "my.csv", "--unlabelled", "texts.txt",
        "--data.test=test.csv", "--data.text=said", "--data.pair=of", "--data.label=what",
        "--data.num_workers=0", "--data.batch_size=8",
        "--model.architecture", str(scratch / "bert"), "--data.tokenizer", "bert",
        "--trainer.accelerator=cpu", "--adapt.trainer.max_epochs=1",
        "--finetune.trainer.max_epochs=2", "--rows", "further", "--decoder_steps", "3",
    ]  # fmt: skip
    run = experiment("text").main(command)
    adapted = finished(run, "your texts adapt further").datamodule()
    assert [len(adapted.examples(part)) for part in ("train", "val")] == [18, 2]
    table = read(run.out)
    here = {"row": "further"}
    examples = [by_seed(table, f"{part}_examples", here)[0] for part in ("train", "val", "test")]
    assert examples == [36, 4, 6]


def test_rows_that_need_fewer_seeds_run_with_fewer():
    run = declared("text", "--preset", "small", "--seeds", "6", "--rows", "finetune,mars")
    seeds = {
        row: {node.seed for node in run.nodes.values() if node.name.endswith(f" {row}")}
        for row in ("finetune", "mars")
    }
    assert seeds == {"finetune": set(range(6)), "mars": set(range(5))}


def test_what_is_not_there_is_said_before_anything_trains(scratch):
    run = declared("images", "--rows", "finetune,further", "--unlabelled", "nowhere")
    assert run.missing() == ["--unlabelled nowhere is not there: correct the path"]
    run = declared("images", "--rows", "finetune", "--init_from", "no.pth", "--unlabelled", ".")
    assert run.missing() == ["--init_from no.pth is not there: correct the path"]
    assert declared("images", "--rows", "finetune", "--unlabelled", ".").missing() == []
    with pytest.raises(ValueError, match="--decoder_steps -3: expected at least 1"):
        declared("images", "--decoder_steps", "-3")


def test_best_without_validation_is_refused(scratch):
    with pytest.raises(ValueError, match="fine-tuning never validates: its limit_val_batches is 0"):
        declared("images", "--rows", "finetune", "--select", "best")
    with pytest.raises(ValueError, match="there are no pre-trained weights: give --init_from"):
        declared("text", "--preset", "paper", "--model.pretrained", "false", "--rows", "finetune")


def test_theory(tmp_path):
    run = theory.main(["--preset", "tiny", "--out", str(tmp_path)])
    table = read(run.out)
    every = select(table, {"row": theory.ALL})
    values = {
        metric: select(table, {"metric": metric})
        .dropna(subset=["x"])
        .pivot(index="row", columns="x", values="value")
        for metric in theory.CURVES
    }
    assert values["zeta"].shape == (20, 7) and by_seed(every, "problems")[0] == 20
    for metric in ("norm", "zeta", "zeta_as_printed", "psi"):
        assert (values[metric].diff(axis=1).iloc[:, 1:] < 0).all(axis=None), metric
        assert by_seed(every, f"{metric}_falls")[0] == 1
    assert (values["tuned_norm"] <= values["zeta"] * (1 + 1e-12)).all(axis=None)
    assert (values["distance"] <= values["psi"] * (1 + 1e-12)).all(axis=None)
    exceeding = (values["tuned_norm"] > values["zeta_as_printed"]).any(axis=1)
    assert 0 < exceeding.sum() < 20
    bounds = [by_seed(every, f"{name}_bounds")[0] for name in ("zeta_as_printed", "zeta", "psi")]
    assert bounds == [pytest.approx(1 - exceeding.sum() / 20), 1, 1]
    assert 0.01 < by_seed(every, "zeta_as_printed_exceeded")[0] < 0.2
    words = {claim.name: judge(claim, table)[0] for claim in theory.CLAIMS}
    assert words.pop("ζ as printed bounds") == "refuted" and set(words.values()) == {"supported"}
    report = (run.out / "report.md").read_text()
    assert f"| {1 - exceeding.sum() / 20:.1%} |" in report and "cross term" in report
    assert (run.out / "theory.png").is_file()
    assert set(theory.PLOTTED) == set(theory.CURVES)
    for bound, bounded in theory.BOUNDS.items():  # stand in the same panel
        assert theory.PLOTTED[bound][0] == theory.PLOTTED[bounded][0]
    drop = select(table, {"metric": "extra_drop"}).set_index("row")["value"]
    squares = values["zeta"] ** 2
    drop = drop.reindex(squares.index)
    assert (squares[0.0] - squares[1.0] > drop).all() and (drop > 0).all()
    assert by_seed(every, "extra_drop_in_round_1")[0] == 1


def test_adaptations_have_titles(tmp_path, monkeypatch):
    """The code's names of adaptations are not those that a reader knows."""
    adaptations = cli.grid(Path("recipes/self_distillation/shared_grid.yaml"))["adaptations"]
    assert adaptations.keys() <= report.ADAPTATIONS.keys()
    drawn = []
    monkeypatch.setattr("recipes.plots.save_plot", lambda figure, *_: drawn.append(figure))
    table = tidy(
        [Row(row, metric, 1.0, "CUB", x) for row in ("further", "distil", "distil_2", "contrast")
         for metric, x in (("adaptation_distance", None), ("val_mae_by_steps", 10.0))],
        "self_distillation.images", "small", 0,
    )  # fmt: skip
    text = "\n".join(report.adaptations(table, SimpleNamespace(out=tmp_path)))
    titles = [
        "further pre-training", "self-distillation", "self-distillation, 2 rounds",
        "supervised contrastive pre-training",
    ]  # fmt: skip
    assert [line.split(" | ")[0] for line in text.splitlines() if "1.000" in line] == [
        f"| {title}" for title in titles
    ]
    shown = [one.get_text() for one in drawn[0].axes[0].get_legend().get_texts()]
    assert sorted(shown) == sorted(titles)
