"""Executors of an experiment's nodes: in this process, or in a pool of worker processes.

An executor takes a task, which is a call of a top-level function, and returns a future of its
result. Another backend is a class with `jobs`, `submit` and `stop`, such as cluster.py's.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from lightning.pytorch.utilities.exceptions import SIGTERMException

from recipes.messages import sentence

ProgressCallback = Callable[[str], None]  # gets a short text on a task's progress
STARTING = threading.Lock()  # one process starts at a time, since each start changes os.environ


@dataclass
class Task:
    """A call of `function(argument, on_progress)`.

    Attributes:
        log: file for what the task prints if it runs in another process.
    """

    function: Callable[[Any, ProgressCallback], Any]
    argument: Any
    log: Path


class TaskFailed(Exception):
    """A task raised an exception; the message gives the reason in one sentence."""


class Executor(Protocol):
    """Executes tasks, at most `jobs` at once."""

    jobs: int

    def submit(self, task: Task, on_progress: ProgressCallback) -> "Future[Any]":
        """Start a task; its future raises TaskFailed if it fails."""

    def stop(self) -> None:
        """End all tasks at once."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within the context SIGTERM raises SIGTERMException instead of ending the process at once.

    So tasks in other processes are ended, and records.zip is written. Without effect outside the
    main thread, where no handler can be set, and while a Lightning trainer has a handler of its
    own, which ends the training between two steps.
    """

    def end(*_: Any) -> None:
        if signal.getsignal(signal.SIGTERM) is end:  # Lightning's handler calls this one, too
            raise SIGTERMException

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class InProcess:
    """One task after the other, in this process."""

    jobs = 1

    def submit(self, task: Task, on_progress: ProgressCallback) -> "Future[Any]":
        """Execute the task before returning."""
        future: Future[Any] = Future()
        try:
            future.set_result(task.function(task.argument, on_progress))
        except SIGTERMException:
            raise  # this process has to end and must not start the next task
        except (Exception, SystemExit) as error:
            if os.environ.get("RECIPES_TRACEBACK"):
                raise
            future.set_exception(TaskFailed(_reason(error)))
        return future

    def stop(self) -> None:
        """There is nothing to end."""


class LocalPool:
    """Executes tasks in parallel, in worker processes on this machine that share its cores.

    A worker is started when it is first needed and then reused, so that it imports the libraries
    once. It ends with this process, even if this process is killed.

    Args:
        jobs: number of worker processes.
        threads: torch threads of each; by default OMP_NUM_THREADS, or the cores divided by jobs.
        gpus: names of GPUs, which the processes get in turn, one each; all see all if it is empty.
    """

    def __init__(self, jobs: int, threads: int | None = None, gpus: Sequence[str] = ()):
        self.jobs, self.threads, self.gpus = jobs, threads or threads_of(jobs), gpus
        self.waiting = ThreadPoolExecutor(jobs)  # one thread for each process waits for its results
        self.idle: SimpleQueue[tuple[int, _Worker | None]] = SimpleQueue()
        self.workers: list[_Worker] = []
        for place in range(jobs):
            self.idle.put((place, None))

    def submit(self, task: Task, on_progress: ProgressCallback) -> "Future[Any]":
        """Hand the task to a free process."""
        return self.waiting.submit(self._execute, task, on_progress)

    def _execute(self, task: Task, on_progress: ProgressCallback) -> Any:
        place, worker = self.idle.get()
        if worker is None or not worker.process.is_alive():
            gpu = self.gpus[place % len(self.gpus)] if self.gpus else None
            worker = _Worker(self.threads, gpu)
            self.workers.append(worker)
        try:
            return worker.execute(task, on_progress)
        finally:
            self.idle.put((place, worker))

    def stop(self) -> None:
        """Kill the processes, and what they have started."""
        self.waiting.shutdown(wait=False, cancel_futures=True)
        for worker in self.workers:
            worker.kill()


class _Worker:
    """A worker process, which executes one task after the other."""

    def __init__(self, threads: int, gpu: str | None = None):
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        variables = {"OMP_NUM_THREADS": str(threads)}
        if gpu is not None:
            variables["CUDA_VISIBLE_DEVICES"] = gpu
        with STARTING, _environment(**variables):
            self.process = context.Process(target=_worker_loop, args=(child, threads), daemon=False)
            self.process.start()
        child.close()

    def execute(self, task: Task, on_progress: ProgressCallback) -> Any:
        """Send the task, pass on its progress messages, and return its result."""
        try:
            self.pipe.send(task)
            while True:
                kind, content = self.pipe.recv()
                if kind == "progress":
                    on_progress(content)
                elif kind == "failed":
                    raise TaskFailed(content)
                else:
                    return content
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            raise TaskFailed(f"its process ended with exit code {code}; see {task.log}") from None

    def kill(self) -> None:
        """End the process and all that it started."""
        if self.process.pid is not None and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # the worker has not called setsid yet
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.join()


def _worker_loop(pipe: Connection, threads: int) -> None:
    """Execute the tasks that come through the pipe, until it is closed."""
    with contextlib.suppress(PermissionError):
        os.setsid()  # Ctrl-C then reaches only the parent, which ends this process group
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(threads)
    while True:
        try:
            task: Task = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(task, lambda text: pipe.send(("progress", text))))


def attempt(task: Task, on_progress: ProgressCallback) -> tuple[str, Any]:
    """Execute a task in a worker process; what it prints goes to its log.

    Returns:
        "result" and what the task returned, or "failed" and the reason in one sentence.
    """
    task.log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _output_to(task.log):
            try:
                return "result", task.function(task.argument, on_progress)
            except BaseException:
                traceback.print_exc()
                raise
    except (Exception, SystemExit) as error:
        return "failed", f"{_reason(error)} (full output: {task.log})"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Send what this process and those it starts print to a file."""
    sys.stdout.flush(), sys.stderr.flush()
    originals = os.dup(1), os.dup(2)
    with log.open("a", buffering=1) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            yield
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            for stream, original in zip((1, 2), originals, strict=True):
                os.dup2(original, stream)
                os.close(original)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables within a `with` block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def visible_gpus() -> list[str]:
    """Names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES."""
    import torch

    if not (count := torch.cuda.device_count()):
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",")[:count] if given else [str(place) for place in range(count)]


def threads_of(jobs: int) -> int:
    """Torch threads of each of `jobs` processes: OMP_NUM_THREADS, or the cores divided by jobs."""
    return int(os.environ.get("OMP_NUM_THREADS", max(1, _cores() // jobs)))


def _reason(error: BaseException) -> str:
    message = sentence(error)
    if message is not None:
        return message
    if isinstance(error, SystemExit):
        return f"it ended with exit code {error.code}"
    return f"{type(error).__name__}: {error}"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
