"""records.zip: another machine goes on where a run ended, and trains no trial twice."""

import contextlib
import json
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes import experiment_plan, runner
from recipes.records import read_record
from recipes.results import Row, read
from recipes.runner import main
from tests.recipes.fake_trainings import experiment, look


def chosen(run):
    """Two trials, and a training at the better rate for each seed."""
    trials = [run.stage(f"t{i}", "matvit", varied={"model.lr": 10.0**-i}) for i in (1, 2)]
    for seed in run.seeds:
        best = run.best(trials, "val/accuracy", ["model.lr"], mode="max")
        final = run.stage("final", "matvit", seed, settings=best)
        run.measure("look", seed, look, {"final": final})


def moved(run):
    """The records of a run, whose folder is moved out of the way."""
    file = Path(run.options.out, "kept.zip")
    file.write_bytes((run.out / "records.zip").read_bytes())
    shutil.rmtree(run.out)
    return file


def test_more_seeds_on_another_machine_repeat_nothing(go, trainings, monkeypatch, capsys):
    table = read(go(declare=chosen).out)
    file = moved(go(declare=chosen))
    monkeypatch.setattr(experiment_plan, "show", lambda run: None)
    go("--seeds", "2", "--records", str(file), "--plan", declare=chosen)
    said = capsys.readouterr().out
    assert "seed 0: final: finished" in said and "seed 1: final: to do" in said
    assert trainings.names == ["t1", "t2"]  # seed 0's is the first trial, as long and of its seed
    run = go("--seeds", "2", "--records", str(file), declare=chosen)
    assert trainings.names == ["t1", "t2", "final"]
    assert "--model.lr=0.1" in trainings.calls[-1] and "--seed_everything=1" in trainings.calls[-1]
    assert read(run.out)[lambda rows: rows.seed == 0].equals(table)
    # the file of that run has both, and a third machine has nothing left to do
    run = go("--seeds", "2", "--records", str(moved(run)), declare=chosen)
    assert len(trainings.calls) == 3 and set(read(run.out).seed) == {0, 1}
    assert not list(run.out.rglob("*.ckpt"))


def test_a_folder_of_other_settings_makes_way_for_the_records(go, trainings):
    """Before, the records were said to be there, and all was trained again."""
    file = moved(go(declare=chosen))
    go("--model.weight_decay", "0.5", declare=chosen)
    trained = len(trainings.calls)
    run = go("--records", str(file), declare=chosen)
    assert len(trainings.calls) == trained and len(read(run.out))
    go("--model.weight_decay", "0.5", declare=chosen)  # which the folder put aside has
    assert len(trainings.calls) == trained


def test_a_plan_beside_a_run_unpacks_nothing(go, trainings, monkeypatch, capsys):
    file = moved(go(declare=chosen))
    monkeypatch.setattr(experiment_plan, "show", lambda run: None)

    @contextlib.contextmanager
    def refused(run):
        raise ValueError(f"{run.out} is in use by another run")
        yield

    monkeypatch.setattr(runner, "locked", refused)
    run = go("--records", str(file), "--plan", declare=chosen)
    said = " ".join(capsys.readouterr().out.split())
    assert "is in use by another run; the plan is that of the folder, without" in said
    assert "seed 0: final: to do" in said and not run.out.exists()
    with pytest.raises(ValueError, match="is in use by another run$"):
        go("--records", str(file), declare=chosen)


def test_what_reads_a_checkpoint_that_did_not_come_has_it_trained_again(
    go,
    trainings,
):
    file = moved(go(declare=chosen))

    def more(run):
        chosen(run)
        run.measure("more", 0, look, {"trial": run.nodes[run.out / "seed0" / "t2"]})

    run = go("--records", str(file), declare=more)
    assert trainings.names == ["t1", "t2", "t2"]
    assert read_record(run.out / "seed0" / "t1")["files"] is False
    assert (run.out / "seed0" / "t2" / "checkpoints" / "last.ckpt").is_file()


def write_files(m):
    (m.folder / "small.json").write_text("[1, 2]")
    (m.folder / "second.bin").write_bytes(bytes(m.settings["size"]))
    yield Row(row="a", metric="size", value=m.settings["size"])


@pytest.mark.parametrize("size", [10, 2**20 + 1])
def test_files_that_others_need_come_unless_they_are_large(go, trainings, size):
    def declare(run):
        a = run.stage("a", "matvit")
        made = run.measure("made", 0, write_files, {"a": a}, {"size": size})
        for seed in run.seeds:
            for name, file in {"b": "small.json", "c": "second.bin"}.items():
                run.stage(name, "matvit", seed, varied={"model.init_from": made / file})

    file = moved(go(declare=declare))
    with zipfile.ZipFile(file) as archive:
        names = {name for name in archive.namelist() if "/made/" in name}
        record = json.loads(archive.read("paper-name/tiny/seed0/made/node.json"))
    expected = {"node.json", "results.csv", "small.json"} | (
        {"second.bin"} if size == 10 else set()
    )
    assert {name.rpartition("/")[2] for name in names} == expected
    assert record["files"] == (size == 10)
    del trainings.calls[:]
    go("--seeds", "2", "--records", str(file), declare=declare)
    assert trainings.names == (["b", "c"] if size == 10 else ["a", "b", "c"])


def test_a_published_report_is_written_again(go, trainings, tmp_path, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "recipes.paper.name", SimpleNamespace(EXPERIMENT=experiment(chosen))
    )
    first = go("--seeds", "1", declare=chosen)
    command = f"python -m recipes.paper.name --out {tmp_path} --seeds 2"
    run = go("--records", str(moved(first)), "--seeds", "2", declare=chosen)
    assert run.command == command  # it gives the same table without the records
    published = tmp_path / "published"
    published.mkdir()
    for name in ("results.csv", "records.zip"):
        shutil.copy(run.out / name, published)
    before = (run.out / "report.md").read_text()
    shutil.rmtree(run.out)
    main([str(published)])
    assert (published / "report.md").read_text() == before and "chosen in trials" in before
    assert not run.out.exists() and len(trainings.calls) == 3


@pytest.mark.parametrize("missing", ["weights/tiny", "weights/other"])
def test_records_say_which_weights_are_missing(go, trainings, tmp_path, monkeypatch, missing):
    """Before, they had "no part of this run", or the trials were missing in the report."""

    def declare(run):
        for name in ("tiny", "other"):
            stage = run.stage(name, "matvit", varied={"model.init_from": f"weights/{name}"})
            run.measure(f"look at {name}", 0, look, {name: stage})

    monkeypatch.setitem(
        sys.modules, "recipes.paper.name", SimpleNamespace(EXPERIMENT=experiment(declare))
    )
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "other"):
        Path("weights", name).mkdir(parents=True)
        Path("weights", name, "model.safetensors").write_text("weights")
    run = go(declare=declare)
    published = tmp_path / "published"
    published.mkdir()
    for name in ("results.csv", "records.zip"):
        shutil.copy(run.out / name, published)
    main([str(published)])
    shutil.rmtree(missing)
    with pytest.raises(FileNotFoundError, match=rf"made with {missing}, not .*`make weights` br"):
        main([str(published)])


def draw(m):
    (m.folder / "picture.png").write_text("a picture that its licence may forbid to publish")
    yield Row(row="a", metric="size", value=1.0)


def test_files_that_no_setting_names_are_not_in_it(go, trainings):
    run = go(declare=lambda run: run.measure("drawn", 0, draw))
    with zipfile.ZipFile(run.out / "records.zip") as archive:
        names = [name.rpartition("/")[2] for name in archive.namelist()]
    assert names == ["run.json", "node.json", "results.csv"]


def test_records_of_other_settings_or_no_records_are_refused(go, trainings, tmp_path):
    file = moved(go(declare=chosen))
    count = len(trainings.calls)
    with pytest.raises(ValueError, match=r"kept.zip has no part of this run: another experiment"):
        go("--records", str(file), "--model.weight_decay", "0.5", declare=chosen)
    for name in ("kept.txt", "missing.zip"):
        (tmp_path / "kept.txt").write_text("no archive")
        with pytest.raises(ValueError, match=rf"{name}: expected a records.zip of a run"):
            go("--records", str(tmp_path / name), declare=chosen)
    assert len(trainings.calls) == count
    assert not list(tmp_path.rglob(".lock"))  # nor a run's empty folder


def test_a_shorter_trial_or_another_seed_is_not_adopted(go, trainings):
    def declare(run):
        trials = [
            run.stage(f"t{i}", "matvit", settings={"trainer.max_epochs": 1, "model.lr": 10.0**-i})
            for i in (1, 2)
        ]
        best = run.best(trials, "val/accuracy", ["model.lr"])
        run.stage("final", "matvit", settings=best)
        run.stage("final", "matvit", 1, settings={"trainer.max_epochs": 1, **best})
        run.stage("same", "matvit", settings={"trainer.max_epochs": 1, **best})
        run.stage("after", "matvit", varied={"model.init_from": trials[0]}, settings=best)

    run = go(declare=declare)
    assert sorted(trainings.names) == ["after", "final", "final", "t1", "t2"]
    for name in ("same", "t1"):
        folder = run.out / "seed0" / name
        assert (folder / "checkpoints" / "last.ckpt").is_file() and (folder / "node.json").is_file()
    assert go(declare=declare) and len(trainings.calls) == 5


def test_a_training_is_adopted_where_files_cannot_have_two_names(go, trainings, monkeypatch):
    """As on exFAT and some network drives."""

    def refused(source, target):
        raise PermissionError(1, "Operation not permitted", source)

    monkeypatch.setattr("os.link", refused)
    run = go(declare=chosen)
    assert trainings.names == ["t1", "t2"]
    final, trial = (run.out / "seed0" / name / "checkpoints/last.ckpt" for name in ("final", "t1"))
    assert final.read_bytes() == trial.read_bytes()
