"""Predictions from a checkpoint alone: pictures, sentences, prompts."""

import argparse
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from PIL import Image

from datamodules import CorpusData, E2EData, InstructionData, TextToTextData
from datamodules.image_folders import ImageFolderData
from datamodules.instructions import fill_template
from datamodules.tokens import train_tokenizer
from lightning_modules.albef import VQA, Entailment, Grounding, Pretraining, Retrieval
from lightning_modules.apet import insert
from lightning_modules.matformer import MatLM, MatViT, extract
from lightning_modules.self_distillation import Adaptation, Finetuning
from recipes import cli
from recipes.__main__ import dispatch
from recipes.ending import commands, ending
from recipes.export import main as export
from recipes.predict import Predictor, abridged, has_answers, main, number, read_inputs

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
COLORS = {"blue": (20, 30, 220), "green": (30, 200, 40), "red": (220, 20, 30)}
SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}


def picture(color: str, seed: int, size: int = 20) -> Image.Image:
    noise = np.random.default_rng(seed).integers(-20, 20, (size, size + 4, 3))
    return Image.fromarray(np.clip(noise + COLORS[color], 0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A run on a folder of class folders, and new pictures in one folder without classes."""
    folder = tmp_path_factory.mktemp("pictures")
    for name in COLORS:
        (folder / "data" / name).mkdir(parents=True)
        for seed in range(8):
            picture(name, seed).save(folder / "data" / name / f"{seed}.png")
    (folder / "new" / "deeper").mkdir(parents=True)
    for place, name in enumerate(COLORS):
        picture(name, 100 + place).save(folder / "new" / "deeper" / f"{name}.png")
    run = cli.main(
        [
            *("fit", "-c", str(RECIPES / "matformer" / "folder.yaml")),
            f"--data.root={folder / 'data'}",
            *("--data.image_size=16", "--data.batch_size=8", "--data.num_workers=0"),
            *("--data.augmentation=none", "--data.auto_augment=null", "--data.val_fraction=0.25"),
            "--data.mean=[0.4,0.4,0.3]",
            "--model.architecture=vit_small_patch16_224",
            f"--model.model_args={json.dumps(SMALL)}",
            *("--model.lr=3e-3", "--model.warmup_steps=2", "--trainer.max_epochs=12"),
            *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"),
            *("--trainer.logger=false", f"--checkpoint.dirpath={folder / 'run'}"),
            f"--trainer.default_root_dir={folder}",
        ]
    )
    shutil.rmtree(folder / "data")  # nothing but the checkpoint is left
    (folder / "ending.txt").write_text(ending(run.trainer, run.model))
    return folder


def test_the_end_of_a_run_names_its_checkpoints_and_what_to_do_with_them(pictures):
    last, best, predict, export_ = (pictures / "ending.txt").read_text().splitlines()
    run = pictures / "run"
    assert last == f"last checkpoint: {run / 'last.ckpt'}"
    found = re.fullmatch(r"best checkpoint: (.+\.ckpt) \(val/accuracy ([\d.]+)\)", best)
    assert found and Path(found[1]).parent == run and found[1] != str(run / "last.ckpt")
    saved = torch.load(found[1], weights_only=True)["callbacks"]
    scores = [state["best_model_score"] for key, state in saved.items() if "val/accuracy" in key]
    assert float(found[2]) == pytest.approx(float(scores[0]), rel=1e-3)
    assert predict.endswith(f"python -m recipes predict --ckpt_path {found[1]} PATH")
    assert export_.endswith(f"python -m recipes export {found[1]} FOLDER")


class Trained:
    """Stands for a trainer after a training on data of this description."""

    def __init__(self, **description):
        self.datamodule, self.describe = self, lambda: description


@pytest.mark.parametrize(
    ("kind", "begins"),
    [
        (VQA, "ask"),
        (Retrieval, "search"),
        (Pretraining, "search"),
        (Entailment, "judge"),
        (Grounding, "point"),
    ],
)
def test_pictures_with_texts_have_their_own_commands(kind, begins):
    [line] = commands(Trained(kind="pictures and texts"), kind.__new__(kind), Path("a.ckpt"))
    assert f"python -m recipes.albef.use {begins} --ckpt_path a.ckpt " in line


def test_a_path_with_spaces_is_quoted_in_the_commands():
    module = Finetuning.__new__(Finetuning)
    torch.nn.Module.__init__(module)
    line, *_ = commands(Trained(kind="images"), module, Path("my run/a.ckpt"))
    assert line.endswith("recipes predict --ckpt_path 'my run/a.ckpt' PATH")


def test_predict_sends_pictures_with_texts_where_they_are_answered():
    with pytest.raises(ValueError, match="albef.use --help` says how"):
        read_inputs(["a.jpg"], {"kind": "pictures and texts"}, None, None)


@pytest.mark.parametrize("operations", [["add"], ["plug"]])
def test_export_is_named_where_it_can_merge(operations):
    module = Finetuning.__new__(Finetuning)
    torch.nn.Module.__init__(module)
    module.model = insert(torch.nn.Sequential(torch.nn.Linear(9, 9)), 9, operations=operations)
    predict, *rest = commands(Trained(kind="images"), module, Path("a.ckpt"))
    assert "recipes predict --ckpt_path a.ckpt" in predict
    assert ["recipes export a.ckpt FOLDER" in line for line in rest] == [True] * (
        operations == ["add"]
    )


class TestImages:
    def test_the_command_writes_a_table_of_new_pictures(self, pictures, tmp_path, capsys):
        checkpoint = str(pictures / "run" / "last.ckpt")
        main(["--ckpt_path", checkpoint, str(pictures / "new"), "--out", str(tmp_path)])
        table = pd.read_csv(tmp_path / "predictions.csv")
        assert [Path(name).stem for name in table["input"]] == ["blue", "green", "red"]
        assert table["prediction"].tolist() == ["blue", "green", "red"]
        shares = table[["probability", "probability_2", "probability_3"]]
        np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-5)
        assert (shares.diff(axis=1).iloc[:, 1:] <= 0).all(axis=None)
        shown = capsys.readouterr().out
        rows = [line for line in shown.splitlines() if ".png" in line]
        assert "3 predictions" in shown and len(rows) == 3
        for row, probability in zip(rows, table["probability"], strict=True):
            assert f" {probability:.1%} " in row  # not cut at the terminal's 80 columns

    def test_it_sees_what_validation_saw(self, pictures):
        """The same logits as the trained module under the DataModule's own transform."""
        path = pictures / "new" / "deeper" / "green.png"
        data = ImageFolderData(root="", image_size=16, mean=(0.4, 0.4, 0.3))
        transform = data.eval_transform()
        module = MatViT.load_from_checkpoint(pictures / "run" / "last.ckpt").eval()
        with torch.no_grad():
            logits = module(transform(Image.open(path))[None])[0]
        [prediction] = Predictor(pictures / "run" / "last.ckpt", device="cpu")([path])
        assert prediction.probability == pytest.approx(logits.softmax(0).max().item())

    def test_pil_images_and_batches_of_any_size(self, pictures):
        images = [picture(name, 200) for name in ("red", "blue", "green", "red", "blue")]
        predictor = Predictor(pictures / "run" / "last.ckpt", batch_size=2, top_k=2)
        predictions = predictor(images)
        assert [one.label for one in predictions] == ["red", "blue", "green", "red", "blue"]
        assert all(len(one.top) == 2 for one in predictions)

    def test_an_opened_picture_is_read_as_its_file_is(self, pictures, tmp_path):
        pixels = np.random.default_rng(0).integers(0, 2**16, (20, 24), np.uint16)
        Image.fromarray(pixels).save(tmp_path / "deep.png")
        predictor = Predictor(pictures / "run" / "last.ckpt", device="cpu")
        of_file, opened = predictor([tmp_path / "deep.png", Image.open(tmp_path / "deep.png")])
        assert of_file == opened

    def test_names_that_are_not_utf8_are_written_all_the_same(self, pictures, tmp_path):
        picture("red", 5).save(tmp_path / "caf.png")
        os.rename(tmp_path / "caf.png", os.fsencode(tmp_path) + b"/caf\xe9.png")
        command = ["--ckpt_path", str(pictures / "run" / "last.ckpt"), "--out", str(tmp_path)]
        main([*command, str(tmp_path)])
        [row] = pd.read_csv(tmp_path / "predictions.csv").itertuples()
        assert Path(row.input).name == "caf\\xe9.png" and row.prediction == "red"

    def test_a_named_granularity_is_the_extracted_model(self, pictures):
        checkpoint = pictures / "run" / "last.ckpt"
        image = picture("red", 300)
        module = MatViT.load_from_checkpoint(checkpoint).eval()
        transform = ImageFolderData(root="", image_size=16, mean=(0.4, 0.4, 0.3)).eval_transform()
        for name in ("S", "XL"):
            with torch.no_grad():
                logits = extract(module.model, name)(transform(image)[None])[0]
            [prediction] = Predictor(checkpoint, granularity=name)([image])
            assert prediction.probability == pytest.approx(logits.softmax(0).max().item(), rel=1e-5)

    def test_a_budget_chooses_mix_n_match(self, pictures):
        checkpoint = pictures / "run" / "last.ckpt"
        module = MatViT.load_from_checkpoint(checkpoint)
        sizes = {
            name: sum(p.numel() for p in extract(module.model, name).parameters())
            for name in ("S", "M", "L", "XL")
        }
        assert Predictor(checkpoint, max_params=sizes["M"]).module.granularity == [1, 1]
        assert Predictor(checkpoint, max_params=sizes["L"] - 1).module.granularity == [1, 2]
        with pytest.raises(ValueError, match="below the smallest"):
            Predictor(checkpoint, max_params=sizes["S"] - 1)

    def test_unreadable_pictures_are_named_and_left_out(self, pictures, tmp_path, capsys):
        for name in ("a.png", "c.png"):
            picture("red", 5).save(tmp_path / name)
        (tmp_path / "b.png").write_bytes(b"no image")
        command = ["--ckpt_path", str(pictures / "run" / "last.ckpt"), "--out", str(tmp_path)]
        main([*command, str(tmp_path)])
        assert "left out" in (said := capsys.readouterr().err) and "b.png" in said
        assert len(pd.read_csv(tmp_path / "predictions.csv")) == 2
        with pytest.raises(ValueError, match="none of the 1 pictures could be read"):
            main([*command, str(tmp_path / "b.png")])

    def test_wrong_inputs_are_said_in_a_sentence(self, pictures, tmp_path):
        checkpoint = str(pictures / "run" / "last.ckpt")
        (tmp_path / "notes.txt").write_text("x")
        (tmp_path / "empty").mkdir()
        for path, error, reason in (
            ("nowhere.png", FileNotFoundError, "nowhere.png is not there: expected a picture"),
            (str(tmp_path / "notes.txt"), ValueError, "is no picture: expected a name that ends"),
            (str(tmp_path / "empty"), FileNotFoundError, "has no images"),
        ):
            with pytest.raises(error, match=reason):
                main(["--ckpt_path", checkpoint, path])
        with pytest.raises(FileNotFoundError, match="last.ckpt is not there"):
            main(["--ckpt_path", str(tmp_path / "last.ckpt"), "x.png"])
        torch.save({"state_dict": {}}, tmp_path / "old.ckpt")
        with pytest.raises(ValueError, match="does not say what it was trained on"):
            Predictor(tmp_path / "old.ckpt")
        with pytest.raises(ValueError, match="--top_k 0: expected at least 1"):
            main(["--ckpt_path", checkpoint, "x.png", "--top_k", "0"])
        with pytest.raises(FileNotFoundError, match="is a folder: expected a checkpoint, such as"):
            main(["--ckpt_path", str(tmp_path), "x.png"])
        (tmp_path / "cut.ckpt").write_bytes(Path(checkpoint).read_bytes()[:5000])
        with pytest.raises(ValueError, match="cut.ckpt cannot be read as a checkpoint"):
            main(["--ckpt_path", str(tmp_path / "cut.ckpt"), "x.png"])
        with pytest.raises(ValueError, match="notes.txt is a file: expected a folder"):
            main(["--ckpt_path", checkpoint, "x.png", "--out", str(tmp_path / "notes.txt")])
        for device in ("quantum", *(() if torch.accelerator.is_available() else ("cuda:0",))):
            with pytest.raises(ValueError, match=f"device {device} is not here: expected cpu"):
                Predictor(checkpoint, device=device)


CLEAN = """
import sys, json
import numpy, torch
from PIL import Image
sys.path = [place for place in sys.path if place not in ("", {root!r})]
{cure}
{lines}
picture = torch.from_numpy(numpy.load({picture!r}))
with torch.no_grad():
    numpy.save({answer!r}, model(picture).softmax(-1).numpy())
config = json.load(open(folder + "/config.json"))
settings = config["pretrained_cfg"]
print(config["label_names"], settings["mean"], settings["input_size"])
"""
CURE = (Path(__file__).resolve().parents[2] / "cpu_torchvision.py").read_text()


class TestExport:
    @pytest.mark.parametrize("flags", [["--granularity", "S"], ["--max_params", "MIXED"], []])
    def test_a_clean_process_loads_it_and_gives_equal_outputs(self, pictures, tmp_path, flags):
        checkpoint = pictures / "run" / "last.ckpt"
        module = MatViT.load_from_checkpoint(checkpoint)
        sizes = [sum(p.numel() for p in extract(module.model, n).parameters()) for n in ("L", "XL")]
        flags = [str(sum(sizes) // 2) if one == "MIXED" else one for one in flags]
        out = tmp_path / "exported"
        export([str(checkpoint), str(out), *flags])
        options = {"granularity": "S"} if "S" in flags else {}
        if "--max_params" in flags:
            options = {"max_params": float(flags[1])}
            assert (out / "load.py").is_file()
        predictor = Predictor(checkpoint, device="cpu", top_k=3, **options)
        [prediction] = predictor([picture("red", 7)])
        transform = ImageFolderData(root="", image_size=16, mean=(0.4, 0.4, 0.3)).eval_transform()
        np.save(tmp_path / "x.npy", transform(picture("red", 7))[None].numpy())
        lines = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
        code = CLEAN.format(
            root=str(RECIPES.parent), cure=CURE, lines=lines,
            picture=str(tmp_path / "x.npy"), answer=str(tmp_path / "y.npy"),
        )  # fmt: skip
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        said = subprocess.run(
            [sys.executable, "-c", code],
            cwd=out, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert said.returncode == 0, said.stderr
        shares = dict(zip(("blue", "green", "red"), np.load(tmp_path / "y.npy")[0], strict=True))
        assert dict(prediction.top) == pytest.approx(shares, abs=1e-6)
        assert "['blue', 'green', 'red'] [0.4, 0.4, 0.3] [3, 16, 16]" in said.stdout
        assert all(file.stat().st_mode & 0o044 for file in out.iterdir())

    def test_onnx_of_a_size(self, pictures, tmp_path):
        checkpoint = str(pictures / "run" / "last.ckpt")
        export([checkpoint, str(tmp_path / "s.onnx"), "--to", "onnx", "--granularity", "S"])
        assert (tmp_path / "s.onnx").stat().st_size > 1000  # to_onnx compares with the model

    def test_what_cannot_be_written_is_said(self, pictures, reviews, tmp_path):
        images, texts = (str(one / "run" / "last.ckpt") for one in (pictures, reviews))
        for command, reason in (
            ([images, str(tmp_path / "a"), "--to", "peft"], "has no VeRA adapter"),
            ([images, str(tmp_path / "a.onnx")], "a.onnx: add --to onnx for such a file"),
            ([texts, str(tmp_path / "a"), "--granularity", "S"], "no nested model"),
            ([texts, str(tmp_path / "a.onnx"), "--to", "onnx"], "writes image classifiers"),
        ):
            with pytest.raises(ValueError, match=reason):
                export(command)


WORDS = {"good": ["fine", "great", "lovely"], "poor": ["awful", "bad", "dreadful"]}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """A run on a csv, whose tokenizer was trained on it."""
    folder = tmp_path_factory.mktemp("reviews")
    rows = [
        {"review": f"a {word} film, number {i}", "verdict": label}
        for label, words in WORDS.items() for word in words for i in range(12)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "train.csv", index=False)
    bert = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 64,
    }  # fmt: skip
    cli.main(
        [
            *("fit", "-c", str(RECIPES / "vera" / "text.yaml")),
            *(f"--data.train={folder / 'train.csv'}", "--data.text=review"),
            *("--data.label=verdict", "--data.tokenizer=null", "--data.vocab_size=300"),
            *("--data.num_workers=0", "--data.max_length=32", "--data.batch_size=8"),
            *("--model.architecture=bert", "--model.pretrained=false", "--model.method=full"),
            f"--model.model_args={json.dumps(bert)}",
            *("--model.lr=3e-3", "--trainer.max_epochs=6", "--trainer.accelerator=cpu"),
            *("--trainer.callbacks=null", "--trainer.enable_progress_bar=false"),
            *("--trainer.logger=false", f"--checkpoint.dirpath={folder / 'run'}"),
            f"--trainer.default_root_dir={folder}",
        ]
    )
    (folder / "train.csv").unlink()
    return folder


class TestSentences:
    def test_a_table_standard_input_and_python_agree(self, reviews, tmp_path, monkeypatch, capsys):
        checkpoint = str(reviews / "run" / "last.ckpt")
        texts = ["a lovely film, number 99", "a dreadful film, number 3", "a great, great film"]
        (tmp_path / "new.csv").write_text("id,review\n" + "".join(f'1,"{t}"\n' for t in texts))
        (tmp_path / "new.jsonl").write_text(
            "".join(json.dumps({"review": t}) + "\n" for t in texts)
        )
        (tmp_path / "new.txt").write_text("\n".join(texts))
        labels = [one.label for one in Predictor(checkpoint)(texts)]
        assert labels == ["good", "poor", "good"]
        for path in ("new.csv", "new.jsonl", "new.txt", "-"):
            monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(texts)))
            source = path if path == "-" else str(tmp_path / path)
            main(["--ckpt_path", checkpoint, source, "--out", str(tmp_path)])
            table = pd.read_csv(tmp_path / "predictions.csv")
            assert table["input"].tolist() == texts
            assert table["prediction"].tolist() == labels

    def test_a_folder_is_no_text_file(self, reviews, tmp_path):
        command = ["--ckpt_path", str(reviews / "run" / "last.ckpt"), str(tmp_path)]
        with pytest.raises(ValueError, match=f"{tmp_path} is a folder, expected a text file"):
            main(command)

    def test_another_column_is_named(self, reviews, tmp_path):
        (tmp_path / "new.csv").write_text("comment\nan awful film\n")
        command = ["--ckpt_path", str(reviews / "run" / "last.ckpt"), str(tmp_path / "new.csv")]
        with pytest.raises(ValueError, match="no column 'review', the columns are 'comment'"):
            main(command)
        main([*command, "--text", "comment", "--out", str(tmp_path)])
        assert pd.read_csv(tmp_path / "predictions.csv")["prediction"].tolist() == ["poor"]

    def test_padding_in_a_batch_changes_nothing(self, reviews):
        predictor = Predictor(reviews / "run" / "last.ckpt")
        short, long = "bad", "a fine film that goes on and on, number 4"
        alone = [predictor([one])[0].probability for one in (short, long)]
        together = [one.probability for one in predictor([short, long])]
        assert together == pytest.approx(alone, rel=1e-5)

    def test_a_model_that_is_not_nested_has_no_granularity(self, reviews):
        with pytest.raises(ValueError, match="no nested model"):
            Predictor(reviews / "run" / "last.ckpt", granularity="S")


def test_a_text_classifier_is_a_transformers_folder(reviews, tmp_path):
    export([str(reviews / "run" / "last.ckpt"), str(tmp_path)])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a lovely film", "bad"]
    words = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        shares = model(**words).logits.softmax(-1).max(-1)
    predictions = Predictor(reviews / "run" / "last.ckpt", device="cpu")(texts)
    assert [model.config.id2label[i] for i in shares.indices.tolist()] == [
        one.label for one in predictions
    ]
    assert shares.values.tolist() == pytest.approx([one.probability for one in predictions])


@pytest.mark.parametrize(
    ("stage", "prompts", "longest"),
    [
        ("vera/e2e", ["name[Eagle], food[French]", "name[Zizzi]"], 64),
        ("apet/generation", ["who likes the cook", "who sells"], 8),  # its target_length
    ],
)
def test_a_language_model_writes_text(stage, prompts, longest, monkeypatch, tmp_path):
    cli.main(
        [
            *("fit", "-c", str(RECIPES / f"{stage}.yaml"), "--preset", "tiny"),
            *("--trainer.max_steps=4", "--trainer.enable_progress_bar=false"),
            *("--trainer.logger=false", "--trainer.val_check_interval=1"),
            "--trainer.limit_val_batches=1",
            *(f"--trainer.default_root_dir={tmp_path}", f"--checkpoint.dirpath={tmp_path}"),
        ]
    )
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    main(
        [
            *("--ckpt_path", str(tmp_path / "last.ckpt"), str(tmp_path / "prompts.txt")),
            *("--out", str(tmp_path), "--max_new_tokens", "5"),
        ]
    )
    table = pd.read_csv(tmp_path / "predictions.csv", keep_default_na=False)
    assert list(table.columns) == ["input", "prediction"]
    assert table["input"].tolist() == prompts
    seen = []
    batches = []
    monkeypatch.setattr(
        "recipes.predict.generate",
        lambda _, batch, *__, **how: batches.append(batch) or seen.append(how) or [""] * 2,
    )
    for given in (None, 5):
        Predictor(tmp_path / "last.ckpt", max_new_tokens=given)(prompts)
    assert [how["max_new_tokens"] for how in seen] == [longest, 5]
    # surrounding space goes where it goes in training
    Predictor(tmp_path / "last.ckpt")([f" {one}  " for one in prompts])
    same = torch.equal(batches[0]["input_ids"], batches[2]["input_ids"])
    assert same == (stage == "apet/generation")


def test_an_empty_prompt_is_said_to_be_empty():
    predictor = object.__new__(Predictor)
    predictor.description = {"template": "{input}", "before": [], "behind": []}
    predictor.tokenizer = train_tokenizer([], 259)
    with pytest.raises(ValueError, match="1 text is empty, and the tokenizer adds no token"):
        predictor._prompts(["Once", ""])


class Writer(Predictor):
    """What a language model tuned on instructions is asked, without the model."""

    def __init__(self, **settings: Any) -> None:
        self.data = InstructionData(source="generated", tokenizer=None, vocab_size=300, **settings)
        self.data._tokenizer = self.tokenizer = train_tokenizer([], 259)
        self.description, self.device = self.data.describe(), torch.device("cpu")
        self.kind, self.batch_size, self.max_new_tokens = "prompts", 32, None
        self.module: Any = SimpleNamespace(model=None)


@pytest.fixture
def asked(monkeypatch):
    """The prompts, with special tokens, of each batch that a model is asked to continue."""
    seen: list[list[str]] = []

    def generate(_, batch, tokenizer, **how):
        seen.append([tokenizer.decode(ids[ids > 0]) for ids in batch["input_ids"]])
        return [""] * len(seen[-1])

    monkeypatch.setattr("recipes.predict.generate", generate)
    return seen


def test_instructions_are_asked_as_in_training(asked, tmp_path):
    """Their inputs were left out, and a long one lost the line that a response follows."""
    writer = Writer(max_length=40)
    entries = [{"instruction": "Sum {pair} up.", "input": "long " * 50}, {"instruction": "Hi."}]
    lines = "".join(json.dumps(one) + "\n" for one in entries)
    (tmp_path / "new.jsonl").write_text(lines)
    inputs = read_inputs([str(tmp_path / "new.jsonl")], writer.description, None, None)
    writer([value for _, value in inputs])
    assert asked == [[f"<s>{fill_template(**one)}" for one in entries]]
    with pytest.raises(ValueError, match="no column 'question', .*: name it with --text or --pair"):
        read_inputs([str(tmp_path / "new.jsonl")], writer.description, "question", None)


def test_the_column_of_prompts_is_that_of_training(tmp_path):
    (tmp_path / "new.csv").write_text("mr,target,text\nname[Eagle],a,b\n")
    for data, seen in (
        (E2EData(source="generated", vocab_size=300), "name[Eagle]"),
        (TextToTextData("columns", files={"train": "a.csv", "val": "a.csv"}), "b"),
        (CorpusData("files", "a.txt", column="target"), "a"),
    ):
        data._tokenizer = train_tokenizer([], 259)
        found = read_inputs([str(tmp_path / "new.csv")], data.describe(), None, None)
        assert found == [(seen, seen)]
        with pytest.raises(ValueError, match="--pair text: this checkpoint continues one text"):
            read_inputs([str(tmp_path / "new.csv")], data.describe(), None, "text")


@pytest.mark.parametrize("text", ["nan", "-3", "0", "many", "M", ""])
def test_what_is_no_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no number such as 12M"):
        number(text)


def test_long_inputs_are_abridged_where_they_are_shown():
    assert abridged("short.png", True) == "short.png" and len(abridged("x" * 99, True)) == 30
    assert abridged("/a/very/long/path/to/the/pictures/of/a/cat.png", True).endswith("/cat.png")
    assert abridged("the film is " + "very " * 20, False).startswith("the film is very")


def test_numbers_with_units():
    assert [number(one) for one in ("12M", "1.5G", "70k", "8e3", "12")] == [
        12e6, 1.5e9, 70e3, 8e3, 12,
    ]  # fmt: skip
    assert math.isclose(number("0.5b"), 5e8)


def test_with_a_stage_s_file_predict_is_lightning_s(monkeypatch):
    called = []
    monkeypatch.setattr("recipes.__main__.main", lambda callbacks: called.append("stage"))
    monkeypatch.setattr("recipes.predict.main", lambda argv: called.append(argv))
    for command in (["-c", "stage.yaml"], ["--config=stage.yaml"], ["--ckpt_path", "a", "b.png"]):
        monkeypatch.setattr(sys, "argv", ["recipes", "predict", *command])
        dispatch()
    assert called == ["stage", "stage", ["--ckpt_path", "a", "b.png"]]


def test_a_module_that_answers_nothing_is_known():
    """Also where its data have no description."""
    assert not has_answers(Adaptation, {}) and not has_answers(Adaptation, {"kind": "images"})
    assert has_answers(Finetuning, {}) and has_answers(MatLM, {"kind": "prompts"})
