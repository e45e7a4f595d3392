"""Text for language models: documents, tokenised and packed into blocks.

Documents come from files (text, or a column of csv, tsv, jsonl and json), from a dataset of the
`datasets` library, or from the installed Python source. They are tokenised once, into memory-mapped
token files (see token_files.py), so that a corpus may be larger than memory.
"""

import csv
import functools
import hashlib
import io
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from torch.utils.data import Dataset

from datamodules.loading import require_choice, require_limits
from datamodules.tables import column_error
from datamodules.token_files import (
    Blocks,
    TokenFile,
    TokenStream,
    Windows,
    appearing,
    write_tokens,
)
from datamodules.tokens import (
    WithTokenizer,
    fingerprint,
    how_to_set,
    load_tokenizer,
    tokenizer_state,
    train_tokenizer,
)

Source = Literal["python", "files", "datasets"]
BYTES = 259  # entries of `train_tokenizer`'s tokenizer when it has no merges: one for each byte
PIECE = 2**20  # characters; a longer text is split into several documents
# A line's last word with the white space before it, to which most tokenizers join it.
LAST_WORD = re.compile(r"[^\S\r\n]\S*\Z")
RECORDS = re.compile(r"\s*\[\s*\{")  # how a json file begins that is a list of records
TRAINING_BYTES = 50_000_000  # most bytes of text that a tokenizer is trained on
SPLITS = {"train": "train", "val": "validation", "test": "test"}


class CorpusData(WithTokenizer):
    """Blocks of tokens for a causal language model.

    Training: documents in an order drawn by `seed`, each with its end-of-text token, joined and
    cut into blocks; blocks in a new order every epoch. Validation and test: every token of the
    text is scored once, in windows (see `Windows`). Samples have `input_ids` and `labels` (L,).

    Args:
        source: "python", the installed Python source, which is another text with other packages;
            "files"; or "datasets", a dataset of the `datasets` library.
        train: source "files": files or folders to train on, with * allowed in a name's last part;
            source "datasets": the dataset's name. A folder with a manifest.json is a token file
            and used as it is.
        val: files to validate on (source "files"). None: the dataset's validation split, or else
            the last `val_fraction` of the training tokens, whatever the seed; "train" (source
            "datasets"): those tokens although the dataset has a validation split.
        test: files to test on (source "files"). None: the dataset's test split, or else the
            validation part.
        root: folder to look in for files that are not below the current folder; RECIPES_DATA when
            None.
        column: name of the column with the text, in csv, tsv and jsonl files, lists of records in
            json files, and datasets.
        config: configuration of the dataset, such as "wikitext-2-raw-v1".
        tokenizer: name of a transformers tokenizer, or a folder with its files. None: a tokenizer
            with `vocab_size` entries is trained on the training text; 259 is byte-level.
        vocab_size: see `tokenizer`.
        length: tokens in a block or window, the model's context.
        eval_stride: see `Windows`; length - 1, disjoint windows, when None.
        val_fraction: see `val`.
        max_bytes: most bytes of text to read from each part; the last document is cut there.
        eval_tokens: most tokens to score of the validation and of the test part.
        cache: folder for token files and trained tokenizers.
        batch_size: blocks per device and training step.
        **kwargs: see `PartsData`.

    Raises:
        ValueError: for settings out of range, or files that `source` does not take.
    """

    def __init__(
        self,
        source: Source = "python",
        train: str | list[str] | None = None,
        val: str | list[str] | None = None,
        test: str | list[str] | None = None,
        root: str | None = None,
        column: str = "text",
        config: str | None = None,
        tokenizer: str | None = None,
        vocab_size: int = BYTES,
        length: int = 1024,
        eval_stride: int | None = None,
        val_fraction: float = 0.05,
        max_bytes: int | None = None,
        eval_tokens: int | None = None,
        cache: str = "runs/corpora",
        batch_size: int = 8,
        **kwargs: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, **kwargs)
        require_choice("source", source, get_args(Source))
        if (source == "python") != (train is None):
            raise ValueError(
                f"source is {source} and train is {train!r}: set --data.train to files or to the "
                "dataset's name, except for source python, which needs none."
            )
        if not 0 < val_fraction < 1:
            raise ValueError(
                f"val_fraction is {val_fraction}, expected a share between 0 and 1, both excluded."
            )
        held_out = source == "datasets" and val == "train"
        if source != "files" and (test or (val and not held_out)):
            raise ValueError(
                f"source is {source}, val is {val!r} and test is {test!r}, expected neither: they "
                "are for source files; python holds out val_fraction, a dataset has its own splits "
                "(or --data.val train, which holds out val_fraction of its training split)."
            )
        require_limits(eval_stride=eval_stride, max_bytes=max_bytes, eval_tokens=eval_tokens)
        if length < 2:
            raise ValueError(f"length is {length}, expected 2 tokens or more in a block.")
        self.source, self.root, self.column, self.config = source, root, column, config
        self.parts = {"train": train, "val": val, "test": test}
        self.tokenizer_name, self.trained_size = tokenizer, vocab_size
        self.length, self.eval_stride = length, eval_stride or length - 1
        self.val_fraction, self.max_bytes, self.eval_tokens = val_fraction, max_bytes, eval_tokens
        self.cache = Path(cache)
        self._tokenizer: Any = None
        self._files: dict[str, TokenFile] = {}

    def prepare_data(self) -> None:
        """Tokenise the text; Lightning calls this in one process of each machine."""
        self.token_file("train")
        self.stream("val")

    @property
    def tokenizer(self) -> Any:
        """The tokenizer; a trained one is kept in `cache`, named by a hash of its training text."""
        if self._tokenizer is None:
            if self.tokenizer_name:
                self._tokenizer = load_tokenizer(self.tokenizer_name)
            elif self.trained_size == BYTES:
                self._tokenizer = train_tokenizer([], BYTES)
                self._tokenizer.name_or_path = "bytes"
            else:
                self._tokenizer = self._trained_tokenizer()
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self.tokenizer)

    def samples(self, part: str) -> Dataset:
        if part == "train":
            return Blocks(self.stream("train"), self.length)
        return Windows(self.stream(part), self.length, self.eval_stride)

    def stream(self, part: str) -> TokenStream:
        """The tokens of a part, within the limits."""
        if part == "predict" or (part == "test" and not self._exists("test")):
            part = "val"
        if part != "train" and self._exists(part):
            return TokenStream(self.token_file(part), stop=self.eval_tokens)
        file = self.token_file("train")
        held_out = 0 if self._exists("val") else round(len(file.tokens) * self.val_fraction)
        border = len(file.tokens) - held_out
        if part == "train":
            return TokenStream(file, stop=border, seed=self.seed)
        return TokenStream(file, border, border + self.eval_tokens if self.eval_tokens else None)

    def token_file(self, part: str) -> TokenFile:
        """The tokens of all documents of a part; the file is written at the first call."""
        if part not in self._files:
            if (written := self._written(part)) is not None:
                folder = written
            else:
                key = f"{self._key(part)} {fingerprint(self.tokenizer)}"
                digest = hashlib.sha256(key.encode())
                folder = self.cache / f"{self.source}-{part}-{digest.hexdigest()[:16]}"
                source = str(self.parts[part] or self.parts["train"] or self.source)
                write_tokens(self.documents(part), self.tokenizer, folder, source)
            self._files[part] = TokenFile(folder, self.tokenizer)
        return self._files[part]

    def documents(self, part: str) -> Iterator[str]:
        """The texts of a part within `max_bytes`, in an order that depends on the source alone."""
        if self.source == "python":
            texts = read_python()
        elif self.source == "files":
            texts = (text for path in self._paths(part) for text in read_file(path, self.column))
        else:
            texts = read_set(str(self.parts["train"]), self.config, SPLITS[part], self.column)
        return limited(texts, self.max_bytes)

    @classmethod
    def text_of(cls, source: Source = "python", max_bytes: int | None = None, **_: Any) -> str:
        """A hash of the text if it depends on more than the settings and the files they name.

        The installed Python source does: on the packages. Takes the arguments of the constructor;
        "" for other sources.
        """
        return python_digest(max_bytes) if source == "python" else ""

    def members(self, part: str) -> tuple[list[str], bool]:
        """One line with the token file's manifest and the tokens used; see `PartsData.members`."""
        stream = self.stream(part)
        return [json.dumps({**stream.file.manifest, "used": len(stream)}, sort_keys=True)], False

    def describe(self) -> dict[str, Any]:
        """Prompts are texts without a template, of any length that leaves room for new tokens."""
        return {
            "kind": "prompts",
            "template": "{input}",
            "before": [],
            "behind": [],
            "tokenizer": tokenizer_state(self.tokenizer),
            "decoding": {},
            "columns": [self.column, None],
        }

    @property
    def tokenizer_cure(self) -> str:
        return how_to_set("the one that it was trained with")

    def _exists(self, part: str) -> bool:
        """Whether a part has its own documents; otherwise it is held out of the training part."""
        if self.source == "datasets":
            return part == "train" or (
                self.parts[part] is None
                and SPLITS[part] in set_splits(str(self.parts["train"]), self.config)
            )
        return self.parts[part] is not None

    def _paths(self, part: str) -> list[Path]:
        named = self.parts[part]
        return find_files([named] if isinstance(named, str) else named or [], self._root())

    def _key(self, part: str) -> str:
        """A string that identifies the sources of a part's documents, for the names in `cache`."""
        if self.source == "datasets":
            name = str(self.parts["train"])
            # a folder's files may change; a set of the hub is known by its name
            files = _stamps(_matching(Path(name))) if Path(name).exists() else []
            made_from: Any = [name, self.config, SPLITS[part], *files]
        else:
            made_from = _stamps(python_files() if self.source == "python" else self._paths(part))
        return json.dumps([made_from, self.column, self.max_bytes])

    def _tokenizer_key(self) -> str:
        return self.tokenizer_name or f"{self.trained_size} of {self._key('train')}"

    def _written(self, part: str) -> Path | None:
        """The token file that `train`, `val` or `test` names, if it names one.

        Raises:
            ValueError: if it names more than that, or there is a limit on the bytes of texts.
        """
        named = self.parts[part]
        if self.source != "files" or named is None:
            return None
        names = [named] if isinstance(named, str) else named
        places = (place for name in names for place in _places(name, self._root()))
        folder = next((place for place in places if (place / "manifest.json").is_file()), None)
        if folder is not None and len(names) > 1:
            raise ValueError(
                f"--data.{part} names the token file {folder} among {len(names)} sources: give it "
                "alone, or the texts of all of them."
            )
        if folder is not None and self.max_bytes is not None:
            raise ValueError(
                f"--data.{part} names the token file {folder}, of which max_bytes "
                f"{self.max_bytes} has no meaning: write one of less text, or drop the limit."
            )
        return folder

    def _root(self) -> str:
        return self.root or os.environ.get("RECIPES_DATA", "")

    def _trained_tokenizer(self) -> Any:
        if folder := self._written("train"):
            raise ValueError(
                f"{folder} holds tokens and no text, from which a tokenizer could be trained: "
                "set --data.tokenizer to the one that made them."
            )
        digest = hashlib.sha256(self._tokenizer_key().encode()).hexdigest()[:16]
        folder = self.cache / f"tokenizer-{digest}"
        if not folder.is_dir():
            made = train_tokenizer(self._some_text(), self.trained_size)
            with appearing(folder) as scratch:
                made.save_pretrained(scratch)
        return load_tokenizer(str(folder))

    def _some_text(self) -> Iterator[str]:
        left = TRAINING_BYTES
        for text in self.documents("train"):
            if left <= 0:
                return
            left -= len(text.encode())
            yield text


# Reading documents.


def find_files(patterns: Sequence[str], root: str = "") -> list[Path]:
    """The files that names, folders and patterns with * refer to, sorted within each pattern.

    Args:
        patterns: relative to the current folder, or else to `root`.
        root: a folder; "" for none.

    Raises:
        FileNotFoundError: no file matches one of them.
    """
    paths: list[Path] = []
    for pattern in patterns:
        names = _places(pattern, root)
        found = next(filter(None, map(_matching, names)), [])
        if not found:
            places = " or ".join(map(str, dict.fromkeys(names)))
            raise FileNotFoundError(
                f"{places} is not there, expected text files: correct --data.train or --data.val."
            )
        paths += found
    return paths


def _stamps(paths: Sequence[Path]) -> list[tuple[str, int, float]]:
    """Each file's path, size and time of its last change."""
    return [(str(path), (stat := path.stat()).st_size, stat.st_mtime) for path in paths]


def _places(name: str, root: str) -> list[Path]:
    """The paths that a name may mean: relative to the current folder, or to the root."""
    return [Path(name).expanduser(), *([Path(root, name).expanduser()] if root else [])]


def _matching(name: Path) -> list[Path]:
    if name.is_file():
        return [name]
    found = name.rglob("*") if name.is_dir() else name.parent.glob(name.name)
    return sorted(path for path in found if path.is_file())


def read_file(path: Path, column: str) -> Iterator[str]:
    """Yield the documents of a file.

    In csv, tsv and jsonl files each row's `column` is a document, and in a json file that is a list
    of records (which is in memory as a whole) each record's; any other file is one. Those that are
    long are several, see `pieces`.

    Raises:
        ValueError: the file is not UTF-8, or a row has no such column or no text in it.
    """
    place, suffix = f"{path}", path.suffix.lower()
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            if suffix == ".jsonl":
                for number, line in enumerate(lines, start=1):
                    place = f"{path}, line {number}"
                    if line.strip():
                        yield from pieces(_text(json.loads(line), column))
            elif suffix == ".json" and RECORDS.match(lines.read(PIECE)):
                lines.seek(0)
                for number, record in enumerate(json.load(lines)):
                    place = f"{path}, entry {number}"
                    yield from pieces(_text(record, column))
            elif suffix in (".csv", ".tsv"):
                tsv: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
                reader = csv.DictReader(lines, **(tsv if suffix == ".tsv" else {}))
                for row in reader:
                    place = f"{path}, line {reader.line_num}"
                    if None in row or None in row.values():
                        names = reader.fieldnames or []
                        cells = sum(value is not None for key, value in row.items() if key)
                        cells += len(row.get(None) or [])
                        raise column_error(path, reader.line_num, cells, len(names))
                    yield from pieces(row[column])
            else:
                lines.seek(0)  # where that look has moved on
                yield from pieces(lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8.") from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: its {column!r} has half of a surrogate pair ({error}): repair it."
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place}: there is no text {column!r} in it ({error!r}): name the text's column in "
            "--data.column, or repair it."
        ) from error


def _text(record: Any, column: str) -> str:
    text = record[column]
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is no text")
    text.encode()  # JSON can say half of a surrogate pair, UTF-8 cannot
    return text


def pieces(text: str | TextIO) -> Iterator[str]:
    """The documents of a text: all of it, or several of about a million characters.

    They end with a line; those in a line that is longer end before white space, if it has some.
    """
    lines = io.StringIO(text, newline="") if isinstance(text, str) else text
    piece, size = [""], 0
    while line := lines.readline(PIECE):
        piece.append(line)
        size += len(line)
        if size >= PIECE:
            # a line of that length goes on in the next one
            word = LAST_WORD.search(line, 1) if len(line) == PIECE else None
            rest = word[0] if word else ""
            yield "".join(piece)[: size - len(rest)]
            piece, size = [rest], len(rest)
    if size:
        yield "".join(piece)


@functools.cache
def python_files() -> list[Path]:
    """The installed Python source files: the standard library and all packages.

    Ordered by a hash of their names, so that the first million bytes come from many packages, and
    the order hardly changes when a package is installed or removed. Without the files that pip
    writes for an editable package, which name the folder that it lies in.
    """
    names: dict[str, Path] = {}
    for root in map(sysconfig.get_path, ("stdlib", "purelib")):
        for folder, below, files in os.walk(root):
            below[:] = [one for one in below if one not in ("site-packages", "dist-packages")]
            for file in files:
                if file.endswith(".py") and not file.startswith("__editable__"):
                    path = Path(folder, file)
                    names[path.relative_to(root).as_posix()] = path
    return [names[name] for name in sorted(names, key=_hash)]


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def read_python() -> Iterator[str]:
    """Yield the text of each of `python_files` that is UTF-8."""
    for path in python_files():
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def limited(texts: Iterable[str], max_bytes: int | None) -> Iterator[str]:
    """The texts until they have that many bytes of UTF-8; the last one is cut there."""
    left = max_bytes
    for text in texts:
        if left is None:
            yield text
            continue
        kept = text.encode()[:left]
        yield kept.decode(errors="ignore")  # a character may be cut in two
        if not (left := left - len(kept)):
            return


@functools.cache
def python_digest(max_bytes: int | None) -> str:
    """A hash of the installed Python source, as far as `max_bytes`; see `python_files`."""
    digest = hashlib.sha256()
    for text in limited(read_python(), max_bytes):
        digest.update(text.encode())
    return digest.hexdigest()


def set_splits(name: str, config: str | None) -> list[str]:
    """The splits of a dataset of the `datasets` library."""
    import datasets

    return datasets.get_dataset_split_names(name, config)


def read_set(name: str, config: str | None, split: str, column: str) -> Iterator[str]:
    """The documents of a set of the `datasets` library, by hub name or folder, streamed.

    Raises:
        ValueError: it has no such column, or a value in it is no text.
    """
    import datasets

    for row in datasets.load_dataset(name, config, split=split, streaming=True):
        if column not in row:
            raise ValueError(
                f"{name} has no column {column!r}, the columns are {', '.join(row)}: name the "
                "text's in --data.column."
            )
        text = row[column]
        if isinstance(text, str):
            yield from pieces(text)
        elif text is not None:  # an empty cell is no document
            raise ValueError(
                f"column {column!r} of {name} has {text!r}, which is no text: name the text's in "
                "--data.column."
            )
