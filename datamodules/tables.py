"""Reading text: lines, JSON, tables with named columns, sets of the `datasets` library, labels."""

import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TXT = "sentence"  # name of the only column of a txt file
# JSON can say half of a pair, as of an emoji that was cut in two; UTF-8 and tokenizers cannot
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
csv.field_size_limit(2**31 - 1)  # characters of a cell; Python's default is 131,072


def read_class(text: str, classes: Mapping[str, int], place: str) -> int:
    """The number of the class with this name.

    Raises:
        ValueError: with the place, if none has it.
    """
    if text not in classes:
        raise ValueError(
            f"{place}: the label is {text!r}, expected one of {', '.join(map(repr, classes))}: "
            "correct the line, or give the training part an example of that label."
        )
    return classes[text]


def read_score(text: str, place: str) -> float:
    """`text` as a finite number.

    Raises:
        ValueError: with the place, if it is none.
    """
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not np.isfinite(number):
        raise ValueError(f"{place}: the score is {text!r}, expected a number: correct the line.")
    return number


def open_lines(path: str | Path, ends: bool = False) -> list[str]:
    """The lines of a UTF-8 file, with or without a byte order mark.

    Args:
        path: the file.
        ends: whether lines keep their ends; the last one gets one, too.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, or the file is empty or not UTF-8.
    """
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder, expected a text file: name one.")
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"{path} is not there, expected a text file: correct its name, or put it there."
        )
    try:
        # not splitlines(): a sentence may contain characters that Unicode treats as line ends
        text = Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): save it as UTF-8.") from error
    # a file without any "\n" is one of old Macs, whose lines end in "\r"
    # in others, "\r" before the end is Windows', or two of them of a program that wrote it twice
    end = "\n" if "\n" in text else "\r"
    lines = text.split(end)
    if lines[-1] == "":
        lines.pop()
    lines = [line + end if ends else line.rstrip("\r") for line in lines]
    if not lines:
        raise ValueError(f"{path} is empty, expected lines of text: put the data in it.")
    return lines


def parse_json(text: str, place: str) -> Any:
    """The content of a JSON text.

    Raises:
        ValueError: with the place, if it is no JSON, or has half of a surrogate pair.
    """
    try:
        content = json.loads(text)
        if SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: this is no JSON ({error}): repair it, or fetch or write it again."
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: this has half of a surrogate pair ({error}): repair it."
        ) from error


def read_json(path: str | Path) -> Any:
    """The content of a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty, not UTF-8 or no JSON.
    """
    return parse_json("\n".join(open_lines(path)), str(path))


def read_list(file: Path) -> list[Any]:
    """The entries of a json list.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no json, or no list.
    """
    content = read_json(file)
    if not isinstance(content, list):
        raise ValueError(
            f"{file} holds no list but {str(content)[:60]!r}: give a list with an entry for each "
            "image or text."
        )
    return content


def require_keys(file: Path | str, place: int, entry: Any, keys: Sequence[str]) -> None:
    """Raise an error if an entry of a json list lacks a key.

    Args:
        file: the list, as the message names it.
        place: of the entry in the list.
        entry: of the list.
        keys: what it must have.

    Raises:
        ValueError: naming the file, the entry and what is expected.
    """
    if not isinstance(entry, dict) or any(key not in entry for key in keys):
        raise ValueError(
            f"{file}, entry {place} is {str(entry)[:60]!r}, expected one with {', '.join(keys)}: "
            "correct or remove it."
        )


def json_lines(path: str | Path) -> Iterator[tuple[int, Any]]:
    """The content of each line of a JSON Lines file, with its number; empty lines are left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is empty or not UTF-8, or a line is no JSON.
    """
    for number, line in enumerate(open_lines(path), start=1):
        if line.strip():
            yield number, parse_json(line, f"{path}, line {number}")


def column_error(path: str | Path, line: int, count: int, expected: int) -> ValueError:
    """The error of a row that has more or fewer columns than its header."""
    return ValueError(
        f"{path}, line {line}: the row has {count} columns, expected {expected}: repair the line."
    )


def read_table(
    path: str | Path,
    columns: Sequence[str],
    repair: str = "set the names with text, pair and label",
) -> list[tuple[int, dict[str, str]]]:
    """The rows of a csv, tsv, jsonl or txt file, each with the number of the line it ends on.

    csv may have cells in quotation marks; in tsv these have no special meaning; jsonl has an object
    on each line; txt has a sentence on each line, as the column `sentence`.

    Args:
        path: the file.
        columns: names of columns that the table must have.
        repair: what the error of a missing column advises.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: an unknown ending, a column that is missing, a row of the wrong length or a
            line that is no JSON object.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".jsonl":
        rows: list[tuple[int, dict[str, str]]] = []
        for number, found in json_lines(path):
            if not isinstance(found, dict):
                raise ValueError(
                    f"{path}, line {number}: this is a {type(found).__name__}, expected an object "
                    "with the columns as keys: repair the line."
                )
            _require(columns, found, f"{path}, line {number}", repair)
            rows.append((number, {name: _as_text(value) for name, value in found.items()}))
        return rows
    if suffix == ".csv":
        (_, header), *cells = csv_cells(path)
        if len(header) == 1 and ";" in header[0]:  # as Excel saves it where "," is in numbers
            repair = "save it with commas between the cells, not semicolons"
        _require(columns, header, str(path), repair)
        return named_cells(path, header, cells)
    lines = open_lines(path)
    header = _header(path, lines[0])
    if suffix == ".txt" and all(_is_object(line) for line in lines[:3]):
        raise ValueError(
            f"{path} holds JSON objects, expected a sentence on each line of a .txt: let its name "
            "end in .jsonl."
        )
    _require(columns, header, str(path), repair)
    if suffix == ".txt":
        return [(n, {TXT: line}) for n, line in enumerate(lines, start=1) if line.strip()]
    cells = [(number, line.split("\t")) for number, line in enumerate(lines, start=1) if line]
    return named_cells(path, header, cells[1:])


def csv_cells(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row of a csv ([] for an empty line), with the number of its last line.

    Line ends within quotation marks stay as they are in the file, as pandas and `datasets` read it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as for `open_lines`, or a line has a carriage return outside quotation marks.
    """
    reader = csv.reader(open_lines(path, ends=True))
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: a carriage return is in a cell without quotation "
            "marks: remove it, or put the cell in them."
        ) from error


def named_cells(
    path: str | Path, header: Sequence[str], rows: Iterable[tuple[int, list[str]]]
) -> list[tuple[int, dict[str, str]]]:
    """The cells of each row as a dict by the header's names, with its line, without empty rows.

    Raises:
        ValueError: a row has more or fewer cells than the header, or two columns have one name.
    """
    if twice := [name for place, name in enumerate(header) if name and name in header[:place]]:
        raise ValueError(
            f"{path} has two columns {twice[0]!r}, expected different names: rename or remove one."
        )
    named = []
    for number, cells in rows:
        if cells and len(cells) != len(header):
            raise column_error(path, number, len(cells), len(header))
        if cells:
            named.append((number, dict(zip(header, cells, strict=True))))
    return named


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


def _header(path: str | Path, first: str) -> list[str]:
    """The names of the columns of a tsv or txt file whose first line is this."""
    suffix = Path(path).suffix.lower()
    if suffix == ".txt":
        return [TXT]
    if suffix == ".tsv":
        return first.split("\t")
    raise ValueError(
        f"{path} ends in {suffix or 'nothing'}, expected .csv, .tsv, .jsonl or .txt: rename the "
        "file."
    )


def _require(columns: Iterable[str], found: Iterable[str], place: str, repair: str) -> None:
    if missing := [name for name in columns if name not in found]:
        raise ValueError(
            f"{place}: there is no column {missing[0]!r}, the columns are "
            f"{', '.join(map(repr, found))}: {repair}."
        )


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def hub_rows(name: str, part: str, config: str | None = None) -> Any:
    """The rows, by column, of a part of a set that the `datasets` library loads.

    Args:
        name: on the hub, or a folder that `datasets` reads.
        part: "train", "val", "test", or a name that only this set has.
        config: configuration of the set, such as GLUE's task.

    Raises:
        ImportError: `datasets` is not installed.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            "source hub needs the package datasets, which is not installed: pip install datasets, "
            "or give a folder."
        ) from error
    return load_dataset(name, config, split="validation" if part == "val" else part)
