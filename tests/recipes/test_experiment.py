"""What an experiment declares: flags, fingerprints, rows, and values that other stages give."""

from pathlib import Path

import pytest

from datamodules import corpus
from recipes.experiment import Experiment
from recipes.runner import command_line

MATFORMER = Path(__file__).resolve().parents[2] / "recipes" / "matformer"


def made(*arguments, config="matvit"):
    """A run of an experiment without nodes."""
    experiment = Experiment(
        "paper.name", str(MATFORMER / "x.py"), config, "About.", lambda run: None, lambda t, r: []
    )
    return command_line(experiment, [*arguments])


def test_command_line(capsys):
    run = made("--preset", "small", "--seeds", "2", "--data.root", "/d", "--model.lr=1")
    assert (run.preset, list(run.seeds), str(run.out)) == ("small", [0, 1], "runs/paper-name/small")
    assert run.flags.of("matvit") == ["--data.root=/d", "--model.lr=1"]
    with pytest.raises(SystemExit):
        made("--help")
    shown = capsys.readouterr().out
    for option in ("--preset", "--seeds", "--rows", "--only", "--jobs", "--out", "--plan"):
        assert option in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--preset", "huge"], "unknown preset 'huge': .* has tiny, small, paper"),
        (["--seeds", "0"], "--seeds 0: expected at least 1"),
        (["--jobs", "0"], "--jobs 0: expected at least 1"),
        (["--model.lr"], "--model.lr has no value"),
        (["model.lr", "3"], "'model.lr' is no flag: expected --key value"),
        (["--seed_everything", "3"], "--seed_everything is set by the experiment: --seeds N"),
        (["--ckpt_path=x"], "--ckpt_path is set by the experiment: the same command continues"),
        (["--matvit.data.init_args.seed=1"], "is set by the experiment: --seeds N"),
        (["-c", "x.yaml"], "is set by the experiment: flags change settings"),
        (["--trainer.default_root_dir=x"], "is set by the experiment: --out DIR"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        made(*arguments)


def settings(run, stage):
    return run.nodes[run.out / "seed0" / stage].parsed()


def test_a_flag_wins_over_files_and_settings():
    run = made("--model.lr", "0.5", "--matvit.model.warmup_steps", "3")
    run.stage("a", "matvit", settings={"model.lr": 0.1, "model.momentum": 0.7})
    run.stage("b", "pretrain")
    run.check()
    a, b = (settings(run, name).model.init_args for name in "ab")
    assert (a.lr, a.momentum, a.warmup_steps) == (0.5, 0.7, 3)
    assert b.lr == 0.5 and b.warmup_steps != 3


@pytest.mark.parametrize(
    "flag",
    [
        "--model.rank=3",
        "--model.init_args.rank=3",
        '--model={"class_path": "x", "init_args": {"rank": 3}}',
        '--model.init_args={"rank": 3}',
        "--matvit.model.rank=3",
        "--model.rank+=3",
    ],
)
def test_a_flag_that_names_what_is_varied_is_refused(flag):
    run = made(flag)
    run.rows(["a"])
    run.stage("a", "matvit", varied={"model.init_args.rank": 8})
    with pytest.raises(ValueError, match="this experiment varies model.rank; choose rows with --r"):
        run.check()


def test_a_flag_of_another_file_may_name_what_is_varied():
    run = made("--pretrain.model.lr=3")
    run.stage("a", "matvit", varied={"model.lr": 8})
    run.stage("b", "pretrain")
    run.check()
    assert settings(run, "a").model.init_args.lr == 8
    assert settings(run, "b").model.init_args.lr == 3


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--model.no_such=1", "matvit.yaml: model.no_such is no setting"),
        ("--models.lr=1", "--models.lr=1 is no setting: expected one that begins with trainer"),
        ("--no_such=1", "matvit.yaml: --no_such=1 is no setting"),
        ("--model.lr=fast", "matvit.yaml: model.lr is fast: expected float"),
    ],
)
def test_an_unknown_flag_is_refused(flag, said):
    run = made(flag)
    run.stage("a", "matvit")
    run.stage("b", "pretrain")
    with pytest.raises(ValueError, match=said):
        run.check()


def test_what_is_derived_is_computed_from_the_users_flags():
    run = made("--trainer.max_epochs=12")
    run.stage("a", "matvit", derived={"trainer.max_epochs": lambda s: s.trainer.max_epochs // 4})
    assert settings(run, "a").trainer.max_epochs == 3


def test_rows():
    assert made().rows(["a", "b"]) == ["a", "b"]
    assert made().rows(["a", "b"], ["b"]) == ["b"]
    assert made("--rows", "a").rows(["a", "b"], ["b"]) == ["a"]
    with pytest.raises(ValueError, match="--rows has 'c': expected some of a, b"):
        made("--rows", "c").rows(["a", "b"])
    with pytest.raises(ValueError, match="this experiment has no rows to choose"):
        made("--rows", "c").check()


def chain(run):
    """Two stages, the second from the weights of the first, and a measurement of both."""
    a = run.stage("first", "matvit", settings={"model.lr": 0.25})
    b = run.stage("second", "matvit", varied={"model.init_from": a})
    run.measure("look", 0, chain, {"a": a, "b": b})
    return run


def test_only_takes_what_it_needs_with_it():
    assert [node.name for node in chain(made("--only", "sec*")).chosen()] == ["first", "second"]
    assert len(chain(made()).chosen()) == 3
    with pytest.raises(ValueError, match="--only x fits no part of the experiment: first, second"):
        chain(made("--only", "x")).chosen()


def test_a_stage_as_a_value_is_its_last_checkpoint():
    run = chain(made())
    last = run.out / "seed0" / "first" / "checkpoints" / "last.ckpt"
    assert settings(run, "second").model.init_args.init_from == str(last)
    assert [node.name for node in run.nodes[run.out / "seed0" / "look"].waits_for()] == [
        "first",
        "second",
    ]


def prints(*arguments, build=chain):
    return {node.name: node.fingerprint for node in build(made(*arguments)).nodes.values()}


def test_a_fingerprint_is_of_the_settings_and_of_what_a_stage_starts_from():
    before = prints()
    assert prints("--trainer.devices=1", "--trainer.accelerator", "cpu") == before
    two = prints("--trainer.devices=2", "--trainer.strategy=ddp")  # batches are twice as large
    assert all(two[name] != before[name] for name in before)
    assert prints("--trainer.devices=0,1") == prints("--trainer.num_nodes=2") == two
    assert prints("--data.num_workers=3", "--out", "elsewhere", "--jobs", "2") == before
    assert prints("--model.init_args.lr=0.25", "--data.batch_size=128")["first"] == before["first"]
    changed = prints("--model.lr=0.125")
    assert all(changed[name] != before[name] for name in before)

    def other_first(run):
        a = run.stage("first", "matvit", settings={"model.lr": 0.25, "model.momentum": 0.5})
        run.stage("second", "matvit", varied={"model.init_from": a})
        return run

    changed = prints(build=other_first)
    assert changed["second"] != before["second"]


def test_external_weights_are_part_of_the_fingerprint(tmp_path):
    weights = tmp_path / "model.safetensors"

    def build(run):
        run.stage("a", "matvit", settings={"model.init_from": str(tmp_path)})
        return run

    without = prints(build=build)
    weights.write_text("weights")
    one = prints(build=build)
    weights.write_text("others!!")
    assert len({found["a"] for found in (without, one, prints(build=build))}) == 3


def test_text_that_depends_on_the_installed_packages_is_part_of_the_fingerprint(monkeypatch):
    """Otherwise one table could have rows of two texts, by --records or after a pip install."""

    def of(*arguments):
        run = made("--data.max_bytes", "1000", *arguments, config="matlm")
        return run.stage("a", "matlm").fingerprint

    before, plain = of(), of("--data.source=files", "--data.train=x.txt")
    assert of() == before
    monkeypatch.setattr(corpus, "python_digest", lambda max_bytes: f"{max_bytes} other bytes")
    assert of() != before and of("--data.source=files", "--data.train=x.txt") == plain


def test_a_value_of_other_stages_stands_for_itself_until_it_is_there():
    def build(run, metric="val/accuracy"):
        trials = [run.stage(f"t{i}", "matvit", settings={"model.lr": 10.0**-i}) for i in (1, 2)]
        run.stage("final", "matvit", settings=run.best(trials, metric, ["model.lr"]))
        return run

    run = build(made())
    assert settings(run, "final").model.init_args.lr == 0.1
    final = run.nodes[run.out / "seed0" / "final"]
    assert [node.name for node in final.waits_for()] == ["t1", "t2"]
    before = prints(build=build)
    assert prints(build=lambda run: build(run, "val/loss"))["final"] != before["final"]
    changed = prints("--model.momentum=0.1", build=build)
    assert changed["final"] != before["final"]


def test_two_stages_of_one_name_must_be_the_same():
    run = made()
    assert run.stage("a", "matvit") is run.stage("a", "matvit")
    with pytest.raises(ValueError, match="declared twice"):
        run.stage("a", "matvit", settings={"model.lr": 3.0})
