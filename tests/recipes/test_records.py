"""What a finished node's records give."""

import math
import os

import pytest

from recipes.records import best, fingerprint, read_history


@pytest.mark.parametrize(("mode", "expected"), [("max", 0.9), ("min", 0.5)])
def test_a_value_that_is_no_number_is_never_the_best(mode, expected):
    assert best([math.nan, 0.5, 0.9], mode) == expected
    assert best([0.5, math.nan, 0.9], mode) == expected
    assert math.isinf(best([math.nan], mode)) and (best([math.nan], mode) < 0) == (mode == "max")


def test_steps_that_a_killed_process_logged_too_far_count_once(tmp_path):
    for number, steps in enumerate([(0, 10, 20, 30), (20, 30, 40)]):
        (tmp_path / f"log{number}").mkdir()
        lines = [f"{step},{number}.{step}" for step in steps]
        text = "\n".join(["step,loss", *lines])
        (tmp_path / f"log{number}" / "metrics.csv").write_text(text)
    assert read_history(tmp_path)["step"] == [0, 10, 20, 30, 40]
    assert read_history(tmp_path)["loss"] == [0.0, 0.1, 1.2, 1.3, 1.4]


@pytest.mark.parametrize("setting", ["{}", "local-dir:{}", ["{}", "other"]])
def test_a_replaced_file_changes_the_fingerprint(tmp_path, setting):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a")
    place = str(tmp_path) if setting == "local-dir:{}" else str(file)
    value = setting.format(place) if isinstance(setting, str) else [place, "other"]
    before = fingerprint({"model": {"source": value}}, 0, {})
    os.utime(file, (1, 1))  # a copy of it on another machine has another date
    assert fingerprint({"model": {"source": value}}, 0, {}) == before
    file.write_bytes(b"b")
    assert fingerprint({"model": {"source": value}}, 0, {}) != before
