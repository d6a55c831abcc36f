"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.sweep import draw_fewer_examples, sweep, sweep_rows


def test_all_but_the_kept_cases_are_exhaustive() -> None:
    kept, left = sweep(["a", "b"], "a")
    assert kept == "a" and left.values == ("b",) and [mark.name for mark in left.marks] == ["exhaustive"]
    kept, left = sweep_rows([("a", 1), ("b", 2)], ("a", 1))
    assert kept.values == ("a", 1) and not kept.marks and left.values == ("b", 2) and left.marks


def test_a_property_is_tried_with_fewer_examples() -> None:
    drawn: list[int] = []

    @settings(max_examples=50, database=None)
    @given(st.integers())
    def holds(number: int) -> None:
        drawn.append(number)

    item: Any = SimpleNamespace(obj=holds)
    for count in (20, 8, 8):
        draw_fewer_examples(item)
        drawn.clear()
        holds()
        assert len(drawn) == count
