"""Token files: a tokenised corpus on disk, memory-mapped, cut into blocks or windows for a model.

A token file is a folder with `tokens.bin` (all documents one after the other, each with its
end-of-text token), `ends.npy` (where each document ends) and `manifest.json` (which tokenizer made
them, and how many there are).
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from datamodules.loading import IGNORED
from datamodules.tokens import fingerprint

FORMAT = 1
# Documents and characters that are tokenised at a time: a tokenizer takes about a hundred bytes of
# memory for a byte of text.
BATCH, CHARACTERS = 64, 2**20


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A scratch folder to fill, which is renamed to `folder` when the block ends without an error.

    If several processes write the same folder at once, the first to finish wins.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    scratch = private / folder.name
    scratch.mkdir()  # with the umask's rights; a temporary folder is for its owner alone
    try:
        yield scratch
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(private, ignore_errors=True)


def write_tokens(
    documents: Iterable[str], tokenizer: Any, folder: str | Path, source: str = "the corpus"
) -> Path:
    """Tokenise documents into a folder; only a few of them are in memory at a time.

    Args:
        documents: texts; empty ones are left out.
        tokenizer: of transformers, with an end-of-text token, which is appended to each document.
        folder: the token file to write; if it exists, nothing is written.
        source: what the documents are from, for the error.

    Returns:
        The folder.

    Raises:
        ValueError: there is no text, or the tokenizer has no end-of-text token.
    """
    folder = Path(folder)
    if folder.is_dir():
        return folder
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {tokenizer.name_or_path!r} has no end-of-text token, expected one that "
            "ends each document: choose another with --data.tokenizer."
        )
    with appearing(folder) as scratch:
        dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
        ends, size, texts = [0], 0, (text for text in documents if text)
        with (scratch / "tokens.bin").open("wb") as file:
            for batch in gathered(texts, CHARACTERS, BATCH):
                size += sum(len(text.encode()) for text in batch)
                encoded = tokenizer(batch, add_special_tokens=False, return_attention_mask=False)
                for ids in encoded["input_ids"]:
                    np.array([*ids, tokenizer.eos_token_id], dtype).tofile(file)
                    ends.append(ends[-1] + len(ids) + 1)
        if not size:
            raise ValueError(
                f"{source} has no text, expected documents that are not empty: "
                "correct --data.train, --data.val or --data.column."
            )
        np.save(scratch / "ends.npy", np.array(ends[1:], np.int64))
        manifest = {
            "format": FORMAT,
            "tokenizer": tokenizer.name_or_path,
            "tokenizer_sha256": fingerprint(tokenizer),
            "dtype": np.dtype(dtype).name,
            "tokens": ends[-1],
            "documents": len(ends) - 1,
            "bytes": size,
        }
        (scratch / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return folder


def gathered(texts: Iterable[str], characters: int, count: int) -> Iterator[list[str]]:
    """Lists of at most `count` texts, each ended by the text that brings it to `characters`."""
    texts_so_far: list[str] = []
    size = 0
    for text in texts:
        texts_so_far.append(text)
        size += len(text)
        if size >= characters or len(texts_so_far) == count:
            yield texts_so_far
            texts_so_far, size = [], 0
    if texts_so_far:
        yield texts_so_far


class TokenFile:
    """A token file that `write_tokens` has written, memory-mapped.

    Args:
        folder: its folder.
        tokenizer: the tokenizer that must have made it.

    Attributes:
        tokens: (N,) of all documents.
        ends: (documents,), the place after each document's last token.
        manifest: `tokens`, `documents`, `bytes` of text, `tokenizer_sha256`, …

    Raises:
        FileNotFoundError: there is no manifest.
        ValueError: it was made by another tokenizer, has another format, or is incomplete.
    """

    def __init__(self, folder: str | Path, tokenizer: Any) -> None:
        folder = Path(folder)
        path = folder / "manifest.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is not there, expected the manifest of a token file: name a folder that "
                "this repository's write_tokens made, or a text file."
            )
        self.manifest: dict[str, Any] = json.loads(path.read_text())
        if self.manifest.get("format") != FORMAT:
            raise ValueError(
                f"{path} has format {self.manifest.get('format')!r}, expected {FORMAT}: write the "
                "token file again."
            )
        if self.manifest["tokenizer_sha256"] != fingerprint(tokenizer):
            raise ValueError(
                f"The tokens in {folder} are of the tokenizer {self.manifest['tokenizer']!r}, "
                f"expected those of {tokenizer.name_or_path!r}: set --data.tokenizer to the first, "
                "or write the token file again."
            )
        self.folder = folder
        self.tokens = self._mapped()
        self.ends: NDArray[np.int64] = np.load(folder / "ends.npy")
        if len(self.tokens) != self.manifest["tokens"]:
            raise ValueError(
                f"{folder / 'tokens.bin'} has {len(self.tokens)} tokens, expected the "
                f"{self.manifest['tokens']} of its manifest: write the token file again."
            )

    def _mapped(self) -> NDArray[Any]:
        return np.memmap(self.folder / "tokens.bin", self.manifest["dtype"], mode="r")

    def __getstate__(self) -> dict[str, Any]:
        """All but the tokens: pickled for a worker, a memory map would be copied."""
        return {**self.__dict__, "tokens": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tokens = self._mapped()


class TokenStream:
    """The documents of a part of a token file, one after another.

    Args:
        file: the token file.
        start: first token of the part.
        stop: the token after the part; None: the end. A document that crosses a border is cut
            there.
        seed: seed of a random order of the documents; None keeps their order.
    """

    def __init__(
        self, file: TokenFile, start: int = 0, stop: int | None = None, seed: int | None = None
    ) -> None:
        self.file = file
        ends = np.clip(file.ends, start, len(file.tokens) if stop is None else stop)
        begins = np.concatenate([[start], ends[:-1]])
        documents = np.flatnonzero(ends > begins)
        if seed is not None:
            documents = np.random.default_rng(seed).permutation(documents)
        self._ends = ends[documents]  # end of each document, in the file
        self._places = np.cumsum(self._ends - begins[documents])  # and in the stream

    def __len__(self) -> int:
        return int(self._places[-1]) if len(self._places) else 0

    def read(self, first: int, last: int) -> Tensor:
        """The tokens from `first` to before `last` (or the end), int64."""
        last = min(last, len(self))
        pieces = [np.empty(0, np.int64)]
        document = int(np.searchsorted(self._places, first, side="right"))
        while first < last:
            stop = min(int(self._places[document]), last)
            shift = int(self._ends[document] - self._places[document])  # from stream to file
            pieces.append(self.file.tokens[first + shift : stop + shift].astype(np.int64))
            first, document = stop, document + 1
        return torch.from_numpy(np.concatenate(pieces))


class Blocks(Dataset):
    """Training samples: a stream cut into blocks of `length` tokens; a shorter rest is left out.

    A sample has `input_ids` and `labels` (L,), which are the same: transformers' models predict
    labels[1:] from input_ids[:-1].

    Raises:
        ValueError: the stream is shorter than a block.
    """

    def __init__(self, stream: TokenStream, length: int) -> None:
        if len(stream) < length:
            raise ValueError(
                f"The corpus has {len(stream)} tokens to train on, expected a block of {length} or "
                "more: add text, or set --data.length lower."
            )
        self.stream, self.length = stream, length

    def __len__(self) -> int:
        return len(self.stream) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.stream.read(index * self.length, (index + 1) * self.length)
        return {"input_ids": ids, "labels": ids.clone()}


class Windows(Dataset):
    """Evaluation samples: windows in which every token of a stream but the first is a label once.

    Window k begins at token k·stride and has `length` tokens. Labels that an earlier window scores
    are -100, and so is the first, which has no context. With stride = length - 1 the windows score
    disjoint tokens; with a smaller stride each token has at least length - stride tokens of
    context. The last window is padded with token 0, label -100.

    Raises:
        ValueError: the stride is not from 1 to length - 1, or the stream has one token or none.
    """

    def __init__(self, stream: TokenStream, length: int, stride: int) -> None:
        if not 1 <= stride < length:
            raise ValueError(
                f"eval_stride is {stride}, expected 1 to {length - 1}, below the window's length "
                f"of {length}: leave it out for disjoint windows."
            )
        if len(stream) < 2:
            raise ValueError(
                f"The corpus has {len(stream)} tokens to score, expected 2 or more: add text."
            )
        self.stream, self.length, self.stride = stream, length, stride

    def __len__(self) -> int:
        # the first scores tokens 1 … length - 1, each further one the next `stride`
        return 1 + max(0, -(-(len(self.stream) - self.length) // self.stride))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        first = index * self.stride
        ids = self.stream.read(first, first + self.length)
        labels = ids.clone()
        labels[: self.length - self.stride if index else 1] = IGNORED
        rest = (0, self.length - len(ids))
        pad = torch.nn.functional.pad
        return {"input_ids": pad(ids, rest), "labels": pad(labels, rest, value=IGNORED)}
