"""Local data files: JSON lines, JSON, CSV and Parquet.

JSON lines are parsed here rather than by a library, so that errors name the file and line, and so that files of any size work: only
the offset of each line is kept in memory.
"""

from __future__ import annotations

import csv
import json
import mmap
from array import array
from pathlib import Path
from typing import Any

from strop.data.sources.records import DataError, Record, Records

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def open_file(path: Path) -> Records:
    """Open a data file. Raises DataError if it is missing, empty or malformed."""
    if path.is_dir():
        raise DataError(f"{str(path)!r} is a folder; set dataset_name to one {', '.join(SUFFIXES)} file in it")
    if not path.is_file():
        raise DataError(f"there is no data file {str(path)!r} (looked for {path.absolute()}); check dataset_name")
    if path.stat().st_size == 0:
        raise DataError(f"the data file {str(path)!r} is empty; a dataset needs at least one row")
    match path.suffix:
        case ".jsonl":
            records: Records = JsonLinesRecords(path)
        case ".json":
            records = _read_json(path)
        case ".csv":
            records = _read_csv(path)
        case ".parquet":
            records = ParquetRecords(path)
        case suffix:
            raise DataError(f"{str(path)!r} ends with {suffix!r}; supported data files end with {', '.join(SUFFIXES)}")
    if len(records) == 0:
        raise DataError(f"the data file {str(path)!r} has no rows; a dataset needs at least one")
    return records


class JsonLinesRecords(Records):
    """One JSON object per line. Blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts, self._lines = array("Q"), array("Q")
        start = 3 if self._bytes[:3] == b"\xef\xbb\xbf" else 0  # a byte order mark is not JSON
        self._bytes.seek(start)
        for number, line in enumerate(iter(self._bytes.readline, b""), start=1):
            if line.strip():
                _parse_object(line, f"{path}:{number}")
                self._starts.append(start)
                self._lines.append(number)
            start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def read_record(self, index: int) -> Record:
        self._bytes.seek(self._starts[index])
        return _parse_object(self._bytes.readline(), self.location(index))

    def location(self, index: int) -> str:
        return f"{self.name}:{self._lines[index]}"


def _parse_object(line: bytes, where: str) -> Record:
    try:
        value = json.loads(line)
    except ValueError as error:
        text = line.decode(errors="replace").strip()
        raise DataError(f"{where} is not JSON ({error}): {text:.200}. Each line must be one JSON object") from error
    if not isinstance(value, dict):
        raise DataError(f"{where} is a JSON {type(value).__name__}, not an object: {line.decode(errors='replace').strip():.200}")
    return value


class InMemoryRecords(Records):
    """The objects of a JSON list, or the rows of a CSV file."""

    def __init__(self, path: Path, records: list[Record], unit: str) -> None:
        self.name, self._records, self._unit = str(path), records, unit

    def __len__(self) -> int:
        return len(self._records)

    def read_record(self, index: int) -> Record:
        return self._records[index]

    def location(self, index: int) -> str:
        return f"{self.name}, {self._unit} {index + 1}"


def _read_json(path: Path) -> Records:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}). If it has one object per line, name it .jsonl") from error
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise DataError(f"{path} must hold a JSON list of objects. If it has one object per line, name it .jsonl")
    return InMemoryRecords(path, value, "item")


def _read_csv(path: Path) -> Records:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        records: list[Record] = []
        try:
            for record in reader:
                if None in record or None in record.values():
                    expected = len(reader.fieldnames or ())
                    raise DataError(f"{path}:{reader.line_num} does not have the {expected} fields of the header")
                records.append(record)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}:{reader.line_num} is not CSV ({error})") from error
    return InMemoryRecords(path, records, "row")


class ParquetRecords(Records):
    def __init__(self, path: Path) -> None:
        import pyarrow  # type: ignore[import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]

        self.name = str(path)
        try:
            self._table: Any = pyarrow.parquet.read_table(path, memory_map=True)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as Parquet ({error})") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read_record(self, index: int) -> Record:
        record: Record = self._table.slice(index, 1).to_pylist()[0]
        return record

    def location(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"
