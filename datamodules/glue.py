"""GLUE (Wang et al., arXiv 1804.07461): nine tasks of one or two sentences, and the diagnostic set.

The official download is tab-separated without quoting, some files with a byte order mark, CoLA's
without a header. Classes are numbered as `datasets` numbers them, so that a folder and the hub give
the same labels: entailment 0, not_entailment 1 (RTE, QNLI); entailment 0, neutral 1, contradiction
2 (MNLI, AX); the files' own 0 and 1 elsewhere.
"""

import csv
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from datamodules.loading import data_folder, hold_out, require_choice, require_share
from datamodules.tables import column_error, hub_rows, open_lines, read_class, read_score
from datamodules.text import Example, SentenceData

Source = Literal["folder", "hub", "generated"]


class Task(NamedTuple):
    """The names of a task's files, columns, classes and metrics.

    Attributes:
        first, second, label: columns.
        labels: the classes in order; none for regression.
        folder: the official folder.
        hub: the name in `datasets`.
        submit: the file that GLUE's server takes.
        files: of train, val and test.
    """

    first: str
    second: str | None
    label: str | None
    labels: tuple[str, ...]
    metrics: tuple[str, ...]
    folder: str
    hub: str
    submit: str
    files: tuple[str | None, str | None, str | None] = ("train.tsv", "dev.tsv", "test.tsv")


_BINARY = ("0", "1")
_ENTAILED = ("entailment", "not_entailment")
_NLI = ("entailment", "neutral", "contradiction")
_PAIR = ("sentence1", "sentence2")
_MATCHED = ("train.tsv", "dev_matched.tsv", "test_matched.tsv")
_MISMATCHED = ("train.tsv", "dev_mismatched.tsv", "test_mismatched.tsv")

TASKS = {
    "CoLA": Task("sentence", None, "label", _BINARY, ("matthews",), "CoLA", "cola", "CoLA.tsv"),
    "SST-2": Task("sentence", None, "label", _BINARY, ("accuracy",), "SST-2", "sst2", "SST-2.tsv"),
    "MRPC": Task(
        "#1 String", "#2 String", "Quality", _BINARY, ("accuracy", "f1"), "MRPC", "mrpc", "MRPC.tsv"
    ),
    "STS-B": Task(*_PAIR, "score", (), ("pearson", "spearman"), "STS-B", "stsb", "STS-B.tsv"),
    "QQP": Task(
        "question1",
        "question2",
        "is_duplicate",
        _BINARY,
        ("accuracy", "f1"),
        "QQP",
        "qqp",
        "QQP.tsv",
    ),
    "MNLI": Task(*_PAIR, "gold_label", _NLI, ("accuracy",), "MNLI", "mnli", "MNLI-m.tsv", _MATCHED),
    "MNLI-MM": Task(
        *_PAIR, "gold_label", _NLI, ("accuracy",), "MNLI", "mnli", "MNLI-mm.tsv", _MISMATCHED
    ),
    "QNLI": Task(
        "question", "sentence", "label", _ENTAILED, ("accuracy",), "QNLI", "qnli", "QNLI.tsv"
    ),
    "RTE": Task(*_PAIR, "label", _ENTAILED, ("accuracy",), "RTE", "rte", "RTE.tsv"),
    "WNLI": Task(*_PAIR, "label", _BINARY, ("accuracy",), "WNLI", "wnli", "WNLI.tsv"),
    "AX": Task(
        *_PAIR,
        None,
        _NLI,
        ("matthews",),
        "diagnostic",
        "ax",
        "AX.tsv",
        (None, None, "diagnostic.tsv"),
    ),
}
_COLA_HEADER = ["source", "label", "star", "sentence"]  # which train.tsv and dev.tsv leave out


class GLUEData(SentenceData):
    """One GLUE task.

    `train`, `val` and `test` are labelled: GLUE's test labels are not public, so `test` is the
    development part again; `predict` is the official test part, for `write_submission`. MNLI
    validates on the matched part and MNLI-MM on the mismatched one, after the same training. AX,
    the diagnostic set, has only `predict`, for a model trained on MNLI. With `val_fraction`, `val`
    is a share of the training part, so that settings chosen on it are not chosen on `test`.

    Args:
        task: CoLA, SST-2, MRPC, STS-B, QQP, MNLI, MNLI-MM, QNLI, RTE, WNLI or AX.
        root: folder with the tasks' folders; $RECIPES_DATA/glue when None.
        folder: the task's folder in `root`; its official name when None.
        source: "folder" reads `root`; "hub" downloads nyu-mll/glue with `datasets`; "generated"
            writes a small set of the same format with `write_glue` and reads that.
        bad_rows: what to do with a row of the wrong length; the official QQP has a few, which are
            commonly skipped.
        val_fraction: share of the training part, drawn by `seed`, that is held out to validate on
            instead of the development part; 0 holds nothing out.
        **kwargs: see `SentenceData`.
    """

    def __init__(
        self,
        task: str,
        root: str | None = None,
        folder: str | None = None,
        source: Source = "folder",
        bad_rows: Literal["error", "skip"] = "error",
        val_fraction: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_choice("source", source, get_args(Source))
        require_choice("bad_rows", bad_rows, ("error", "skip"))
        self.task_name, self.task = task, find_task(task)
        self.root, self.folder_name = root, folder or self.task.folder
        require_share(val_fraction, "0 to validate on the development part")
        self.source, self.bad_rows, self.val_fraction = source, bad_rows, val_fraction

    @property
    def num_classes(self) -> int:
        return len(self.task.labels) or 1

    @property
    def class_names(self) -> list[str]:
        return list(self.task.labels)

    @property
    def metrics(self) -> list[str]:
        """The official metrics, the one that papers report first."""
        return list(self.task.metrics)

    def load(self, part: str) -> list[Example]:
        if self.val_fraction and part in ("train", "val"):
            train, val = hold_out(self._official("train"), self.val_fraction, self.seed)
            return train if part == "train" else val
        return self._official("val" if part == "test" else part)

    def drawn(self, part: str) -> bool:
        return self.val_fraction > 0 and part in ("train", "val")

    def _official(self, part: str) -> list[Example]:
        name = self.task.files[("train", "val", "predict").index(part)]
        if name is None:
            raise ValueError(
                f"{self.task_name} has no {part} part, expected predict: train and validate on "
                "MNLI, and predict this task with that model."
            )
        if self.source == "hub":
            return self._from_hub(part)
        if self.source == "generated":
            with tempfile.TemporaryDirectory() as root:
                written = write_glue(root, self.task_name, seed=self.seed)
                return read_glue(self.task_name, written / name)
        folder = data_folder(self.root, "glue") / self.folder_name
        return read_glue(self.task_name, folder / name, self.bad_rows == "skip")

    def _from_hub(self, part: str) -> list[Example]:
        split = {"train": "train", "val": "validation", "predict": "test"}[part]
        if self.task.hub == "mnli" and part != "train":
            split += "_mismatched" if self.task_name == "MNLI-MM" else "_matched"
        rows = hub_rows("nyu-mll/glue", split, self.task.hub)
        columns = [name for name in rows.column_names if name not in ("label", "idx")]
        return [
            Example(
                row[columns[0]],
                row[columns[1]] if self.task.second else None,
                None if part == "predict" else row["label"],
            )
            for row in rows
        ]


def find_task(name: str) -> Task:
    """The task of this name, whatever the case.

    Raises:
        ValueError: if there is none.
    """
    for known, task in TASKS.items():
        if known.lower() == name.lower():
            return task
    raise ValueError(f"task is {name!r}, expected one of {', '.join(TASKS)}.")


def read_glue(task: str, path: str | Path, skip_bad_rows: bool = False) -> list[Example]:
    """The examples of an official file, labelled if it has the task's label column.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a column is missing, a row has the wrong length, or a label is none of the
            task's; with file and line.
    """
    known = find_task(task)
    lines = open_lines(path)
    header = lines[0].split("\t")
    start = 1
    if known is TASKS["CoLA"] and "sentence" not in header:
        header, start = _COLA_HEADER, 0
    for name in (known.first, known.second):
        if name is not None and name not in header:
            raise ValueError(
                f"{path}, line 1: there is no column {name!r} among {', '.join(header)}, expected "
                f"the official file of {task}: check the folder and the task."
            )
    at = {name: place for place, name in enumerate(header)}
    classes = {name: number for number, name in enumerate(known.labels)}
    examples = []
    for number, line in enumerate(lines[start:], start=start + 1):
        cells = line.split("\t")
        if len(cells) != len(header):
            if skip_bad_rows:
                continue
            error = column_error(path, number, len(cells), len(header))
            raise ValueError(f"{str(error)[:-1]}, or skip such rows with --data.bad_rows skip.")
        label = None
        if known.label in at:
            text, place = cells[at[known.label]], f"{path}, line {number}"
            label = read_class(text, classes, place) if classes else _score(text, place)
        second = cells[at[known.second]].strip() if known.second else None
        examples.append(Example(cells[at[known.first]].strip(), second, label))
    return examples


def _score(text: str, place: str) -> float:
    """The similarity score of an STS-B example, 0 to 5."""
    score = read_score(text, place)
    if not 0 <= score <= 5:
        raise ValueError(f"{place}: the score is {text}, expected 0 to 5: correct the line.")
    return score


def write_submission(task: str, predictions: Sequence[float], path: str | Path) -> Path:
    """Writes the file that GLUE's server takes: `index` and `prediction` of the test part.

    Args:
        task: see `GLUEData`.
        predictions: a class for each example of the test part, in its order; or a score, which is
            cut to 0 … 5.
        path: the file; in a folder, it gets the official name (`RTE.tsv`).

    Returns:
        The path of the file.

    Raises:
        ValueError: a prediction is no class of the task, or no number.
    """
    known = find_task(task)
    lines = ["index\tprediction"]
    for index, prediction in enumerate(predictions):
        if not known.labels:
            score = read_score(str(float(prediction)), f"prediction {index} of {task}")
            text = f"{min(max(score, 0.0), 5.0):.3f}"
        elif float(prediction) in range(len(known.labels)):
            text = known.labels[int(prediction)]
        else:
            raise ValueError(
                f"Prediction {index} of {task} is {prediction}, expected a class from 0 to "
                f"{len(known.labels) - 1}: take the arg max of the logits."
            )
        lines.append(f"{index}\t{text}")
    path = Path(path)
    path = path / known.submit if path.is_dir() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return path


# Generated data in the same format.


def write_glue(
    root: str | Path, task: str, train: int = 256, val: int = 64, test: int = 32, seed: int = 0
) -> Path:
    """Writes generated examples of `task` in the official format, easy enough for small models.

    A sentence praises or blames (SST-2), has its words in order or reversed (CoLA), or is paired
    with one that says the same, the contrary or something else. As in the official files, there
    are unpaired quotation marks, and MRPC begins with a byte order mark.

    Args:
        root: the task's official folder is created in it.
        task: see `GLUEData`.
        train: number of training examples.
        val: number of development examples.
        test: number of test examples, which are unlabelled.
        seed: seed of the examples.

    Returns:
        The task's folder.
    """
    known = find_task(task)
    rng = random.Random(f"{known.hub} {seed}")
    folder = Path(root) / known.folder
    folder.mkdir(parents=True, exist_ok=True)
    mark = "\ufeff" if known.hub == "mrpc" else ""
    for name, count, labelled in zip(known.files, (train, val, test), (1, 1, 0), strict=True):
        if name is None:
            continue
        header, rows = _header(known, bool(labelled)), []
        for index in range(count):
            values = dict.fromkeys(header, str(index)) | _sentences(known, index, rng)
            rows.append([values[column] for column in header])
        if header != _COLA_HEADER:
            rows.insert(0, header)
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            file.write(mark if labelled else "")
            csv.writer(
                file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None, lineterminator="\n"
            ).writerows(rows)
    return folder


def _header(task: Task, labelled: bool) -> list[str]:
    """The columns of an official file."""
    sentences = [task.first, *([task.second] if task.second else [])]
    label = [task.label] if labelled and task.label else []
    if task.hub == "cola" and labelled:
        return _COLA_HEADER
    if task.hub == "mrpc":
        return [*(label or ["index"]), "#1 ID", "#2 ID", *sentences]
    if task.hub == "stsb":
        between = ["genre", "filename", "year", "old_index", "source1", "source2"]
        return ["index", *between, *sentences, *label]
    if task.hub == "qqp":
        return ["id", *(["qid1", "qid2"] if labelled else []), *sentences, *label]
    if task.hub == "mnli":
        parses = [f"{name}_{kind}" for kind in ("binary_parse", "parse") for name in sentences]
        ids = ["index", "promptID", "pairID", "genre"]
        return [*ids, *parses, *sentences, *(["label1", *label] if label else [])]
    return [*(["index"] if task.hub != "sst2" or not labelled else []), *sentences, *label]


_WHO = ["the cook", "a waiter", "my sister", "the old man", "our teacher", 'the "chef"', "a girl"]
_DOES = ["likes", "sells", "paints", "carries", "breaks", "buys", "forgets"]
_WHAT = ["the red bowl", "a table", "some bread", "the lamp", "two 'old\" cups", "a small boat"]
_GOOD = ["charming", "wonderful", "moving", "funny", "fresh"]
_BAD = ["dull", "awful", "tedious", "stale", "clumsy"]


def _sentences(task: Task, index: int, rng: random.Random) -> dict[str, str]:
    """The sentences and the label of one example, by column."""
    classes = len(task.labels) or 6
    place = index % classes  # every class occurs, however few examples there are
    first = [rng.choice(_WHO), rng.choice(_DOES), rng.choice(_WHAT)]
    found: dict[str, str] = {}
    if task.hub == "sst2":
        word = rng.choice(_GOOD if place else _BAD)
        found[task.first] = f"{rng.choice(_WHO)} finds this film {word} . "
    elif task.hub == "cola":
        words = " ".join(first).split()
        if not place:
            words.reverse()
        found[task.first] = " ".join(words).capitalize() + "."
    else:
        other = [rng.choice(_WHO), rng.choice(_DOES), rng.choice(_WHAT)]
        if not task.labels:  # the more words they share, the higher the score
            second = first if place == 5 else [*first[: place // 2], *other[place // 2 :]]
        elif task.labels[place] in ("1", "entailment"):
            second = first
        elif task.labels[place] == "contradiction":
            second = [first[0], "never " + first[1], first[2]]
        else:
            second = other if other != first else [*other[:2], "nothing"]
        found[task.first], found[task.second or ""] = " ".join(first) + ".", " ".join(second) + "."
    label = task.labels[place] if task.labels else f"{place:.3f}"
    return found | {task.label or "": label, "label1": label}
