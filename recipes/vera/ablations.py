"""VeRA and LoRA at several ranks, and VeRA's variants: vectors, initialisation, shared matrices.

Scores against trained parameters for VeRA and for LoRA at several ranks (Section 4.5, Fig. 2), and
at `small` for RandLoRA and VB-LoRA too, where methods are also compared at equal training time, by
the measured time of a step. Then the variants of Tables 6 and 7 (Section 4.6). All stages are those
of glue.yaml.

    python -m recipes.vera.ablations                            a generated task: seconds
    make weights && python -m recipes.vera.ablations --preset small --seeds 3
                                                                STS-B and MiniLM
    python -m recipes.vera.ablations --preset paper --seeds 5   RoBERTa-large
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pandas as pd
import torch

from lightning_modules.optim import build_optimizer
from lightning_modules.tuning import trainable
from lightning_modules.vera.scores import loss_of
from recipes.attention import plain_attention
from recipes.claims import Claim, Comparison
from recipes.experiment import Experiment, Measuring, Run, Stage
from recipes.machine import OthersAtWork
from recipes.messages import console
from recipes.methods import measure_majority, measure_score, silent_trainer
from recipes.nodes import Later
from recipes.plots import curves
from recipes.provenance import provenance
from recipes.records import Finished, type_of
from recipes.results import Row, select
from recipes.runner import run_experiment
from recipes.tables import Column, Table, tabulate
from recipes.vera.methods import ARGS, METHOD, TITLES, train

VARIANTS: dict[str, dict[str, Any]] = {
    "only_d": {ARGS: {"train": ["d"]}},
    "only_b": {ARGS: {"train": ["b"]}},
    "kaiming_normal": {ARGS: {"init": "kaiming_normal"}},
    "uniform": {ARGS: {"init": "uniform"}},
    "d_1e-7": {ARGS: {"d_init": 1e-7}},
    "d_1.0": {ARGS: {"d_init": 1.0}},
    "unique": {ARGS: {"shared": False}},
}
VARIANT_TITLES = {
    "only_d": "only d",
    "only_b": "only b",
    "kaiming_normal": "A, B Kaiming normal",
    "uniform": "A, B uniform in [0, 0.1]",
    "d_1e-7": "d starts at 1e-7",
    "d_1.0": "d starts at 1.0",
    "unique": "A, B not shared: each layer's own",
}
TABLE_6 = {  # RoBERTa-large: MRPC, RTE
    "default": (90.5, 85.8),
    "only d": (89.7, 67.0),
    "only b": (81.6, 64.3),
    "A, B Kaiming normal": (90.0, 82.6),
    "A, B uniform in [0, 0.1]": (68.9, 53.1),
    "d starts at 1e-7": (90.8, 84.7),
    "d starts at 1.0": (70.3, 60.3),
}
TABLE_7 = {  # RoBERTa-large: MRPC, RTE, CoLA, STS-B
    "shared": (90.0, 84.6, 67.7, 91.5),
    "unique": (90.7, 84.6, 68.3, 91.5),
}
VARIED = ("data.task", "model.rank", ARGS)
ROUNDS, STEPS = 8, 5  # of the timing: in each round, every row in turn makes 5 steps


def declare(run: Run) -> None:
    """Declare every rank of every method, and every variant, on its tasks."""
    grid = run.grid("ablations_grid")
    grid["rows"] = all_rows(grid)
    chosen = run.rows(grid["rows"])
    for seed in run.seeds:
        for task in grid["sets"]:
            metric = grid["metrics"][task]
            scoring = {"set": task, "metric": metric, "part": grid["part"]}
            stages: dict[str, Any] = {}
            for row in rows_of(grid, task):
                if row not in chosen:
                    continue
                stages[row] = train(run, "glue", grid, row, task, seed, VARIED, f"val/{metric}")
                settings = {"row": row, **scoring}
                nodes = {"stage": stages[row]}
                run.measure(f"{task}_{row}.score", seed, measure_score, nodes, settings)
                if row == f"vera_r{grid['rank']}":  # the variants are compared with this
                    default = {"row": "default", **scoring}
                    run.measure(f"{task}_default.score", seed, measure_score, nodes, default)
                if grid["curves"]:
                    run.measure(f"{task}_{row}.curve", seed, measure_curve, nodes, settings)
            if stages:
                nodes = {"stage": next(iter(stages.values()))}
                run.measure(f"{task}_majority", seed, measure_majority, nodes, scoring)
            if grid["curves"] and seed == 0 and task in grid["ranks"]["tasks"]:
                settings = {"set": task, "rows": rows_to_time(stages)}
                run.measure(f"{task}.speed", seed, measure_speed, settings=settings)


def all_rows(grid: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """All rows, of the grid's ranks and of VARIANTS, with their settings."""
    rows = {
        f"{method}_r{rank}": {METHOD: method, "model.rank": rank}
        for method in TITLES
        for rank in grid["ranks"].get(method, [])
    }
    for method, arguments in grid.get("arguments", {}).items():
        for row in rows.values():
            if row[METHOD] == method:
                row[ARGS] = arguments
    default = {METHOD: "vera", "model.rank": grid["rank"]}
    return rows | {f"vera_r{grid['rank']}": default} | {
        name: {**default, **changes} for name, changes in VARIANTS.items()
    }  # fmt: skip


def rows_of(grid: Mapping[str, Any], task: str) -> list[str]:
    """The rows trained on a task, each once: VeRA's default may be a rank of the sweep too."""
    rows = []
    if task in grid["ranks"]["tasks"]:
        rows += [row for row in grid["rows"] if row not in VARIANTS]
    if variants := grid["variants"].get(task):
        rows += [f"vera_r{grid['rank']}", *variants]
    return list(dict.fromkeys(rows))


def measure_curve(m: Measuring) -> Iterator[Row]:
    """The score of every evaluation on the validation part, by the number of updates."""
    stage = m.stages["stage"]
    scores = stage.history[f"val/{m.settings['metric']}"]
    for place, score in enumerate(scores, start=1):
        x = stage.updates * place / len(scores)
        row, name = m.settings["row"], m.settings["set"]
        yield Row(metric="score by updates", value=score, row=row, set=name, x=x)


def rows_to_time(stages: Mapping[str, Stage]) -> Later:
    """The trainings by row, as a setting of `measure_speed`.

    A setting reads no checkpoint, unlike the nodes of a measurement: so a machine that has only the
    records of another can time the rows without training them again.
    """
    return Later(
        tuple(stages.values()),
        lambda trainings: dict(zip(stages, trainings, strict=True)),
        "the settings of each row",
        {},
    )


def measure_speed(m: Measuring) -> Iterator[Row]:
    """Seconds of a training step (forward, backward, update) of every row, timed in turn.

    The median over rounds, without the first; one process and the same batch, so that rows share
    the conditions. No rows if other programs used the machine meanwhile.

    Settings: `set` in the table; `rows`, their finished trainings, of which the settings are used.
    """
    others = OthersAtWork()
    trainings: dict[str, Finished] = m.settings["rows"]
    data = next(iter(trainings.values())).datamodule()
    batch = next(iter(data.train_dataloader()))
    steps = {row: step_of(training, data, batch) for row, training in trainings.items()}
    seconds: dict[str, list[float]] = {row: [] for row in steps}
    for _ in range(ROUNDS):
        for row, step in steps.items():
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[row].append((time.perf_counter() - start) / STEPS)
    for row, values in seconds.items() if others.absent() else ():
        value = statistics.median(values[1:])
        yield Row(metric="seconds per update", value=value, row=row, set=m.settings["set"])


def step_of(training: Finished, data: Any, batch: Mapping[str, torch.Tensor]) -> Callable[[], None]:
    """A training step on a batch, computed as in a stage's training but with learning rate 0.

    The device, the precision and the way of attention are the stage's: VeRA's cheaper way
    (lightning_modules/vera/layer.py) depends on the precision. The weights are the initial ones,
    since the time does not depend on them.
    """
    settings = training.settings
    precision, accelerator = settings.trainer.precision, settings.trainer.accelerator
    trainer = silent_trainer(accelerator=accelerator, precision=precision)
    where, plugin = trainer.strategy.root_device, trainer.precision_plugin
    torch.set_float32_matmul_precision("high")  # as for every training (recipes/cli.py)
    arguments = {**settings.model.init_args.as_dict(), "num_classes": data.num_classes}
    module: Any = type_of(settings.model)(**arguments)
    module.configure_model()
    module = plugin.convert_module(module.to(where)).train()
    parameters = list(trainable(module.model).values())
    optimizer = build_optimizer("adamw", [{"params": parameters}], lr=0.0)
    batch = {name: value.to(where) for name, value in batch.items()}

    def step() -> None:
        optimizer.zero_grad()
        with plain_attention(trainer, data), plugin.forward_context():
            loss = loss_of(*module.outputs(batch))
        loss.backward()
        optimizer.step()

    return step


def report(table: pd.DataFrame, run: Run) -> list[str]:
    """The ranks, the frontier at equal time, the variants, and the paper's numbers."""
    grid = run.grid("ablations_grid")
    swept = [task for task in grid["ranks"]["tasks"] if task in set(table["set"])]
    text = [
        f"# Ranks and variants of VeRA, preset {run.preset}",
        provenance(run, table),
        "Scores in % ("
        + ", ".join(f"{task} {grid['metrics'][task]}" for task in grid["sets"])
        + "). Tuned parameters are those beside the heads.",
    ]
    if swept:
        text += sweep_report(table, run, grid, swept)
    if VARIANTS.keys() & set(table["row"]):
        text += variants_report(table, grid)
    return text


def variants_report(table: pd.DataFrame, grid: Mapping[str, Any]) -> list[str]:
    """Scores of the variants, and the paper's."""
    varied = [task for task in grid["variants"] if task in set(table["set"])]
    columns = [Column("tuned parameters", "tuned", {"set": varied[0]}, digits=0, spread="")]
    for task in varied:
        columns.append(Column(task, "score", {"set": task}, scale=100))
        columns.append(
            Column(f"{task} − default", "score", {"set": task}, scale=100, reference="default")
        )
    return [
        f"**Variants** of VeRA at rank {grid['rank']} (Tables 6 and 7): mean ± standard deviation "
        "over seeds. The default draws A and B Kaiming uniform, shares them and starts d at 0.1. "
        "`only d` keeps b at 1 and starts d at 0; `only b` keeps d at 0.1 and starts b at 0: so "
        "both start from the base model.",
        tabulate(
            table, {"majority": "majority class", "default": "default", **VARIANT_TITLES}, columns
        ).markdown(),
        "**The paper's Table 6**, RoBERTa-large, rank 256:",
        Table(["", "MRPC", "RTE"], [[n, *map(str, v)] for n, v in TABLE_6.items()]).markdown(),
        "**The paper's Table 7**, matrices shared or each layer's own:",
        Table(
            ["", "MRPC", "RTE", "CoLA", "STS-B"], [[n, *map(str, v)] for n, v in TABLE_7.items()]
        ).markdown(),
    ]


def sweep_report(
    table: pd.DataFrame, run: Run, grid: Mapping[str, Any], tasks: list[str]
) -> list[str]:
    """Scores by rank, their plot by tuned parameters, and scores at equal time where measured."""
    rows = {
        f"{method}_r{rank}": f"{TITLES[method]}, rank {rank}"
        for method in TITLES
        for rank in grid["ranks"].get(method, [])
    }
    style: dict[str, Any] = {"scale": 100, "spread": "range"}
    columns = [Column("tuned parameters", "tuned", {"set": tasks[0]}, digits=0, spread="")]
    for task in tasks:
        columns.append(Column(task, "score", {"set": task}, **style))
        if (default := f"vera_r{grid['rank']}") in set(table["row"]):
            title = f"{task} − {rows[default]}"
            columns.append(Column(title, "score", {"set": task}, scale=100, reference=default))
    timed = "seconds per update" in set(table["metric"])
    if timed:
        where = {"set": tasks[0]}
        columns.append(Column("ms per update", "seconds per update", where, scale=1000, spread=""))
        swept = select(table, {"row": list(rows)})  # not the variants, which are timed too
        table = pd.concat([table, at_equal_time(swept, tasks)], ignore_index=True)
        columns += [
            Column(
                f"{task}, validation, at equal time", "score at equal time", {"set": task}, **style
            )
            for task in tasks
        ]
    curves(
        by_parameters(table, rows), run.out / "ranks.png", "score", panel="set", titles=TITLES,
        scale=100, log=True, xlabel="tuned parameters", ylabel="score, %", spread="range",
    )  # fmt: skip
    paper = "(Section 4.5, Fig. 2, which has no numbers; the paper's are RTE and RoBERTa-large)"
    return [
        f"**Ranks** {paper}: median over seeds and, in brackets, lowest and highest."
        + (
            " At equal time: the score on the validation part when the row with the shortest "
            "training has ended. Its learning rate has by then fallen to zero and the others' "
            "have not, which favours it."
            if timed
            else ""
        ),
        tabulate(
            table, {"majority": "majority class", **rows}, columns, heading="method"
        ).markdown(),
        "![Score against tuned parameters](ranks.png)",
    ]


def by_parameters(table: pd.DataFrame, rows: Mapping[str, str]) -> pd.DataFrame:
    """The scores of the ranks as curves: `row` is the method, `x` the tuned parameters."""
    scores = select(table, {"metric": "score", "row": list(rows)}).copy()
    tuned = select(table, {"metric": "tuned"}).set_index(["seed", "set", "row"])["value"]
    keys = pd.MultiIndex.from_frame(scores[["seed", "set", "row"]])
    scores["x"] = tuned.reindex(keys).to_numpy()
    scores["row"] = scores["row"].str.replace(r"_r\d+$", "", regex=True)
    return scores


def at_equal_time(table: pd.DataFrame, tasks: list[str]) -> pd.DataFrame:
    """Each row's validation score at the time when the shortest training has ended."""
    lines = []
    for task in tasks:
        timed = select(table, {"metric": "seconds per update", "set": task})
        step_seconds = timed.set_index("row")["value"]
        points = select(table, {"metric": "score by updates", "set": task})
        points = points[points["row"].isin(step_seconds.index)]
        seconds = points["x"] * step_seconds.loc[points["row"]].to_numpy()
        limit = seconds.groupby(points["row"]).max().min()
        before = points[(seconds <= limit * 1.0001).to_numpy()]
        last = before.sort_values("x").groupby(["seed", "row"], sort=False).tail(1)
        lines.append(last.assign(metric="score at equal time", x=float("nan")))
    return pd.concat(lines, ignore_index=True)


def worse(name: str, row: str, words: str) -> Claim:
    """A claim that a variant of Table 6 is below the default, on the mean of the tasks."""
    return Claim(
        name=name,
        paper="VeRA",
        sentence=words,
        where="Table 6, mean of MRPC and RTE",
        number=mean_in_table_6(row),
        test=Comparison("score", "default", row, mean_over="set", scale=100, digits=1),
        gate=LEARNT,
    )


LEARNT = Comparison(  # task by task
    "score", "default", "majority", threshold=0.05, scale=100,
    says="VeRA is five points better than the commonest class or the mean",
)  # fmt: skip


def mean_in_table_6(row: str) -> str:
    """The paper's means of MRPC and RTE, of a variant and of the default."""
    of_both = (statistics.mean(TABLE_6[one]) for one in (VARIANT_TITLES[row], "default"))
    return " and ".join(f"{mean:.2f}" for mean in of_both)


def as_good(name: str, row: str, points: int, words: str) -> Claim:
    """A claim that the default is at most `points` above a variant of Table 6, or itself below."""
    return Claim(
        name=name,
        paper="VeRA",
        sentence=words,
        where="Table 6, mean of MRPC and RTE",
        number=mean_in_table_6(row),
        test=Comparison(
            "score", row, "default", threshold=-points / 100, mean_over="set", scale=100, digits=1
        ),
        gate=LEARNT,
    )


def at_equal_parameters(task: str, rank: int, method: str, other_rank: int, preset: str) -> Claim:
    """A claim that VeRA beats another method with as many tuned parameters, at one preset."""
    where, title = {"set": task}, TITLES[method]
    source = {
        "where": "Section 4.5, Fig. 2, RTE" if method == "lora" else "not in the paper",
        "number": "a figure" if method == "lora" else "–",
    }
    return Claim(
        name=f"ablations: above {title} at equal parameters, {preset}",
        paper="VeRA",
        sentence=f"On {task} VeRA of rank {rank} scores above {title} of rank {other_rank}, which "
        "tunes as many parameters.",
        test=Comparison(
            "score", f"vera_r{rank}", f"{method}_r{other_rank}", 0.0, where, scale=100, digits=1
        ),
        gate=Comparison(
            "score",
            "lora_r8",
            "majority",
            0.05,
            where,
            scale=100,
            says="LoRA of rank 8 is five points better than the commonest class or the mean",
        ),
        preset=preset,
        **source,
    )


CLAIMS = [
    worse("ablations: b alone", "only_b", "Training b alone is worse than both vectors."),
    worse("ablations: d alone", "only_d", "Training d alone is worse than both vectors."),
    worse(
        "ablations: uniform matrices", "uniform",
        "A and B uniform in [0, 0.1] are worse than Kaiming uniform.",
    ),
    worse("ablations: d from 1", "d_1.0", "Starting d at 1.0 is worse than at 0.1."),
    # thresholds: the paper's own difference, up to the next point
    as_good(
        "ablations: Kaiming normal", "kaiming_normal", 2,
        "A and B Kaiming normal are at most two points below Kaiming uniform.",
    ),
    as_good(
        "ablations: d from 1e-7", "d_1e-7", 1,
        "Starting d at 1e-7 is at most one point below starting it at 0.1.",
    ),
    Claim(
        name="ablations: sharing costs nothing",
        paper="VeRA",
        sentence="Shared A and B are at most one point below each layer's own.",
        where="Table 7, mean of four tasks",
        number="83.5 and 83.8",
        test=Comparison(
            "score", "default", "unique", threshold=-0.01, mean_over="set", scale=100, digits=1
        ),
        gate=LEARNT,
    ),
    at_equal_parameters("RTE", 1024, "lora", 1, "paper"),
    at_equal_parameters("STS-B", 384, "lora", 1, "small"),
    at_equal_parameters("STS-B", 384, "randlora", 384, "small"),
    at_equal_parameters("STS-B", 384, "vblora", 2, "small"),
]  # fmt: skip

EXPERIMENT = Experiment(
    "vera.ablations", __file__, "glue", __doc__ or "", declare, report,
    measured_on={"small": "MiniLM (22.7M parameters), {sets}"},
)  # fmt: skip

main = partial(run_experiment, EXPERIMENT)

if __name__ == "__main__":
    console(main)
