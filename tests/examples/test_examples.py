"""The examples run as their first lines say, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from PIL import Image

from datamodules.tokens import train_tokenizer
from recipes.matformer.matvit import EXPERIMENT
from recipes.nodes import LAST
from recipes.records import instance_of
from recipes.runner import command_line

ROOT = Path(__file__).resolve().parents[2]
COLORS = {"blue": (20, 30, 220), "red": (220, 20, 30)}


def run(example, *arguments):
    """What an example's main, called with arguments, prints."""
    code = f"import sys; sys.path.insert(0, 'examples'); import {example}; {example}.main("
    code += ", ".join(map(repr, arguments)) + ")"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len((ROOT / "examples" / f"{example}.py").read_text().splitlines()) < 40
    return done.stdout


def test_own_images(tmp_path):
    noise = np.random.default_rng(0)
    for name, color in COLORS.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.clip(noise.integers(-20, 20, (16, 16, 3)) + color, 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(
                tmp_path / "data" / name / f"{number}.png"
            )
    folder = tmp_path / "run"
    out = run("own_images", str(tmp_path / "data"), 4, 16, str(folder))
    lines = [line for line in out.splitlines() if line.startswith(("S: ", "M: ", "L: ", "XL: "))]
    assert len(lines) == 8
    for line in lines:
        assert line.split(": ")[2].split(" ")[0] in COLORS


def test_own_text(tmp_path):
    sentences = [f"a {word} film {n}" for n in range(20) for word in ("dull", "funny")]
    rows = [f"{text},{'good' if 'funny' in text else 'poor'}" for text in sentences]
    (tmp_path / "own.csv").write_text("\n".join(["sentence,label", *rows]) + "\n")
    base = tmp_path / "base"
    train_tokenizer(sentences, 300).save_pretrained(base)
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, pad_token_id=0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(base)
    folder = tmp_path / "run"
    out = run("own_text", str(tmp_path / "own.csv"), str(base), 1, str(folder))
    answers = [line for line in out.splitlines() if line.startswith("a ")]
    assert len(answers) == 2
    assert all(line.split(": ")[1].split(" ")[0] in ("good", "poor") for line in answers)
    assert json.loads((folder / "adapter" / "manifest.json").read_text())["rank"] == 256


@pytest.mark.parametrize("example", ["own_images", "own_text"])
def test_without_arguments_the_usage_is_printed(example):
    command, environment = [sys.executable, f"examples/{example}.py"], {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"usage: python examples/{example}.py ")
    assert "Traceback" not in done.stderr


def test_digits_are_those_of_the_demo(tmp_path, monkeypatch):
    """What `make demo` predicts is held out from the very run whose checkpoint it names."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import digits

    digits.main(str(tmp_path), "digits")
    files = {part: list((tmp_path / part).rglob("*.png")) for part in ("train", "val", "new")}
    assert {part: len(paths) for part, paths in files.items()} == {
        "train": 1298, "val": 479, "new": 20,
    }  # fmt: skip
    for name in ("ARGS", "MAKEFLAGS"):  # of `make test ARGS=…`, which are pytest's
        monkeypatch.delenv(name, raising=False)
    shown = subprocess.run(
        ["make", "-n", "--no-print-directory", "demo"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    *_, trained, written, predicted, exported = shown.splitlines()
    assert written.split()[-3:] == ["examples/digits.py", "runs/numbers", "pairs"]
    digits.main(str(tmp_path / "numbers"), "pairs")
    pictures = list((tmp_path / "numbers" / "new").iterdir())
    assert len(pictures) == 20
    (picture,) = [one for one in predicted.split() if one.endswith(".png")]
    shown_picture = tmp_path / picture.removeprefix("runs/")
    assert shown_picture in pictures
    run = command_line(EXPERIMENT, trained.partition("matvit ")[2].split())
    EXPERIMENT.declare(run)
    checkpoint = run.out / "seed0" / "matvit" / LAST
    assert checkpoint.parents[1] in run.nodes
    assert str(checkpoint) in predicted.split() and str(checkpoint) in exported.split()
    data = instance_of(run.parsed("matvit").data.as_dict())
    for one in pictures:
        pixels, label = np.array(Image.open(one))[..., 0], data.class_names.index(one.name[0])
        assert any(
            np.array_equal(pixels, source) and label == truth
            for source, truth in data.val_set.items
        ), one


@pytest.mark.parametrize("example", ["own_images", "own_text", "digits"])
def test_readme_names_it(example):
    assert f"examples/{example}.py" in (ROOT / "README.md").read_text()
