"""Alpaca's form: reading, template, sequences whose response alone counts, held-out examples."""

import json
from pathlib import Path

import pytest
import torch

from datamodules import InstructionData
from datamodules.instructions import (
    Instruction,
    fill_template,
    follow_up,
    read_instructions,
    read_questions,
    write_instructions,
    write_questions,
)


@pytest.fixture(scope="module")
def data() -> InstructionData:
    return InstructionData(source="generated", vocab_size=500, val_fraction=0.125)


def entry(**changes: object) -> dict:
    return {"instruction": "Add.", "input": "1 2", "output": "3"} | changes


def write(folder: Path, entries: object, name: str = "a.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(entries, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def test_template_with_and_without_input() -> None:
    assert fill_template("Do {it}.", "£{x}") == (
        "Below is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nDo {it}.\n\n### Input:\n£{x}\n\n### Response:"
    )
    assert fill_template("Do it.") == (
        "Below is an instruction that describes a task. Write a response that appropriately "
        "completes the request.\n\n### Instruction:\nDo it.\n\n### Response:"
    )


def test_json_and_jsonl_read_alike(tmp_path: Path) -> None:
    entries = [entry(), entry(input="", output="two\nlines é", source="kept out")]
    expected = [
        Instruction(fill_template("Add.", "1 2"), "3"),
        Instruction(fill_template("Add."), "two\nlines é"),
    ]
    assert read_instructions(write(tmp_path, entries)) == expected
    lines = "\n\n".join(json.dumps(each) for each in entries)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    assert read_instructions(tmp_path / "a.jsonl") == expected
    short = {"instruction": "Add.", "output": "3"}
    without = write(tmp_path, [short, {**short, "input": None}])  # as pandas and datasets write it
    assert read_instructions(without) == [Instruction(fill_template("Add."), "3")] * 2


def test_only_the_response_and_its_end_count(data: InstructionData) -> None:
    tokenizer = data.tokenizer
    for place, (prompt, response) in enumerate(data.examples("val")):
        sample = data.val_dataloader().dataset[place, 0, True]
        before = [1, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        after = [*tokenizer(response, add_special_tokens=False)["input_ids"], 2]
        assert sample["input_ids"] == before + after
        assert sample["labels"].tolist() == [-100] * len(before) + after
    batch = next(iter(data.train_dataloader()))
    outside = batch["attention_mask"] == 0
    assert outside.any() and (batch["labels"][outside] == -100).all()


def test_a_prompt_for_generation_is_the_one_of_training(data: InstructionData) -> None:
    batch = next(iter(data.prompt_dataloader("train")))
    shown = data.train_dataloader().dataset.dataset
    for row, mask, place in zip(*(batch[key] for key in batch), strict=True):
        prompt = row[mask.bool()].tolist()
        ids, labels = shown[place]["input_ids"], shown[place]["labels"]
        assert ids[: len(prompt)] == prompt
        assert (labels != -100).nonzero()[0].item() == len(prompt)
    assert batch["attention_mask"][:, -1].all() and not batch["attention_mask"].all()


def test_the_same_are_held_out_whatever_the_seed(data: InstructionData, tmp_path) -> None:
    train, val = data.examples("train"), data.examples("val")
    assert (len(train), len(val)) == (224, 32)
    assert not {example.prompt for example in train} & {example.prompt for example in val}
    assert len(set(train + val)) == 256
    places = torch.cat([batch["labels"] for batch in data.prompt_dataloader("test")]).tolist()
    assert places == list(range(32))
    assert data.references("test") == [[example.response] for example in val]

    path = write_instructions(tmp_path)
    parts = [
        InstructionData(str(tmp_path), path.name, seed=seed).examples("val") for seed in (0, 3)
    ]
    assert parts[0] == parts[1]
    everything = InstructionData(source="generated", val_fraction=0)
    assert len(everything.examples("train")) == 256
    assert everything.val_dataloader() == []


def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    long = [entry(instruction="word " * 50, output="a"), entry(output="out " * 90)]
    write(tmp_path, long + [entry()] * 6)

    def sequences(max_length: int) -> list[dict]:
        data = InstructionData(
            str(tmp_path), "a.json", val_fraction=0, vocab_size=300, max_length=max_length
        )
        samples = data.train_dataloader().dataset.dataset
        return [samples[place] for place in range(len(samples))]

    whole = sequences(10_000)
    prompt = whole[1]["labels"].tolist().count(-100)
    assert len(whole) == 8 and whole[0]["labels"].tolist().count(-100) > prompt + 1
    with pytest.warns(UserWarning, match=f"1 of the 8 .* train part .* max_length={prompt + 1}"):
        short = sequences(prompt + 1)
    assert len(short) == 7
    for sample in short:  # one token of the response remains
        assert len(sample["input_ids"]) == prompt + 1
        assert (sample["labels"] != -100).tolist() == [False] * prompt + [True]
    with pytest.raises(ValueError, match=f"Every prompt .* has max_length={prompt} or more tokens"):
        sequences(prompt)


def test_generated_file_has_the_form(tmp_path: Path) -> None:
    path = write_instructions(tmp_path / "new", seed=1)
    entries = json.loads(path.read_text())
    assert all(list(each) == ["instruction", "input", "output"] for each in entries)
    assert len({tuple(each.values()) for each in entries}) == len(entries) == 256
    assert 50 < sum(each["input"] == "" for each in entries) < 206
    assert all(each["output"] for each in entries)
    with pytest.raises(ValueError, match="count is 301, expected at most 300"):
        write_instructions(tmp_path, count=301)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([entry(), {"input": "a", "output": "b"}], "entry 2: there is no key 'instruct"),
        ([entry(output=3)], "entry 1: output is 3, expected a text"),
        ([entry(), ["a"]], "entry 2: this is a list, expected an object"),
        ({"data": []}, r"a\.json holds a dict, expected a list"),
    ],
)
def test_bad_entries(tmp_path: Path, entries: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_instructions(write(tmp_path, entries))


def test_bad_files_and_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text('[{"instruction": "a",]')
    with pytest.raises(ValueError, match=r"a\.json: this is no JSON \(.*line 1 column"):
        read_instructions(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_text(json.dumps(entry()) + "\n{\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: this is no JSON"):
        read_instructions(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_text("[]")
    with pytest.raises(ValueError, match=r"a\.txt ends in \.txt, expected \.json or \.jsonl"):
        read_instructions(tmp_path / "a.txt")
    with pytest.raises(ValueError, match="The train part has 0 examples"):
        write(tmp_path, [], "none.json")
        InstructionData(str(tmp_path), "none.json", val_fraction=0).train_dataloader()
    with pytest.raises(FileNotFoundError, match=r"gone\.json is not there"):
        InstructionData(str(tmp_path), "gone.json").examples("train")
    monkeypatch.delenv("RECIPES_DATA", raising=False)
    with pytest.raises(ValueError, match="set --data.root, or RECIPES_DATA"):
        InstructionData().examples("train")
    with pytest.raises(ValueError, match="val_fraction is 1, expected a share from 0 to below 1"):
        InstructionData(val_fraction=1)
    with pytest.raises(ValueError, match="source is 'disk'"):
        InstructionData(source="disk")  # type: ignore[arg-type]


def test_real_file(recipes_data: Path) -> None:
    """Counts of data/alpaca_2k/PROVENANCE.md."""
    examples = read_instructions(recipes_data / "alpaca_2k" / "alpaca_2k.json")
    assert len(examples) == 2000 and all(example.response for example in examples)
    assert sum("\n\n### Input:\n" in example.prompt for example in examples) == 753
    data = InstructionData(root=str(recipes_data / "alpaca_2k"))
    assert [len(data.examples(part)) for part in ("train", "val")] == [1900, 100]


def test_questions_of_two_turns(tmp_path):
    """What is written is read again, and a turn's prompt holds all that was said before."""
    questions = read_questions(write_questions(tmp_path, count=3))
    assert [question.question_id for question in questions] == [1, 2, 3]
    first, second = questions[0].turns
    prompt = follow_up(fill_template(first), " lamp lamp", second)
    assert prompt == (
        f"{fill_template(first)} lamp lamp\n\n### Instruction:\n{second}\n\n### Response:"
    )
    (tmp_path / "bad.jsonl").write_text('{"question_id": 1, "turns": ["a", "b"]}\n')
    with pytest.raises(ValueError, match="bad.jsonl, line 1: expected an object with question_id"):
        read_questions(tmp_path / "bad.jsonl")
