"""Streams by position: every row once in an epoch, whatever the blocks, and exactly the same after a resume at any point."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.data.sources.records import DataError
from strop.data.sources.shards import find_shards, list_shards
from strop.data.sources.streamed import RecordStream, StreamBlocks, Streamed


class Numbers:
    """The numbers of a range, made while they are read."""

    def __init__(self, start: int, count: int) -> None:
        self.numbers = range(start, start + count)

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"number": number} for number in self.numbers)


class Counting(Numbers):
    """The same with a state, which counts the rows that were read."""

    read = 0
    start_at = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start_at = state["next"]

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.next = self.start_at
        for number in self.numbers[self.start_at :]:
            Counting.read += 1
            self.next += 1
            yield {"number": number}


def stream_of(sizes: Sequence[int], kind: type[Numbers] = Numbers) -> RecordStream:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    shards = [shard for start, size in zip(starts, sizes, strict=True) for shard in list_shards(f"{start}+", kind(start, size))]
    return RecordStream("numbers", shards)


def items_of(stream: RecordStream, **options: Any) -> Streamed[tuple[int, int]]:
    return Streamed(StreamBlocks(stream, **options), lambda record, copy: (record.read()["number"], copy))


SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(any)


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, rows=st.integers(1, 9), seed=st.none() | st.integers(0, 3), copies=st.integers(1, 3))
def test_each_epoch_has_every_row_once(sizes: list[int], rows: int, seed: int | None, copies: int) -> None:
    items, total = items_of(stream_of(sizes), rows=rows, seed=seed, copies=copies), sum(sizes) * copies
    for epoch in range(3):
        found = [items[position] for position in range(epoch * total, (epoch + 1) * total)]
        assert sorted(found) == [(number, copy) for number in range(sum(sizes)) for copy in range(copies)]
        assert {items.epoch(position) for position in range(epoch * total, (epoch + 1) * total)} == {epoch}
        if seed is None:
            assert found == sorted(found)


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, rows=st.integers(1, 9), data=st.data())
def test_what_stands_at_a_position_depends_on_nothing_but_the_position(sizes: list[int], rows: int, data: st.DataObject) -> None:
    """In any order, and after a resume at any point, with the state or without it."""
    options: dict[str, Any] = {"rows": rows, "seed": 5, "limit": data.draw(st.none() | st.integers(1, 12))}
    end = 3 * sum(sizes)
    whole = items_of(stream_of(sizes), **options)
    wanted = [whole[position] for position in range(end)]
    asked = data.draw(st.lists(st.integers(0, end - 1), max_size=6))
    fresh = items_of(stream_of(sizes), **options)
    assert [fresh[position] for position in asked] == [wanted[position] for position in asked]

    stopped = data.draw(st.integers(0, end - 1))
    first = items_of(stream_of(sizes), **options)
    for position in range(stopped):
        first[position]
    rest = items_of(stream_of(sizes), **options)
    rest.load_state(json.loads(json.dumps(first.state())))
    begun = max(0, stopped - data.draw(st.integers(0, 3)))  # groups that a kill left unfinished
    assert [rest[position] for position in range(begun, end)] == wanted[begun:]


def test_the_state_is_that_of_a_run_that_was_not_interrupted() -> None:
    """Bytes of checkpoints agree, whatever was read ahead."""
    options: dict[str, Any] = {"rows": 4, "seed": 1}
    whole = items_of(stream_of([9, 8]), **options)
    parts = items_of(stream_of([9, 8]), **options)
    for position in range(60):
        whole[position]
        parts[position]
        parts.peek(position + 7)
        if position % 13 == 0:
            state = json.loads(json.dumps(parts.state()))
            parts = items_of(stream_of([9, 8]), **options)
            parts.load_state(state)
    assert json.dumps(whole.state()) == json.dumps(parts.state())


def test_a_resume_reads_no_more_than_its_block() -> None:
    first = items_of(stream_of([1000], Counting), rows=10, seed=1)
    for position in range(500):
        first[position]
    state = json.loads(json.dumps(first.state()))
    first.peek(520)  # the thread is done
    Counting.read = 0
    rest = items_of(stream_of([1000], Counting), rows=10, seed=1)
    rest.load_state(state)
    assert rest[499] == first[499] and Counting.read < 40


def test_a_position_of_long_ago_is_read_again_from_the_beginning_of_its_epoch() -> None:
    items = items_of(stream_of([5000]), rows=1000, seed=2)
    first = items[3]
    assert items[4999] and items[3] == first


def test_memory_holds_a_few_blocks_whatever_the_length() -> None:
    blocks = StreamBlocks(stream_of([40_000]), rows=2000, seed=0)
    for position in range(0, 40_000, 100):
        blocks.locate(position)
    assert len(blocks._blocks) <= 3


def test_only_rows_that_count_have_positions() -> None:
    even = items_of(stream_of([10, 11]), rows=3, seed=1, keep=lambda record: record.read()["number"] % 2 == 0)
    assert sorted(even[position] for position in range(11)) == [(number, 0) for number in range(0, 21, 2)]
    assert even.epoch(11) == 1


def test_a_limit_takes_the_same_rows_in_every_epoch() -> None:
    items = items_of(stream_of([4, 4, 4]), rows=3, seed=1, limit=5)
    assert {items[position][0] for position in range(5)} == {items[position][0] for position in range(5, 10)} == set(range(5))


def write_lines(path: Path, count: int, start: int = 0) -> Path:
    path.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(start, start + count)))
    return path


def test_data_that_was_changed_since_the_checkpoint_is_an_error(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", 20)
    items = items_of(RecordStream("rows", find_shards(str(file))), rows=5)
    for position in range(12):
        items[position]
    state = items.state()
    write_lines(file, 20, start=1)
    rest = items_of(RecordStream("rows", find_shards(str(file))), rows=5)
    rest.load_state(state)
    with pytest.raises(DataError, match=r"rows was changed since its position was noted: .*rows.jsonl:1. is another row"):
        rest[12]


def test_an_epoch_of_another_length_is_an_error() -> None:
    counts = chain([12], repeat(17))

    class Growing(Numbers):
        def __iter__(self) -> Iterator[dict[str, int]]:
            return iter(Numbers(0, next(counts)))

    items = items_of(RecordStream("rows", list_shards("rows", Growing(0, 0))), rows=5)
    assert [items[position][0] for position in range(12)] == list(range(12))
    with pytest.raises(DataError, match="rows had 12 rows in an earlier epoch and has 15 now"):
        items[22]


def test_a_source_that_fails_says_so_each_time_it_is_asked(tmp_path: Path) -> None:
    class Broken(Numbers):
        def __iter__(self) -> Iterator[dict[str, int]]:
            yield {"number": 1}
            raise OSError("the connection is gone")

    items = items_of(RecordStream("net", list_shards("net", Broken(0, 1))), rows=5)
    for _ in range(2):
        with pytest.raises(DataError, match=r"net, row 2 cannot be read \(OSError: the connection is gone\)"):
            items[0]


def test_a_stream_without_rows_is_an_error() -> None:
    with pytest.raises(DataError, match="numbers has no rows to use"):
        items_of(stream_of([0]), rows=5)[0]


def test_what_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(DataError, match="rows is of the type generator, which cannot be read again"):
        list_shards("rows", ({"number": number} for number in range(3)))
