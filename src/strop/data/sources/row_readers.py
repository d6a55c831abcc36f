"""Converts rows of built-in data sets in unusual formats into columns and messages, or skips them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strop.data.builtin_dataset import BuiltinDataset, Condition
from strop.data.sources.in_memory import ListRecords
from strop.data.sources.records import DataError, Record, Records
from strop.data.sources.streamed import StreamedRecords

logger = logging.getLogger(__name__)


def read_rows(builtin: BuiltinDataset, records: Records, folder: str | None = None) -> Records:
    """Return the records as the entry reads them: with further columns, or replaced by others.

    ``folder``: the images of a set that stores them separately."""
    if builtin.media_files is not None and folder is None:
        raise DataError(
            f"{records.name} names its images by their paths, and media_data_dir is not set; set it to the folder that has "
            f"{builtin.media_files}"
        )
    if builtin.read_row is None and builtin.split_row is None:
        return records
    if isinstance(records, StreamedRecords):
        raise DataError(
            f"the rows of {records.name} are read in another form than they have, so they cannot be streamed; set streaming=false"
        )
    if split := builtin.split_row:
        rows = [each for index in range(len(records)) for each in split(records[index], records.location(index))]
        if not rows:
            raise DataError(f"none of the {len(records)} rows of {records.name} can be used")
        return ListRecords(records.name, rows, "conversation")
    read_row = builtin.read_row
    assert read_row is not None
    return _ReadRecords(records, lambda record, where: read_row(record, where, folder))


def select_rows(builtin: BuiltinDataset, records: Records) -> Sequence[int]:
    """Return the indices of the records that meet the entry's conditions. Raises DataError if none does."""
    if not builtin.keep:
        return range(len(records))
    columns = tuple(dict.fromkeys(condition.column for condition in builtin.keep))
    rows = enumerate(records.iter_values(columns))
    kept = [index for index, values in rows if keeps_row(builtin.keep, dict(zip(columns, values, strict=True)))]
    if not kept:
        raise DataError(f"none of the {len(records)} rows of {records.name} can be used: {_format_conditions(builtin.keep)}")
    if left_out := len(records) - len(kept):
        logger.info(
            "%d of %d rows of %s are left out: %s", left_out, len(records), records.name, _format_conditions(builtin.keep)
        )
    return kept


def keeps_row(conditions: Sequence[Condition], record: Record) -> bool:
    """Return whether a row meets all conditions."""
    for condition in conditions:
        value = record.get(condition.column)
        text = "" if value is None else str(value)
        if condition.at_most is not None and isinstance(value, list | tuple) and len(value) > condition.at_most:
            return False
        if condition.one_of and text not in condition.one_of:
            return False
        if condition.none_of and text.strip().lower() in condition.none_of:
            return False
    return True


def _format_conditions(conditions: Sequence[Condition]) -> str:
    return ", ".join(map(_format_condition, conditions))


def _format_condition(condition: Condition) -> str:
    if condition.at_most is not None:
        return f"{condition.column} must be at most {condition.at_most}"
    if condition.one_of:
        return f"{condition.column} must be {' or '.join(map(repr, condition.one_of))}"
    return f"{condition.column} must not be {' or '.join(map(repr, condition.none_of))}"


class _ReadRecords(Records):
    """Records with columns computed when a record is read."""

    def __init__(self, records: Records, read: Callable[[Record, str], Mapping[str, Any]]) -> None:
        self.name, self.uniform, self._records, self._read = records.name, records.uniform, records, read

    def __len__(self) -> int:
        return len(self._records)

    def read_record(self, index: int) -> Record:
        record = self._records.read_record(index)
        return {**record, **self._read(record, self.location(index))}

    def location(self, index: int) -> str:
        return self._records.location(index)
