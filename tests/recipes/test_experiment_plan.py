"""An experiment's plan: which stages are measured, what with, and what is said of the rest."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes import experiment_plan, stopwatch
from recipes.experiment import Experiment
from recipes.experiment_plan import grouped, show
from recipes.plan import Plan
from recipes.records import write_record
from recipes.runner import command_line
from recipes.stopwatch import StageProfile

MATFORMER = Path(__file__).resolve().parents[2] / "recipes" / "matformer"
MODEL = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
SMALL = [f"--model.model_args={json.dumps(MODEL)}", "--data.classes=[3,5]"]


def nothing(m):
    yield from ()


def declare(run):
    trials = [run.stage(f"trial{n}", "matvit", 0, settings={"model.lr": 0.1 * n}) for n in (1, 2)]
    best = run.best(trials, "val/loss", ["model.lr"], mode="min")
    for seed in run.seeds:
        wide = run.stage("wide", "matvit", seed, {"model.fractions": None}, best)
        run.stage("next", "matvit", seed, {"model.init_from": wide, "model.fractions": None})
        made = run.measure("made", seed, nothing, {"wide": wide})
        run.stage("last", "matvit", seed, {"model.init_from": made / "weights.pt"})


def planned(tmp_path, *flags):
    experiment = Experiment(
        "paper.name", str(MATFORMER / "x.py"), "matvit", "About.", declare, lambda *_: []
    )
    run = command_line(experiment, ["--out", str(tmp_path), *SMALL, *flags])
    declare(run)
    run.check()
    return run


def stages_of(run):
    return [node for node in run.nodes.values() if hasattr(node, "config")]


@pytest.fixture
def measured(monkeypatch):
    """Stands for recipes.plan.plan: its calls, each of 100 seconds; leaves a checkpoint."""
    calls = []

    def plan(path, preset, arguments, folder):
        calls.append(arguments)
        torch.save({}, folder / "timed.ckpt")
        profile = StageProfile(parameters=(10, 10), examples=64, batch=8, checkpoint=2**30)
        return Plan(profile, 2.0, 16, 8, {"weights": 2**20}, {"training steps": 100.0}, False)

    monkeypatch.setattr(experiment_plan, "plan", plan)
    return calls


def test_stages_that_take_the_same_are_one_group(tmp_path):
    run = planned(tmp_path, "--seeds", "2")
    groups = grouped(stages_of(run), tmp_path)
    named = [[f"{one.name}{one.seed}" for one in group.stages] for group in groups]
    assert named == [
        ["trial10", "trial20"],
        ["wide0", "wide1"],
        ["next0", "next1"],
        ["last0", "last1"],
    ]


def test_what_is_not_there_yet_is_stood_for_or_said(tmp_path, measured, capsys):
    show(planned(tmp_path / "out", "--seeds", "2"), start=8.0)
    said = " ".join(capsys.readouterr().out.split())
    _, wide, later, last = measured
    assert "--model.lr=0.1" in wide  # that of the first trial, until the trials are finished
    [start] = [one for one in later if "init_from" in one]
    assert start.endswith("/1/timed.ckpt")  # what the measured steps of `wide` have left
    assert not any("init_from" in one for one in last)
    assert "last: measured with matvit.yaml's own model.init_from, since made has not" in said
    assert "trial1, …, trial2 2 to do 16 updates of 8 examples, 2.0 epochs of 64" in said
    assert "8 of 8 trainings are to do: 0.22 h (808 s); 2 measurements" in said
    assert not (tmp_path / "out").exists()
    assert not Path(start.partition("=")[2]).exists()


def test_a_measured_checkpoint_goes_once_no_group_to_come_starts_from_it(
    tmp_path, measured, monkeypatch
):
    there, plan = [], experiment_plan.plan

    def looking(path, preset, arguments, folder):
        there.append(sorted(one.parent.name for one in folder.parent.glob("*/timed.ckpt")))
        return plan(path, preset, arguments, folder)

    monkeypatch.setattr(experiment_plan, "plan", looking)
    show(planned(tmp_path), start=0.0)
    # the trials, `wide`, `next` and `last`, which waits for a measurement of `wide` only
    assert there[2] == ["1"]
    assert there[3] == []


def test_what_is_finished_is_not_measured_again(tmp_path, measured, capsys):
    run = planned(tmp_path)
    for stage in stages_of(run)[:3]:  # the trials and `wide`
        (stage.folder / "checkpoints").mkdir(parents=True)
        torch.save({}, stage.folder / "checkpoints" / "last.ckpt")
        (stage.folder / "log0").mkdir()
        loss = 0.5 if stage.name == "trial2" else 1.0
        (stage.folder / "log0" / "metrics.csv").write_text(f"val/loss\n{loss}\n")
        record = {"fingerprint": stage.fingerprint, "finished": True, "seconds": 90.0}
        write_record(stage.folder, record)
    run = planned(tmp_path, "--jobs", "2")
    show(run, start=0.0)
    said = " ".join(capsys.readouterr().out.split())
    later, _ = measured
    [wide] = [stage for stage in stages_of(run) if stage.name == "wide"]
    assert f"--model.init_from={wide.folder}/checkpoints/last.ckpt" in later
    assert "0 to do, 2 finished, which took 180 s" in said
    assert "2 of 5 trainings are to do: 0.06 h (200 s); or 0.03 h (100 s) if 2 run at once" in said
    assert "the finished ones took 0.07 h (270 s)" in said


@pytest.mark.parametrize("free, enough", [(4, True), (2, False)])
def test_room_for_the_checkpoints(tmp_path, measured, monkeypatch, capsys, free, enough):
    usage = SimpleNamespace(free=free * 2**30)
    monkeypatch.setattr(experiment_plan.shutil, "disk_usage", lambda path: usage)
    show(planned(tmp_path, "--only", "trial1,trial2"), start=0.0)
    said = " ".join(capsys.readouterr().out.split())
    # two stages, and the one that runs has a second copy
    assert f"their checkpoints take 3.0 GB of {free}.0 GB that are free" in said
    assert ("too little" not in said) is enough


@pytest.mark.parametrize("megabytes, enough", [(3, True), (2, False)])
def test_memory_of_the_stages_that_run_at_once(
    tmp_path, measured, monkeypatch, capsys, megabytes, enough
):
    pages = {"SC_PAGE_SIZE": 2**10, "SC_PHYS_PAGES": megabytes * 2**10 - 1}
    monkeypatch.setattr(experiment_plan.os, "sysconf", pages.get)
    monkeypatch.setattr(experiment_plan, "visible_gpus", list)
    show(planned(tmp_path, "--only", "trial1,trial2", "--jobs", "8"), start=0.0)
    said = " ".join(capsys.readouterr().out.split())
    # two stages of a megabyte each: no more are left than these
    assert "at once they take up to 0.0 GB of the 0.0 GB of memory that this machine has" in said
    assert ("too little: lower --jobs" not in said) is enough
    show(planned(tmp_path, "--only", "trial1,trial2"), start=0.0)
    assert "at once" not in capsys.readouterr().out


def test_memory_of_stages_that_share_gpus(tmp_path, measured, monkeypatch, capsys):
    memory = SimpleNamespace(total_memory=2**19)
    monkeypatch.setattr(experiment_plan.torch.cuda, "get_device_properties", lambda place: memory)
    monkeypatch.setattr(experiment_plan, "visible_gpus", lambda: ["0", "1"])
    show(planned(tmp_path, "--only", "trial1,trial2", "--jobs", "2"), start=0.0)
    assert "that a GPU has, which is too little" in " ".join(capsys.readouterr().out.split())
    memory.total_memory = 2**20  # one stage each
    show(planned(tmp_path, "--only", "trial1,trial2", "--jobs", "2"), start=0.0)
    said = " ".join(capsys.readouterr().out.split())
    assert "that a GPU has" in said and "too little" not in said


def test_missing_data_are_said_once_and_nothing_is_measured(tmp_path, measured, capsys):
    flags = ["--preset", "paper", "--data.root", str(tmp_path / "no"), "--only", "trial1,wide"]
    run = planned(tmp_path, *flags)
    show(run, start=0.0)
    said = capsys.readouterr().out
    assert not measured
    assert said.count("missing: ") == 1 and "could not be measured" in " ".join(said.split())


def test_missing_data_of_a_measurement_that_has_to_run_are_listed(tmp_path, measured, capsys):
    run = planned(tmp_path, "--only", "trial1,made")
    [made] = [node for node in run.nodes.values() if node.name == "made"]
    made.missing = "questions.jsonl is not there: fetch it"
    show(run, start=0.0)
    assert "missing: questions.jsonl is not there: fetch it" in capsys.readouterr().out
    write_record(made.folder, {"fingerprint": made.fingerprint, "finished": True, "seconds": 1.0})
    assert not run.missing()


def test_a_stage_that_fails_does_not_take_the_others_along(tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(experiment_plan, "plan", fails)
    show(planned(tmp_path, "--only", "trial1"), start=0.0)
    said = " ".join(capsys.readouterr().out.split())
    assert "trial1: not measured: RuntimeError: out of memory" in said
    assert "1 that could not be measured are not included" in said


def test_a_chain_is_measured_for_real(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stopwatch, "QUICK", 0.0)
    monkeypatch.setattr(stopwatch, "EPOCHS", 1)
    show(planned(tmp_path, "--only", "next", "--trainer.max_epochs=1"), start=0.0)
    said = " ".join(capsys.readouterr().out.split())
    assert "not measured" not in said and "without" not in said
    assert "weights: random" in said and "weights: the checkpoint that wide will write" in said
    assert said.count("parameters, all train") == 3 and "activations" in said
