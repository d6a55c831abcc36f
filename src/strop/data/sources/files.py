"""Local data files: JSON lines, JSON, CSV, Parquet and Arrow.

Tables are read by the library ``datasets``. Text is parsed here, because ``datasets`` would name no line in its errors, give every record
the columns of all, and read numbers where CSV has text ("007" as 7, "NA" as nothing). Of JSON lines only the offsets are kept in memory.
"""

from __future__ import annotations

import csv
import json
import mmap
from array import array
from pathlib import Path

from strop.data.sources.in_memory import DatasetRecords, ListRecords
from strop.data.sources.records import DataError, Record, Records

FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")


def open_file(path: Path) -> Records:
    """Open a data file. Raises DataError if it is missing, empty or malformed."""
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
    match ".arrow" if is_saved_dataset else path.suffix:
        case ".jsonl":
            records: Records = JsonLinesRecords(path)
        case ".json":
            records = _read_json(path)
        case ".csv":
            records = _read_csv(path)
        case ".parquet" | ".arrow":
            records = _open_arrow(path)
        case suffix:
            raise DataError(f"{str(path)!r} ends with {suffix!r}; supported data files end with {', '.join(FILE_SUFFIXES)}")
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


def _read_json(path: Path) -> Records:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}). If it has one object per line, name it .jsonl") from error
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise DataError(f"{path} must hold a JSON list of objects. If it has one object per line, name it .jsonl")
    return ListRecords(str(path), value, "item")


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
    return ListRecords(str(path), records, uniform=True)


def _open_arrow(path: Path) -> Records:
    """Open a Parquet or Arrow file, or a folder that ``Dataset.save_to_disk`` wrote, with ``datasets``. Nothing is copied."""
    import datasets  # type: ignore[import-untyped,unused-ignore]
    import pyarrow  # type: ignore[import-untyped,unused-ignore]
    import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]

    try:
        if path.is_dir():
            dataset = datasets.load_from_disk(str(path))
        elif path.suffix == ".arrow":
            dataset = datasets.Dataset.from_file(str(path))
        else:  # without the schema's metadata, which may ask to decode images and audio
            table = pyarrow.parquet.read_table(path, memory_map=True)
            dataset = datasets.Dataset(table.replace_schema_metadata(None))
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        kind = "a saved dataset" if path.is_dir() else "Arrow" if path.suffix == ".arrow" else "Parquet"
        raise DataError(f"{path} cannot be read as {kind} ({error})") from error
    return DatasetRecords(str(path), dataset)
