"""Edges that a new user finds: what model and data agree on, and what is said where they do not."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertTokenizerFast, ViTImageProcessor

from datamodules.tables import read_table
from lightning_modules.optim import with_schedule
from recipes import agreement, cli
from recipes.agreement import RANDOM, other_normalisation, weights_of
from recipes.cli import expanded, parse
from recipes.plan import files

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TEXT = RECIPES / "vera" / "text.yaml"
ADAPT = RECIPES / "self_distillation" / "images_adapt.yaml"
FOLDER = RECIPES / "matformer" / "folder.yaml"


@pytest.fixture
def bert(tmp_path):
    folder = tmp_path / "bert"
    BertConfig().save_pretrained(folder)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


class TestTokenizer:
    def test_a_local_model_implies_its_own(self, bert):
        settings = parse(TEXT, overrides=["--data.tokenizer=null", f"--model.architecture={bert}"])
        assert settings.data.init_args.tokenizer == bert

    def test_one_that_is_named_stays(self, bert):
        flags = ["--data.tokenizer=other", f"--model.architecture={bert}"]
        assert parse(TEXT, overrides=flags).data.init_args.tokenizer == "other"

    def test_a_model_type_implies_none(self):
        flags = ["--data.tokenizer=null", "--model.architecture=bert"]
        assert parse(TEXT, overrides=flags).data.init_args.tokenizer is None


def transform(*flags):
    """Mean and standard deviation of a parsed stage's data."""
    data = parse(FOLDER, overrides=list(flags)).data.init_args
    return tuple(data.mean), tuple(data.std)


class TestNormalisation:
    weights = ("--model.pretrained=true", "--model.architecture=vit_small_patch16_dinov3")
    other = ("--data.mean=[0.5,0.5,0.5]", "--data.std=[0.5,0.5,0.5]")

    def test_follows_pre_trained_weights_where_nothing_else_is_said(self):
        assert transform(*self.weights) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        assert transform(*self.weights, self.other[0])[0] == (0.5, 0.5, 0.5)
        assert other_normalisation(parse(FOLDER, overrides=[*self.weights])) is None

    def test_timm_models_are_known_by_their_hub_name_too(self):
        name = "vit_base_patch16_clip_224.openai"
        given = [
            transform(self.weights[0], f"--model.architecture={prefix}{name}")
            for prefix in ("", "hf-hub:timm/")
        ]
        assert given[0] == given[1] and given[0][0][0] == pytest.approx(0.4815, abs=1e-4)

    def test_a_model_of_the_hub_that_timm_does_not_list_says_its_own(self, monkeypatch, tmp_path):
        statistics = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
        (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": statistics}))
        monkeypatch.setattr(agreement, "hf_hub_download", lambda name, file: tmp_path / file)
        agreement._statistics_on_hub.cache_clear()
        flags = ["--model.pretrained=true", "--model.architecture=hf-hub:somebody/vit"]
        assert transform(*flags) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))

    def test_what_the_hub_does_not_have_is_left_to_the_loading(self, monkeypatch):
        def fails(name, file):
            raise OSError("offline")

        monkeypatch.setattr(agreement, "hf_hub_download", fails)
        flags = ["--model.pretrained=true", "--model.architecture=hf-hub:somebody/other"]
        assert transform(*flags)[0] == (0.5, 0.5, 0.5)

    def test_the_hub_is_not_asked_for_what_is_given(self, monkeypatch):
        asked = []
        monkeypatch.setattr(agreement, "hf_hub_download", lambda *names: asked.append(names))
        parse(
            FOLDER, overrides=[*self.other, "--model.pretrained=true", "--model.architecture=a/b"]
        )
        assert not asked

    def test_a_folder_of_transformers_says_its_own(self, tmp_path):
        ViTImageProcessor(image_mean=[0.1] * 3, image_std=[0.2] * 3).save_pretrained(tmp_path)
        flags = ["--model.pretrained=true", f"--model.architecture={tmp_path}"]
        flags += ["--data.mean=null", "--data.std=null"]
        data = parse(ADAPT, overrides=flags).data.init_args
        assert (data.mean, data.std) == ((0.1,) * 3, (0.2,) * 3)

    def test_another_than_the_weights_is_said_with_the_cure(self):
        said = other_normalisation(parse(FOLDER, overrides=[*self.weights, *self.other]))
        assert said and "--data.mean [0.485, 0.456, 0.406]" in said and "(0.5, 0.5, 0.5)" in said

    def test_random_weights_know_none(self):
        assert transform(self.weights[1]) == ((0.5, 0.5, 0.5),) * 2
        assert other_normalisation(parse(FOLDER, overrides=[self.weights[1], *self.other])) is None

    def test_a_local_folder_says_its_own(self, tmp_path):
        cfg = {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1]}
        (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": cfg}))
        flags = ["--model.pretrained=true", f"--model.architecture=local-dir:{tmp_path}"]
        assert transform(*flags) == ((0.1, 0.2, 0.3), (1, 1, 1))
        said = other_normalisation(parse(FOLDER, overrides=[*flags, *self.other]))
        assert "mean (0.1, 0.2, 0.3)" in str(said)
        for source in (tmp_path, tmp_path / "model.safetensors"):
            start = parse(FOLDER, overrides=[f"--model.init_from={source}"])
            assert "mean (0.1, 0.2, 0.3)" in str(other_normalisation(start))

    def test_a_checkpoint_says_what_it_was_trained_on(self, tmp_path):
        described = {"transform": {"mean": [0.4, 0.4, 0.3], "std": [0.5, 0.5, 0.5]}}
        file = tmp_path / "last.ckpt"
        torch.save({"state_dict": {}, "Data": {"description": described}}, file)
        start = f"--model.init_from={file}"
        said = other_normalisation(parse(FOLDER, overrides=[start]))
        assert said and "--data.mean [0.4, 0.4, 0.3]" in said and str(file) in said
        same = [start, "--data.mean=[0.4,0.4,0.3]"]
        assert other_normalisation(parse(FOLDER, overrides=same)) is None
        file.write_bytes(b"broken")  # which is for the loading of the weights to say
        assert other_normalisation(parse(FOLDER, overrides=[start])) is None


def test_where_weights_come_from():
    here = weights_of(parse(FOLDER))
    assert here == f"{RANDOM}, since neither model.pretrained nor model.init_from is given"
    assert weights_of(parse(FOLDER, overrides=["--model.init_from=a.ckpt"])) == "weights: a.ckpt"
    named = weights_of(parse(FOLDER, overrides=["--model.pretrained=true"]))
    assert named == "weights: vit_small_patch16_224"


class Begins(cli.RecipeCLI):
    """A stage up to where its classes would be built."""

    def instantiate_classes(self):
        pass

    def _run_subcommand(self, subcommand):
        pass


def test_a_training_from_random_weights_says_so_when_it_starts(monkeypatch):
    said = []
    monkeypatch.setattr(cli, "rank_zero_info", said.append)
    for verb, flags, count in (
        ("fit", [], 1),
        ("fit", ["--model.init_from=a.ckpt"], 1),
        ("fit", ["--ckpt_path=last.ckpt"], 1),
        ("validate", [], 1),
        ("fit", ["--data.batch_size=2"], 2),
    ):
        Begins([verb, *expanded(["-c", str(FOLDER)]), *flags])
        assert len(said) == count
    assert all(one.startswith("weights: random, since neither") for one in said)


def test_scores_of_random_weights_are_said_to_be_such():
    with pytest.warns(UserWarning, match="^weights: random, since .*; set --ckpt_path to use"):
        Begins(["validate", *expanded(["-c", str(FOLDER)])])


def test_a_checkpoint_of_low_rank_says_its_ranks(tmp_path):
    """Of a run that began with low-rank weights: to score it, init_from is not needed again."""
    ranks, file = {"blocks.0.mlp.fc1": 3}, tmp_path / "last.ckpt"
    torch.save({"state_dict": {}, "hyper_parameters": {"ranks": ranks}}, file)
    config = expanded(["-c", str(RECIPES / "pela" / "finetune.yaml")])
    for flags, expected in (([], ranks), (["--model.ratio=2"], None)):
        stage = Begins(["test", *config, f"--ckpt_path={file}", *flags])
        assert stage.config["test"].model.init_args.ranks == expected
    torch.save([], file)  # no checkpoint of Lightning's, which says so itself
    Begins(["test", *config, f"--ckpt_path={file}"])


def test_a_checkpoint_that_is_cut_off_is_named(tmp_path):
    torch.save({"state_dict": {"weight": torch.zeros(1000)}}, tmp_path / "last.ckpt")
    Begins(["fit", *expanded(["-c", str(FOLDER)]), f"--ckpt_path={tmp_path / 'last.ckpt'}"])
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "last.ckpt").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cut\.ckpt cannot be read as a checkpoint"):
        Begins(["fit", *expanded(["-c", str(FOLDER)]), f"--ckpt_path={tmp_path / 'cut.ckpt'}"])


def test_a_warm_up_longer_than_the_run_is_said():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.warns(UserWarning, match="warms up for 100 steps of 40 and never"):
        with_schedule(optimizer, "cosine", 100, 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with_schedule(optimizer, "cosine", 10, 40)


def test_json_lines_that_end_in_txt_are_said(tmp_path):
    (tmp_path / "a.txt").write_text('{"sentence": "fine"}\n{"sentence": "bad"}\n')
    with pytest.raises(ValueError, match=r"a\.txt holds JSON objects.*end in \.jsonl"):
        read_table(tmp_path / "a.txt", ["sentence"])
    (tmp_path / "b.txt").write_text("[a line in brackets]\n7\n")
    assert [row["sentence"] for _, row in read_table(tmp_path / "b.txt", ["sentence"])] == [
        "[a line in brackets]",
        "7",
    ]


def test_a_training_says_its_classes_when_it_starts(monkeypatch, tmp_path):
    """Two spellings of one label are seen before the training, not after it."""
    said = []
    monkeypatch.setattr(cli, "rank_zero_info", said.append)
    monkeypatch.setattr(cli.RecipeCLI, "_run_subcommand", lambda self, verb: None)
    table = tmp_path / "a.csv"
    table.write_text("sentence,label\n" + "".join(f"s,{k}\n" for k in ("big", "big ", *range(10))))
    flags = [f"--data.train={table}", "--model.architecture=bert", "--model.pretrained=false"]
    cli.main(["fit", "-c", str(TEXT), *flags, "--data.tokenizer=null", "--trainer.logger=false"])
    names = ", ".join(f"'{number}'" for number in range(10))
    assert f"classes: {names}, 2 more" in said


@pytest.fixture
def one_class(tmp_path):
    (tmp_path / "cats").mkdir()
    for place in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / "cats" / f"{place}.png")
    return tmp_path


def test_plan_lists_all_unreadable_images(one_class):
    (one_class / "dogs").mkdir()
    Image.new("RGB", (8, 8)).save(one_class / "dogs" / "0.png")
    for name in ("cats/bad.png", "dogs/worse.jpg"):
        (one_class / name).write_bytes(b"no image")
    flags = [f"--data.root={one_class}"]
    missing = [one for one in files(str(FOLDER), "paper", flags, True) if "missing" in one]
    assert len(missing) == 2 and "bad.png" in missing[0] and "worse.jpg" in missing[1]
    assert not [one for one in files(str(FOLDER), "paper", flags) if "missing" in one]
