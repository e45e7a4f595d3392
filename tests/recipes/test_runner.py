"""The runner: finished nodes are skipped, killed ones continue, jobs run side by side."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from recipes import experiment_plan, runner, work
from recipes.cli import parse
from recipes.executors import InProcess
from recipes.experiment import Experiment
from recipes.messages import ExperimentFailed
from recipes.records import read_history, read_record, write_record
from recipes.results import read
from recipes.runner import run_experiment
from tests.recipes.fake_trainings import (
    MATFORMER,
    Trainings,
    chain,
    experiment,
    look,
    report,
    stage_of,
)

PATIENCE = 900  # seconds after which a subprocess counts as hung, on the slowest machine


def test_everything_runs_once_and_ends_in_table_and_report(go, trainings):
    run = go("--seeds", "2")
    assert trainings.names == ["a", "b", "c"] * 2
    table = read(run.out)
    assert list(table.row) == ["a", "a", "b", "b"] * 2 and list(table.seed) == [0] * 4 + [1] * 4
    assert list(table.value[:4]) == [1, 0.25, 2, 0.008] and set(table.stage) == {"look"}
    assert (run.out / "report.md").read_text() == "# Report\n\n8 numbers\n"
    last = run.out / "seed0" / "a" / "checkpoints" / "last.ckpt"
    assert (run.out / "seed0" / "look" / "seen.txt").read_text() == str({"start": str(last)})
    go("--seeds", "2")
    assert len(trainings.calls) == 6
    assert read(run.out).equals(table)


def test_only_some_parts_still_end_in_a_report(go, trainings, capsys):
    run = go("--only", "a,c")
    assert trainings.names == ["a", "c"] and not (run.out / "report.md").exists()
    assert "Nothing was measured, so there is no report." in capsys.readouterr().out
    assert go("--only", "look").out == run.out and trainings.names == ["a", "c", "b"]

    def more(run):
        chain(run)
        run.stage("d", "matvit", settings={"model.lr": 0.125})

    (run.out / "report.md").unlink()
    go("--only", "look", declare=more)
    assert trainings.names == ["a", "c", "b"]
    assert (run.out / "report.md").read_text() == "# Report\n\n4 numbers\n"


def test_what_a_stage_is_called_with(go, trainings):
    run = go("--model.betas=[0.5,0.6]", "--trainer.accelerator", "cpu")
    call = trainings.calls[1]
    folder = run.out / "seed0" / "b"
    file = run.out / "stages" / "matvit.yaml"
    assert call[:5] == ["fit", "-c", str(file), "--preset", "tiny"]
    assert file.read_text() == (MATFORMER / "matvit.yaml").read_text()
    assert call.index("--model.betas=[0.5,0.6]") < call.index(
        f"--model.init_from={run.out / 'seed0' / 'a' / 'checkpoints' / 'last.ckpt'}"
    )
    assert f"--checkpoint.dirpath={folder / 'checkpoints'}" in call
    assert "--seed_everything=0" in call and not any("--ckpt_path" in a for a in call)


@pytest.mark.parametrize(
    "flags, kept",
    [
        ((), {"last.ckpt"}),
        (("--checkpoint.monitor=val/loss",), {"last.ckpt", "epoch=0-step=1.ckpt"}),
        (("--checkpoint.save_top_k=-1",), {"last.ckpt", "epoch=0-step=1.ckpt"}),
    ],
)
def test_a_finished_stage_keeps_no_second_copy_of_its_checkpoint(go, trainings, flags, kept):
    folder = go(*flags).out / "seed0" / "a" / "checkpoints"
    assert {file.name for file in folder.iterdir()} == kept


@pytest.mark.parametrize("fails", [RuntimeError("killed"), KeyboardInterrupt()])
def test_a_killed_stage_continues_from_its_last_checkpoint(go, trainings, fails):
    trainings.fails = fails
    with pytest.raises((ExperimentFailed, KeyboardInterrupt)):
        go()
    trainings.fails = None
    count = len(trainings.calls)
    run = go()
    last = run.out / "seed0" / "a" / "checkpoints" / "last.ckpt"
    assert f"--ckpt_path={last}" in trainings.calls[count]
    assert len(read_history(run.out / "seed0" / "a")["loss"]) == 2


def test_sigterm_ends_the_experiment_and_starts_nothing_else(go, trainings):
    """Lightning ends the stage only, by an exception of its own."""
    trainings.fails = SIGTERMException()
    with pytest.raises(SIGTERMException):
        go()
    assert trainings.names == ["a"]


@pytest.mark.parametrize("jobs", [2, 1])
def test_sigterm_leaves_the_records(go, trainings, monkeypatch, tmp_path, jobs):
    class Executor(InProcess):
        """One of either kind: SIGTERM comes while the second task runs, outside a trainer."""

        stopped = False

        def submit(self, task, on_progress):
            if trainings.calls:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(10)
            return super().submit(task, on_progress)

        def stop(self):
            self.stopped = True

    def not_caught(*_):
        raise AssertionError("SIGTERM would have ended the process")

    executor = Executor()
    executor.jobs = jobs
    monkeypatch.setattr(runner, "executor_of", lambda run: executor)
    before = signal.signal(signal.SIGTERM, not_caught)
    try:
        with pytest.raises(SIGTERMException):
            go("--only", "a,c")
        assert signal.getsignal(signal.SIGTERM) is not_caught
    finally:
        signal.signal(signal.SIGTERM, before)
    assert trainings.names == ["a"] and executor.stopped
    [records] = tmp_path.rglob("records.zip")
    with zipfile.ZipFile(records) as archive:
        assert any(name.endswith("a/node.json") for name in archive.namelist())


def test_a_killed_stage_that_kept_its_weights_only_starts_again(go, trainings):
    trainings.fails, trainings.weights_only = RuntimeError("killed"), True
    with pytest.raises(ExperimentFailed):
        go("--only", "a")
    trainings.fails = None
    run = go("--only", "a")
    assert not any("--ckpt_path" in a for a in trainings.calls[1])
    assert read_history(run.out / "seed0" / "a")["loss"] == [2.0]


def test_a_failed_stage_stops_what_needs_it_and_nothing_else(go, monkeypatch):
    train = Trainings()

    def broken(args, callbacks=()):
        if stage_of(args) == "a":
            raise FileNotFoundError("/nowhere is not a folder: set --data.root")
        train(args)

    monkeypatch.setattr(work, "run_stage", broken)
    with pytest.raises(ExperimentFailed) as error:
        go()
    assert train.names == ["c"]
    assert str(error.value) == (
        "a (seed 0): /nowhere is not a folder: set --data.root. Not run because of it: b, look. "
        "All else is finished; the same command continues."
    )


def test_a_value_that_cannot_be_read_stops_what_needs_it_and_nothing_else(go, trainings):
    def unreadable(done):
        raise ValueError("no such number")

    def declare(run):
        seen = run.measure("seen", 0, look, {"a": run.stage("a", "matvit")})
        lr = run.value(seen, unreadable, "a number", like=0.1)
        run.stage("b", "matvit", settings={"model.lr": lr})
        run.stage("c", "matvit", settings={"model.lr": 0.5})

    with pytest.raises(ExperimentFailed, match=r"b \(seed 0\): no such number"):
        go(declare=declare)
    assert trainings.names == ["a", "c"]


def test_missing_data_of_a_measurement_are_refused_before_anything_trains(go, trainings):
    def declare(run):
        a = run.stage("a", "matvit")
        run.measure("look", 0, look, {"a": a}, missing="x.jsonl is not there: fetch it")

    with pytest.raises(FileNotFoundError, match="x.jsonl is not there: fetch it"):
        go(declare=declare)
    assert not trainings.calls
    go("--only", "a", declare=declare)  # nothing that needs it
    assert trainings.names == ["a"]


def test_changed_settings_begin_anew_and_the_old_folder_is_kept(go, trainings, capsys):
    go()
    for lr in ("0.5", "0.75"):
        run = go("--model.lr", lr)
    folder = run.out / "seed0"
    assert {"a.old1", "a.old2", "a", "look.old2"} <= {path.name for path in folder.iterdir()}
    assert all((folder / name / "checkpoints" / "last.ckpt").is_file() for name in ("a.old1", "a"))
    assert "its settings have changed" in capsys.readouterr().out
    assert set(read(run.out).value[read(run.out).metric == "lr"]) == {0.75}


def test_the_old_table_stays_until_there_is_a_new_row(go, trainings):
    out = go().out
    before = [(out / name).read_text() for name in ("results.csv", "run.json")]
    trainings.fails = RuntimeError("no memory")
    with pytest.raises(ExperimentFailed):
        go("--model.lr", "0.5")
    assert [(out / name).read_text() for name in ("results.csv", "run.json")] == before
    trainings.fails = None
    go("--model.lr", "0.5")
    assert "--model.lr 0.5" in (out / "run.json").read_text()
    assert set(read(out).value[read(out).metric == "lr"]) == {0.5}


def test_settings_of_before_find_their_results_again(go, trainings):
    table = read(go().out)
    go("--model.lr", "0.5")
    count = len(trainings.calls)
    assert read(go().out).equals(table) and len(trainings.calls) == count
    go("--model.lr", "0.5")
    assert len(trainings.calls) == count


def test_a_comment_or_a_device_restarts_nothing(go, trainings, tmp_path):
    stage = tmp_path / "recipes" / "matvit.yaml"
    stage.parent.mkdir()
    text = (MATFORMER / "matvit.yaml").read_text()
    here = Experiment("n", str(stage.with_suffix(".py")), "matvit", "", chain, report)
    for content, flags in (
        (text, []),
        (f"# a comment\n{text}", []),
        (text.replace("presets:", "\n\npresets:  # another"), []),
        (text, ["--data.num_workers=2", "--trainer.accelerator=cpu"]),
    ):
        stage.write_text(content)
        run_experiment(here, ["--out", str(tmp_path), *flags])
    assert len(trainings.calls) == 3
    stage.write_text(text.replace("lr: 8.0e-3", "lr: 9.0e-3"))
    run_experiment(here, ["--out", str(tmp_path)])
    assert len(trainings.calls) > 3


def test_a_file_edited_meanwhile_does_not_change_what_runs(trainings, tmp_path, monkeypatch):
    stage = tmp_path / "recipes" / "matvit.yaml"
    stage.parent.mkdir()
    text = (MATFORMER / "matvit.yaml").read_text()
    stage.write_text(text)
    contents = []

    def train_and_edit(args, callbacks=()):
        contents.append(Path(args[2]).read_text())
        stage.write_text(text.replace("lr: 8.0e-3", "lr: 9.0e-3"))
        trainings(args)

    monkeypatch.setattr(work, "run_stage", train_and_edit)
    here = Experiment("n", str(stage.with_suffix(".py")), "matvit", "", chain, report)
    run = run_experiment(here, ["--out", str(tmp_path)])
    assert contents == [text] * 3
    assert set(read(run.out).value[read(run.out).metric == "lr"]) == {0.25, 0.008}


def test_a_stage_whose_checkpoint_is_gone_is_trained_again(go, trainings, capsys):
    run = go()
    (run.out / "seed0" / "a" / "checkpoints" / "last.ckpt").unlink()
    go()
    assert trainings.names[3:] == ["a"]
    assert (run.out / "seed0" / "a.old1").is_dir()
    said = " ".join(capsys.readouterr().out.split())
    assert "seed 0: a: its checkpoint is gone, starting anew" in said


def test_what_another_experiment_measured_is_in_its_own_table(go, trainings):
    def declare(run):
        other = run.sibling("paper.other")
        for one in (run, other):
            trained = one.stage("a", "matvit", settings={"model.lr": 0.25})
            one.measure("look", 0, look, {one.name: trained})

    run = go(declare=declare)
    assert set(read(run.out)["row"]) == {"paper.name"}
    assert (run.out.parents[1] / "paper-other" / "tiny" / "seed0" / "look").is_dir()


def test_stages_of_several_devices_are_not_given_one_gpu_each(monkeypatch):
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["0", "1"])
    for flags, gpus in (((), ["0", "1"]), (("--trainer.devices=2",), [])):
        run = runner.command_line(experiment(), ["--jobs", "2", *flags])
        assert runner.executor_of(run).gpus == gpus


def test_a_stage_takes_one_device_unless_told_otherwise(go, trainings):
    """With `auto`, Lightning would start the whole experiment once for each GPU."""
    go()
    assert all("--trainer.devices=1" in call for call in trainings.calls)


def test_ones_own_logger_stays_beside_the_table_s(go, trainings):
    kind = "lightning.pytorch.loggers.TensorBoardLogger"
    mine = json.dumps({"class_path": kind, "init_args": {"save_dir": "x"}})
    for flag in (f"--trainer.logger={mine}", f"--trainer.logger+={mine}"):
        go(flag)
        _, _, file, _, preset, *arguments = trainings.calls[-1]
        settings = parse(file, preset, arguments)
        given = settings.trainer.logger
        kinds = [one.class_path.rpartition(".")[2] for one in given]
        assert kinds == ["TensorBoardLogger", "CSVLogger"]


def test_a_checkpoint_in_shards_is_refused_and_kept(go, trainings):
    folder = go("--only", "a").out / "seed0" / "a" / "checkpoints"
    (folder / "last.ckpt").unlink()
    (folder / "last.ckpt").mkdir()
    write_record(folder.parent, {**read_record(folder.parent), "finished": False})
    with pytest.raises(ExperimentFailed, match="folder of shards.*strategy fsdp2"):
        go("--only", "a")
    assert (folder / "last.ckpt").is_dir()


@pytest.mark.parametrize("flag", ["checkpoint.save_last", "trainer.enable_checkpointing"])
def test_checkpoints_cannot_be_switched_off(go, flag):
    with pytest.raises(ValueError, match="continued and measured from their last checkpoint"):
        go(f"--{flag}", "false")


def test_the_time_of_a_killed_process_is_unknown(tmp_path):
    write_record(tmp_path, {"seconds": 0.0})
    with pytest.raises(RuntimeError), work.timed(tmp_path):
        raise RuntimeError
    assert not read_record(tmp_path)["running"]
    write_record(tmp_path, {**read_record(tmp_path), "alone": True, "running": True})  # SIGKILL
    with work.timed(tmp_path):
        assert read_record(tmp_path)["running"] and read_record(tmp_path)["made"]
    record = read_record(tmp_path)
    assert record["finished"] and not record["alone"] and not record["running"]


def test_several_devices_train_in_a_process_of_their_own(go, trainings, monkeypatch):
    commands = []

    def run(command):
        commands.append(command)
        sys.exit(2)

    monkeypatch.setattr(work, "run_alone", run)
    with pytest.raises(ExperimentFailed, match="a .seed 0., c .seed 0.: it ended with exit code 2"):
        go("--trainer.devices", "2")
    assert not trainings.calls and commands[0][1:4] == ["-m", "recipes", "fit"]


def test_a_process_of_its_own_ends_with_the_experiment():
    command = [
        sys.executable,
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(60)",
    ]
    script = f"from recipes import work; work.run_alone({command})"
    outer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    inner = int(outer.stdout.readline())
    outer.terminate()
    outer.wait(30)
    with pytest.raises(ProcessLookupError):
        os.kill(inner, 0)


@pytest.mark.parametrize(("code", "raised"), [(143, SIGTERMException), (2, SystemExit)])
def test_a_failure_in_a_process_of_its_own(code, raised):
    with pytest.raises(raised):
        work.run_alone([sys.executable, "-c", f"import os; os._exit({code})"])


def test_a_value_of_finished_stages_reaches_the_next(go, trainings):
    def declare(run):
        trials = [run.stage(f"t{i}", "matvit", settings={"model.lr": 10.0**-i}) for i in (1, 2)]
        seen = run.measure("seen", 0, look, {"one": trials[0]})
        run.stage(
            "final",
            "matvit",
            settings=run.best(trials, "loss", ["model.lr"], mode="max"),
            varied={
                "data.batch_size": run.value(
                    seen, lambda done: int(done.rows.value[0]) + 4, "loss + 4", like=1
                )
            },
        )

    go(declare=declare)
    assert trainings.names == ["t1", "t2", "final"]
    assert "--model.lr=0.01" in trainings.calls[-1]  # the second trial's loss is 2
    assert "--data.batch_size=5" in trainings.calls[-1]
    go(declare=declare)
    assert len(trainings.calls) == 3


def test_plan_runs_nothing(go, trainings, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(experiment_plan, "show", lambda run: print("planned", len(run.nodes)))
    go("--plan")
    assert not trainings.calls and not list(tmp_path.iterdir())
    said = " ".join(capsys.readouterr().out.split())
    assert "seed 0: look: to do; after a, b" in said and "planned 4" in said


# The rest trains for real, in processes of their own.

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
sys.path.insert(0, {folder!r})
from jobs_experiment import EXPERIMENT
from recipes.messages import console
from recipes.runner import run_experiment
if __name__ == "__main__":
    console(lambda: run_experiment(EXPERIMENT))
"""
MODULE = """
import time
from pathlib import Path
from recipes.cli import parse
from recipes.experiment import Experiment
from recipes.results import Row
from lightning.pytorch import Callback  # after recipes, which let a CPU torch import torchvision

class Hold(Callback):
    '''Holds a training after its first two epochs for good, if "hold" is there at its start.'''
    def on_fit_start(self, trainer, module):
        self.held = Path("hold").exists()
    def on_train_epoch_start(self, trainer, module):
        while self.held and trainer.current_epoch == 2:
            time.sleep(1)

def look(m):
    for name, stage in m.stages.items():
        for metric, value in stage.metrics.items():
            if metric.startswith("val/"):
                yield Row(row=name, metric=metric, value=value)

def declare(run):
    for seed in run.seeds:
        short = {{"trainer.check_val_every_n_epoch": 1, "data.per_class": 8,
                  "trainer.callbacks": [{{"class_path": "jobs_experiment.Hold"}}]}}
        nested = run.stage("nested", "matvit", seed, settings=short)
        plain = run.stage("plain", "matvit", seed, settings=short,
                          varied={{"model.fractions": None}})
        tuned = run.stage("tuned", "matvit", seed, settings=short,
                          varied={{"model.init_from": nested}})
        run.measure("look", seed, look, {{"nested": nested, "plain": plain, "tuned": tuned}})

EXPERIMENT = Experiment("jobs", {file!r}, "matvit", "", declare, lambda table, run: ["# Jobs"])
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Starts the experiment in a process of its own."""
    paths = [str(MATFORMER.parents[1]), str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "jobs_experiment.py").write_text(MODULE.format(file=str(MATFORMER / "x.py")))
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(tmp_path)))

    def start(*flags):
        command = [sys.executable, str(tmp_path / "script.py"), *flags]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
        )

    return start


@pytest.fixture
def here(script, tmp_path, monkeypatch):
    """Runs the same experiment in this process, whose imports are done, from the same folder."""
    monkeypatch.syspath_prepend(tmp_path)  # its workers start with this one's path
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "jobs_experiment", raising=False)  # another test's
    experiment = importlib.import_module("jobs_experiment").EXPERIMENT
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *flags: run_experiment(experiment, list(flags))
    torch.set_num_threads(threads)


def test_two_jobs_give_the_table_of_one(here):
    tables = []
    for jobs in ("1", "2"):
        run = here("--out", jobs, "--jobs", jobs, "--trainer.max_epochs=2")
        tables.append((run.out / "results.csv").read_bytes())
    assert tables[0] == tables[1] and tables[0].count(b"\n") > 15


# epochs enough to be killed between the first and the last
LONG = ("--trainer.max_epochs=16", "--trainer.log_every_n_steps=6")
LONG += ("--data.per_class=20", "--data.batch_size=32")


def wait_until(condition, process):
    """Wait for a condition that a running process brings about."""
    waited = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None and time.monotonic() < waited
        time.sleep(0.05)


def can_continue(node):
    """Whether a stage's node has a checkpoint to go on from and a log.

    The log's folder comes with its first line, which may be after the first checkpoint, and
    last.ckpt, from which the next run goes on, after the epoch's own.
    """
    return all(list(node.glob(name)) for name in ("checkpoints/last.ckpt", "log*"))


def test_a_second_run_is_refused_and_a_killed_one_continues(script, here, tmp_path):
    first = script("--jobs", "2", *LONG)
    folder = tmp_path / "runs/jobs/tiny"
    nested, lock = folder / "seed0/nested", folder / ".lock"
    wait_until(lambda: lock.is_file() and lock.read_text() == str(first.pid), first)
    first.send_signal(signal.SIGSTOP)  # it must not end before the second asks for the folder
    with pytest.raises(ValueError, match=rf"is in use by another run \(process {first.pid}\)"):
        here(*LONG)
    first.send_signal(signal.SIGCONT)
    wait_until(lambda: can_continue(nested), first)
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(1)
    steps = checkpoint_step(nested)
    time.sleep(1)
    assert checkpoint_step(nested) == steps  # its workers have ended with it
    assert not read_record(nested)["finished"]
    here(*LONG)
    assert read_record(nested)["finished"] and len(list(nested.glob("log*"))) == 2
    assert checkpoint_step(nested) == 16 * 6


def checkpoint_step(folder):
    last = folder / "checkpoints" / "last.ckpt"
    return torch.load(last, weights_only=True)["global_step"] if last.is_file() else None


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install ray")
def test_a_killed_run_on_ray_continues_to_the_table_of_one_job(script, here, tmp_path, capsys):
    """Two workers of a Ray on this machine."""
    ray = ("--cluster", "local", "--jobs", "2", *LONG)
    hold = tmp_path / "hold"
    hold.touch()  # neither training may end while the other's process is still starting
    first = script(*ray)
    folder = tmp_path / "runs/jobs/tiny"
    nested, plain = folder / "seed0/nested", folder / "seed0/plain"
    wait_until(lambda: can_continue(nested) and can_continue(plain), first)
    hold.unlink()
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = script(*ray)  # at once: the lock in a node's folder has to hold it off
    said = second.communicate(timeout=PATIENCE)[0]
    assert second.returncode == 0, said
    for node in (nested, plain):
        assert read_record(node)["finished"] and checkpoint_step(node) == 16 * 6
        assert len(list(node.glob("log*"))) == 2  # it went on, once
    here(*LONG)
    assert capsys.readouterr().out.count("finished before, skipped") == 4
    here(*LONG, "--out", "one")
    tables = [(tmp_path / out / "jobs/tiny/results.csv").read_bytes() for out in ("runs", "one")]
    assert tables[0] == tables[1] and tables[0].count(b"\n") > 3


def test_a_cluster_needs_ray_and_gives_one_device(go, trainings, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match="--cluster local needs Ray, .*: pip install ray$"):
        go("--cluster", "local")
    with pytest.raises(ValueError, match="leave out --trainer.devices, "):
        go("--cluster", "local", "--trainer.devices", "2")
    assert not trainings.calls


def test_ctrl_c_ends_all_and_says_how_to_go_on(script, tmp_path):
    process = script("--jobs", "2", "--trainer.max_epochs=400")
    record = tmp_path / "runs/jobs/tiny/seed0/nested/checkpoints"
    wait_until(lambda: list(record.glob("*.ckpt")), process)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 1 and "interrupted: the same command continues" in said
