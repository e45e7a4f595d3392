"""Domain texts in their publishers' layouts."""

import json

import pytest

from datamodules import DomainData
from datamodules.domains import read_domain, write_domain


def data(folder, **settings):
    return DomainData(folder.name, str(folder.parent), vocab_size=300, batch_size=4, **settings)


def test_json_lines(tmp_path):
    folder = data(write_domain(tmp_path, 8, 4, 4))
    assert folder.class_names == ["COMPARE", "CONJUNCTION", "PART-OF", "USED-FOR"]
    assert [len(folder.examples(part)) for part in ("train", "val", "test")] == [8, 4, 4]
    first = json.loads((tmp_path / "train.txt").read_text().splitlines()[0])
    example = folder.examples("train")[0]
    assert example.first == first["text"] and folder.class_names[example.label] == first["label"]
    batch = next(iter(folder.train_dataloader()))
    assert set(batch) == {"input_ids", "attention_mask", "labels"} and len(batch["labels"]) == 4


def test_tweets(tmp_path):
    for part in ("train", "val", "test"):
        (tmp_path / f"{part}_text.txt").write_text(f"one\u2028{part}\ntwo\n")
        (tmp_path / f"{part}_labels.txt").write_text("1\n0\n")
    examples = data(tmp_path).examples("val")
    assert [(e.first, e.label) for e in examples] == [("one\u2028val", 1), ("two", 0)]
    (tmp_path / "val_labels.txt").write_text("1\n")
    with pytest.raises(ValueError, match="val_text.txt has 2 lines and .* 1, expected as many"):
        data(tmp_path).examples("val")


def test_its_tokenizer_masks():
    tokenizer = DomainData(source="generated", vocab_size=300).tokenizer
    assert tokenizer.mask_token_id == len(tokenizer) - 1
    assert tokenizer.mask_token_id in tokenizer.all_special_ids


def test_a_label_that_is_not_in_training(tmp_path):
    write_domain(tmp_path)
    (tmp_path / "test.txt").write_text(json.dumps({"text": "a", "label": "NEW"}) + "\n")
    with pytest.raises(
        ValueError, match="test.txt, line 1: the label is 'NEW', expected one of 'C"
    ):
        data(tmp_path).examples("test")


@pytest.mark.parametrize("line", ["{", "3", '{"text": "a"}'])
def test_a_line_that_is_none(line, tmp_path):
    (tmp_path / "train.txt").write_text(line + "\n")
    with pytest.raises(ValueError, match="train.txt, line 1: this is no (JSON|object)"):
        read_domain(tmp_path, "train")


def test_no_such_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a folder, expected the data there"):
        data(tmp_path / "no" / "set").examples("train")


def test_the_real_sets(recipes_data):
    for name, classes in {"scierc": 7, "chemprot": 13}.items():
        found = DomainData(name, str(recipes_data))
        assert found.num_classes == classes
    assert [len(found.examples(p)) for p in ("train", "val", "test")] == [4169, 2427, 3469]
