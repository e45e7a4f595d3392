"""An experiment whose trainings take no time, for tests of the runner."""

from pathlib import Path

import torch

from recipes.experiment import Experiment
from recipes.results import Row

MATFORMER = Path(__file__).resolve().parents[2] / "recipes" / "matformer"


class Trainings:
    """Stands for recipes.cli.main: records its calls and leaves what a training leaves."""

    def __init__(self):
        self.calls, self.fails, self.weights_only = [], None, False

    def __call__(self, args, callbacks=()):
        self.calls.append(args)
        folder = next(a for a in args if a.startswith("--checkpoint.dirpath=")).split("=")[1]
        checkpoint = Path(folder) / "last.ckpt"
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        beside = {} if self.weights_only else {"optimizer_states": []}
        for name in ("last.ckpt", "epoch=0-step=1.ckpt"):
            torch.save({"state_dict": {}, **beside}, checkpoint.with_name(name))
        log = checkpoint.parents[1] / f"log{len(self.calls)}"
        log.mkdir()
        number = len(self.calls)
        odd = number if number % 2 else "nan"
        (log / "metrics.csv").write_text(f"loss,val/accuracy,val/odd\n{number},0.5,{odd}\n")
        if self.fails:
            raise self.fails

    @property
    def names(self):
        """The stages of the calls."""
        return [stage_of(args) for args in self.calls]


def stage_of(args):
    folder = next(a for a in args if a.startswith("--trainer.default_root_dir="))
    return Path(folder).name


def look(m):
    for name, stage in m.stages.items():
        yield Row(row=name, metric="loss", value=stage.metrics["loss"])
        yield Row(row=name, metric="lr", value=stage.settings.model.init_args.lr)
    (m.folder / "seen.txt").write_text(str(m.settings))


def chain(run):
    for seed in run.seeds:
        a = run.stage("a", "matvit", seed, settings={"model.lr": 0.25})
        b = run.stage("b", "matvit", seed, varied={"model.init_from": a})
        run.stage("c", "matvit", seed, settings={"model.lr": 0.5})
        run.measure("look", seed, look, {"a": a, "b": b}, {"start": a})


def report(table, run):
    return ["# Report", f"{len(table)} numbers"]


def experiment(declare=chain):
    return Experiment("paper.name", str(MATFORMER / "x.py"), "matvit", "About.", declare, report)
