"""Streams of rows: an endless order over shards, the blocks of it that are kept, and rows by their place."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from threading import RLock
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar, overload

from strop.data.sources.records import DataError, Record, Records
from strop.data.sources.shards import Shard, ShardReader, StreamedRecord
from strop.data.task_order import permute_index
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


# A stream of records by position, with a few blocks in memory.
#
#     position   0 .. B-1   B .. 2B-1   ...   L-1 | L ..
#     block      (0, 0)     (0, 1)      ...       | (1, 0) ..       (epoch, number)
#
# The rows of a block are permuted by (seed, epoch, number), so the record at a position depends only on the data and the seed. The
# length L of an epoch is known once its end was reached. One thread reads one block ahead. Any position can be requested: the
# starts of the latest blocks are saved, also in checkpoints; an earlier block is found by reading its epoch from the beginning.

BLOCKS_IN_MEMORY = 3  # the previous, current and next block
ROWS_IN_MEMORY = 4096  # more blocks if they are small
STARTS, SAVED_STARTS = 256, 32  # of the latest blocks


class BlockKey(NamedTuple):
    epoch: int
    number: int


class BlockStart(NamedTuple):
    """The start of a block, and a digest of its first row, which reveals changed data."""

    position: Any
    first: str


class Place(NamedTuple):
    """The content of a position: ``copy`` of ``record``, and its neighbours, the records of the block."""

    epoch: int
    records: Sequence[StreamedRecord]
    number: int  # index of the record in the block
    copy: int


class StreamBlocks:
    def __init__(
        self,
        stream: RecordStream,
        *,
        rows: int,
        seed: int | None = None,
        keep: Callable[[StreamedRecord], bool] | None = None,
        limit: int | None = None,
        copies: int = 1,
    ) -> None:
        """``rows``: per block. ``seed`` None: in order. ``keep``: which records count. ``limit``: rows per epoch. ``copies``: of
        each row.
        """
        self.name, self._stream, self._rows, self._seed = stream.name, stream, rows, seed
        self._keep, self._limit, self._copies = keep, limit, copies
        self._length: int | None = None  # records of an epoch
        self._reached = 0  # the newest position that the run itself has requested
        self._blocks: OrderedDict[BlockKey, Future[Sequence[StreamedRecord]]] = OrderedDict()
        self._starts: OrderedDict[BlockKey, BlockStart] = OrderedDict()
        self._lock = RLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stream")
        self._reader: tuple[BlockKey, StreamReader] | None = None  # the block it is positioned before; used only by the thread

    @property
    def length(self) -> int | None:
        """The number of positions of an epoch; None until it is known."""
        return None if self._length is None else self._length * self._copies

    def with_copies(self, count: int) -> StreamBlocks:
        """Return the same blocks with ``count`` copies of each row. Nothing may have been read yet."""
        return StreamBlocks(
            self._stream, rows=self._rows, seed=self._seed, keep=self._keep, limit=self._limit, copies=self._copies * count
        )

    def reach(self, position: int) -> None:
        """Record that the run has reached a position, rather than only reading ahead."""
        self._reached = max(self._reached, position)

    def locate(self, position: int) -> Place:
        """Return the content of a position of any epoch. Raises DataError."""
        block = self._rows * self._copies
        while True:
            epoch, rest = (0, position) if self.length is None else divmod(position, self.length)
            number, offset = divmod(rest, block)
            records = self._get(BlockKey(epoch, number))
            count = len(records) * self._copies
            if offset < count:
                if self._seed is not None:
                    offset = permute_index(offset, count, mix_seed(self._seed, epoch, number))
                return Place(epoch, records, *divmod(offset, self._copies))
            assert self.length is not None, "a block that is cut short ends its epoch"

    def state(self) -> Mapping[str, Any]:
        """Return the starts of the latest blocks, up to the one that the run has reached; read-ahead is ignored."""
        with self._lock:
            epoch, rest = (0, self._reached) if self.length is None else divmod(self._reached, self.length)
            newest = BlockKey(epoch, rest // (self._rows * self._copies))
            known = sorted(each for each in self._starts if each <= newest)[-SAVED_STARTS:]
            return {
                "reached": self._reached,
                "length": self._length if epoch else None,
                "blocks": [[*key, *self._starts[key]] for key in known],
            }

    def load_state(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._reached, self._length = state["reached"], state["length"]
            self._blocks.clear()
            self._starts.update(
                (BlockKey(epoch, number), BlockStart(position, first)) for epoch, number, position, first in state["blocks"]
            )

    def _get(self, key: BlockKey) -> Sequence[StreamedRecord]:
        """Return a block, and start reading the next one."""
        with self._lock:
            future = self._request(key)
        try:
            records = future.result()
        except BaseException:
            with self._lock:
                self._blocks.pop(key, None)  # the next request retries
            raise
        with self._lock:
            self._request(self._after(key))
            self._blocks.move_to_end(key)
            while len(self._blocks) > max(BLOCKS_IN_MEMORY, ROWS_IN_MEMORY // self._rows):
                self._blocks.popitem(last=False)
        return records

    def _request(self, key: BlockKey) -> Future[Sequence[StreamedRecord]]:
        future = self._blocks.get(key)
        if future is None or (future.done() and future.exception() is not None):
            future = self._blocks[key] = self._thread.submit(self._read, key)
        return future

    def _after(self, key: BlockKey) -> BlockKey:
        ends = self._length is not None and (key.number + 1) * self._rows >= self._length
        return BlockKey(key.epoch + 1, 0) if ends else BlockKey(key.epoch, key.number + 1)

    # --- in the thread that reads ---------------------------------------------------------------------------------------------

    def _read(self, key: BlockKey) -> Sequence[StreamedRecord]:
        reader = self._reader[1] if self._reader is not None and self._reader[0] == key else self._seek(key)
        self._reader = None  # a reader cannot continue after an error
        if reader is None:
            return ()
        position = reader.position
        before = key.number * self._rows
        wanted = self._rows if self._limit is None else min(self._rows, self._limit - before)
        records = list(islice(self._iter_kept(reader), wanted))
        if records:
            self._note_start(key, BlockStart(position, digest(records[0])))
        end = before + len(records)
        if len(records) < self._rows or end == self._limit or (self._length is not None and end > self._length):
            self._end_epoch(end)
        else:
            self._reader = (BlockKey(key.epoch, key.number + 1), reader)
        return records

    def _seek(self, key: BlockKey) -> StreamReader | None:
        """Return a reader positioned before the block; None if the epoch ends earlier."""
        with self._lock:
            known = [each for each in self._starts if each.epoch == key.epoch and each.number <= key.number]
            nearest = max(known, default=BlockKey(key.epoch, 0))
            start = self._starts.get(nearest)
        if start is not None:
            self._check_start(key.epoch, start)
        reader = self._open(key.epoch, None if start is None else start.position)
        skipped = (key.number - nearest.number) * self._rows
        available = skipped if self._limit is None else self._limit - nearest.number * self._rows
        found = sum(1 for _ in islice(self._iter_kept(reader), min(skipped, available)))
        if found < skipped:
            self._end_epoch(nearest.number * self._rows + found)
            return None
        return reader

    def _open(self, epoch: int, position: Any) -> StreamReader:
        in_order = self._seed is None or self._limit is not None  # ``limit`` selects the same rows in every epoch
        return self._stream.open(epoch, position, seed=None if in_order else self._seed)

    def _check_start(self, epoch: int, start: BlockStart) -> None:
        first = next(self._iter_kept(self._open(epoch, start.position)), None)
        if first is None or digest(first) != start.first:
            found = "the data ends" if first is None else f"{first.where} is another row"
            raise DataError(
                f"{self.name} was changed since its position was noted: {found} where the position leads. A run needs its data as it was "
                "when the run started; restore it, or start over with checkpointing.resume=never"
            )

    def _iter_kept(self, reader: StreamReader) -> Iterator[StreamedRecord]:
        return reader if self._keep is None else filter(self._keep, reader)

    def _note_start(self, key: BlockKey, start: BlockStart) -> None:
        with self._lock:
            self._starts[key] = start
            self._starts.move_to_end(key)
            while len(self._starts) > STARTS:
                self._starts.popitem(last=False)

    def _end_epoch(self, length: int) -> None:
        with self._lock:
            if length == 0:
                raise DataError(f"{self.name} has no rows to use; a dataset needs at least one")
            if self._length not in (None, length):
                raise DataError(
                    f"{self.name} had {self._length} rows in an earlier epoch and has {length} now; a run needs its data as it was when "
                    "the run started"
                )
            self._length = length


def digest(record: StreamedRecord) -> str:
    content = record.content
    if not isinstance(content, bytes):
        content = json.dumps(content, sort_keys=True, default=lambda value: type(value).__name__).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# Rows of streamed data as tasks and examples: by position, without a known number.

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
