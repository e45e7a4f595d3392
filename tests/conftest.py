"""What every test stands on: no network, one thread for each worker, folders for data and runs."""

import cpu_torchvision  # noqa: F401  (first: see its docstring)

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Before anything imports huggingface_hub or matplotlib, which read these once, at import;
# subprocesses that tests start inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked workers would each warn about it

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # for subprocesses; for this one torch has read it already
    torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


class Elsewhere(torch.Tensor):
    """A tensor that stands for one on another device: until moved it refuses to be computed with.

    So a batch that nobody moves to the model's device fails without a GPU, too.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.to:
                return args[0].as_subclass(torch.Tensor).to(*args[1:], **(kwargs or {}))
            if func.__name__ == "__get__":  # an attribute, such as the shape
                return func(*args, **(kwargs or {}))
        raise RuntimeError(f"{func.__name__} got a tensor that was not moved to the device")


@pytest.fixture
def elsewhere() -> Callable[[torch.Tensor], Elsewhere]:
    """Makes a tensor stand for one on another device."""
    return lambda tensor: tensor.as_subclass(Elsewhere)


@pytest.fixture(scope="session")
def recipes_data() -> Path:
    """The folder of real data sets, each in its official layout."""
    named = os.environ.get("RECIPES_DATA")
    if not named:
        pytest.skip("RECIPES_DATA is not set: it names the folder that holds the real data sets")
    folder = Path(named)
    if not folder.is_dir():
        pytest.fail(f"RECIPES_DATA names {folder}, which is not a folder")
    return folder


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder: what a run writes to `runs/` lands there, not in the repository.

    `python -m recipes…` in a subprocess finds this repository from there.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    return tmp_path
