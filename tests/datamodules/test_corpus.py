"""Every token once, packed as the documents lie, refused where it cannot be right, resumable."""

import cpu_torchvision  # noqa: F401

import json
import pickle
import shutil
from itertools import pairwise
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules import corpus as corpus_module
from datamodules import token_files
from datamodules.corpus import (
    BYTES,
    PIECE,
    CorpusData,
    python_digest,
    python_files,
    read_file,
    read_set,
)
from datamodules.loading import IGNORED
from datamodules.token_files import TokenFile, TokenStream, Windows, write_tokens
from datamodules.tokens import train_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
BYTE = train_tokenizer([], BYTES)
END = BYTE.eos_token_id
DOCUMENTS = [f"document {i} " + "abc " * (i % 7) for i in range(40)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A jsonl file of 40 documents."""
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def corpus_data(path: Path, **kwargs) -> CorpusData:
    settings = {"length": 16, "batch_size": 4, "cache": str(path.parent / "cache")}
    return CorpusData("files", str(path), **{**settings, **kwargs})


def ids_of(texts: list[str]) -> list[int]:
    """The tokens that documents become, by the definition of a byte-level tokenizer."""
    return [i for text in texts for i in [*BYTE(text, add_special_tokens=False).input_ids, END]]


def test_byte_level_is_one_token_a_byte():
    text = "Grüße, 世界!\n\t"
    ids = BYTE(text, add_special_tokens=False).input_ids
    assert len(ids) == len(text.encode())
    assert BYTE.decode(ids) == text
    assert len(BYTE) == BYTES


def test_the_file_holds_every_document_in_order(corpus):
    data = corpus_data(corpus)
    file = data.token_file("train")
    assert file.tokens.tolist() == ids_of(DOCUMENTS)
    assert file.manifest["documents"] == 40
    assert file.manifest["tokens"] == len(ids_of(DOCUMENTS)) == file.ends[-1]
    assert file.manifest["bytes"] == sum(map(len, DOCUMENTS))
    assert file.tokens.dtype == np.uint16


def test_parts_share_no_token_and_leave_none_out(corpus):
    data = corpus_data(corpus, val_fraction=0.25, seed=3)
    train, val = data.stream("train"), data.stream("val")
    everything = ids_of(DOCUMENTS)
    assert len(train) + len(val) == len(everything)
    assert val.read(0, len(val)).tolist() == everything[-len(val) :]
    assert sorted(train.read(0, len(train)).tolist()) == sorted(everything[: len(train)])
    other = corpus_data(corpus, val_fraction=0.25, seed=4)
    assert torch.equal(other.stream("val").read(0, 10**6), val.read(0, 10**6))
    assert not torch.equal(other.stream("train").read(0, 10**6), train.read(0, 10**6))


def test_training_keeps_documents_whole_and_blocks_are_the_stream(corpus):
    data = corpus_data(corpus, val=str(corpus))
    stream = data.stream("train")
    tokens = stream.read(0, len(stream)).tolist()
    texts = BYTE.decode(tokens).split("</s>")[:-1]
    assert texts != DOCUMENTS and sorted(texts) == sorted(DOCUMENTS)
    blocks = data.samples("train")
    assert len(blocks) == len(tokens) // 16
    joined = torch.cat([blocks[i]["input_ids"] for i in range(len(blocks))]).tolist()
    assert joined == tokens[: len(joined)]
    assert torch.equal(blocks[2]["labels"], blocks[2]["input_ids"])


@pytest.mark.parametrize(
    ("length", "stride"), [(2, 1), (5, 1), (5, 3), (5, 4), (16, 3), (16, 15), (300, 3), (300, 299)]
)
@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 31, 200])
def test_every_token_is_scored_once_with_the_context_promised(tmp_path, length, stride, tokens):
    folder = write_tokens(["x" * (tokens - 1)], BYTE, tmp_path / "tokens")
    file = TokenFile(folder, BYTE)
    file.tokens = np.arange(tokens, dtype=np.uint16)  # a token is its place
    windows = Windows(TokenStream(file), length, stride)
    scored = []
    for index in range(len(windows)):
        ids, labels = windows[index]["input_ids"], windows[index]["labels"]
        assert len(ids) == len(labels) == length
        places = (labels != IGNORED).nonzero().flatten().tolist()
        assert places, "a window that scores nothing"
        for place in places:
            assert labels[place] == ids[place]
            context = ids[:place].tolist()
            assert context == list(range(int(ids[place]) - place, int(ids[place])))
            assert place >= min(length - stride, int(ids[place]))
        scored += labels[places].tolist()
    assert scored == list(range(1, tokens))


def test_limits(corpus):
    data = corpus_data(corpus, max_bytes=100, val=str(corpus), eval_tokens=50)
    kept = data.token_file("train").manifest
    assert kept["bytes"] == 100
    assert len(data.stream("val")) == 50
    assert len(corpus_data(corpus, eval_tokens=7).stream("val")) == 7


def test_columns_text_and_patterns(tmp_path):
    (tmp_path / "a.csv").write_text('id,body\n1,"one, two"\n2,"three\nfour"\n')
    (tmp_path / "b.tsv").write_text('id\tbody\n1\tsay "hi"\n')
    (tmp_path / "c.txt").write_text("line one\nline two\n")
    assert list(read_file(tmp_path / "a.csv", "body")) == ["one, two", "three\nfour"]
    assert list(read_file(tmp_path / "b.tsv", "body")) == ['say "hi"']
    for name in ("a.csv", "b.tsv"):  # whatever the case of its ending, as elsewhere
        capital = shutil.copy(tmp_path / name, tmp_path / f"capital{name[1:].upper()}")
        read, expected = (list(read_file(Path(one), "body")) for one in (capital, tmp_path / name))
        assert read == expected
        Path(capital).unlink()
    assert list(read_file(tmp_path / "c.txt", "body")) == ["line one\nline two\n"]
    data = corpus_data(tmp_path / "*.?sv", column="body")
    texts = BYTE.decode(data.token_file("train").tokens.tolist()).split("</s>")[:-1]
    assert texts == ["one, two", "three\nfour", 'say "hi"']
    (tmp_path / "a.csv").write_text("id,body\n1," + "a" * 200_000 + "\n")
    assert [len(text) for text in read_file(tmp_path / "a.csv", "body")] == [200_000]


def test_a_json_list_of_records_is_read_by_its_column(tmp_path):
    """It was one document, of brackets and names; any other json still is, as a program's file."""
    path = tmp_path / "a.json"
    for indent in (None, 2):
        records = [{"body": "one, two"}, {"body": "three\nGrüße"}]
        path.write_text(json.dumps(records, indent=indent), encoding="utf-8-sig")
        assert list(read_file(path, "body")) == ["one, two", "three\nGrüße"]
    with pytest.raises(ValueError, match=r"a.json, entry 0: there is no text 'text' in it"):
        list(read_file(path, "text"))
    path.write_text('[{"body": "one"')
    with pytest.raises(ValueError, match=r"a.json: there is no text 'body' .*JSONDecodeError"):
        list(read_file(path, "body"))
    for text in ('{"body": "one"}\n', '["one"]\n', ""):
        path.write_text(text, encoding="utf-8-sig")
        assert list(read_file(path, "body")) == [text][: len(text)]


def test_files_are_found_below_the_root_too(tmp_path, monkeypatch):
    (tmp_path / "data" / "set").mkdir(parents=True)
    (tmp_path / "data" / "set" / "a.txt").write_text("some text " * 9)
    settings = {"length": 8, "cache": str(tmp_path / "cache")}
    monkeypatch.setenv("RECIPES_DATA", str(tmp_path / "data"))
    assert len(CorpusData("files", "set/a.txt", **settings).samples("train")) > 5
    monkeypatch.setenv("RECIPES_DATA", str(tmp_path))
    (tmp_path / "data" / "set" / "below").mkdir()  # a folder is no file
    assert CorpusData("files", "set/*", root=str(tmp_path / "data"), **settings).samples("train")
    written = write_tokens(["tokens"], BYTE, tmp_path / "data" / "tokens")
    found = CorpusData("files", "tokens", root=str(tmp_path / "data"), **settings)
    assert Path(found.token_file("train").tokens.filename).parent == written
    with pytest.raises(FileNotFoundError, match="set/a.txt or .*/set/a.txt is not there"):
        CorpusData("files", "set/a.txt", **settings).samples("train")


def test_a_large_text_file_is_cut_at_line_ends(tmp_path):
    path = tmp_path / "large.txt"
    path.write_text("0123456789abcde\n" * (PIECE // 8))
    pieces = list(read_file(path, "text"))
    assert "".join(pieces) == path.read_text()
    assert [len(piece) for piece in pieces] == [PIECE, PIECE]


def test_a_long_line_is_cut_too(tmp_path):
    """A text of one line was one document of any length, held in memory as a whole."""
    path = tmp_path / "line.txt"
    path.write_text("a short line\n" + "no line ends here " * (PIECE // 6))
    pieces = list(read_file(path, "text"))
    assert "".join(pieces) == path.read_text()
    assert len(pieces) > 2 and max(map(len, pieces)) < 2 * PIECE


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl", "set"])
def test_long_texts_of_every_kind_are_cut_between_words(name, tmp_path, monkeypatch):
    """A cell was one document of any length, and a line's end of a million characters any word."""
    monkeypatch.setattr(corpus_module, "PIECE", 100)
    line = "words of text " * 30
    text = f"{line}{'x' * 250} {line}" if name.endswith("sv") else f"{line}\n{'x' * 250}\n{line}\n"
    folder = tmp_path / "set"
    folder.mkdir()
    path = folder / "train.jsonl" if name == "set" else tmp_path / name
    head = "" if path.suffix == ".txt" else "text\n" if name.endswith("sv") else '{"text": '
    tail = "}" if path.suffix == ".jsonl" else ""
    path.write_text(f"{head}{json.dumps(text) if tail else text}{tail}")
    pieces = list(
        read_set(str(folder), None, "train", "text") if name == "set" else read_file(path, "text")
    )
    assert "".join(pieces) == text
    assert 9 < len(pieces) < 16 and max(map(len, pieces)) < 200
    for piece, following in pairwise(pieces):
        # only the word that is longer than a piece is cut inside, and a line's end stays with it
        assert piece[-1] == "\n" or following[0] == " " or piece[-1] + following[0] == "xx"


def test_texts_of_short_lines_are_tokenised_as_they_are(tmp_path):
    """Token files that records name keep their content: of the installed Python source, whole."""
    paths = python_files()[:8]
    whole = write_tokens([path.read_text() for path in paths], BYTE, tmp_path / "whole")
    data = CorpusData("files", list(map(str, paths)), length=16, cache=str(tmp_path / "files"))
    size = TokenFile(whole, BYTE).manifest["bytes"]
    python = CorpusData(length=16, max_bytes=size, cache=str(tmp_path / "python"))
    for one in (data, python):
        written = one.token_file("train").folder
        for file in ("tokens.bin", "ends.npy"):
            assert (written / file).read_bytes() == (whole / file).read_bytes()


def test_long_documents_are_tokenised_a_few_at_a_time(tmp_path, monkeypatch):
    """A tokenizer holds about a hundred bytes for each character that it is given at once."""
    monkeypatch.setattr(token_files, "CHARACTERS", 50)
    calls, tokenizer = [], train_tokenizer([], 259)

    class Counted:
        def __call__(self, batch, **settings):
            calls.append(sum(map(len, batch)))
            return tokenizer(batch, **settings)

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def __len__(self):
            return len(tokenizer)

    documents = ["a" * 30] * 5 + ["b"] * 100
    folder = write_tokens(documents, Counted(), tmp_path / "tokens")
    assert max(calls) <= 50 + 30 and sum(calls) == 250
    assert len(TokenFile(folder, tokenizer).tokens) == 250 + len(documents)


def test_a_set_of_the_datasets_library(tmp_path):
    pytest.importorskip("datasets")
    folder, cache = tmp_path / "words", str(tmp_path / "cache")
    folder.mkdir()
    for split, texts in {"train": DOCUMENTS, "validation": ["one", "two"]}.items():
        rows = [json.dumps({"words": text}) for text in texts]
        (folder / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    data = CorpusData("datasets", str(folder), column="words", length=8, cache=cache)
    assert data.token_file("train").tokens.tolist() == ids_of(DOCUMENTS)
    assert data.stream("val").read(0, 99).tolist() == ids_of(["one", "two"])
    held_out = CorpusData("datasets", str(folder), "train", column="words", length=8, cache=cache)
    tokens = ids_of(DOCUMENTS)
    border = len(tokens) - round(len(tokens) * held_out.val_fraction)
    for part in ("val", "test"):  # which the set does not have
        assert held_out.stream(part).read(0, 99).tolist() == tokens[border:]
    assert len(held_out.stream("train")) == border
    with pytest.raises(ValueError, match="has no column 'text', the columns are words"):
        CorpusData("datasets", str(folder), length=8, cache=cache).token_file("train")
    (folder / "train.jsonl").write_text(json.dumps({"words": "changed"}) + "\n")
    data = CorpusData("datasets", str(folder), column="words", length=8, cache=cache)
    assert data.token_file("train").tokens.tolist() == ids_of(["changed"])
    rows = [{"words": text, "count": 3} for text in [*DOCUMENTS, None]]  # an empty cell at the end
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    settings = {"length": 8, "cache": str(tmp_path / "cells"), "max_bytes": 10**6}
    data = CorpusData("datasets", str(folder), column="words", **settings)
    assert data.token_file("train").tokens.tolist() == ids_of(DOCUMENTS)
    with pytest.raises(ValueError, match="column 'count' of .* has 3, which is no text"):
        CorpusData("datasets", str(folder), column="count", **settings).token_file("train")


def test_installed_python_in_a_fixed_order(tmp_path):
    names = [path.name for path in python_files()[:200]]
    assert len(set(names)) > 100
    data = CorpusData(max_bytes=200_000, length=64, cache=str(tmp_path), eval_tokens=1000)
    assert 199_996 < data.token_file("train").manifest["bytes"] <= 200_000
    assert len(data.stream("val")) == 1000
    assert data.samples("train")[0]["input_ids"].max() < BYTES


def test_the_installed_text_is_known_by_a_hash(tmp_path, monkeypatch):
    folder = tmp_path / "lib"
    folder.mkdir()

    def install(name, text):
        (folder / name).write_text(text)
        python_files.cache_clear()
        python_digest.cache_clear()
        return CorpusData.text_of(max_bytes=9), CorpusData.text_of("python", length=8)

    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(folder))
    try:
        first = install("a.py", "a = 1\nb = 2\n")
        # pip writes it for an editable package, with the folder that the package lies in
        assert install("__editable___x_finder.py", "MAPPING = {}") == first
        cut, whole = install("a.py", "a = 1\nb = 3\n")
        assert cut == first[0] and whole != first[1]  # only within max_bytes
        assert install("b.py", "c = 1\n")[1] != whole
        assert CorpusData.text_of("files", train="a.txt") == ""
    finally:
        python_files.cache_clear()
        python_digest.cache_clear()


def test_a_trained_tokenizer_is_the_same_for_all_processes(corpus):
    first, second = (corpus_data(corpus, vocab_size=300) for _ in range(2))
    assert 259 < first.vocab_size <= 300
    assert len(first.token_file("train").tokens) < len(ids_of(DOCUMENTS))
    written = first.token_file("train").tokens
    assert second.token_file("train").tokens.filename == written.filename
    assert first.tokenizer.decode(written.tolist()).split("</s>")[:-1] == DOCUMENTS


def test_a_token_file_is_taken_as_it_is_and_another_tokenizer_s_refused(corpus):
    folder = write_tokens(DOCUMENTS, BYTE, corpus.parent / "tokens")
    assert len(corpus_data(folder).stream("train")) > 0
    several = {"length": 16, "cache": str(corpus.parent / "cache")}
    assert len(CorpusData("files", [str(folder)], **several).stream("train")) > 0
    with pytest.raises(ValueError, match="names the token file .* among 2 sources"):
        CorpusData("files", [str(folder), str(corpus)], **several).token_file("train")
    with pytest.raises(ValueError, match="of which max_bytes 10 has no meaning"):
        corpus_data(folder, max_bytes=10).token_file("train")
    with pytest.raises(ValueError, match=r"are of the tokenizer '.*', expected those of"):
        train_tokenizer(DOCUMENTS, 300).save_pretrained(corpus.parent / "other")
        corpus_data(folder, tokenizer=str(corpus.parent / "other")).token_file("train")
    with pytest.raises(ValueError, match="holds tokens and no text"):
        corpus_data(folder, vocab_size=300).token_file("train")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "tokens": 3}))
    with pytest.raises(ValueError, match="expected the 3 of its manifest"):
        TokenFile(folder, BYTE)
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 9}))
    with pytest.raises(ValueError, match="format 9, expected 1"):
        TokenFile(folder, BYTE)
    with pytest.raises(FileNotFoundError, match="expected the manifest of a token file"):
        TokenFile(corpus.parent / "nothing", BYTE)


def test_of_two_writers_the_first_one_s_folder_stays(tmp_path):
    def documents():
        yield "late"
        write_tokens(["first"], BYTE, tmp_path / "tokens")  # another process, meanwhile

    write_tokens(documents(), BYTE, tmp_path / "tokens")
    assert TokenFile(tmp_path / "tokens", BYTE).tokens.tolist() == ids_of(["first"])
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]


def test_a_changed_corpus_is_tokenised_again(corpus):
    before = corpus_data(corpus).token_file("train").manifest["tokens"]
    corpus.write_text(corpus.read_text() + json.dumps({"text": "one more"}) + "\n")
    assert corpus_data(corpus).token_file("train").manifest["tokens"] == before + 9


def test_a_tokenizer_folder_that_changed_is_no_dead_end(corpus):
    folder = corpus.parent / "mine"
    lengths = []
    for size in (BYTES, 300):
        train_tokenizer(DOCUMENTS, size).save_pretrained(folder)
        lengths.append(len(corpus_data(corpus, tokenizer=str(folder)).token_file("train").tokens))
    assert lengths[0] > lengths[1]


def test_a_corpus_is_pickled_without_its_tokens(corpus):
    data = corpus_data(corpus)
    blocks = data.samples("train")
    kept = pickle.dumps(blocks)
    assert blocks.stream.file.tokens[:40].tobytes() not in kept
    again = pickle.loads(kept)
    assert isinstance(again.stream.file.tokens, np.memmap)
    assert torch.equal(again[1]["input_ids"], blocks[1]["input_ids"])


def test_others_may_read_a_token_file(corpus):
    folder = write_tokens(["text"], BYTE, corpus.parent / "tokens")
    (corpus.parent / "plain").mkdir()
    assert folder.stat().st_mode == (corpus.parent / "plain").stat().st_mode


@pytest.mark.parametrize(
    ("content", "settings", "said"),
    [
        ("", {}, r"texts.jsonl has no text, expected documents that are not empty"),
        ('{"text": ""}\n', {}, "has no text"),
        ('{"text": "ab"}\n', {}, "tokens to train on, expected a block of 16 or more"),
        ('{"body": "ab"}\n', {}, "line 1: there is no text 'text' in it"),
        ('["ab"]\n', {}, "line 1: there is no text 'text' in it"),
        ('{"text": "ab"\n', {}, "line 1: there is no text 'text' in it"),
        ('{"text": "ab"}\n', {"length": 1}, "length is 1, expected 2 tokens or more"),
        ('{"text": "ab"}\n', {"val_fraction": 0.0}, "val_fraction is 0.0"),
        ('{"text": "ab"}\n', {"vocab_size": 100}, "vocab_size is 100, expected 259"),
        ('{"text": "ab"}\n', {"train": "missing*.txt"}, "missing.* is not there"),
        ('{"text": "ab"}\n', {"source": "python"}, "source is python and train is"),
        ('{"text": "ab"}\n', {"source": "hub"}, "source is 'hub', expected python"),
        ('{"text": "a \\ud800"}\n', {}, "line 1: its 'text' has half of a surrogate pair"),
        ('{"text": 12}\n', {}, "line 1: there is no text 'text' in it .*12 is no text"),
        ("", {"source": "python", "train": None, "val": "a.txt"}, "expected neither"),
        ("", {"source": "datasets", "test": "a.txt"}, "expected neither"),
        ("", {"source": "datasets", "val": "a.txt"}, "expected neither.*or --data.val train"),
        ("", {"eval_stride": 0}, "eval_stride is 0, expected 1 or more"),
        ("", {"eval_tokens": 0}, "eval_tokens is 0, expected 1 or more"),
    ],
)
def test_bad_input_is_said_in_a_sentence(corpus, content, settings, said):
    corpus.write_text(content)
    arguments = {"source": "files", "train": str(corpus), "length": 16, **settings}
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        CorpusData(cache=str(corpus.parent / "cache"), **arguments).samples("train")


def test_a_window_with_no_room_is_refused(corpus):
    with pytest.raises(ValueError, match="eval_stride is 16, expected 1 to 15"):
        corpus_data(corpus, eval_stride=16).samples("val")
    with pytest.raises(ValueError, match="has 1 tokens to score"):
        corpus_data(corpus, eval_tokens=1).samples("val")


def test_not_utf8_is_said(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(ValueError, match="latin.txt is not UTF-8"):
        list(read_file(tmp_path / "latin.txt", "text"))


class Seen(L.LightningModule):
    """Notes the tokens of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].flatten().tolist())
        return self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(corpus: Path, steps: int, folder: Path, resume: str | None = None) -> Seen:
    module = Seen()
    trainer = L.Trainer(
        max_epochs=-1, max_steps=steps, logger=False, accelerator="cpu", num_sanity_val_steps=0,
        limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)],
    )  # fmt: skip
    trainer.fit(module, corpus_data(corpus, seed=5), ckpt_path=resume, weights_only=True)
    return module


@pytest.mark.parametrize("stop", [3, 17])
def test_a_resumed_run_sees_what_the_uninterrupted_one_sees(corpus, tmp_path, stop):
    length = len(corpus_data(corpus).train_dataloader())
    assert 3 < length < 17 < 2 * length, "one stop within the first epoch, one in the second"
    through = train(corpus, 25, tmp_path / "a").seen
    first = train(corpus, stop, tmp_path / "b").seen
    rest = train(corpus, 25, tmp_path / "b", str(tmp_path / "b" / "last.ckpt")).seen
    assert first + rest == through
    assert through[0] != through[length]
