"""Which row of which source stands where in the stream of recorded data, from the position alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.data.task_order import Interleaving, permute_index

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def placement(*sizes: int, weights: tuple[float, ...] | None = None, **options: object) -> Interleaving:
    return Interleaving(sizes=sizes, weights=weights or (None,) * len(sizes), **options)  # type: ignore[arg-type]


@given(SIZES, st.integers(0, 2**32), st.booleans())
def test_without_weights_every_epoch_has_every_row_once(sizes: list[int], seed: int, shuffle: bool) -> None:
    found = placement(*sizes, seed=seed, shuffle=shuffle, max_epochs=3)
    rows = {(source, row) for source, size in enumerate(sizes) for row in range(size)}
    for epoch in range(3):
        seen = [found.locate(epoch * len(rows) + place) for place in range(len(rows))]
        assert len(seen) == len(rows) and set(seen) == rows


@given(SIZES, st.data())
def test_with_weights_every_source_has_its_share_of_every_beginning(sizes: list[int], data: st.DataObject) -> None:
    weights = tuple(data.draw(st.floats(0.1, 10)) for _ in sizes)
    found = placement(*sizes, weights=weights)
    counts: Counter[int] = Counter()
    for index in range(150):
        counts[found.locate(index)[0]] += 1
        for source, weight in enumerate(weights):
            assert abs(counts[source] - (index + 1) * weight / sum(weights)) < len(sizes)


def test_a_weighted_source_is_gone_through_before_it_begins_again() -> None:
    """Three of four positions belong to the small one: its rows come round, each pass in another order."""
    found = placement(6, 20, weights=(3.0, 1.0), seed=1)
    small = [row for source, row in map(found.locate, range(64)) if source == 0]
    assert len(small) == 48
    passes = [small[start : start + 6] for start in range(0, 48, 6)]
    assert all(sorted(one) == list(range(6)) for one in passes)
    assert len({tuple(one) for one in passes}) > 4


def test_the_order_follows_from_the_seed_and_from_nothing_else() -> None:
    one, again, other = (placement(40, 30, seed=seed) for seed in (1, 1, 2))
    backwards = [one.locate(index) for index in reversed(range(140))]
    assert backwards[::-1] == [again.locate(index) for index in range(140)]
    assert [one.locate(index) for index in range(70)] != [other.locate(index) for index in range(70)]


def test_sources_of_one_size_are_not_shuffled_alike() -> None:
    found = placement(50, 50, seed=3)
    orders = [[row for source, row in map(found.locate, range(100)) if source == which] for which in (0, 1)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_without_shuffling_rows_stand_as_in_the_data() -> None:
    assert [placement(3, shuffle=False).locate(index) for index in range(5)] == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1)]
    assert [placement(2, 2, shuffle=False).locate(index) for index in range(4)] == [(1, 0), (0, 0), (1, 1), (0, 1)]


def test_there_is_nothing_before_the_first_and_after_the_last_epoch() -> None:
    found = placement(3, 2, max_epochs=2)
    found.locate(9)
    for index in (-1, 10):
        with pytest.raises(IndexError, match="2 epochs of 5 tasks"):
            found.locate(index)
    assert placement(3).locate(10**15)[1] in range(3), "without epochs there is no end"


@given(st.integers(1, 500), st.integers(0, 2**63))
def test_shuffling_loses_no_row(size: int, seed: int) -> None:
    assert sorted(permute_index(index, size, seed) for index in range(size)) == list(range(size))
