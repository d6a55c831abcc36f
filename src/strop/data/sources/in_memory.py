"""Records that are held in memory or memory-mapped: lists of dicts, and datasets of the library ``datasets``."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.data.sources.records import DataError, Record, Records

BATCH_ROWS = 1000  # that are decoded together


class ListRecords(Records):
    """A list of dicts: the ``rows`` of a data source, the objects of a JSON list, or the rows of a CSV file."""

    def __init__(self, name: str, records: Sequence[Record], unit: str = "row", *, uniform: bool = False) -> None:
        self.name, self.uniform, self._records, self._unit = name, uniform, records, unit

    def __len__(self) -> int:
        return len(self._records)

    def read_record(self, index: int) -> Record:
        return self._records[index]

    def location(self, index: int) -> str:
        return f"{self.name}, {self._unit} {index + 1}"


class DatasetRecords(Records):
    """A ``datasets.Dataset``. ``files``: its memory-mapped files, where reading past the end would kill the process."""

    uniform = True

    def __init__(self, name: str, dataset: Any, files: Iterable[Path] = ()) -> None:
        self.name, self._dataset = name, dataset
        # as stored, {bytes, path}: decoding needs PIL, and re-encoding would change the file
        self._raw = dataset.with_format("arrow") if _is_encoded(dataset) else None
        self._sizes = {file: file.stat().st_size for file in files}

    def __len__(self) -> int:
        return len(self._dataset)

    def read_record(self, index: int) -> Record:
        self._check_files()
        try:
            record: Record = self._dataset[index] if self._raw is None else self._raw[index].to_pylist()[0]
        except Exception as error:  # pyarrow and datasets raise many classes for damaged or unusual values
            raise DataError(f"{self.location(index)} cannot be read ({type(error).__name__}: {error!s:.300})") from error
        return record

    def _check_files(self) -> None:
        for file, size in self._sizes.items():
            if not file.exists() or file.stat().st_size < size:
                raise DataError(f"{file} was removed or cut short while it was read; a run needs its data until the end")

    def location(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"

    def iter_values(self, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Iterate over the values of some columns, None if a column is missing. Other columns are not decoded."""
        dataset = self._dataset if self._raw is None else self._raw
        selected = dataset.select_columns([column for column in columns if column in self._dataset.column_names])
        for start in range(0, len(self), BATCH_ROWS):
            self._check_files()
            rows = min(BATCH_ROWS, len(self) - start)
            try:
                batch = selected[start : start + rows] if self._raw is None else selected[start : start + rows].to_pydict()
            except Exception as error:  # as in read_record
                raise DataError(
                    f"{self.location(start)} and those after it cannot be read ({type(error).__name__}: {error!s:.300})"
                ) from error
            yield from zip(*(batch.get(column, [None] * rows) for column in columns), strict=True)

    def select_column(self, key: str) -> Iterable[Record]:
        top, names = key.split(".")[0], self._dataset.column_names
        if key in names or top not in names:
            top = key
        return ({top: value} for (value,) in self.iter_values((top,))) if top in names else self


def _is_encoded(dataset: Any) -> bool:
    """Whether rows have images or sound, and no format for reading them was set."""
    return holds_media(getattr(dataset, "features", None)) and dataset.format["type"] is None


def holds_media(features: Any) -> bool:
    """Whether columns of a ``datasets.Dataset`` are images, audio or video, which the library decodes when a row is read."""
    if features is None:
        return False
    if isinstance(features, Mapping | list | tuple):
        return any(holds_media(each) for each in (features.values() if isinstance(features, Mapping) else features))
    return hasattr(features, "decode_example") or holds_media(getattr(features, "feature", None))


def open_rows(rows: Any) -> Records:
    """Open a list of dicts or a ``datasets.Dataset``. Raises DataError for anything else.

    The name, and with it the task ids, is derived from the number of rows and from the first and last row, so it is the same for
    every run with the same data.
    """
    if isinstance(rows, Records):
        return rows
    check_rows(rows)
    if len(rows) == 0:
        raise DataError("rows is empty; a dataset needs at least one row")
    if is_dataset(rows):
        named = DatasetRecords("rows", rows)  # its records are as stored, including images
        return DatasetRecords(_name_rows(named), rows)
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"rows[{index}] is {row!r:.80}, not a dict; a row is a dict of columns, such as prompt and answer")
    return ListRecords(_name_rows(rows), rows)


def check_rows(rows: Any, *, streamed: bool = False) -> None:
    """Raise DataError for anything other than a list of dicts or a ``datasets.Dataset`` or, if ``streamed``, an
    ``IterableDataset``.
    """
    if streamed and type(rows).__name__ == "IterableDataset":
        return
    if not (is_dataset(rows) or (isinstance(rows, Sequence) and not isinstance(rows, str | bytes))):
        raise DataError(
            f"rows is of the type {type(rows).__name__}; pass a list of dicts or a datasets.Dataset{_suggest_rows(rows)}"
        )


def is_dataset(rows: Any) -> bool:
    """Whether this is a ``datasets.Dataset``, checked without importing the library."""
    library = sys.modules.get("datasets")
    return library is not None and isinstance(rows, library.Dataset)


def _suggest_rows(rows: Any) -> str:
    match type(rows).__name__:
        case "DatasetDict" | "IterableDatasetDict":
            names = sorted(rows)
            return f": one of its splits {names}, such as data[{names[0]!r}]" if names else ""
        case "generator" | "map" | "filter" | "zip" | "set" | "frozenset" | "dict_values":
            return ": list(rows)"
        case "DataLoader":
            return ": its dataset"
        case "IterableDataset":
            return "; set streaming=True to read it in order, or pass list(rows.take(1000)), its first 1000 rows"
        case "DataFrame":
            return ": rows.to_dict('records')"
    return ""


def _name_rows(rows: Any) -> str:
    ends = json.dumps([len(rows), rows[0], rows[-1]], sort_keys=True, default=lambda value: type(value).__name__)
    return f"rows-{hashlib.blake2b(ends.encode(), digest_size=4).hexdigest()}"
