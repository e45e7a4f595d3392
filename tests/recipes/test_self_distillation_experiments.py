"""The experiments on self-distillation, from the command line to the report, in a few steps."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from transformers import BertConfig, BertModel, BertTokenizer

from lightning_modules.self_distillation import Adaptation
from recipes.legacy import Experiment, presets, read_history
from recipes.self_distillation import tables, theory
from recipes.self_distillation.adaptation import divided, read_grid

ROWS = {
    "images": ["finetune", "mars", "further", "self_distillation", "rounds_2"],
    "text": ["finetune", "self_distillation", "without_mae"],
}
ADAPTATIONS = {
    "images": ["further", "distil", "distil_2"],
    "text": ["further", "distil", "without_mae"],
}
METRIC = {"images": "accuracy", "text": "f1"}


def main_of(name):
    return importlib.import_module(f"recipes.self_distillation.{name}").main


@pytest.mark.parametrize("name", ROWS)
def test_tiny_preset(name, tmp_path, monkeypatch):
    command = [
        "--out", str(tmp_path), "--rows", ",".join(ROWS[name]), "--trainer.max_steps=4",
        "--trainer.val_check_interval=4",
    ]  # fmt: skip
    folder = main_of(name)(command).out
    metrics = json.loads((folder / "metrics.json").read_text())
    ((found,),) = (seed.values() for seed in metrics["seeds"])
    assert list(found["rows"]) == ROWS[name]
    for row in found["rows"].values():
        assert 0 <= row["test"][METRIC[name]] <= 1
        assert row["gap"] == pytest.approx(row["test"]["loss"] - row["train"]["loss"])
        assert row["distance"] > 0 and row["seconds"]["fine-tuning"] > 0
    # every student began with the original, whatever its teacher
    assert list(found["adaptations"]) == ADAPTATIONS[name]
    assert {one["start"] for one in found["adaptations"].values()} == {metrics["original"]}
    assert len({one["distance"] for one in found["adaptations"].values()}) == 3
    text = (folder / "report.md").read_text()
    assert text.count("| yes |") == 3 and "| no |" not in text
    assert metrics["provenance"] in text and "--rows" in metrics["provenance"]
    assert ("new texts" in text) == (name == "text")
    ((title, parts),) = found["data"]["splits"].items()
    manifest = json.loads((folder / "seed0" / f"{title} split.json").read_text())
    for part, short in parts.items():
        assert short.items() <= manifest["parts"][part].items()
        assert f"{short['examples']} · `{short['sha256'][:12]}`" in text
    with Image.open(folder / "analyses.png") as plot:
        assert min(plot.size) > 300

    def fail(args):
        raise AssertionError(f"a finished stage was trained again: {args}")

    monkeypatch.setattr("recipes.legacy.run_stage", fail)
    main_of(name)(command)
    assert json.loads((folder / "metrics.json").read_text()) == metrics


@pytest.mark.parametrize("name", ROWS)
def test_unknown_row(name, tmp_path):
    with pytest.raises(ValueError, match="--rows has 'fine': expected some of finetune, recadam"):
        main_of(name)(["--out", str(tmp_path), "--rows", "fine"])


@pytest.mark.parametrize("name", ROWS)
def test_grids_name_what_is_there(name):
    folder = Path(theory.__file__).parent
    known = presets(folder, f"{name}_grid")
    assert {"tiny", "small", "own", "paper"} <= set(known)
    for preset in known:
        experiment = Experiment("sd", folder, preset, 1, Path("nowhere"))
        grid = read_grid(experiment, name)
        assert set(grid["metrics"]) == set(grid["sets"])
        assert set(grid["default"] or []) <= set(grid["rows"])
        used = {row["from"] for row in grid["rows"].values() if "from" in row}
        taught = {one["teacher"] for one in grid["adaptations"].values() if "teacher" in one}
        assert used | taught == set(grid["adaptations"])
        for stage in ("adapt", "finetune"):
            experiment.files(f"{name}_{stage}")


def test_a_grid_lies_over_the_shared_one():
    experiment = Experiment("sd", Path(theory.__file__).parent, "small_sizes", 1, Path("nowhere"))
    grid, small = (
        read_grid(replace(experiment, preset=preset), "images")
        for preset in ("small_sizes", "small")
    )
    assert grid["adaptations"] == small["adaptations"]
    assert small["adaptations"]["further_x2"] == {"times": 2, "trainer.val_check_interval": 800}
    assert small["adaptations"]["distil"] == {"teacher": "further", "model.distil": "hidden"}
    assert grid["pretrain"] == small["pretrain"] is not None
    assert len(grid["sets"]) == 5 and len(small["sets"]) == 1
    assert grid["default"] == ["finetune", "further", "self_distillation"] != small["default"]


def test_arguments_of_some_stages_only():
    command = "--data.root d --adapt.model.lr 1 --trainer.max_steps=2 --finetune.model.lr=3 --x -1"
    assert divided(command.split()) == {
        "every": ["--data.root", "d", "--trainer.max_steps=2", "--x", "-1"],
        "adapt": ["--model.lr", "1"],
        "finetune": ["--model.lr=3"],
    }


VIT = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 1, "num_heads": 2}
SMALL = {"img_size": 48, "patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4}
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
        "--model.init_from", "encoder.pt", "--adapt.model.decoder_args", json.dumps(DECODER),
        "--adapt.trainer.max_steps=3", "--finetune.trainer.max_steps=4",
        "--finetune.trainer.val_check_interval=2", "--rows", "finetune,self_distillation",
    ]  # fmt: skip
    with pytest.raises(
        ValueError, match=r"no decoder, .*--decoder_steps 2000 of recipes.self_dist"
    ):
        main_of("images")(command)
    folder = main_of("images")([*command, "--decoder_steps", "3"]).out
    metrics = json.loads((folder / "metrics.json").read_text())
    found = metrics["seeds"][0]["your images"]
    assert {one["start"] for one in found["adaptations"].values()} == {metrics["original"]}
    assert set(found["adaptations"]) == {"further", "distil"}
    splits = found["data"]["splits"]
    assert [part["examples"] for part in splits["your images"].values()] == [24, 6, 6]
    assert [part["examples"] for part in splits["your images, unlabelled"].values()] == [16, 4]
    manifest = json.loads((folder / "seed0" / "your images split.json").read_text())
    members = [manifest["parts"][part]["members"] for part in ("train", "val", "test")]
    assert len(members[0]) == 24 and not set(members[0]) & set(members[1])
    assert members[1] == members[2] and members[1][0].startswith("cat/")
    report = (folder / "report.md").read_text()
    assert "best on the validation part" in report and "no test part of its own" in report
    assert splits["your images"]["train"]["sha256"][:12] in report
    Image.new("RGB", (30, 20)).save("new.jpg")
    assert classify(report, capsys) in ("cat", "dog")


def test_your_own_texts(scratch, capsys):
    words = ["good", "bad", "film", "plot", "a", "the"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"num_hidden_layers": 1, "max_position_embeddings": 24}
    config = BertConfig(vocab_size=len(vocabulary), **sizes)
    BertModel(config).save_pretrained("bert")  # as MiniLM, without a masked-LM head
    BertTokenizer(vocab=dict(zip(vocabulary, range(99), strict=False))).save_pretrained("bert")
    rows = [f"the {words[i % 2]} {words[2 + i % 3]},{['yes', 'no'][i % 2]}\n" for i in range(40)]
    Path("my.csv").write_text("said,what\n" + "".join(rows))
    Path("texts.txt").write_text("a good film\nthe bad plot\n" * 10)
    command = [
        "--preset", "own", "--data.train", "my.csv", "--unlabelled", "texts.txt",
        "--data.text=said", "--data.label=what", "--data.num_workers=0", "--data.batch_size=8",
        "--model.architecture", "bert", "--data.tokenizer", "bert", "--trainer.accelerator=cpu",
        "--adapt.trainer.max_epochs=1", "--finetune.trainer.max_epochs=2",
        "--rows", "finetune,self_distillation",
    ]  # fmt: skip
    command[command.index("--model.architecture") + 1] = str(scratch / "bert")
    with pytest.raises(ValueError, match=r"has no cls.predictions.bias, .*--decoder_steps 1000 of"):
        main_of("text")(command)
    folder = main_of("text")([*command, "--decoder_steps", "3"]).out
    metrics = json.loads((folder / "metrics.json").read_text())
    found = metrics["seeds"][0]["your texts"]
    assert {one["start"] for one in found["adaptations"].values()} == {metrics["original"]}
    splits = found["data"]["splits"]
    assert [part["examples"] for part in splits["your texts"].values()] == [36, 4, 4]
    assert [part["examples"] for part in splits["your texts, unlabelled"].values()] == [18, 2]
    assert classify((folder / "report.md").read_text(), capsys) in ("yes", "no")


def test_what_is_best_on_validation_is_scored(scratch):
    pretrained = Adaptation(
        "vit_tiny_patch16_224", model_args={**VIT, "embed_dim": 32, "depth": 2},
        decoder_args={"depth": 1, "width": 16, "heads": 2},
    )  # fmt: skip
    torch.manual_seed(0)
    pretrained.configure_model()
    torch.save(pretrained.model.state_dict(), "start.pt")
    command = [
        "--model.init_from=start.pt", "--rows=finetune", "--select=best",
        "--finetune.model.lr=0.5", "--finetune.trainer.max_steps=12",
        "--finetune.trainer.val_check_interval=2",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="fine-tuning never validates: its limit_val_batches is 0"):
        main_of("images")(command)
    folder = main_of("images")([*command, "--finetune.trainer.limit_val_batches=1.0"]).out
    ((found,),) = (s.values() for s in json.loads((folder / "metrics.json").read_text())["seeds"])
    row = found["rows"]["finetune"]
    history = read_history(folder / "seed0" / "digits 5–9 finetune")["val/accuracy"]
    best = history.index(max(history))
    assert best + 1 < len(history) == 6
    assert torch.load(row["checkpoint"], weights_only=True)["global_step"] == 2 * (best + 1)
    assert row["val"]["accuracy"] == pytest.approx(history[best]) and history[best] > history[-1]


def test_score_by_size(scratch, monkeypatch):
    for part, count in {"train": 30, "val": 3}.items():
        write_images(Path("data/cifar10") / part, ["cat", "dog"], count)
    pretrained = Adaptation(
        "vit_tiny_patch16_224", model_args=SMALL, decoder_args={"depth": 2, "width": 64, "heads": 4}
    )
    pretrained.configure_model()
    torch.save(pretrained.model.state_dict(), "start.pt")
    plots = {}
    monkeypatch.setattr(
        tables, "save_plot", lambda figure, path: plots.update({path.name: figure.axes})
    )
    folder = main_of("images")([
        "--preset", "small_sizes", "--data.root=data", "--rows=finetune",
        "--model.init_from=start.pt", "--trainer.max_steps=1",
    ]).out  # fmt: skip
    assert folder.name == "small_sizes" and "(sizes.png)" in (folder / "report.md").read_text()
    (found,) = json.loads((folder / "metrics.json").read_text())["seeds"]
    (axis,) = plots["sizes.png"]
    (curve,) = axis.containers
    scores = [100 * one["rows"]["finetune"]["test"]["accuracy"] for one in found.values()]
    assert list(curve[0].get_xdata()) == [20, 40, 60, 60, 60]
    assert sorted(curve[0].get_ydata()) == pytest.approx(sorted(scores))


def test_theory(tmp_path):
    folder = theory.main(["--out", str(tmp_path), "--problems", "3"])
    problems = json.loads((folder / "metrics.json").read_text())["problems"]
    assert len(problems) == 3
    for found in problems:
        assert max(found["lemma_1"]) < 1e-11 and found["without_ridge"] < 1e-11
        assert theory.falls(found["zeta"]) and theory.falls(found["psi"])
        assert all(d <= psi for d, psi in zip(found["distance"], found["psi"], strict=True))
        # the first round takes B off besides
        zeta = [value**2 for value in found["zeta"]]
        assert zeta[0] - zeta[1] > found["extra_drop"] > 0
    assert "(theory.png)" in (folder / "report.md").read_text()
    assert (folder / "theory.png").is_file()
