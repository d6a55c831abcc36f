"""The first rows of a dataset and its size, without reading all of it or contacting the hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from strop.data.builtin_dataset import BuiltinDataset, Condition, Purpose
from strop.data.builtin_sets import BUILTIN_DATASETS
from strop.data.sources.files import check_file, iter_csv, open_file, parse_object, refuse_utf16, shorten_path
from strop.data.sources.hub import choose_files
from strop.data.sources.in_memory import ListRecords, holds_media
from strop.data.sources.local_copies import find_copy
from strop.data.sources.records import DataError, Record, Records
from strop.data.sources.row_readers import keeps_row
from strop.data.sources.source import check_hub_name, is_local

FIRST_ROWS = 8
LARGEST_READ = 64 * 2**20  # bytes; the rows of larger files are estimated
LARGEST_LINE = 16 * 2**20


@dataclass(frozen=True)
class Peek:
    """The beginning of a dataset."""

    records: Records
    rows: int | None  # None: unknown
    exact: bool = True


class FirstRecords(ListRecords):
    """The first records of a file, each with its line or row."""

    def __init__(self, name: str, records: Sequence[Record], locations: Sequence[str]) -> None:
        super().__init__(name, records)
        self._locations = locations

    def location(self, index: int) -> str:
        return self._locations[index]


def peek_dataset(
    name: str, subset: str | None = None, split: str | None = None, purpose: Purpose = "train", revision: str | None = None
) -> Peek | None:
    """Return the beginning of a dataset; None for a hub dataset without a local or cached copy. Raises DataError."""
    if name not in BUILTIN_DATASETS and is_local(name):
        return peek_file(Path(name))
    if name not in BUILTIN_DATASETS:
        check_hub_name(name)
    builtin = BUILTIN_DATASETS.get(name) or BuiltinDataset(name)
    subset, split = subset or builtin.subset, split or builtin.splits.choose(purpose)
    hub, split = builtin.find_split(split)
    copy = find_copy(hub, revision or builtin.revision)
    if copy is not None and (files := choose_files(builtin, subset)):
        copy = copy / files[0]
    if copy is None:
        file = _find_cached(hub, subset, split)
        peek = None if file is None else _peek_arrow_files(name, [file])
    elif copy.suffix == ".gz" or "*" in copy.name:
        peek = Peek(ListRecords(name, []), None)
    else:
        peek = peek_file(copy) if copy.is_file() else _peek_copy(name, copy, subset, split)
    return peek if peek is None or not builtin.keep else _leave_out(peek, builtin.keep)


def _leave_out(peek: Peek, conditions: Sequence[Condition]) -> Peek:
    """Return the first rows used by a built-in set; their number is unknown without reading all."""
    kept = [index for index, record in enumerate(peek.records) if keeps_row(conditions, record)]
    locations = [peek.records.location(index) for index in kept]
    return Peek(FirstRecords(peek.records.name, [peek.records[index] for index in kept], locations), None)


def is_on_this_machine(name: str) -> bool:
    """Return whether the benchmark split of a built-in set has a local copy, or is in the cache of ``datasets``."""
    builtin = BUILTIN_DATASETS[name]
    if find_copy(builtin.hub, builtin.revision) is not None:
        return True
    return _find_cached(builtin.hub, builtin.subset, builtin.splits.choose("evaluation")) is not None


def format_rows(name: str | None) -> str:
    """Format the number of rows of a local file; empty for other data and for a file that cannot be read."""
    if name is None or name in BUILTIN_DATASETS or not is_local(name):
        return ""
    try:
        found = peek_file(Path(name))
    except DataError:
        return ""
    if found.rows is None:
        return ""
    return f"{found.rows:,} row{'' if found.rows == 1 else 's'}" if found.exact else f"about {found.rows:,} rows"


def peek_file(path: Path) -> Peek:
    """Return the beginning of a data file. Raises DataError if it is missing, empty or malformed there."""
    try:
        is_saved_dataset = check_file(path)
        match ".arrow" if is_saved_dataset else path.suffix:
            case ".jsonl":
                return _peek_lines(path)
            case ".csv":
                return _peek_csv(path)
            case ".parquet":
                return _peek_parquet(path)
            case ".arrow":
                return _peek_arrow_files(str(path), sorted(path.glob("*.arrow")) if is_saved_dataset else [path])
            case ".json" if path.stat().st_size > LARGEST_READ:
                return Peek(ListRecords(str(path), []), None)
    except OSError as error:
        raise DataError(f"the data file {shorten_path(path)} cannot be read: {error.strerror or error}") from error
    records = open_file(path)
    return Peek(records, len(records))


def _peek_lines(path: Path) -> Peek:
    first: list[tuple[Record, str]] = []
    size = read = 0
    with path.open("rb") as file:
        refuse_utf16(path, file.read(2))
        file.seek(3 if os.pread(file.fileno(), 3, 0) == b"\xef\xbb\xbf" else 0)
        for number in range(1, 1_000):
            line = file.readline(LARGEST_LINE)
            read += len(line)
            if line.strip() and len(line) < LARGEST_LINE:
                first.append((parse_object(line, f"{path}:{number}"), f"{path}:{number}"))
            if len(first) == FIRST_ROWS or not line:
                break
        size = os.fstat(file.fileno()).st_size
        if not first:
            raise DataError(f"the data file {str(path)!r} has no rows; a dataset needs at least one")
        exact = size <= LARGEST_READ
        rows = len(first) + (sum(1 for line in file if line.strip()) if exact else (size - read) * len(first) // read)
    return Peek(FirstRecords(str(path), *zip(*first, strict=True)), rows, exact)


def _peek_csv(path: Path) -> Peek:
    if (size := path.stat().st_size) <= LARGEST_READ:
        records = open_file(path)
        return Peek(records, len(records))
    with path.open(newline="", encoding="utf-8-sig") as file:
        first = list(islice(iter_csv(path, file), FIRST_ROWS))
    length = sum(len(value) + 1 for record in first for value in record.values())
    return Peek(ListRecords(str(path), first, uniform=True), size * len(first) // max(1, length), exact=False)


def _peek_parquet(path: Path) -> Peek:
    import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            first = [row for batch in file.iter_batches(batch_size=FIRST_ROWS) for row in batch.to_pylist()][:FIRST_ROWS]
            rows = file.metadata.num_rows
    except Exception as error:  # pyarrow raises many classes for damaged files
        raise DataError(f"{path} cannot be read as Parquet ({error!s:.300})") from error
    if not rows:
        raise DataError(f"the data file {str(path)!r} has no rows; a dataset needs at least one")
    return Peek(ListRecords(str(path), first), rows)


def _peek_copy(name: str, copy: Path, subset: str | None, split: str) -> Peek:
    import datasets  # type: ignore[import-untyped,unused-ignore]

    one = None if subset is None else subset.split(",")[0]
    wanted = split.partition("+")[0].partition("[")[0]  # train[:10%]+test
    try:
        rows = datasets.load_dataset(str(copy), one, split=wanted, streaming=True)
        stored = rows.decode(False) if holds_media(rows.features) else rows
        first = list(stored.take(FIRST_ROWS))
    except Exception as error:  # datasets raises many classes; their messages list the splits or subsets
        raise DataError(
            f"the dataset {name!r} (subset {subset!r}, split {split!r}) cannot be read from its local copy {copy}: {error}"
        ) from error
    if not first:
        raise DataError(f"the split {split!r} of the dataset {name!r} has no rows")
    return Peek(ListRecords(name, first, uniform=True), None)


def _peek_arrow_files(name: str, files: Sequence[Path]) -> Peek:
    try:
        tables = [_read_arrow(file) for file in files]
    except Exception as error:  # pyarrow raises many classes for damaged files
        raise DataError(f"{name} cannot be read as Arrow ({error!s:.300})") from error
    first = [row for table in tables[:1] for row in table.slice(0, FIRST_ROWS).to_pylist()]
    if not first:
        raise DataError(f"the data file {name!r} has no rows; a dataset needs at least one")
    return Peek(ListRecords(name, first), sum(table.num_rows for table in tables))


def _read_arrow(file: Path) -> Any:
    import pyarrow.ipc  # type: ignore[import-untyped,unused-ignore]

    with pyarrow.OSFile(str(file)) as source:
        try:
            return pyarrow.ipc.open_stream(source).read_all()
        except pyarrow.ArrowInvalid:
            source.seek(0)
            return pyarrow.ipc.open_file(source).read_all()


def _find_cached(hub: str, subset: str | None, split: str) -> Path | None:
    """Return the first file of a split of a hub dataset in the cache of the library ``datasets``; None if there is none."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_DATASETS_CACHE", str(home / "datasets"))).expanduser()
    folders = (cache / hub.replace("/", "___").lower(), cache / hub.replace("/", "___"))
    try:
        files = sorted(file for folder in folders for file in folder.glob(f"{subset or '*'}/*/*/*.arrow"))
    except (OSError, ValueError, NotImplementedError):  # not a valid folder name
        return None
    wanted = split.partition("+")[0].partition("[")[0]  # train[:10%]+test
    return next((file for file in files if file.stem.partition("-")[2].startswith(wanted)), None)
