"""Ray as an executor, with a fake `ray`; test_runner.py has a test with Ray itself."""

import contextlib
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipes.cluster import LOCK, RayCluster
from recipes.executors import Task, TaskFailed
from recipes.results import read

ROOT = Path(__file__).resolve().parents[2]


class RayError(Exception):
    """The base of Ray's own errors."""


class Crashed(RayError):
    """A worker process has died."""


class Cancelled(RayError):
    """A task was ended by `cancel`."""


@dataclass(eq=False)
class Reference:
    """A task that Ray was handed."""

    function: Any
    given: tuple[Any, ...]


class FakeRay(ModuleType):
    """What cluster.py calls of Ray. `get` executes a task, in another working directory."""

    def __init__(self):
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.resources, self.given, self.options = {"CPU": 4.0}, {}, {}
        self.running = threading.Semaphore(0)  # one for each task that was begun
        self.ends, self.ended = [], threading.Event()  # calls of cancel and shutdown

    def init(self, **given):
        self.given = given

    def cluster_resources(self):
        return self.resources

    def remote(self, **options):
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda *given: Reference(function, given))

    def get(self, reference):
        task = reference.given[0]
        self.running.release()
        if task.function is crashes:
            raise Crashed
        if task.function is never_ends:
            self.ended.wait(60)
            raise Cancelled
        with contextlib.chdir("/"):
            return reference.function(*reference.given)

    def cancel(self, reference, force=False):
        self.ends.append((reference.given[0].argument, force))

    def shutdown(self):
        self.ends.append("shutdown")
        self.ended.set()


@pytest.fixture
def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return fake


def doubled(argument, on_progress):
    os.write(1, b"doubles\n")
    return 2 * argument


def refuses(argument, on_progress):
    raise ValueError(f"{argument} is wrong")


def crashes(argument, on_progress): ...


def never_ends(argument, on_progress): ...


def test_a_result_or_the_reason_of_a_failure_comes_back(ray, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the command's working directory, and so the task's
    cluster = RayCluster("auto", 1)

    def result(function):
        return cluster.submit(Task(function, 3, Path("a/node.log")), print).result(60)

    assert result(doubled) == 6
    assert (tmp_path / "a" / "node.log").read_text() == "doubles\n"
    with pytest.raises(TaskFailed, match=r"^3 is wrong \(full output: a/node.log\)$"):
        result(refuses)
    with pytest.raises(TaskFailed, match=r"^its process .* ended \(Crashed\); see a/node.log$"):
        result(crashes)


def test_stop_ends_what_runs_and_begins_nothing_more(ray, tmp_path):
    cluster = RayCluster("auto", 2)

    def submit(function, argument):
        return cluster.submit(Task(function, argument, tmp_path / "a" / "node.log"), print)

    assert submit(doubled, 0).result(60) == 0
    with pytest.raises(TaskFailed):
        submit(crashes, 1).result(60)
    running, waiting = [submit(never_ends, n) for n in (2, 3)], submit(never_ends, 4)
    for _ in range(4):
        assert ray.running.acquire(timeout=60)
    cluster.stop()
    assert sorted(ray.ends[:-1]) == [(2, True), (3, True)] and ray.ends[-1] == "shutdown"
    for future in running:
        with pytest.raises(TaskFailed, match="Cancelled"):
            future.result(60)
    assert waiting.cancelled()


def other_process_waits(folder, on_progress):
    """Whether another process has to wait for the lock in a node's folder."""
    code = "import fcntl, sys; "
    code += "fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", code, str(folder / LOCK)]
    done = subprocess.run(command, capture_output=True, text=True)
    return "BlockingIOError" in done.stderr


def test_a_task_locks_its_nodes_folder(ray, tmp_path):
    task = Task(other_process_waits, tmp_path / "a", tmp_path / "a" / "node.log")
    assert RayCluster("auto", 1).submit(task, print).result(60)
    assert not other_process_waits(tmp_path / "a", print)


@pytest.mark.parametrize(("resources", "gpus"), [({"CPU": 4.0}, 0), ({"CPU": 4.0, "GPU": 2.0}, 1)])
def test_what_ray_is_told(ray, monkeypatch, resources, gpus):
    given = {"RECIPES_DATA": "/data", "HF_HUB_OFFLINE": "1", "TOKEN": "secret", "PYTHONPATH": "/b"}
    monkeypatch.setattr(os, "environ", given)
    ray.resources = resources
    RayCluster("10.0.0.1:6379", 3)
    passed = {"RECIPES_DATA": "/data", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    passed["PYTHONPATH"] = f"{ROOT}{os.pathsep}/b"
    common = {"runtime_env": {"env_vars": passed}, "log_to_driver": False}
    assert ray.given == {"address": "10.0.0.1:6379", **common}
    assert ray.options == {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0}
    RayCluster("local", 3)
    assert ray.given == {"address": "local", **common, "num_cpus": 3, "include_dashboard": False}
    assert given.get("RAY_USAGE_STATS_ENABLED") == given.get("RAY_worker_niceness") == "0"


def test_an_experiment_on_a_cluster_has_the_table_of_one_without(ray, go, trainings, tmp_path):
    table = read(go("--cluster", "auto").out)
    assert sorted(trainings.names) == ["a", "b", "c"] and ray.ends == ["shutdown"]
    assert list(table.row) == ["a", "a", "b", "b"] and list(table.value) == [1, 0.25, 2, 0.008]
