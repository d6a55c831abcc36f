"""Values of a step in bins, for services that have bars and no histograms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.monitoring.trackers.base import MetricHistogram


def count(*values: float) -> tuple[tuple[float, ...], tuple[int, ...]]:
    return MetricHistogram(name="histograms/reward", values=values).count()


@pytest.mark.parametrize(
    ("values", "middles", "counts"),
    [
        ((0.0, 1.0, 1.0), (0.0, 1.0), (1, 2)),
        ((0.5, 0.5), (0.5,), (2,)),
        ((-1.0, 0.0, 1.0, 1.0), (-1.0, 0.0, 1.0), (1, 1, 2)),
        ((0.0, 1.0, 4.0), (0.0, 1.0, 2.0, 3.0, 4.0), (1, 1, 0, 0, 1)),
    ],
)
def test_few_values_are_the_middles_of_their_bins(
    values: tuple[float, ...], middles: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    assert count(*values) == (pytest.approx(middles), counts)


def test_many_values_have_thirty_bins() -> None:
    middles, counts = count(*[number / 1000 for number in range(1000)])
    assert len(middles) == len(counts) == 30 and max(counts) - min(counts) <= 1


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_every_value_is_counted_once_however_large_or_close(values: list[float]) -> None:
    middles, counts = count(*values)
    assert sum(counts) == len(values) and len(middles) == len(counts) <= 31
    assert list(middles) == sorted(middles)
