"""Reviews of films, and sentences as prompts with label words."""

import json
import sys

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from datamodules import GLUEData, ReviewData
from datamodules.text import Example, SentenceSet
from datamodules.tokens import special_tokens, train_tokenizer


def test_rotten_tomatoes_is_split_as_on_the_hub(recipes_data):
    data = ReviewData("rotten_tomatoes", root=str(recipes_data / "rotten_tomatoes"))
    sizes = [len(data.examples(part)) for part in ("train", "val", "test")]
    assert sizes == [8530, 1066, 1066]
    for part in ("train", "val", "test"):
        labels = [example.label for example in data.examples(part)]
        assert sum(labels) * 2 == len(labels)
    texts = [{e.first for e in data.examples(part)} for part in ("train", "test")]
    assert len(texts[0] & texts[1]) < 20  # a few lines stand twice in the files


def test_imdb_is_read_from_its_folders(tmp_path):
    for part, count in (("train", 20), ("test", 3)):
        for kind in ("neg", "pos"):
            folder = tmp_path / part / kind
            folder.mkdir(parents=True)
            for i in range(count):
                (folder / f"{i}_1.txt").write_text(f"{kind} {part}<br />{i}")
    data = ReviewData("imdb", root=str(tmp_path))
    assert [len(data.examples(part)) for part in ("train", "val", "test")] == [36, 4, 6]
    assert data.examples("test")[0] == ("neg test 0", None, 0)
    with pytest.raises(FileNotFoundError, match=r"no neg/\*\.txt"):
        ReviewData("imdb", root=str(tmp_path / "test")).examples("train")


@pytest.mark.parametrize("name", ["rotten_tomatoes", "imdb"])
def test_reviews_by_a_name_that_datasets_knows(name, tmp_path):
    """Here a folder in its form; IMDB has no validation part, so that a tenth is held out."""
    pytest.importorskip("datasets")
    parts = {"train": 20, "validation": 3, "test": 4}
    for part, count in parts.items():
        if (name, part) != ("imdb", "validation"):
            rows = [{"text": f" {part}<br />{n} ", "label": n % 2} for n in range(count)]
            (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = ReviewData(name, root=str(tmp_path), source="hub")
    sizes = [len(data.examples(part)) for part in ("train", "val", "test")]
    assert sizes == ([20, 3, 4] if name == "rotten_tomatoes" else [18, 2, 4])
    assert data.examples("test")[:2] == [("test 0", None, 0), ("test 1", None, 1)]
    assert data.drawn("val") == (name == "imdb")


def test_the_hub_is_asked_for(monkeypatch, tmp_path):
    asked = []

    def rows(name, part):
        asked.append((name, part))
        return [{"text": "good", "label": 1}]

    monkeypatch.setattr("datamodules.reviews.hub_rows", rows)
    with pytest.raises(FileNotFoundError):
        ReviewData("imdb", root=str(tmp_path)).examples("test")
    assert not asked
    ReviewData("imdb", source="hub").examples("test")
    ReviewData("rotten_tomatoes", source="hub").examples("val")
    assert asked == [
        ("stanfordnlp/imdb", "test"),
        ("cornell-movie-review-data/rotten_tomatoes", "val"),
    ]
    with pytest.raises(ValueError, match="source is 'web', expected folder or hub"):
        ReviewData("imdb", source="web")


@pytest.mark.parametrize("row", [{"review": "a", "label": 1}, {"text": "a", "label": -1}])
def test_a_set_that_has_no_reviews_is_said(row, monkeypatch):
    monkeypatch.setattr("datamodules.reviews.hub_rows", lambda name, part: [row])
    with pytest.raises(ValueError, match="expected a text and a label that is 0 or 1"):
        ReviewData("imdb", source="hub").examples("test")


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets, or give a folder"):
        ReviewData("imdb", source="hub").examples("test")


def test_sentences_become_prompts_with_label_words():
    data = GLUEData("RTE", source="generated", label_words=["a", "b"], batch_size=3, limit=3)
    assert len(data.label_tokens) == 2
    batch = next(iter(data.train_dataloader()))
    example = data.examples("train")
    texts = {data.tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["input_ids"]}
    assert texts == {f"Input: {e.first} {e.second} Output:" for e in example}
    assert sorted(batch) == ["attention_mask", "input_ids", "labels"]


@pytest.mark.parametrize(
    ("first", "second", "kept"), [(50, 50, (21, 21)), (50, 4, (38, 4)), (4, 50, (4, 38))]
)
def test_the_longer_sentence_of_a_prompt_is_truncated_first(first, second, kept):
    tokenizer = train_tokenizer(["Input: Output: a b"] * 9, 300)
    pair = Example("a " * first, "b " * second)
    texts = SentenceSet([pair], tokenizer, 48, regression=False, prompts=True)
    text = tokenizer.decode(texts[0]["input_ids"])
    assert (text.count(" a"), text.count(" b")) == kept and text.endswith(" Output:</s>")
    assert len(texts[0]["input_ids"]) == 48


BAD = [
    (["yes"], "expected 2 different words"),
    (["yes", "yes"], "expected 2 different words"),
    (["y", "no"], "'y' is 2 tokens"),
]


@pytest.mark.parametrize(("words", "message"), BAD)
def test_label_words_that_do_not_serve_are_said(words, message):
    data = GLUEData("RTE", source="generated", label_words=words, vocab_size=259)
    with pytest.raises(ValueError, match=message):
        data.label_tokens  # noqa: B018


@pytest.mark.parametrize("words", [["zwyx", "qqvk"], ["zwyx", "yes"], ["Yes", "yes"]])
def test_label_words_need_known_and_different_tokens(words):
    model = models.WordLevel({"[UNK]": 0, "yes": 1, "no": 2}, unk_token="[UNK]")
    lower = Tokenizer(model)
    lower.normalizer = normalizers.Lowercase()
    lower.pre_tokenizer = pre_tokenizers.Whitespace()
    data = GLUEData("RTE", source="generated", label_words=words)
    data._tokenizer = PreTrainedTokenizerFast(tokenizer_object=lower, unk_token="[UNK]")
    with pytest.raises(ValueError, match=f"the label words '{words[0]}', '{words[1]}' have the"):
        data.label_tokens  # noqa: B018
    data.label_words = ["yes", "no"]
    assert data.label_tokens == [1, 2]


def space_first(vocabulary, merges, kind):
    """A tokenizer that puts a space before each text: Llama's two ways, and T5's."""
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocabulary], 0))
    else:
        pieces = {piece: number for number, piece in enumerate(vocabulary)}
        tokenizer = Tokenizer(models.BPE(pieces, merges, unk_token="<unk>", fuse_unk=True))
    if kind == "normalizer":
        before = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(before)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=kind == "unigram")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("kind", ["normalizer", "metaspace", "unigram"])
def test_label_words_are_encoded_in_their_place(kind):
    letters = list("▁Output:yesno")
    merges = [("▁", "y"), ("▁y", "e"), ("▁ye", "s"), ("▁", "n"), ("▁n", "o")]
    merged = [left + right for left, right in merges]
    vocabulary = list(dict.fromkeys(["<unk>", *letters, *merged]))
    data = GLUEData("RTE", source="generated", label_words=["yes", "no"])
    data._tokenizer = space_first(vocabulary, merges, kind)
    assert data.label_tokens == [vocabulary.index("▁yes"), vocabulary.index("▁no")]
    data.label_words = ["yes", "not"]
    with pytest.raises(ValueError, match=r"the label word 'not' is 2 tokens of the .*\(▁no t\)"):
        data.label_tokens  # noqa: B018


def test_a_label_word_behind_a_space_of_its_own_is_several_tokens():
    data = GLUEData("RTE", source="generated", label_words=["yes", "no"])
    vocabulary = ["<unk>", *"▁Output:", "yes", "no"]
    data._tokenizer = space_first(vocabulary, [], "unigram")
    with pytest.raises(ValueError, match=r"'yes' is 2 tokens of the tokenizer \(▁ yes\)"):
        data.label_tokens  # noqa: B018


def test_numbers_have_no_label_words():
    data = GLUEData("STS-B", source="generated", label_words=["yes", "no"])
    with pytest.raises(ValueError, match="expected none, since the labels are numbers"):
        data.label_tokens  # noqa: B018


def test_special_tokens_are_those_that_the_tokenizer_adds():
    tokenizer = train_tokenizer(["some text"], 300)
    assert special_tokens(tokenizer) == ([1], [2])
