"""Tables of sentences: reading, labels, splits, batches."""

import json
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from tokenizers import processors

from datamodules import TextData
from datamodules.loading import SeededDataset
from datamodules.tables import open_lines, read_table
from datamodules.text import Example, SentenceSet
from datamodules.tokens import load_tokenizer, train_tokenizer


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_bytes(text.encode())
    return str(folder / name)


CSV = 'sentence,label\r\n"good, ""very"" good",yes\r\nbad,no\r\n"two\nlines",yes\r\n'


def test_csv_tsv_and_jsonl_read_alike(tmp_path: Path) -> None:
    rows = [('it\'s "fine"', "yes"), ("bad £ é", "no")]
    tsv = "\ufeffsentence\tlabel\n" + "".join(f"{a}\t{b}\n" for a, b in rows)
    jsonl = "".join(json.dumps({"sentence": a, "label": b}) + "\n" for a, b in rows)
    data = 'sentence,label\n"it\'s ""fine""",yes\nbad £ é,no\n'
    for name, text in {"a.tsv": tsv, "a.jsonl": jsonl, "a.csv": data}.items():
        found = TextData(write(tmp_path, name, text), val=write(tmp_path, "v" + name, text))
        assert found.class_names == ["no", "yes"]
        assert found.examples("train") == [
            Example(rows[0][0], None, 1),
            Example(rows[1][0], None, 0),
        ]


def test_quoted_csv_with_line_breaks(tmp_path: Path) -> None:
    rows = read_table(write(tmp_path, "a.csv", CSV), ["sentence", "label"])
    assert [row["sentence"] for _, row in rows] == ['good, "very" good', "bad", "two\nlines"]
    assert [line for line, _ in rows] == [2, 3, 5]


def test_columns_without_a_name_are_as_many_as_they_are(tmp_path: Path) -> None:
    rows = read_table(write(tmp_path, "a.csv", "sentence,,\na,b,c\n"), ["sentence"])
    assert [row["sentence"] for _, row in rows] == ["a"]


def test_classes_are_numbered_in_order_of_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "sentence,label\na,10\nb,9\nc,2\n")
    assert TextData(path).class_names == ["2", "9", "10"]
    # with a label that is no number, but that Python reads as one: by name, always in one order
    path = write(tmp_path, "b.csv", "sentence,label\na,10\nb,9\nc,nan\nd,2\n")
    assert TextData(path).class_names == ["10", "2", "9", "nan"]


def test_split_by_seed(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.csv", "sentence,label\n" + "".join(f"s{i},{i % 2}\n" for i in range(50))
    )
    first, again, other = (TextData(path, val_fraction=0.2, seed=seed) for seed in (0, 0, 1))
    train, val = first.examples("train"), first.examples("val")
    assert (len(train), len(val)) == (40, 10)
    assert not set(train) & set(val)
    assert again.examples("val") == val == first.examples("test") == first.examples("predict")
    assert other.examples("val") != val
    assert len(TextData(path, limit=5).examples("train")) == 5

    manifests = [
        {part: data.manifest(part) for part in ("train", "val")} for data in (first, other)
    ]
    assert manifests[0] == {part: again.manifest(part) for part in ("train", "val")}
    for part, examples in {"train": train, "val": val}.items():
        assert manifests[0][part]["sha256"] != manifests[1][part]["sha256"]
        assert manifests[0][part]["members"] == [json.dumps(example) for example in examples]
    # its own file: nothing is drawn, but by a limit
    fixed = TextData(path, val=path, eval_limit=3)
    assert "members" not in fixed.manifest("train") and fixed.manifest("train")["examples"] == 50
    assert len(fixed.manifest("val")["members"]) == 3


def test_pair_regression_and_unlabelled_test(tmp_path: Path) -> None:
    train = write(tmp_path, "a.tsv", "a\tb\ty\n" + "one two\tthree\t1.5\n" * 8)
    test = write(tmp_path, "t.tsv", "a\tb\none\tfour\n")
    data = TextData(train, test=test, text="a", pair="b", label="y", regress=True, batch_size=4)
    assert (data.num_classes, data.class_names) == (1, [])
    batch = next(iter(data.train_dataloader()))
    assert batch["labels"].tolist() == [1.5] * 4
    assert batch["labels"].dtype == torch.float32
    batch = next(iter(data.predict_dataloader()))
    assert batch["labels"].tolist() == [-100.0]
    with pytest.raises(ValueError, match="None of the 1 examples of the test part has a label"):
        data.test_dataloader()
    ids = batch["input_ids"][0].tolist()
    assert (ids[0], ids[-1], ids.count(data.tokenizer.sep_token_id)) == (1, 2, 2)
    assert SeededDataset(data.val_dataloader().dataset.dataset)[0, 0, False]["labels"] == -100


def test_batches_are_padded_to_their_longest_and_cut(tmp_path: Path) -> None:
    text = "sentence,label\nshort,0\n" + "a much longer sentence " * 20 + ",1\n"
    data = TextData(
        write(tmp_path, "a.csv", text),
        val=write(tmp_path, "v.csv", text),
        max_length=16,
        batch_size=2,
        vocab_size=300,
    )
    batch = next(iter(data.val_dataloader()))
    assert batch["input_ids"].shape == (2, 16)
    assert batch["attention_mask"].sum(1).tolist()[1] == 16
    assert (batch["input_ids"][0][batch["attention_mask"][0] == 0] == data.pad_token_id).all()
    assert batch["labels"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "sentence,label\na,yes\nb,yes\n", "'label' has 1 different labels, expected two"),
        ("a.csv", "sentence,label\na,yes\nb,\n", "a.csv, line 3: there is no label: fill it in"),
        ("a.jsonl", '{"sentence": "a", "label": null}\n', "a.jsonl, line 1: there is no label"),
        (
            "a.jsonl",
            '{"sentence": "a", "label": 1}\n{"sentence": "b", "label": 1.0}\n',
            "a.jsonl: the labels '1' and '1.0' are one number: write it in one way",
        ),
        ("a.csv", "sentence,label\na,-1.0\nb,-1\n", "a.csv: the labels '-1' and '-1.0' are one nu"),
    ],
)
def test_labels_that_say_nothing(tmp_path: Path, name: str, content: str, message: str) -> None:
    data = TextData(write(tmp_path, name, content))
    with pytest.raises(ValueError, match=message):
        data.num_classes  # noqa: B018


def test_half_of_a_surrogate_pair_is_said_with_its_line(tmp_path: Path) -> None:
    line = '{"sentence": "%s", "label": %d}\n'
    whole = write(tmp_path, "whole.jsonl", line % (r"a \ud83d\ude00", 0) + line % ("b", 1))
    assert TextData(whole).num_classes == 2
    cut = write(tmp_path, "cut.jsonl", line % ("a", 0) + line % (r"b \uD83D", 1))
    with pytest.raises(ValueError, match=r"cut\.jsonl, line 2: .*half of a surrogate pair"):
        TextData(cut).num_classes  # noqa: B018


def test_a_label_that_only_the_test_part_has(tmp_path: Path) -> None:
    train = write(tmp_path, "a.csv", "sentence,label\na,x\nb,y\n")
    test = write(tmp_path, "t.csv", "sentence,label\na,x\nb,z\n")
    with pytest.raises(
        ValueError, match=r"t\.csv, line 3: the label is 'z', expected one of 'x', "
    ):
        TextData(train, test=test).examples("test")
    TextData(train, test=test).setup("validate")
    with pytest.raises(ValueError, match="the label is 'z'"):  # before the training, not after it
        TextData(train, test=test).setup("fit")


def test_all_lines_of_jsonl_say_whether_a_test_file_has_labels(tmp_path: Path) -> None:
    """By the first alone, the others' labels were dropped."""
    train = write(tmp_path, "a.csv", "sentence,label\na,x\nb,y\n")
    first, second = '{"sentence": "a"}\n', '{"sentence": "b", "label": "y"}\n'
    some = TextData(train, test=write(tmp_path, "some.jsonl", first + second))
    with pytest.raises(ValueError, match=r"some\.jsonl, line 1: the label is '', expected one of"):
        some.examples("test")
    none = TextData(train, test=write(tmp_path, "none.jsonl", first + first))
    assert [example.label for example in none.examples("test")] == [None, None]


def test_files_of_old_macs(tmp_path: Path) -> None:
    """Their lines end in a carriage return, which is an ordinary character in other files."""
    (tmp_path / "a.csv").write_bytes(b"sentence,label\ra,x\rb,y\r")
    rows = read_table(tmp_path / "a.csv", ["sentence"])
    assert rows == [(2, {"sentence": "a", "label": "x"}), (3, {"sentence": "b", "label": "y"})]
    (tmp_path / "b.txt").write_bytes(b"one\rtwo\nthree\r\r\n")
    assert open_lines(tmp_path / "b.txt") == ["one\rtwo", "three"]
    (tmp_path / "c.tsv").write_bytes(b"sentence\tlabel\na\tx\r\r\nb\ty\r\nc\tx\r")
    assert [row["label"] for _, row in read_table(tmp_path / "c.tsv", ["label"])] == ["x", "y", "x"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"])
def test_line_ends_within_quotation_marks_are_as_pandas_reads_them(
    tmp_path: Path, end: str
) -> None:
    inner = ["\r"] if end == "\r" else ["\n", "\r\n", "\r"]
    lines = ["sentence,label", *(f'"two{one}lines",{one == end}' for one in inner), "a,b", ""]
    path = write(tmp_path, "a.csv", end.join(lines))
    expected = pd.read_csv(path, dtype=str).to_dict("records")
    assert [row for _, row in read_table(path, ["sentence"])] == expected
    assert [row["sentence"] for row in expected] == [*(f"two{one}lines" for one in inner), "a"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "sentence,label\na,b\nc\n", "a.csv, line 3: the row has 1 columns, expected 2"),
        ("a.csv", "sentence,label\na,b\rc\n", "a.csv, line 2: a carriage return is in a cell with"),
        ("a.csv", "sentence,la\rbel\na,b\n", "a.csv, line 1: a carriage return is in a cell with"),
        ("a.tsv", "sentence\tlabel\na\tb\tc\n", "a.tsv, line 2: the row has 3 columns, expected 2"),
        ("a.csv", "text,label\na,b\n", "no column 'sentence', the columns are 'text', 'label'"),
        ("a.csv", "sentence;label\na, b;x\n", "'sentence;label': save it with commas between"),
        ("a.csv", "sentence,label,label\na,x,0\n", "a.csv has two columns 'label', expected diff"),
        ("a.tsv", "label\tsentence\tlabel\nx\ta\t0\n", "a.tsv has two columns 'label', expected"),
        ("a.jsonl", '{"sentence": "a", "label": 1}\n{\n', "a.jsonl, line 2: this is no JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl, line 1: this is a list, expected an object"),
        ("a.jsonl", '{"sentence": "a"}\n', "a.jsonl, line 1: there is no column 'label'"),
        ("a.txt", "a\n", "a.txt: there is no column 'label', the columns are 'sentence'"),
        ("a.doc", "a\n", "a.doc ends in .doc, expected .csv, .tsv, .jsonl or .txt"),
        ("a.csv", "", "a.csv is empty"),
        ("b.csv", "\x00", None),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, message: str | None) -> None:
    if message is None:
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
        message = "b.csv is not UTF-8"
        with pytest.raises(ValueError, match=message):
            open_lines(tmp_path / name)
        return
    with pytest.raises(ValueError, match=message):
        TextData(write(tmp_path, name, text)).examples("train")


def test_bad_values(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "sentence,label\na,one\n")
    with pytest.raises(ValueError, match="line 2: the score is 'one', expected a number"):
        TextData(path, regress=True).examples("train")
    with pytest.raises(FileNotFoundError, match="gone.csv is not there"):
        TextData(str(tmp_path / "gone.csv")).examples("train")
    with pytest.raises(ValueError, match="val_fraction is 1.0"):
        TextData(path, val_fraction=1.0)
    two = write(tmp_path, "two.csv", "sentence,label\na,x\nb,y\n")
    with pytest.raises(ValueError, match="train part has 0 .* or change val_fraction=0.9"):
        TextData(two, val_fraction=0.9).examples("train")
    with pytest.raises(ValueError, match="The test part has 0 examples, .* 1 or more: add some.$"):
        TextData(two, test=write(tmp_path, "t.csv", "sentence,label\n")).examples("test")
    with pytest.raises(ValueError, match="limit is 0"):
        TextData(path, limit=0)
    with pytest.raises(ValueError, match="vocab_size is 9, expected 259"):
        train_tokenizer(["a"], 9)
    with pytest.raises(OSError, match="The tokenizer '.*none' cannot be loaded"):
        load_tokenizer(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ("-100", "-100, which marks an example without a score .*: remove the line, or give all"),
        ("-1e2", "-1e2, which marks an example without a score"),
        ("nan", "'nan', expected a number"),
        ("inf", "'inf', expected a number"),
    ],
)
def test_a_score_that_no_loss_can_take_is_named(tmp_path: Path, score: str, said: str) -> None:
    """-100 was left out of the loss and of the correlations without a word."""
    data = TextData(write(tmp_path, "a.csv", f"sentence,label\na,-99\nb,{score}\n"), regress=True)
    with pytest.raises(ValueError, match=f"line 3: the score is {said}"):
        data.examples("train")


def test_labels_that_are_hardly_classes_are_warned_of(tmp_path: Path, recwarn) -> None:
    """A score for each sentence made a class of each."""
    for share, warned in ((1, True), (2, False)):
        rows = "".join(f"s,{i // share}.5\n" for i in range(22))
        data = TextData(write(tmp_path, "a.csv", "sentence,label\n" + rows))
        assert data.num_classes == 22 // share
        said = [str(one.message) for one in recwarn if "set data.regress" in str(one.message)]
        recwarn.clear()
        assert len(said) == warned
        assert not warned or "has 22 different labels in 22 lines, each of them a class" in said[0]


def test_texts_without_a_token_are_refused(tmp_path: Path) -> None:
    """Of an empty text GPT-2's tokenizer makes no token: the padding alone was classified."""
    path = write(tmp_path, "a.csv", "sentence,label\n,x\nb,y\n  ,x\n,y\n")
    data = TextData(path, val=path, vocab_size=259)
    assert len(data.samples("train")[0]["input_ids"]) == 2  # begin and end
    plain = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    data.tokenizer.backend_tokenizer.post_processor = plain
    with pytest.raises(ValueError, match="2 texts are empty, and the tokenizer adds no token of"):
        data.samples("train")
    assert len(SentenceSet([Example(" ")], data.tokenizer, 9, False)[0]["input_ids"]) == 1


def test_a_checkpoint_of_other_examples_or_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Otherwise it would be scored on sentences that it was trained on, or on others' tokens."""
    rows = "".join(f"s {i * 7 % 13} {i * 5 % 11} {i},{i % 2}\n" for i in range(50))
    path = write(tmp_path, "a.csv", "sentence,label\n" + rows)

    def resumed(verb: TrainerFn, seed: int = 1, **settings: object) -> None:
        state = {"description": TextData(path, **settings).describe(), "module": "", "seed": 0}
        data = TextData(path, seed=seed, **settings)
        data.trainer = SimpleNamespace(state=SimpleNamespace(fn=verb))
        data.load_state_dict(state)

    for verb in (TrainerFn.VALIDATING, TrainerFn.TESTING, TrainerFn.FITTING):
        resumed(verb, seed=0)
        with pytest.raises(
            ValueError, match="had seed 0 and this one has 1, .* --seed_everything 0"
        ):
            resumed(verb)
    with pytest.raises(ValueError, match="another tokenizer, .*: give it the training examples of"):
        resumed(TrainerFn.PREDICTING)
    resumed(TrainerFn.VALIDATING, val=path)  # no seed draws what is scored
    with pytest.raises(ValueError, match="had seed 0 and this one has 1"):
        resumed(TrainerFn.FITTING, val=path)  # of which it draws the order
