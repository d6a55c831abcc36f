"""A stream of records by position, with a few blocks in memory.

    position   0 .. B-1   B .. 2B-1   ...   L-1 | L ..
    block      (0, 0)     (0, 1)      ...       | (1, 0) ..       (epoch, number)

The rows of a block are permuted by (seed, epoch, number), so the record at a position depends only on the data and the seed. The
length L of an epoch is known once its end was reached. One thread reads one block ahead. Any position can be requested: the
starts of the latest blocks are saved, also in checkpoints; an earlier block is found by reading its epoch from the beginning.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from threading import RLock
from typing import Any, NamedTuple

from strop.data.interleaving import permute_index
from strop.data.sources.records import DataError
from strop.data.sources.streaming.base import StreamedRecord
from strop.data.sources.streaming.record_stream import RecordStream, StreamReader
from strop.sampling import mix_seed

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
