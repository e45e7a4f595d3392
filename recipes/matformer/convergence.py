"""How far the independent models' trainings were from convergence."""

from collections.abc import Iterator

from recipes.experiment import Measuring
from recipes.results import Row

INDEPENDENT = "independent"  # the row of models that are trained alone
# Language models trained alone must lose less than this in the last quarter of their training. That
# excludes models that have hardly begun; one with few tokens a parameter may pass, since the
# learning rate falls to the end.
LEARNT = 0.05  # nats


def measure_training(m: Measuring) -> Iterator[Row]:
    """A validation metric of each independent model after each quarter (x) of its training.

    Its change in the last quarter shows how far the training was from convergence. A stage with
    fewer than four validations yields no rows. Settings: `metric`, such as "val/loss", and `row`
    where it is not INDEPENDENT.
    """
    logged, row = m.settings["metric"], m.settings.get("row", INDEPENDENT)
    for name, stage in m.stages.items():
        values = stage.history.get(logged, [])
        for quarter in range(1, 5) if len(values) > 3 else ():
            at = round(len(values) * quarter / 4) - 1
            yield Row(row, logged.replace("/", "_"), values[at], name, x=quarter)
