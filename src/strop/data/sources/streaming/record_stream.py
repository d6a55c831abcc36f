"""The records of several shards, one after another. Each epoch has its own order of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from strop.data.interleaving import permute_index
from strop.data.sources.records import DataError, Record
from strop.data.sources.streaming.base import Shard, ShardReader, StreamedRecord
from strop.sampling import mix_seed


@dataclass(frozen=True)
class RecordStream:
    name: str
    shards: Sequence[Shard]
    change: Callable[[Record, str], Record] | None = None  # converts each record when it is read

    def open(self, epoch: int = 0, position: Any = None, *, seed: int | None = None) -> StreamReader:
        """Return a reader of an epoch's records, from its beginning or from a position. ``seed`` None: shards in order."""
        count = len(self.shards)
        order = [number if seed is None else permute_index(number, count, mix_seed(seed, epoch)) for number in range(count)]
        return StreamReader([self.shards[number] for number in order], position, self.change)

    def read_first(self) -> StreamedRecord:
        """Return the first record. Raises DataError if there is none."""
        first = next(self.open(), None)
        if first is None:
            raise DataError(f"the data {self.name!r} has no rows; a dataset needs at least one")
        return first


class StreamReader(Iterator[StreamedRecord]):
    """The position is (number of the shard in the order, position in the shard)."""

    def __init__(
        self, shards: Sequence[Shard], position: Any = None, change: Callable[[Record, str], Record] | None = None
    ) -> None:
        self._shards, self._change = shards, change
        self._number: int
        self._number, start = position or (0, None)
        self._open(start)

    def _open(self, start: Any = None) -> None:
        self._reader: ShardReader = self._shards[self._number].open(start)
        self._records = iter(self._reader)

    @property
    def position(self) -> Any:
        return (self._number, self._reader.position)

    def __next__(self) -> StreamedRecord:
        while True:
            record: StreamedRecord | None = next(self._records, None)
            if record is not None:
                return record if self._change is None else replace(record, change=self._change)
            if self._number + 1 == len(self._shards):
                raise StopIteration
            self._number += 1
            self._open()
