"""Scores on tasks of lm-evaluation-harness, at any sizes of a trained language model.

python -m recipes evaluate runs/…/last.ckpt --granularity S M L XL --tasks lambada_openai piqa
python -m recipes evaluate FOLDER --tasks my_task --task-folder my_tasks --shots 0

MatFormer's 25 tasks are 1-shot, which is the default here. Each size is extracted first, so that it
runs at its own cost. Needs `pip install -e '.[harness]'`.
"""

import argparse
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lightning_modules.matformer import extract
from lightning_modules.matformer.nest import nesting_of
from recipes import results
from recipes.generate import granularity, load
from recipes.nodes import device
from recipes.results import Row, tidy
from recipes.tables import Column, Table, tabulate

EXPERIMENT = "matformer.evaluate"


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    """Print a table of tasks and sizes, write it to --out, and return its tidy form.

    Raises:
        ValueError: lm_eval is missing, a task is unknown, or a granularity is not the model's.
        FileNotFoundError: there is no such checkpoint or folder.
    """
    options = command_line().parse_args(argv)
    harness = Harness(options.task_folder)
    harness.check(options.tasks)
    model, tokenizer = load(options.model)
    sizes = {"all": model}
    if options.granularity:
        nesting = nesting_of(model)
        chosen = [granularity(one) for one in options.granularity]
        sizes = {nesting.label(one): extract(model, one) for one in chosen}
    rows = [
        row
        for label, small in sizes.items()
        for row in harness.rows(label, small, tokenizer, options)
    ]
    table = tidy(rows, EXPERIMENT, "", 0)
    shown(table).show(f"{options.model}, {options.shots}-shot")
    if options.out is not None:
        results.write(options.out, table)
    return table


def command_line() -> argparse.ArgumentParser:
    """The verb's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes evaluate",
        description="Scores on tasks of lm-evaluation-harness, at any sizes of a language model.",
    )
    add = parser.add_argument
    add("model", metavar="CKPT", help="a checkpoint of MatLM, or a folder of transformers")
    add("--tasks", nargs="+", required=True, metavar="TASK", help="of lm_eval, or --task-folder")
    add("--task-folder", metavar="DIR", help="with further tasks as lm_eval's YAML files")
    add(
        "--granularity",
        nargs="+",
        metavar="G",
        help="sizes of a nested model: S, M, … or 0,0,1,1 by layer; without it the largest",
    )
    add("--shots", type=int, default=1, metavar="N", help="solved examples before each; default 1")
    add("--limit", type=int, metavar="N", help="only the first N examples of a task")
    add("--bos", action="store_true", help="put a begin token first, as for Llama and Gemma")
    add("--batch-size", type=int, default=8, metavar="N", help="default 8")
    add("--out", type=Path, metavar="CSV", help="a file for the table, one number a line")
    return parser


class Harness:
    """lm-evaluation-harness, and the tasks that it knows.

    Args:
        folder: with further tasks.

    Raises:
        ValueError: it is not installed.
    """

    def __init__(self, folder: str | None = None) -> None:
        try:
            from lm_eval import simple_evaluate
            from lm_eval.models.huggingface import HFLM
            from lm_eval.tasks import TaskManager
        except ImportError as error:
            raise ValueError(
                f"lm-evaluation-harness cannot be imported ({error}): pip install -e '.[harness]'"
            ) from error
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of settings made on purpose
        self.evaluate, self.adapter = simple_evaluate, HFLM
        self.known = TaskManager(include_path=folder)

    def check(self, tasks: Sequence[str]) -> None:
        """Refuse a task that is not known, before a model is loaded.

        Raises:
            ValueError: naming it.
        """
        if unknown := [task for task in tasks if not self.known.match_tasks([task])]:
            raise ValueError(
                f"{unknown[0]} is no task of lm_eval: `lm-eval ls tasks` lists them, and "
                "--task-folder adds those of a folder"
            )

    def rows(
        self, label: str, model: Any, tokenizer: Any, options: argparse.Namespace
    ) -> Iterator[Row]:
        """Every metric of every task, and its standard error, at one size."""
        adapter = self.adapter(
            pretrained=model.to(device()),
            tokenizer=tokenizer,
            batch_size=options.batch_size,
            # CorpusData puts an end token between documents, and no begin token before them
            add_bos_token=options.bos,
            prefix_token_id=None if options.bos else tokenizer.eos_token_id,
        )
        answer = self.evaluate(
            model=adapter,
            tasks=options.tasks,
            task_manager=self.known,
            num_fewshot=options.shots,
            limit=options.limit,
            log_samples=False,
        )
        for task, values in answer["results"].items():
            for key, value in values.items():
                metric = key.replace(",none", "").replace(",", " ")
                if isinstance(value, int | float) and metric != "sample_len":
                    yield Row(label, metric, float(value), set=task)


def shown(table: pd.DataFrame) -> Table:
    """Tasks below each other, sizes side by side, each metric without its standard error."""
    scores = table[~table["metric"].str.contains("_stderr")]
    columns = [
        Column(f"{size}: {metric}", metric, {"row": size}, digits=4, spread="")
        for metric in results.unique(scores, "metric")
        for size in results.unique(scores, "row")
    ]
    return tabulate(scores, None, columns, index="set")


if __name__ == "__main__":
    main()
