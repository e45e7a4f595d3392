import subprocess
import time

import pytest
import torch

from recipes import machine
from recipes.machine import OthersAtWork, own_time, processor_time, ratio, rounds
from recipes.records import Finished, read_record, write_record
from recipes.work import timed

BUSY = "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"


def test_time_of_started_processes_is_own(python=("python", "-c", BUSY)):
    own, busy = own_time(), processor_time()
    subprocess.run(python, check=True)
    assert own_time() - own > 0.35
    assert processor_time() - busy > 0.35


def test_a_program_that_was_not_started_here_is_another(tmp_path):
    file = tmp_path / "done"
    others = OthersAtWork()
    # its shell ends first, so that it is nobody's child
    subprocess.run(["sh", "-c", f"(python -c '{BUSY}'; touch {file}) &"], check=True)
    while not file.exists():
        time.sleep(0.05)
    passed = time.monotonic() - others.start[0]
    assert others.share() * passed * machine.os.cpu_count() > 0.35


@pytest.mark.parametrize("share, alone", [(0.01, True), (0.2, False)])
def test_seconds_of_a_shared_machine_are_not_reported(tmp_path, monkeypatch, share, alone):
    monkeypatch.setattr("recipes.machine.OthersAtWork.share", lambda self: share)
    write_record(tmp_path, {"fingerprint": "x", "finished": False, "seconds": 1.0})
    with timed(tmp_path):
        pass
    assert read_record(tmp_path)["alone"] is alone
    assert (Finished(tmp_path, 0).seconds is not None) is alone
    monkeypatch.setattr("recipes.machine.OthersAtWork.share", lambda self: 0.0)
    with timed(tmp_path):  # a second process does not make the first one's time better
        pass
    assert read_record(tmp_path)["alone"] is alone


def test_rounds_are_in_turns_and_at_least_three():
    called = []
    candidates = {name: (lambda name=name: called.append(name)) for name in "ab"}
    measured = rounds(candidates, 5, 0.0, torch.device("cpu"))
    assert called == ["a", "b"] * 4  # the first round warms up
    assert [list(took) for took in measured] == [["a", "b"]] * 3
    assert len(rounds(candidates, 2, 0.0, torch.device("cpu"))) == 2


def test_a_ratio_is_taken_within_each_round():
    measured = [{"a": 1.0, "b": 2.0}, {"a": 10.0, "b": 10.0}, {"a": 1.0, "b": 3.0}]
    assert ratio(measured, "b", "a") == 2.0
