"""GLUE: the official files, real and generated, the hub, and submissions."""

import csv
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

from datamodules import GLUEData
from datamodules.glue import TASKS, read_glue, write_glue, write_submission
from datamodules.text import Example

LABELLED = [name for name in TASKS if name != "AX"]


@pytest.mark.parametrize("task", LABELLED)
def test_generated_tasks_load_and_batch(task: str) -> None:
    data = GLUEData(task, source="generated", batch_size=8, vocab_size=400)
    parts = {part: data.examples(part) for part in ("train", "val", "test", "predict")}
    assert [len(examples) for examples in parts.values()] == [256, 64, 64, 32]
    assert {example.label for example in parts["predict"]} == {None}
    labels = {example.label for example in parts["train"]}
    assert labels == set(range(6 if task == "STS-B" else data.num_classes))
    assert all((example.second is None) == (data.task.second is None) for example in parts["val"])
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape[0] == 8
    assert batch["labels"].dtype == (torch.float32 if data.regression else torch.int64)
    assert next(iter(data.predict_dataloader()))["labels"].eq(-100).all()


def test_metrics_and_classes_of_the_tasks() -> None:
    found = {name: (GLUEData(name).metrics[0], GLUEData(name).num_classes) for name in TASKS}
    accuracy = ("accuracy", 2)
    assert found == {
        **dict.fromkeys(["SST-2", "MRPC", "QQP", "QNLI", "RTE", "WNLI"], accuracy),
        **dict.fromkeys(["MNLI", "MNLI-MM"], ("accuracy", 3)),
        "CoLA": ("matthews", 2),
        "STS-B": ("pearson", 1),
        "AX": ("matthews", 3),
    }
    assert GLUEData("rte").class_names == ["entailment", "not_entailment"]
    assert GLUEData("MNLI").class_names == ["entailment", "neutral", "contradiction"]


def test_diagnostic_set_only_predicts(tmp_path: Path) -> None:
    assert len(GLUEData("AX", source="generated").examples("predict")) == 32
    with pytest.raises(ValueError, match="AX has no train part"):
        GLUEData("AX", source="generated").examples("train")


def test_generated_files_are_official_ones(tmp_path: Path) -> None:
    head = {}
    for task in TASKS:
        folder = write_glue(tmp_path, task, train=4, val=4, test=4)
        for path in folder.iterdir():
            head[path.name, task] = path.read_text(encoding="utf-8").split("\n")[0].split("\t")
    assert head["train.tsv", "MRPC"][0] == "\ufeffQuality"
    assert head["train.tsv", "CoLA"][0] != "source"
    assert head["test.tsv", "CoLA"] == ["index", "sentence"]
    assert head["test.tsv", "QQP"] == ["id", "question1", "question2"]
    assert head["train.tsv", "STS-B"][-3:] == ["sentence1", "sentence2", "score"]
    assert len(head["train.tsv", "MNLI"]) == 12
    assert head["dev_mismatched.tsv", "MNLI-MM"][-1] == "gold_label"


def test_quotes_do_not_merge_rows(tmp_path: Path) -> None:
    path = tmp_path / "dev.tsv"
    path.write_text('sentence\tlabel\n"one \t1\ntwo" three\t0\n', encoding="utf-8")
    assert read_glue("SST-2", path) == [Example('"one', None, 1), Example('two" three', None, 0)]


def test_limit_and_seed() -> None:
    def train(seed: int) -> list[Example]:
        return GLUEData("RTE", source="generated", seed=seed, limit=10).examples("train")

    assert len(train(0)) == 10
    assert train(0) == train(0) != train(1)


def test_through_datasets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Rows(list):
        column_names = ("premise", "hypothesis", "label", "idx")

    def load_dataset(*args: str, split: str) -> Rows:
        asked.append((*args, split))
        return Rows([{"premise": "a", "hypothesis": "b", "label": 2, "idx": 0}])

    module = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)  # type: ignore[arg-type]
    data = GLUEData("MNLI-MM", source="hub")
    assert data.examples("train") == [Example("a", "b", 2)]
    assert data.examples("predict") == [Example("a", "b", None)]
    assert data.examples("val") == [Example("a", "b", 2)]
    assert asked == [
        ("nyu-mll/glue", "mnli", "train"),
        ("nyu-mll/glue", "mnli", "test_mismatched"),
        ("nyu-mll/glue", "mnli", "validation_mismatched"),
    ]


def test_submission_files(tmp_path: Path) -> None:
    path = write_submission("RTE", torch.tensor([0, 1]).tolist(), tmp_path)
    assert path == tmp_path / "RTE.tsv"
    assert path.read_bytes() == b"index\tprediction\n0\tentailment\n1\tnot_entailment\n"
    path = write_submission("STS-B", [5.7, 2.34567, -1], tmp_path / "new" / "a.tsv")
    assert path.read_text() == "index\tprediction\n0\t5.000\n1\t2.346\n2\t0.000\n"
    assert write_submission("MNLI", [2], tmp_path).read_text().endswith("0\tcontradiction\n")
    assert write_submission("CoLA", [1], tmp_path).read_text().endswith("0\t1\n")
    names = {write_submission(task, [0], tmp_path).name for task in TASKS}
    assert len(names) == 11 and {"MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"} <= names
    with pytest.raises(ValueError, match="Prediction 1 of RTE is 2, expected a class from 0 to 1"):
        write_submission("RTE", [0, 2], tmp_path)
    with pytest.raises(ValueError, match="prediction 0 of STS-B: the score is 'nan'"):
        write_submission("STS-B", [float("nan")], tmp_path)


def test_bad_rows(tmp_path: Path) -> None:
    folder = tmp_path / "RTE"
    folder.mkdir()
    train = folder / "train.tsv"
    header = "index\tsentence1\tsentence2\tlabel\n"
    train.write_text(header + "0\t a\tb \tentailment\n1\ta\tentailment\n")
    with pytest.raises(ValueError, match=r"train\.tsv, line 3: the row has 3 columns, expected 4"):
        GLUEData("RTE", root=str(tmp_path)).examples("train")
    skipped = GLUEData("RTE", root=str(tmp_path), bad_rows="skip")
    assert skipped.examples("train") == [Example("a", "b", 0)]
    train.write_text(header + "0\ta\tb\tneutral\n")
    with pytest.raises(ValueError, match="line 2: the label is 'neutral', expected one of 'ent"):
        read_glue("RTE", train)
    with pytest.raises(ValueError, match="there is no column 'question' among index"):
        read_glue("QNLI", train)
    sts = tmp_path / "sts.tsv"
    sts.write_text("sentence1\tsentence2\tscore\na\tb\t7\n")
    with pytest.raises(ValueError, match="line 2: the score is 7, expected 0 to 5"):
        read_glue("STS-B", sts)


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RECIPES_DATA", raising=False)
    with pytest.raises(ValueError, match="task is 'COLA2', expected one of CoLA"):
        GLUEData("COLA2")
    with pytest.raises(ValueError, match="source is 'disk'"):
        GLUEData("RTE", source="disk")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set --data.root, or RECIPES_DATA"):
        GLUEData("RTE").examples("train")
    with pytest.raises(FileNotFoundError, match="QNLI/train.tsv is not there"):
        GLUEData("QNLI", root=str(tmp_path)).examples("train")


def test_real_files(recipes_data: Path) -> None:
    """Counts and balances of data/glue/PROVENANCE.md."""

    def count(task: str, part: str, folder: str | None = None) -> Counter:
        data = GLUEData(task, root=str(recipes_data / "glue"), folder=folder)
        return Counter(example.label for example in data.examples(part))

    sizes = {
        "CoLA": (8551, 1043, 1063),
        "SST-2": (67349, 872, 1821),
        "MRPC": (3668, 408, 1725),
        "STS-B": (5749, 1500, 1379),
        "RTE": (2490, 277, 3000),
        "WNLI": (635, 71, 146),
    }
    for task, expected in sizes.items():
        assert tuple(count(task, part).total() for part in ("train", "val", "predict")) == expected
    assert count("QNLI", "val").total() == count("QNLI", "predict").total() == 5463
    assert count("QQP", "train", "QQP_subset").total() == 20497
    assert count("QQP", "val", "QQP_subset").total() == 3000
    assert count("AX", "predict") == {None: 1104}
    assert count("SST-2", "val") == {1: 444, 0: 428}
    assert count("MRPC", "train") == {1: 2474, 0: 1194}
    assert count("MRPC", "val") == {1: 279, 0: 129}
    assert count("RTE", "val") == {0: 146, 1: 131}
    assert count("CoLA", "val") == {1: 721, 0: 322}


def test_the_default_csv_reader_would_lose_rows(recipes_data: Path) -> None:
    path = recipes_data / "glue" / "STS-B" / "train.tsv"
    with open(path, encoding="utf-8", newline="") as file:
        merged = len(list(csv.reader(file, delimiter="\t"))) - 1
    assert merged < len(read_glue("STS-B", path)) == 5749


def test_the_seed_draws_what_is_held_out(tmp_path: Path):
    write_glue(tmp_path, "RTE")
    parts = [
        GLUEData("RTE", str(tmp_path), vocab_size=300, val_fraction=0.25, seed=seed).examples("val")
        for seed in (0, 0, 1)
    ]
    assert parts[0] == parts[1] != parts[2]


def test_a_share_of_the_training_part_to_choose_on():
    """Validation on held-out training examples; the development part is left for the test."""
    official = GLUEData("RTE", source="generated", vocab_size=300)
    data = GLUEData("RTE", source="generated", vocab_size=300, val_fraction=0.25)
    everything = official.examples("train")
    train, val = data.examples("train"), data.examples("val")
    assert sorted(train + val) == sorted(everything) and len(val) == len(everything) // 4
    assert data.examples("test") == official.examples("val")
    assert len(data.manifest("val")["members"]) == len(val)  # the seed drew them
    assert "members" not in data.manifest("test") and "members" not in official.manifest("val")
    with pytest.raises(ValueError, match="val_fraction is 1, expected a share from 0 to below 1"):
        GLUEData("RTE", val_fraction=1)
