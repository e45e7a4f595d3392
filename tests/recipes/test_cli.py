"""The command line: what the YAML says is what runs, and a slip in it is named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from lightning_modules.matformer import MatViT
from recipes.cli import _fit_parser, _parse, grid, layers, main, parse, presets
from recipes.ending import ending

MATFORMER = Path(__file__).resolve().parents[2] / "recipes" / "matformer"
STAGE = ["-c", str(MATFORMER / "matvit.yaml")]
BASE = STAGE[1]
PLAIN = ["-c", str(MATFORMER.parent / "vera" / "text.yaml")]
MODEL = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}


def run(subcommand, folder, *overrides, callbacks=()):
    return main(
        [
            *(subcommand, *STAGE, "--preset", "tiny"),
            f"--model.init_args.model_args={json.dumps(MODEL)}",
            "--data.init_args.classes=[3,5,7]",
            "--data.init_args.batch_size=16",
            "--trainer.max_epochs=1",
            "--trainer.check_val_every_n_epoch=1",
            "--trainer.limit_train_batches=2",
            "--trainer.enable_progress_bar=false",
            f"--trainer.default_root_dir={folder}",
            f"--checkpoint.dirpath={folder}",
            *overrides,
        ],
        callbacks,
    )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run("fit", folder)


def test_fit_trains_and_leaves_a_checkpoint(fitted):
    folder, cli = fitted
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == 2
    assert cli.trainer.callback_metrics["val/accuracy_S"] >= 0


def test_the_data_say_how_many_classes_there_are(fitted):
    folder, cli = fitted
    assert cli.model.model.get_classifier().out_features == 3
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    assert checkpoint["hyper_parameters"]["num_classes"] == 3


def test_the_config_beside_a_run_makes_the_same_run(fitted):
    _, cli = fitted
    saved = Path(cli.trainer.log_dir) / "config.yaml"
    again = main(["fit", "-c", str(saved)])
    for name, value in cli.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name


def test_validate_scores_a_checkpoint_as_fit_did(fitted):
    folder, cli = fitted
    scored = run("validate", folder, f"--ckpt_path={folder / 'last.ckpt'}").trainer.callback_metrics
    expected = {k: v for k, v in cli.trainer.callback_metrics.items() if k.startswith("val/")}
    assert scored == expected and len(scored) == 17
    assert scored["val/accuracy"] == scored["val/accuracy_XL"]
    tested = run("test", folder, f"--ckpt_path={folder / 'last.ckpt'}").trainer.callback_metrics
    assert tested == {k.replace("val/", "test/"): v for k, v in expected.items()}


def test_predict_gives_the_logits_of_the_largest(fitted):
    folder, cli = fitted
    arguments = [f"--ckpt_path={folder / 'last.ckpt'}", "--return_predictions=true"]
    logits = torch.cat(run("predict", folder, *arguments).trainer.predict_loop.predictions)
    labels = torch.tensor([label for _, label in cli.datamodule.val_set.items])
    accuracy = (logits.argmax(-1) == labels).float().mean()
    torch.testing.assert_close(accuracy, cli.trainer.callback_metrics["val/accuracy_XL"])


def test_the_last_checkpoint_is_the_last_one_when_the_best_is_kept_too(tmp_path):
    run(
        *("fit", tmp_path, "--trainer.max_epochs=3", "--model.init_args.lr=0"),
        *("--checkpoint.monitor=val/accuracy", "--checkpoint.mode=max"),
    )
    steps = {
        file.name: torch.load(file, weights_only=True)["global_step"]
        for file in tmp_path.glob("*.ckpt")
    }
    assert steps == {"last.ckpt": 6, "epoch=0-step=2.ckpt": 2}


@pytest.mark.parametrize("monitor", [[], ["--checkpoint.monitor=val/accuracy"]], ids=["", "best"])
def test_the_last_checkpoint_is_of_the_end_of_training(tmp_path, monitor):
    """Also when it is saved every so many steps, and where the folder has an older one."""
    every = ["--checkpoint.every_n_train_steps=4", "--checkpoint.every_n_epochs=null", *monitor]
    for steps in (6, 7):
        run("fit", tmp_path, *every, "--trainer.max_epochs=-1", f"--trainer.max_steps={steps}")
        assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == steps
    assert not list(tmp_path.glob("last-*"))


def test_an_interrupted_run_continues_in_a_folder_that_was_moved(tmp_path):
    run("fit", tmp_path / "a", "--trainer.max_epochs=1")
    (tmp_path / "a").rename(tmp_path / "b")
    last = tmp_path / "b" / "last.ckpt"
    run("fit", tmp_path / "b", "--trainer.max_epochs=2", f"--ckpt_path={last}")
    assert torch.load(last, weights_only=True)["global_step"] == 4


def test_a_finished_run_that_is_resumed_in_another_folder_names_the_best_without_score(tmp_path):
    """Lightning reloads the best checkpoint's path, but not its score."""
    best = "--checkpoint.monitor=val/accuracy"
    with pytest.warns(UserWarning, match="with the lowest val/accuracy is kept as the best: set"):
        run("fit", tmp_path / "a", best)
    again = run("fit", tmp_path / "b", best, f"--ckpt_path={tmp_path / 'a' / 'last.ckpt'}")
    lines = ending(again.trainer, again.model).splitlines()
    assert f"best checkpoint: {tmp_path / 'a' / 'epoch=0-step=2.ckpt'}" in lines


@pytest.mark.parametrize("monitor", [[], ["--checkpoint.monitor=val/accuracy"]], ids=["", "best"])
def test_epochs_without_validation_leave_a_checkpoint_too(tmp_path, monitor, monkeypatch):
    """A run that is killed before its first validation loses one epoch, not all."""
    monkeypatch.setattr(MatViT, "on_train_epoch_start", stopped_in_epoch_2, raising=False)
    with pytest.raises(InterruptedError):
        run(
            *("fit", tmp_path, "--trainer.max_epochs=3", *monitor),
            "--trainer.check_val_every_n_epoch=3",
        )
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4


def test_a_chosen_time_of_saving_holds_for_the_last_checkpoint_too(tmp_path, monkeypatch):
    monkeypatch.setattr(MatViT, "on_train_epoch_start", stopped_in_epoch_2, raising=False)
    with pytest.raises(InterruptedError):
        run(
            *("fit", tmp_path, "--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=3"),
            *("--checkpoint.monitor=val/accuracy", "--checkpoint.save_on_train_epoch_end=false"),
        )
    assert not list(tmp_path.glob("*.ckpt"))  # nothing had been validated


def stopped_in_epoch_2(module):
    if module.current_epoch == 2:
        raise InterruptedError


def test_on_resume_the_yaml_has_the_last_word(fitted, tmp_path):
    folder, cli = fitted
    cli = run(
        "fit",
        tmp_path,
        f"--ckpt_path={folder / 'last.ckpt'}",
        "--trainer.max_epochs=2",
        "--model.init_args.idle_tail=moving",
    )
    assert cli.trainer.global_step == 4
    assert cli.model.hparams.idle_tail == "moving"
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["hyper_parameters"]
    assert saved["idle_tail"] == "moving"


def test_init_from_starts_a_new_run_and_is_not_in_its_checkpoint(fitted, tmp_path):
    folder, cli = fitted
    last = folder / "last.ckpt"
    new = run(
        "fit", tmp_path, f"--model.init_args.init_from={last}", "--model.init_args.lr=1.0e-12"
    )
    assert new.trainer.global_step == 2
    for name, value in cli.model.state_dict().items():
        torch.testing.assert_close(new.model.state_dict()[name], value)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["hyper_parameters"]
    assert "init_from" not in saved


@pytest.mark.parametrize(
    ("stage", "key"),
    [
        ({"model": {"init_args": {"learning_rate": 0.1}}}, "learning_rate"),
        ({"data": {"init_args": {"batchsize": 8}}}, "batchsize"),
        ({"trainer": {"epochs": 3}}, "epochs"),
        ({"checkpoints": {"save_last": False}}, "checkpoints"),
    ],
)
def test_an_unknown_key_in_a_stage_is_named(stage, key, tmp_path):
    (tmp_path / "stage.yaml").write_text(yaml.safe_dump(stage))
    with pytest.raises(ValueError, match=f"{key}.* is no setting") as wrong:
        main(["fit", *STAGE, "--preset", "tiny", "-c", str(tmp_path / "stage.yaml")])
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("--model.lr=fast", "model.lr is fast: expected float"),
        ("--model.init_args.lr=fast", "model.lr is fast: expected float"),
        ("--model.joint=median", "model.joint is 'median': expected 'mean' or 'sum' or null"),
        ("--model.lrr=3", "model.lrr is no setting: --model.help lists those that there are"),
        ("--model.betas=3", "model.betas is 3: expected list"),
        ("--data=datamodules.NoSuchData", "data names 'datamodules.NoSuchData': module 'datamo"),
        ("--data.batch_size=8.5", "data.batch_size is 8.5: expected int"),
        ("--trainer.max_epochs=1e1", "trainer.max_epochs is 10.0: expected int or null"),
        ("--seed_everything=x", "seed_everything is x: expected bool or int"),
        ("--trainer.precision=31", "trainer.precision is 31: expected 64, 32, 16 or 'transformer"),
        ("--trainer.epochs=3", "--trainer.epochs=3 is no setting"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(wrong, said):
    with pytest.raises(ValueError) as error:
        main(["fit", *STAGE, "--preset", "tiny", wrong])
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


def test_an_unknown_argument_of_a_method_is_named_with_the_known_ones():
    stage = ["-c", str(MATFORMER.parent / "apet/decoder.yaml"), "--preset", "tiny"]
    said = "model.method_args.bugdet is no setting: expected some of d_init, .*budget, operations"
    with pytest.raises(ValueError, match=said):
        main(["fit", *stage, "--model.method_args", '{"bugdet": 100}'])


@pytest.mark.parametrize(
    ("asked", "shown"), [("--model.help", "MatViT"), ("--data.help", "Digits")]
)
def test_help_on_the_classes_that_the_file_names(asked, shown, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", *STAGE, "--preset", "tiny", asked])
    assert stop.value.code == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["fit", "validate"])
def test_the_help_of_a_verb_lists_the_preset(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    usage, _, text = capsys.readouterr().out.partition("options:")[0].partition("\n\n")
    assert usage == f"usage: python -m recipes {verb} -c FILE [--preset NAME] [--SETTING VALUE ...]"
    assert "--preset NAME one of the presets" in text


def test_print_config_prints_what_would_run(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["fit", *STAGE, "--preset", "tiny", "--model.init_args.lr=0.5", "--print_config"])
    assert stop.value.code == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["model"]["init_args"]["lr"] == 0.5
    assert shown["model"]["init_args"]["model_args"]["embed_dim"] == 32
    assert shown["checkpoint"]["save_last"] is True


def test_lightnings_own_strategy_of_fsdp2_is_refused():
    own = json.dumps({"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"})
    with pytest.raises(ValueError, match="wrong parameters .* use --trainer.strategy fsdp2"):
        main(["fit", "-c", BASE, "--preset", "tiny", f"--trainer.strategy={own}"])


def test_one_seed_for_the_whole_run():
    config = parse(BASE, "tiny", ["--seed_everything=7"])
    assert (config.seeding.seed, config.data.init_args.seed) == (7, 7)


@pytest.mark.parametrize(
    "given",
    [
        [*STAGE, "--preset", "tiny"],
        ["--preset=tiny", *STAGE],
        [f"-c={BASE}", "--preset=tiny"],
        [f"--config={BASE}", "--preset", "tiny"],
    ],
)
def test_a_preset_is_laid_over_its_stage(given, capsys):
    with pytest.raises(SystemExit):
        main(["fit", *given, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["gradient_clip_val"] == 1.0  # from the top
    assert printed["data"]["class_path"].endswith("DigitsData")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([*STAGE, "--preset", "tinny"], "unknown preset 'tinny': .*matvit.yaml has tiny, small, p"),
        (["--preset", "tiny"], "--preset tiny: no -c FILE is given"),
        ([*STAGE, "--preset"], "--preset has no value"),
        ([*PLAIN, "--preset", "tiny"], "--preset tiny: .*text.yaml has no presets"),
        (["-c", "nowhere.yaml"], "nowhere.yaml is not there: expected the YAML file of a stage"),
    ],
)
def test_a_preset_that_is_not_there(given, said):
    with pytest.raises((ValueError, OSError), match=said):
        main(["fit", *given])


def test_presets_lie_over_the_top_as_a_second_file_would():
    assert presets(BASE) == ["tiny", "small", "paper"]
    paper, tiny = parse(BASE), parse(BASE, "tiny")
    assert paper.trainer.max_epochs != tiny.trainer.max_epochs
    assert paper.data.class_path.endswith("ImageNetData")
    assert tiny.data.class_path.endswith("DigitsData")
    for config in (paper, tiny):  # what tiny does not mention stays
        assert config.trainer.gradient_clip_val == 1.0
        assert config.model.init_args.fractions == [0.125, 0.25, 0.5, 1.0]


def test_a_preset_may_extend_another(tmp_path):
    file = tmp_path / "stage.yaml"
    file.write_text(
        "a: 1.0e-3\nb: {x: 1, y: 2}\nc: 5\npresets:\n"
        "  # said of it\n  one: {a: 2, b+: {y: 3}}\n  two: {extends: one, c: null}\n"
    )
    assert presets(file) == ["one", "two", "paper"]
    assert grid(file) == {"a": 0.001, "b": {"x": 1, "y": 2}, "c": 5}
    assert grid(file, "two") == {"a": 2, "b": {"x": 1, "y": 3}, "c": None}
    assert grid(file, "two", {"d": 1})["d"] == 1
    assert "1.0e-3" in layers(file)[0]  # as it is written: 1e-3 is for jsonargparse to read


def test_every_stage_is_parsed_as_if_it_were_the_first():
    """One parser reads them all; neither another stage's settings nor an error stays in it."""
    glue = MATFORMER.parent / "vera" / "glue.yaml"
    others = (BASE, "paper"), (str(MATFORMER / "matlm.yaml"), "small"), (str(glue), "tiny")
    alone = []
    for file, preset in others:
        _fit_parser.cache_clear()
        _parse.cache_clear()
        alone.append(parse(file, preset, ["--model.lr=0.5"]))
    _parse.cache_clear()
    with pytest.raises(ValueError, match="no_such"):
        parse(BASE, "tiny", ["--trainer.max_epochs=7", "--model.no_such=1"])
    for (file, preset), first in [*zip(others, alone, strict=True)] * 2:
        assert parse(file, preset, ["--model.lr=0.5"]) == first
        parse(file, preset, ["--trainer.max_epochs=7", "--model.lr=0.25"])
        _parse.cache_clear()


def test_parsing_leaves_the_random_generators_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    parse(BASE, "tiny", ["--model.lr=0.125"])
    assert torch.equal(torch.get_rng_state(), before)


def test_parse_builds_nothing_and_takes_overrides():
    config = parse(BASE, overrides=["--data.init_args.root=/nowhere", "--model.init_args.lr=0.25"])
    assert config.data.init_args.root == "/nowhere"
    assert config.model.init_args.lr == 0.25


# what Lightning's annotations are where typing has Union[float, int] in its cache already
FLOATS_FIRST = """
import inspect, cpu_torchvision, lightning
hints = inspect.unwrap(lightning.Trainer.__init__).__annotations__
hints["limit_train_batches"] = float | int | None
from recipes.cli import parse
for value in ("1", "1.0", "0.5", "20"):
    settings = parse({file!r}, "tiny", [f"--trainer.limit_train_batches={{value}}"])
    print(settings.trainer.limit_train_batches)
"""


def test_one_batch_is_not_all_of_them_whatever_order_the_types_come_in():
    code = FLOATS_FIRST.format(file=BASE)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1.0", "0.5", "20"]


@pytest.mark.parametrize(
    "given, read",
    [("all-linear", "all-linear"), ("[query,value]", ["query", "value"]), ("null", None)],
)
def test_targets_are_a_list_or_the_word_that_peft_has(given, read):
    config = parse(Path(PLAIN[1]), overrides=[f"--model.targets={given}", "--data.train=x.csv"])
    assert config.model.init_args.targets == read
