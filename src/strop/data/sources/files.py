"""Local data files: JSON lines, JSON, CSV, Parquet and Arrow.

Tables are read by the library ``datasets``. Text is parsed here, because ``datasets`` reports no line in its errors, gives every
record the columns of all, and reads CSV text as numbers ("007" as 7, "NA" as nothing). For JSON lines, only the offsets are kept
in memory.
"""

from __future__ import annotations

import csv
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from strop.data.sources.in_memory import DatasetRecords, ListRecords
from strop.data.sources.records import DataError, Record, Records
from strop.storage.files import NotUtf8, decode_text

LONGEST_FIELD = (1 << 31) - 1  # characters of a field of a CSV file; Python's own limit is 131,072
FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")


def is_url(name: str) -> bool:
    """Return whether a data set is a file at a URL, which the library ``datasets`` downloads and caches."""
    return name.startswith(("https://", "http://", "hf://"))


def open_file(path: Path) -> Records:
    """Open a data file. Raises DataError if it is missing, empty or malformed."""
    try:
        records = _open_by_suffix(path)
    except OSError as error:
        raise DataError(f"the data file {shorten_path(path)} cannot be read: {error.strerror or error}") from error
    if len(records) == 0:
        raise DataError(f"the data file {str(path)!r} has no rows; a dataset needs at least one")
    return records


def shorten_path(path: Path) -> str:
    return f"{str(path)!r:.300}"


def _open_by_suffix(path: Path) -> Records:
    is_saved_dataset = check_file(path)
    match ".arrow" if is_saved_dataset else path.suffix:
        case ".jsonl":
            return JsonLinesRecords(path)
        case ".json":
            return _read_json(path)
        case ".csv":
            return _read_csv(path)
        case ".parquet" | ".arrow":
            return _open_arrow(path)
        case suffix:
            raise DataError(f"{str(path)!r} ends with {suffix!r}; supported data files end with {', '.join(FILE_SUFFIXES)}")


def check_file(path: Path) -> bool:
    """Return whether a path is a folder written by ``Dataset.save_to_disk``. Raises DataError if it is neither that nor a
    non-empty file.
    """
    is_saved_dataset = (path / "state.json").is_file()
    if path.is_dir() and not is_saved_dataset:
        raise DataError(
            f"{str(path)!r} is a folder; set dataset_name to one {', '.join(FILE_SUFFIXES)} file in it, or to a folder that "
            "Dataset.save_to_disk wrote"
        )
    if not path.exists():
        raise DataError(f"there is no data file {str(path)!r} (looked for {path.absolute()}); check dataset_name")
    if path.is_file() and path.stat().st_size == 0:
        raise DataError(f"the data file {str(path)!r} is empty; a dataset needs at least one row")
    return is_saved_dataset


class JsonLinesRecords(Records):
    """One JSON object per line. Blank lines are skipped. The file stays open and is read by position: if it is truncated during
    the run, DataError is raised, while a memory mapping would crash the process.
    """

    def __init__(self, path: Path, malformed: list[DataError] | None = None) -> None:
        """``malformed`` collects the errors of invalid lines, which are skipped; None: the first error is raised."""
        self.name = str(path)
        self._file = path.open("rb")
        self._starts, self._lengths, self._lines = array("Q"), array("Q"), array("Q")
        refuse_utf16(path, self._file.read(2))
        start = 3 if os.pread(self._file.fileno(), 3, 0) == b"\xef\xbb\xbf" else 0  # a byte order mark is not JSON
        self._file.seek(start)
        for number, line in enumerate(self._file, start=1):
            if line.strip() and self._is_record(line, f"{path}:{number}", malformed):
                self._starts.append(start)
                self._lengths.append(len(line))
                self._lines.append(number)
            start += len(line)

    def _is_record(self, line: bytes, where: str, malformed: list[DataError] | None) -> bool:
        try:
            parse_object(line, where)
        except DataError as error:
            if malformed is None:
                raise
            malformed.append(error)
            return False
        return True

    def __len__(self) -> int:
        return len(self._starts)

    def read_record(self, index: int) -> Record:
        line = os.pread(self._file.fileno(), self._lengths[index], self._starts[index])
        if len(line) < self._lengths[index]:
            raise DataError(
                f"{self.location(index)} was removed while the run was reading it; a run needs its data until the end"
            )
        return parse_object(line, self.location(index))

    def location(self, index: int) -> str:
        return f"{self.name}:{self._lines[index]}"


def refuse_utf16(path: Path, start: bytes) -> None:
    """Raise DataError for a file that starts with the byte order mark of UTF-16."""
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16 text; save it as UTF-8")


def parse_object(line: bytes, where: str) -> Record:
    try:
        value = json.loads(line, object_pairs_hook=_refuse_twice)
    except _KeyTwice as error:
        raise DataError(
            f"{where} has the key {error.key!r} twice in one object, of which JSON keeps the last; remove one"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not JSON: it is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:
        text = line[:800].decode(errors="replace").strip()
        raise DataError(f"{where} is not JSON ({_explain(error)}): {text:.200}. Each line must be one JSON object") from error
    if not isinstance(value, dict):
        text = line[:800].decode(errors="replace").strip()
        raise DataError(f"{where} is a JSON {type(value).__name__}, not an object: {text:.200}")
    return value


class _KeyTwice(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} twice")
        self.key = key


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise _KeyTwice(next(name for name in names if names.count(name) > 1))
    return values


def _explain(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.200}"


def _read_json(path: Path) -> Records:
    try:
        value = json.loads(decode_text(path.read_bytes(), path), object_pairs_hook=_refuse_twice)
    except _KeyTwice as error:
        raise DataError(f"{path} has an object with {error}, of which JSON keeps the last; remove one") from error
    except NotUtf8 as error:
        raise DataError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({_explain(error)}). If it has one object per line, name it .jsonl") from error
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise DataError(f"{path} must hold a JSON list of objects. If it has one object per line, name it .jsonl")
    return ListRecords(str(path), value, "item")


def _read_csv(path: Path) -> Records:
    with path.open("rb") as binary:
        refuse_utf16(path, binary.read(2))
    with path.open(newline="", encoding="utf-8-sig") as file:
        return ListRecords(str(path), list(iter_csv(path, file)), uniform=True)


def iter_csv(path: Path, file: TextIO) -> Iterator[Record]:
    """Yield the rows of a CSV file. Raises DataError with the line of one that is malformed."""
    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.DictReader(file, strict=True)
    try:
        names = [name for name in reader.fieldnames or () if name]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{path} has two columns named {twice[0]!r}, of which the last would be read; rename or remove one")
        for record in reader:
            if None in record or None in record.values():
                expected = len(reader.fieldnames or ())
                raise DataError(f"{path}:{reader.line_num} does not have the {expected} fields of the header")
            yield record
    except UnicodeDecodeError as error:
        try:
            decode_text(path.read_bytes(), path)
        except NotUtf8 as found:
            raise DataError(str(found)) from error
        raise
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num} is not CSV ({error})") from error


def _open_arrow(path: Path) -> Records:
    """Open a Parquet or Arrow file, or a folder that ``Dataset.save_to_disk`` wrote, with ``datasets``. Arrow data is not copied."""
    import datasets  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]

    try:
        if path.is_dir():
            dataset = datasets.load_from_disk(str(path))
            return DatasetRecords(str(path), dataset, sorted(path.glob("*.arrow")))
        if path.suffix == ".arrow":
            return DatasetRecords(str(path), datasets.Dataset.from_file(str(path)), [path])
        # without the schema's metadata, which may request decoding of images and audio
        table = pyarrow.parquet.read_table(path).replace_schema_metadata(None)
        return DatasetRecords(str(path), datasets.Dataset(table))
    except Exception as error:  # pyarrow and datasets raise many classes for damaged files
        kind = "a saved dataset" if path.is_dir() else "Arrow" if path.suffix == ".arrow" else "Parquet"
        raise DataError(f"{path} cannot be read as {kind} ({error!s:.300})") from error
