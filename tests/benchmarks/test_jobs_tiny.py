"""The benchmark of jobs prints what it measured; its command is one that the recipe takes."""

import re
import subprocess

from benchmarks import jobs_tiny
from recipes.matformer import matvit
from recipes.runner import command_line


def test_it_prints_both_ways_and_their_ratio(monkeypatch, capsys):
    calls = []

    def run(command, check, capture_output, env, cwd):
        calls.append((command, env["OMP_NUM_THREADS"]))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(jobs_tiny.subprocess, "run", run)
    jobs_tiny.main(["--rounds", "2"])
    shown = capsys.readouterr().out
    assert "| 1 job, 2 threads |" in shown and "| 2 jobs, 1 thread each |" in shown
    assert re.search(r"two jobs are \d+\.\d{3} \(.*\) times as fast; goal 1.5", shown)
    assert [threads for _, threads in calls] == ["2", "1"] * 2
    for command, threads in calls[:2]:
        run_of = command_line(matvit.EXPERIMENT, command[3:])
        assert run_of.options.jobs * int(threads) == 2
        matvit.declare(run_of)
        assert sum("independent_" in node.name for node in run_of.nodes.values()) == 4
