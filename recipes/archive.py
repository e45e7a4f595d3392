"""records.zip: the logs and rows of a run's finished parts, without checkpoints.

Every run writes it beside its table. Unpacked into a run's folder (`--records FILE`), it lets
another machine go on where that run ended: with more seeds or rows, but not with the same trials
and trainings once more. A part whose checkpoint is needed again is trained again.
"""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

from recipes.nodes import Artifact, Node, Stage, free_name, is_measured
from recipes.records import RECORD, ROWS, flattened, read_record, write_record

FILE = "records.zip"
LARGEST = 2**20  # bytes of a file that a measurement wrote for others, such as a list of widths


def pack(nodes: Sequence[Node], base: Path, file: Path, description: Path) -> None:
    """Write the records of the finished nodes.

    Args:
        nodes: of a run; those that are not finished are left out.
        base: names in the file are relative to it.
        file: written atomically.
        description: of the run, packed too if it is there.
    """
    new = file.with_name(f".{file.name}")
    for_others = {
        value.path
        for node in nodes
        for value in node.values().values()
        if isinstance(value, Artifact)
    }
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        if description.is_file():
            archive.write(description, description.name)
        for node in filter(is_measured, nodes):
            record = read_record(node.folder)
            packed, left_out = files_of(node, for_others)
            record["files"] = record.get("files", True) and not left_out
            archive.writestr(_name(node, base, RECORD), json.dumps(record))
            for one in packed:
                archive.write(one, _name(node, base, one.relative_to(node.folder).as_posix()))
    new.replace(file)


def files_of(node: Node, for_others: set[Path]) -> tuple[list[Path], list[Path]]:
    """A node's files that are packed, its record aside, and those that are left out.

    Packed are logs and rows, and small files of measurements that settings of other nodes name.
    """
    packed: list[Path] = []
    left_out: list[Path] = []
    for file in sorted(one for one in node.folder.rglob("*") if one.is_file()):
        if file.name in (RECORD, "node.log"):
            continue
        if isinstance(node, Stage):
            of_log = file.relative_to(node.folder).parts[0].startswith("log")
            if of_log and file.name != "metrics.csv":
                continue  # Lightning's copy of the settings
            wanted = of_log
        else:
            small = file.stat().st_size <= LARGEST
            named = not for_others.isdisjoint([file, *file.parents])
            wanted = file.name == ROWS or (small and named)
        (packed if wanted else left_out).append(file)
    return packed, left_out


def read(file: Path, name: str) -> str:
    """The text of a file in an archive.

    Raises:
        ValueError: as for `unpack`.
    """
    with opened(file) as archive:
        return archive.read(name).decode()


def seconds(file: Path) -> float:
    """How long the parts of a run took in all, each on its own: no wall time.

    Raises:
        ValueError: as for `unpack`.
    """
    with opened(file) as archive:
        names = [one for one in archive.namelist() if Path(one).name == RECORD]
        return sum(json.loads(archive.read(one)).get("seconds") or 0.0 for one in names)


def opened(file: Path) -> zipfile.ZipFile:
    """An archive, to read.

    Raises:
        ValueError: if the file is none.
    """
    try:
        return zipfile.ZipFile(file)
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file}: expected a {FILE} of a run ({error})") from None


def finished_in(nodes: Sequence[Node], base: Path, file: Path) -> list[Node]:
    """The nodes of a run that a file has finished, with the same settings.

    Args:
        nodes: of a run.
        base: as for `pack`.
        file: written by `pack`.

    Raises:
        ValueError: if the file is no such archive, or has no node of the run.
        FileNotFoundError: if nodes in it differ, and the weights that they name are not here.
    """
    with opened(file) as archive:
        names = {_name(node, base, RECORD): node for node in nodes}
        packed = [name for name in archive.namelist() if name in names]
        found = [
            names[name]
            for name in packed
            if json.loads(archive.read(name))["fingerprint"] == names[name].fingerprint
        ]
    # a fingerprint has the content of the weights: without them no part of a training is found
    others = [names[name] for name in packed if names[name] not in found]
    if missing := sorted({one for node in others for one in missing_weights(node)}):
        raise FileNotFoundError(
            f"{file} was made with {', '.join(missing)}, not to be found here: `make weights` "
            "brings them, in the repository's folder"
        )
    if not found:
        raise ValueError(
            f"{file} has no part of this run: another experiment or preset made it, or "
            "other settings, or a version of this code that has others, or a file that a setting "
            "names has changed or is not here, or its text is the Python source of other packages"
        )
    return found


def missing_weights(node: Node) -> list[str]:
    """The folders of `make weights` that a stage's settings name and that are not there."""
    if not isinstance(node, Stage):
        return []
    values = flattened(node.parsed().as_dict()).values()
    named = [one.removeprefix("local-dir:") for one in values if isinstance(one, str)]
    return [one for one in named if one.startswith("weights/") and not Path(one).exists()]


def unpack(nodes: Sequence[Node], base: Path, file: Path) -> None:
    """Extract the records of those nodes, all in the file, that have no folder yet.

    A folder of other settings is put aside, as before a training.
    """
    with opened(file) as archive:
        names = archive.namelist()
        for node in nodes:
            if read_record(node.folder).get("fingerprint") == node.fingerprint:
                continue
            if node.folder.exists():
                node.folder.rename(free_name(node.folder))
            prefix, name = _name(node, base, ""), _name(node, base, RECORD)
            for one in names:
                if one.startswith(prefix) and one != name:
                    archive.extract(one, base)
            # last, so that a folder with a record is complete
            write_record(node.folder, json.loads(archive.read(name)))


def _name(node: Node, base: Path, file: str) -> str:
    return f"{node.folder.relative_to(base).as_posix()}/{file}"
