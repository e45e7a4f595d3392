"""The benchmark runs and compares equal budgets."""

from benchmarks import apet_step


def test_quick(capsys):
    apet_step.main(["--quick"])
    lines = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("| 64 tokens")
    ]
    assert [line.split(" | ")[2] for line in lines] == ["add", "concat", "plug", "add+concat+plug"]
    assert {line.split(" | ")[1] for line in lines} == {"256 (r = 1)"}
