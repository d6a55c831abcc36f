"""Shards that are objects: streamed datasets of the library ``datasets``, and any other re-iterable objects."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import islice
from typing import Any

from strop.data.sources.records import DataError
from strop.data.sources.streaming.base import Shard, ShardReader, StreamedRecord


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
