"""Scores a trained language model on tasks of lm-evaluation-harness, at any of its sizes.

python -m recipes evaluate runs/…/last.ckpt --granularity S M L XL --tasks lambada_openai piqa
python -m recipes evaluate FOLDER --tasks my_task --task-folder my_tasks --shots 0

MatFormer's 25 tasks are 1-shot, which is the default here. Each size is extracted as a model of its
own, so that a smaller one is faster too. Needs `pip install -e '.[harness]'`.
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
from recipes.generate import load
from recipes.messages import require_at_least
from recipes.nodes import device
from recipes.results import Row, tidy
from recipes.tables import Column, Table, tabulate

EXPERIMENT = "matformer.evaluate"


def main(argv: Sequence[str] | None = None) -> pd.DataFrame:
    """Print a table of tasks and sizes, write it to --out, and return its tidy form.

    Raises:
        ValueError: lm_eval is missing, a task is unknown, a number is too small, or a granularity
            is not the model's.
        FileNotFoundError: there is no such checkpoint or folder.
    """
    options = command_line().parse_args(argv)
    require_at_least(0, shots=options.shots)
    require_at_least(1, limit=options.limit, **{"batch-size": options.batch_size})
    harness = Harness(options.task_folder)
    harness.check(options.tasks)
    model, tokenizer = load(options.model)
    sizes = {"all": model}
    if options.granularity:
        nesting = nesting_of(model)
        sizes = {nesting.label(one): extract(model, one) for one in options.granularity}
    rows = [
        row
        for label, submodel in sizes.items()
        for row in harness.rows(label, submodel, tokenizer, options)
    ]
    table = tidy(rows, EXPERIMENT, "", 0)
    shown(table).show(f"{options.model}, {options.shots}-shot")
    if options.out is not None:
        results.write(options.out, table)
    return table


def command_line() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes evaluate",
        description="Scores a language model on lm-evaluation-harness tasks, at any of its sizes.",
    )
    add = parser.add_argument
    add("model", metavar="CKPT", help="a checkpoint of MatLM, or a folder of transformers")
    add("--tasks", nargs="+", required=True, metavar="TASK", help="of lm_eval or of --task-folder")
    add("--task-folder", metavar="DIR", help="folder of further tasks, as lm_eval's YAML files")
    add(
        "--granularity",
        nargs="+",
        metavar="G",
        help="sizes of a nested model: S, M, … or S*6+M*6; without it the largest",
    )
    add("--shots", type=int, default=1, metavar="N", help="solved examples per prompt; default 1")
    add("--limit", type=int, metavar="N", help="only the first N examples of a task")
    add("--bos", action="store_true", help="begin with a BOS token, as for Llama and Gemma")
    add("--batch-size", type=int, default=8, metavar="N", help="default 8")
    add("--out", type=Path, metavar="CSV", help="also write the table here, one number per line")
    return parser


class Harness:
    """lm-evaluation-harness, with its own tasks and those of a folder.

    Args:
        folder: further tasks as lm_eval's YAML files.

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
        # its warnings are about settings that are intended here
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self.evaluate, self.adapter = simple_evaluate, HFLM
        self.task_manager = TaskManager(include_path=folder)

    def check(self, tasks: Sequence[str]) -> None:
        """Refuse an unknown task, before a model is loaded.

        Raises:
            ValueError: a task is unknown; the message names it.
        """
        if unknown := [task for task in tasks if not self.task_manager.match_tasks([task])]:
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
        evaluation = self.evaluate(
            model=adapter,
            tasks=options.tasks,
            task_manager=self.task_manager,
            num_fewshot=options.shots,
            limit=options.limit,
            log_samples=False,
        )
        for task, values in evaluation["results"].items():
            for key, value in values.items():
                metric = key.replace(",none", "").replace(",", " ")
                if isinstance(value, int | float) and metric != "sample_len":
                    yield Row(label, metric, float(value), set=task)


def shown(table: pd.DataFrame) -> Table:
    """A line for each task and metric, sizes side by side, without the standard errors."""
    scores = table[~table["metric"].str.contains("_stderr")]
    scores = scores.assign(set=scores["set"] + ", " + scores["metric"], metric="score")
    columns = [
        Column(size, "score", {"row": size}, digits=4, spread="")
        for size in results.unique(scores, "row")
    ]
    return tabulate(scores, None, columns, index="set")


if __name__ == "__main__":
    main()
