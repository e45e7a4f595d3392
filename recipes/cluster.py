"""Executes the nodes of an experiment as Ray tasks, on a cluster or on this machine alone.

Ray places a task where a CPU is free and, on a cluster with GPUs, a GPU. Every machine of the
cluster needs this repository and the folder of the runs at the same path (a shared file system),
and Python with the same packages, Ray among them.

As without a cluster, a node is started once and a finished one is skipped. Ray ends the tasks of a
killed command within seconds; until then a lock in the node's folder makes the next command's task
wait, so that no stage is ever trained twice at once.
"""

import fcntl
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recipes.executors import ProgressCallback, Task, TaskFailed, attempt

LOCK = ".lock"
PASSED = ("RECIPES_", "HF_")  # environment variables that begin so are passed on to tasks


class RayCluster:
    """Executes tasks in parallel on a Ray cluster; their output goes to their log files.

    Args:
        address: that of a running cluster, "auto" for the one that this machine belongs to, or
            "local", which starts Ray on this machine and stops it with this process.
        jobs: number of tasks at once, at most.

    Raises:
        ValueError: if Ray is not installed.
        OSError: if there is no such cluster.
    """

    def __init__(self, address: str, jobs: int):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's default of 15 starves the workers if other processes keep the machine busy
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            import ray
        except ImportError as error:
            raise ValueError(
                f"--cluster {address} needs Ray, which does not import ({error}): pip install ray"
            ) from None
        variables = {name: v for name, v in os.environ.items() if name.startswith(PASSED)}
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        local: dict[str, Any] = {"num_cpus": jobs, "include_dashboard": False}
        ray.init(
            address=address,
            runtime_env={"env_vars": variables},
            log_to_driver=False,
            **(local if address == "local" else {}),
        )
        self.ray, self.jobs = ray, jobs
        gpus = 1 if ray.cluster_resources().get("GPU") else 0
        # no retries: the next command continues a task whose process has ended
        self.remote = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(execute)
        self.waiting = ThreadPoolExecutor(jobs)  # one thread for each task waits for its result
        self.started: set[Any] = set()

    def submit(self, task: Task, on_progress: ProgressCallback) -> "Future[Any]":
        """Hand the task to Ray; its progress is not reported."""
        return self.waiting.submit(self._execute, task)

    def _execute(self, task: Task) -> Any:
        running = self.remote.remote(task, os.getcwd())
        self.started.add(running)
        try:
            kind, content = self.ray.get(running)
        except self.ray.exceptions.RayError as error:
            reason = f"its process on the cluster ended ({type(error).__name__})"
            raise TaskFailed(f"{reason}; see {task.log}") from None
        finally:
            self.started.discard(running)
        if kind == "failed":
            raise TaskFailed(content)
        return content

    def stop(self) -> None:
        """End the tasks, and Ray if this process started it."""
        self.waiting.shutdown(wait=False, cancel_futures=True)
        for running in list(self.started):
            self.ray.cancel(running, force=True)
        self.ray.shutdown()


def execute(task: Task, folder: str) -> tuple[str, Any]:
    """Execute a task in a Ray worker; see `executors.attempt`.

    Args:
        task: the task.
        folder: the command's working directory, to which the task's paths are relative.
    """
    os.chdir(folder)
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with (task.log.parent / LOCK).open("a") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        return attempt(task, lambda text: None)
