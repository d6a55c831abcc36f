"""Rows of streamed data as tasks and examples: by position, without a known number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeGuard, TypeVar, overload

from strop.data.sources.records import DataError, Record, Records
from strop.data.sources.streaming.base import StreamedRecord
from strop.data.sources.streaming.blocks import StreamBlocks
from strop.data.sources.streaming.record_stream import RecordStream

T = TypeVar("T")
U = TypeVar("U")


class StreamedRecords(Records):
    """The records of a stream. Only the first is accessible by index."""

    uniform = True

    def __init__(self, stream: RecordStream) -> None:
        self.name, self.stream = stream.name, stream
        self.first = stream.read_first()
        self.first.read()  # an error in it is raised before the run starts

    def __len__(self) -> int:
        raise _no_length(self.name)

    def __getitem__(self, index: Any) -> Any:
        if index != 0:
            raise _no_length(self.name)
        return self.first.read()

    def read_record(self, index: int) -> Record:
        record: Record = self[index]
        return record

    def location(self, index: int) -> str:
        return self.first.where


class Streamed(Sequence[T], Generic[T]):
    """Items made from the records of a stream, by position in the run: epoch after epoch."""

    def __init__(self, blocks: StreamBlocks, make: Callable[[StreamedRecord, int], T]) -> None:
        """``make(record, copy)`` returns an item, once for each copy of a record."""
        self._blocks, self._make = blocks, make

    def __len__(self) -> int:
        raise _no_length(self._blocks.name)

    def __bool__(self) -> bool:
        return True

    @overload
    def __getitem__(self, position: int) -> T: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[T]: ...
    def __getitem__(self, position: int | slice) -> T | Sequence[T]:
        if isinstance(position, slice):
            raise _no_length(self._blocks.name)
        self.reach(position)
        return self.peek(position)

    def __iter__(self) -> Iterator[T]:
        """Yield the items of one epoch, ahead of the run."""
        position = 0
        while self.epoch(position) == 0:
            yield self.peek(position)
            position += 1

    def peek(self, position: int) -> T:
        """Return an item ahead of the position of the run."""
        place = self._blocks.locate(position)
        return self._make(place.records[place.number], place.copy)

    def reach(self, position: int) -> None:
        """Record that the run has reached a position, which checkpoints then save."""
        self._blocks.reach(position)

    def beside(self, position: int) -> T:
        """Return an item of the block's next record, unrelated to the item at ``position``."""
        place = self._blocks.locate(position)
        return self._make(place.records[(place.number + 1) % len(place.records)], place.copy)

    def epoch(self, position: int) -> int:
        return self._blocks.locate(position).epoch

    def expand(self, count: int, change: Callable[[T, int], U]) -> Streamed[U]:
        """Return a stream in which each item is replaced by ``change(item, number)`` for ``number`` in range(count)."""
        make = self._make
        return Streamed(self._blocks.with_copies(count), lambda record, copy: change(make(record, copy // count), copy % count))

    def map(self, change: Callable[[T], U]) -> Streamed[U]:
        make = self._make
        return Streamed(self._blocks, lambda record, copy: change(make(record, copy)))

    def read_epoch(self) -> list[T]:
        """Read all items into memory."""
        items = [self[0]]
        while self.epoch(len(items)) == 0:
            items.append(self[len(items)])
        return items

    def state(self) -> Mapping[str, Any]:
        return self._blocks.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._blocks.load_state(state)


def is_streamed(items: Sequence[T]) -> TypeGuard[Streamed[T]]:
    return isinstance(items, Streamed)


def count_items(items: Sequence[Any]) -> int | None:
    """Return the number of items in an epoch; None if they are streamed."""
    return None if is_streamed(items) else len(items)


def has_item(items: Sequence[Any], position: int, max_epochs: int) -> bool:
    """Return whether a position is within the epochs to read of streamed items; other items can be read any number of times.

    True if the stream cannot be read: the reader of the item then gets the error.
    """
    try:
        return not is_streamed(items) or items.epoch(position) < max_epochs
    except DataError:
        return True


def _no_length(name: str) -> DataError:
    return DataError(
        f"{name} is streamed, so it is read in order and its number of rows, which is needed here, is unknown; set streaming=false"
    )
