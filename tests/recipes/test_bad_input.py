"""Bad input, typed as a user types it: one sentence each, which names the value and the cure."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from PIL import Image

from recipes.__main__ import STAGE, VERBS, dispatch

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
IMAGES = f"fit -c {RECIPES}/matformer/folder.yaml"
SMALL = (
    " --data.image_size 16 --data.num_workers 0 --data.val_fraction 0.25 --trainer.logger false "
    "--data.augmentation none --data.auto_augment null --checkpoint.dirpath run "
    "--model.model_args '{img_size: 16, patch_size: 8, embed_dim: 32, depth: 2, num_heads: 2}' "
    "--trainer.accelerator cpu --trainer.max_steps 1 --trainer.enable_progress_bar false"
)
TEXT = f"fit -c {RECIPES}/vera/text.yaml --trainer.accelerator cpu --trainer.logger false"
TEXT += " --model.architecture bert --model.pretrained false --data.tokenizer null"
ALBEF = f"fit -c {RECIPES}/albef/retrieval.yaml --preset tiny"
RUN = "run/last.ckpt"


def written(name, content):
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def pictures(*folders):
    for folder in folders:
        Path(folder).mkdir(parents=True)
        for shade in range(4):
            Image.new("RGB", (20, 20), (60 * shade, 0, 90)).save(f"{folder}/{shade}.png")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with good pictures, a checkpoint of them, and bad input of many kinds."""
    folder = tmp_path_factory.mktemp("bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pictures("single/cats")
        pictures(
            "good/a",
            "good/b",
            "renamed/a",
            "renamed/c",
            "other/train/a",
            "other/train/b",
            "other/val/z",
        )
        written("broken/1.png", b"no picture")
        for empty in ("empty", "bare/a", "bare/b"):
            Path(empty).mkdir(parents=True)
        written("note.txt", "a note")
        written("bad.yaml", "model: [\n")
        written("column.csv", "sentence,klass\ngood,1\nbad,0\n")
        written("hole.csv", "sentence,label\ngood,1\nbad,\n")
        written("torn.csv", "sentence,label\na,b,c\n")
        written("latin.csv", "sentence,label\ncafé,1\nbad,0\n".encode("latin-1"))
        written("one.csv", "sentence,label\ngood,1\nbetter,1\n")
        written("torn.jsonl", '{"sentence": "a", "label": "x"}\n{"sentence": \n')
        written("good.csv", "sentence,label\n" + "".join(f"s {i},{i % 2}\n" for i in range(40)))
        patch.setattr(sys, "argv", ["recipes", *shlex.split(f"{IMAGES} --data.root good{SMALL}")])
        runpy.run_module("recipes", run_name="__main__")
    return folder


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("fti", "'fti' is no verb of python -m recipes, did you mean 'fit'?"),
        ("fit", "no stage is named: give its file, such as -c recipes/matformer/matvit.yaml"),
        ("fit -c bad.yaml", "bad.yaml, line 2: this is no YAML"),
        (f"{IMAGES} --preset huge", "unknown preset 'huge': "),
        (f"{IMAGES} --trainer.max_epochs ten", "trainer.max_epochs is ten: expected int or null"),
        (f"{IMAGES} --modle.lr 1", "--modle.lr 1 is no setting: --help lists"),
        (f"{IMAGES} --data.root nowhere", "nowhere is not a folder, expected one with a folder"),
        (f"{IMAGES} --data.root note.txt", "note.txt is not a folder"),
        (f"{IMAGES} --data.root empty", "empty holds no class folders, expected empty/<class>/"),
        (f"{IMAGES} --data.root bare", "bare/a has no images (known are .jpg,"),
        (f"{IMAGES} --data.root single{SMALL}", "single has one class only, 'cats', expected two"),
        (f"{IMAGES} --data.root good{SMALL} --data.labelled false", "has one class only, 'image'"),
        (f"{IMAGES} --preset tiny", "bare/a has no images (known are .jpg,"),
        (f"{IMAGES} --preset tiny", "set --data.root to the folder above the classes (without it"),
        (f"{IMAGES} --data.root other", "other/val has the class 'z', which is none of the 2"),
        (f"{IMAGES} --data.val_fraction 2", "val_fraction is 2.0, expected a share between 0"),
        (f"{IMAGES} --data.root good{SMALL} --data.batch_size 0", "got batch_size=0"),
        (f"{IMAGES} --data.root good{SMALL} --model.fractions [0.5,0.2]", "must increase from"),
        (f"{IMAGES} --data.root good{SMALL} --model.architecture vit", "timm has no model 'vit'"),
        (
            f"{IMAGES} --data.root good{SMALL} --model.init_from note.txt",
            "expected a safetensors file, a Lightning checkpoint or a",
        ),
        (
            f"{IMAGES} --data.root good --model.pretrained true",
            "the model 'vit_small_patch16_224' cannot be loaded",
        ),
        (f"{IMAGES} --data.root good{SMALL} --ckpt_path note.txt", "cannot be read as a checkp"),
        (
            f"{IMAGES} --data.root renamed{SMALL} --ckpt_path {RUN}",
            "trained on other classes: from class 1 on it has 'b', and the data have 'c'. Give it",
        ),
        (
            f"{IMAGES.replace('fit', 'validate')} --data.root renamed{SMALL} --ckpt_path {RUN}",
            "from class 1 on it has 'b', and the data have 'c'",
        ),
        (
            f"{IMAGES.replace('fit', 'validate')} --data.root good{SMALL} --ckpt_path {RUN} "
            "--seed_everything 1",
            "had seed 0 and this one has 1, which draws other examples to train and to validate",
        ),
        (f"{IMAGES} --data.root good --data.classes [5,6]", "in their order; --data.classes null"),
        (
            f"{ALBEF} --model.sizes.text.vocab_size 30522",
            "--model.sizes.text.vocab_size is one entry of model.sizes.text: give all of its "
            "entries as --model.sizes.text '{vocab_size: VALUE, …}'",
        ),
        (f"{TEXT} --data.train column.csv", "there is no column 'label', the columns are 'sent"),
        (f"{TEXT} --data.train hole.csv", "hole.csv, line 3: there is no label: fill it in"),
        (f"{TEXT} --data.train torn.csv", "torn.csv, line 2: the row has 3 columns, expected 2"),
        (f"{TEXT} --data.train latin.csv", "latin.csv is not UTF-8"),
        (f"{TEXT} --data.train one.csv", "has 1 different labels, expected two or more"),
        (f"{TEXT} --data.train torn.jsonl", "torn.jsonl, line 2: this is no JSON"),
        (
            f"{TEXT} --data.train good.csv --model.architecture nobody/nothing",
            "the model 'nobody/nothing' cannot be loaded, expected a folder with its config.json",
        ),
        (f"{TEXT} --data.train good.csv --model.method verra", "model.method is 'verra': expect"),
        ("predict --ckpt_path nothing.ckpt good", "nothing.ckpt is not there"),
        (f"predict --ckpt_path {RUN} empty", "empty has no images"),
        (f"predict --ckpt_path {RUN} broken", "none of the 1 pictures could be read"),
        (f"predict --ckpt_path {RUN} good.csv", "good.csv is no picture"),
        (f"predict --ckpt_path {RUN} good --granularity Q", "this model has S, M, L, XL"),
        (f"predict --ckpt_path {RUN} good --max_params 10", "below the smallest submodel's"),
        (
            f"predict --ckpt_path {RUN} good --text body",
            "--text body: this checkpoint is for im",
        ),
        (f"predict --ckpt_path {RUN} good --max_new_tokens 9", "--max_new_tokens 9: this checkpoi"),
        (f"predict --ckpt_path {RUN} good --adapter nowhere", "no manifest.json in nowhere"),
        (f"export {RUN} good", "good holds other files: expected a new folder"),
        (f"export {RUN} model.onnx", "model.onnx: add --to onnx for such a file, or name a folder"),
        (f"export {RUN} model.pt2 --to timm", "model.pt2: add --to pt2 for such a file, or name"),
        (f"export {RUN} out --to peft", "--to peft: this checkpoint has no VeRA adapter"),
        (f"export {RUN} out --granularity S --max_params 12M", "give one of them"),
        (f"generate {RUN} --prompt hello", "is a checkpoint of MatViT, expected one of MatLM"),
        (
            "report good",
            "good has no run.json or records.zip: expected the folder of an experiment's run",
        ),
    ],
)
def test_bad_input_gets_one_sentence(command, said, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.delenv("RECIPES_TRACEBACK", raising=False)
    monkeypatch.setenv("RECIPES_DATA", "bare")
    monkeypatch.setattr(sys, "argv", ["recipes", *shlex.split(command)])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("recipes", run_name="__main__")
    shown = capsys.readouterr().err
    reason, hint = shown.strip().splitlines()[-2:]
    assert stop.value.code == 2
    assert reason.startswith("error: ") and said in reason
    assert hint == "(RECIPES_TRACEBACK=1 shows where)" and "Traceback (" not in shown


@pytest.mark.parametrize("labelled", ["true", "false"])
def test_self_distillation_adapts_to_pictures_of_one_class(labelled, place, monkeypatch):
    monkeypatch.chdir(place)
    adapt = f"fit -c {RECIPES}/self_distillation/images_adapt.yaml --preset tiny"
    adapt += " --data datamodules.ImageFolderData --data.root single --data.val_fraction 0.5"
    adapt += f" --data.classes null --data.labelled {labelled} --data.batch_size 2"
    adapt += (
        f" --trainer.max_steps 1 --checkpoint.dirpath adapted_{labelled} --trainer.logger false"
    )
    monkeypatch.setattr(sys, "argv", ["recipes", *shlex.split(adapt)])
    dispatch()
    assert Path(f"adapted_{labelled}/last.ckpt").is_file()


def test_the_overview_names_every_verb(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipes", "--help"])
    dispatch()
    shown = capsys.readouterr().out
    assert all(re.search(rf"^  .*\b{verb}\b", shown, re.M) for verb in (*STAGE, *VERBS))


def test_what_was_loaded_is_printed(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    again = f"{IMAGES} --data.root good{SMALL} --checkpoint.dirpath again --model.init_from {RUN}"
    monkeypatch.setattr(sys, "argv", ["recipes", *shlex.split(again)])
    dispatch()
    assert f"loaded {RUN}: " in (shown := capsys.readouterr().err)
    assert "tensors loaded" in shown
