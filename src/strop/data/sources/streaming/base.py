"""The inputs of a stream: shards, each read in order, from its beginning or from a saved position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from strop.data.sources.files import parse_object
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
