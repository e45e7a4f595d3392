"""What the tests of all experiments ask of a report."""

import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from recipes import plots, results
from recipes.experiment import Experiment, Run


def check_reports_of_parts(experiment: Experiment, run: Run) -> None:
    """A report is written from any part of the table too, which is what `--only` leaves.

    Tries the table without each of its stages, and each stage alone; the same stage of other
    trials, sizes or seeds counts once. Plots are made but not drawn into files, to save time.
    """
    table = results.read(run.out)
    stages = {"".join(c for c in name if not c.isdigit()): name for name in table["stage"]}
    closed = patch.object(plots, "save_plot", lambda figure, *_: plots.plt.close(figure))
    with tempfile.TemporaryDirectory() as folder, closed:
        there = replace(run, out=Path(folder))
        for stage in stages.values():
            for chosen in (table["stage"] == stage, table["stage"] != stage):
                part = table[chosen].reset_index(drop=True)
                if len(part):
                    assert experiment.report(part, there), stage
