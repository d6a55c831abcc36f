"""What a streamed source is read from: shards of files or of an iterable, in the order that each defines."""

from __future__ import annotations

import csv
import glob
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from strop.data.sources.files import FILE_SUFFIXES, check_file, parse_object, refuse_utf16
from strop.data.sources.records import DataError, Record


@dataclass(frozen=True, slots=True)
class StreamedRecord:
    """A record at its location in a shard. Lines are parsed on demand, so that a malformed one costs only its own row."""

    id: str  # the same whenever the record is read
    where: str  # for error messages
    content: Record | bytes | DataError
    change: Callable[[Record, str], Record] | None = None  # (record, where) -> the converted record

    def read(self) -> Record:
        """Return the record. Raises DataError for one that is malformed."""
        if isinstance(self.content, DataError):
            raise self.content
        record = parse_object(self.content, self.where) if isinstance(self.content, bytes) else self.content
        return record if self.change is None else self.change(record, self.where)


class ShardReader(ABC):
    """Reads the records of a shard in order. ``position``: start of the next record as JSON values, accepted by ``Shard.open``."""

    position: Any = None

    def __init__(self) -> None:
        self._records = self._iterate()

    def __iter__(self) -> Iterator[StreamedRecord]:
        return self._records

    @abstractmethod
    def _iterate(self) -> Iterator[StreamedRecord]:
        """Yield each record, with ``position`` after it."""
        ...


class Shard(ABC):
    """A part of a stream that is read in order."""

    name: str

    @abstractmethod
    def open(self, position: Any = None) -> ShardReader:
        """Return a reader of the records from a position on, by default the beginning."""
        ...


# Shards that are local files. At most a few rows of each are in memory.

STREAMED_SUFFIXES = tuple(suffix for suffix in FILE_SUFFIXES if suffix != ".json")
ROWS_PER_READ = 256  # of tables
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def find_shards(name: str) -> Sequence[Shard]:
    """Return the shards of a file, of a folder or of a pattern such as ``data/*.jsonl``, sorted by name. Raises DataError."""
    return [_make_shard(path) for path in list_files(name)]


def list_files(name: str) -> list[Path]:
    """Return the files matching a name. Raises DataError if there are none."""
    path = Path(name)
    if is_pattern(name):
        found = [Path(each) for each in sorted(glob.glob(name, recursive=True)) if Path(each).is_file()]
        if not found:
            raise DataError(f"no file matches {name!r} (looked in {Path.cwd()}); check dataset_name")
        return found
    if not path.is_dir():
        return [path]
    found = sorted(each for each in path.iterdir() if each.suffix in STREAMED_SUFFIXES and each.is_file())
    if not found:
        raise DataError(f"the folder {name!r} has no {', '.join(STREAMED_SUFFIXES)} file to stream; check dataset_name")
    return found


def is_pattern(name: str) -> bool:
    return glob.has_magic(name) and not Path(name).exists()


def _make_shard(path: Path) -> Shard:
    check_file(path)
    match path.suffix:
        case ".jsonl":
            return FileShard(path, _JsonLinesReader)
        case ".csv":
            return FileShard(path, _CsvReader)
        case ".parquet":
            return FileShard(path, _ParquetReader)
        case ".arrow":
            return FileShard(path, _ArrowReader)
        case ".json":
            raise DataError(
                f"{str(path)!r} is a single JSON value, which cannot be streamed; write one object per line (.jsonl), or set "
                "streaming=false"
            )
        case suffix:
            raise DataError(
                f"{str(path)!r} ends with {suffix!r}; files that can be streamed end with {', '.join(STREAMED_SUFFIXES)}"
            )


class FileShard(Shard):
    """A file."""

    def __init__(self, path: Path, reader: type[_FileReader]) -> None:
        self.name, self._path, self._reader = str(path), path, reader

    def open(self, position: Any = None) -> ShardReader:
        return self._reader(self._path, position)


class _FileReader(ShardReader):
    kind: str

    def __init__(self, path: Path, position: Any) -> None:
        self._path = path
        self.position = position
        super().__init__()

    def _iterate(self) -> Iterator[StreamedRecord]:
        try:
            with self._path.open("rb") as file:
                yield from self._read(file)
        except DataError:
            raise
        except Exception as error:  # pyarrow raises many classes for damaged files
            raise DataError(f"{self._path} cannot be read as {self.kind} ({error!s:.300})") from error

    def _read(self, file: BinaryIO) -> Iterator[StreamedRecord]:
        raise NotImplementedError

    def _row(self, number: int, content: Any) -> StreamedRecord:
        return StreamedRecord(f"{self._path}:{number}", f"{self._path}, row {number + 1}", content)


def _skip_byte_order_mark(path: Path, file: BinaryIO) -> int:
    """Return where the text of a file begins, and go there."""
    start = file.read(3)
    refuse_utf16(path, start)
    return file.seek(3 if start == BYTE_ORDER_MARK else 0)


class _JsonLinesReader(_FileReader):
    """The position is (bytes, lines)."""

    kind = "JSON lines"

    def _read(self, file: BinaryIO) -> Iterator[StreamedRecord]:
        offset, number = self.position or (_skip_byte_order_mark(self._path, file), 0)
        file.seek(offset)
        for line in file:
            offset, number = offset + len(line), number + 1
            self.position = (offset, number)
            if line.strip():
                where = f"{self._path}:{number}"
                yield StreamedRecord(where, where, line)


class _CsvReader(_FileReader):
    """The position is (bytes, lines, rows). A row may have several lines."""

    kind = "CSV"

    def _read(self, file: BinaryIO) -> Iterator[StreamedRecord]:
        self._lines, self._offset = 0, _skip_byte_order_mark(self._path, file)
        header = next(csv.reader(self._iter_lines(file), strict=True), None)
        rows = 0
        if self.position is not None:
            self._offset, self._lines, rows = self.position
            file.seek(self._offset)
        reader = csv.reader(self._iter_lines(file), strict=True)
        while (fields := self._next_row(reader)) is not None:
            if not fields:  # a blank line
                continue
            self.position = (self._offset, self._lines, rows + 1)
            where = f"{self._path}:{self._lines}"
            content: Any = dict(zip(header or (), fields, strict=False))
            if len(fields) != len(header or ()):
                content = DataError(f"{where} does not have the {len(header or ())} fields of the header")
            yield StreamedRecord(f"{self._path}:{rows}", where, content)
            rows += 1

    def _next_row(self, reader: Iterator[list[str]]) -> list[str] | None:
        try:
            return next(reader, None)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{self._path}:{self._lines} is not CSV ({error})") from error

    def _iter_lines(self, file: BinaryIO) -> Iterator[str]:
        for line in iter(file.readline, b""):
            self._offset, self._lines = self._offset + len(line), self._lines + 1
            yield line.decode("utf-8")


class _ParquetReader(_FileReader):
    """The position is (row group, row in it)."""

    kind = "Parquet"

    def _read(self, file: BinaryIO) -> Iterator[StreamedRecord]:
        import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]

        parquet = pyarrow.parquet.ParquetFile(file)
        first, skip = self.position or (0, 0)
        sizes = [parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups)]
        for group in range(first, len(sizes)):
            row = 0
            for batch in parquet.iter_batches(batch_size=ROWS_PER_READ, row_groups=[group]):
                wanted = batch.slice(min(skip, len(batch)))
                row, skip = row + len(batch) - len(wanted), max(0, skip - len(batch))
                for content in wanted.to_pylist():
                    row += 1
                    self.position = (group, row)
                    yield self._row(sum(sizes[:group]) + row - 1, content)


class _ArrowReader(_FileReader):
    """The position is (batch, row in it, rows before the batch). The file is read, not mapped, because truncating a mapped file
    kills the process.
    """

    kind = "Arrow"

    def _read(self, file: BinaryIO) -> Iterator[StreamedRecord]:
        first, skip, before = self.position or (0, 0, 0)
        for number, batch in enumerate(self._iter_batches(file)):
            if number < first:
                continue
            for row, content in enumerate(batch.slice(skip).to_pylist(), start=skip):
                self.position = (number, row + 1, before)
                yield self._row(before + row, content)
            before, skip = before + len(batch), 0

    def _iter_batches(self, file: BinaryIO) -> Iterator[Any]:
        import pyarrow.ipc  # type: ignore[import-untyped,unused-ignore]

        try:
            yield from pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            reader = pyarrow.ipc.open_file(file)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))


# Shards that are objects: streamed datasets of the library ``datasets``, and any other re-iterable objects.


def is_iterable_dataset(rows: Any) -> bool:
    """Whether this is a ``datasets.IterableDataset``, checked without importing the library."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(rows, library.IterableDataset)


def list_shards(name: str, rows: Any) -> Sequence[Shard]:
    """Return the shards of an iterable. Raises DataError if it can be iterated only once."""
    if isinstance(rows, Iterator) or not isinstance(rows, Iterable):
        raise DataError(
            f"{name} is of the type {type(rows).__name__}, which cannot be read again for the next epoch or after a restart; pass an "
            "object whose __iter__ starts over"
        )
    stream: Any = rows
    if not is_iterable_dataset(rows):
        return [IterableShard(name, lambda: copy(stream))]
    count = stream.num_shards
    return [
        IterableShard(name if count == 1 else f"{name}, shard {number}", partial(stream.shard, count, number))
        for number in range(count)
    ]


class IterableShard(Shard):
    """An iterable of records. With ``state_dict`` and ``load_state_dict``, as in ``datasets``, it resumes by them; otherwise
    earlier records are read again.
    """

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        """``make()`` returns the iterable with its own state."""
        self.name, self._make = name, make

    def open(self, position: Any = None) -> ShardReader:
        return _IterableReader(self.name, self._make(), position)


class _IterableReader(ShardReader):
    """The position is (rows, state of the iterable)."""

    def __init__(self, name: str, rows: Any, position: Any) -> None:
        self._name, self._rows = name, rows
        self._has_state = hasattr(rows, "state_dict") and hasattr(rows, "load_state_dict")
        self._number: int
        self._state: Any
        self._number, self._state = position or (0, None)
        self._started = False
        super().__init__()

    @property
    def position(self) -> Any:  # type: ignore[override]
        return (self._number, self._rows.state_dict() if self._has_state and self._started else self._state)

    def _iterate(self) -> Iterator[StreamedRecord]:
        iterator: Iterator[Any] | None = None
        while True:
            where = f"{self._name}, row {self._number + 1}"
            try:
                iterator = iterator or self._start()
                record = next(iterator)
                self._started = True
            except StopIteration:
                return
            except Exception as error:  # user code and libraries may raise anything
                raise DataError(f"{where} cannot be read ({type(error).__name__}: {error!s:.300})") from error
            content = record if isinstance(record, Mapping) else DataError(f"{where} is {record!r:.80}, not a dict of columns")
            self._number += 1
            yield StreamedRecord(f"{self._name}:{self._number - 1}", where, content)

    def _start(self) -> Iterator[Any]:
        if self._state is None:
            return islice(iter(self._rows), self._number, None)
        self._rows.load_state_dict(self._state)
        return iter(self._rows)
