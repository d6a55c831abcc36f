"""Merging the metrics of parts gives the metric of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop import metrics
from strop.metrics import Metric

_parts = st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=5), min_size=1, max_size=5)


@given(parts=_parts)
def test_the_mean_of_weighted_means_is_the_mean_of_everything(parts: list[list[float]]) -> None:
    everything = [value for part in parts for value in part]
    merged = metrics.merge(*({"m": metrics.mean(sum(part) / len(part), len(part))} for part in parts))
    assert merged["m"].value == pytest.approx(sum(everything) / len(everything), abs=1e-9)
    assert merged["m"].weight == len(everything)


@given(parts=_parts)
def test_sums_and_extremes_are_those_of_everything(parts: list[list[float]]) -> None:
    everything = [value for part in parts for value in part]
    merged = metrics.merge(
        *(
            {"sum": metrics.total(sum(part)), "max": metrics.maximum(max(part)), "min": Metric(min(part), 1.0, "min")}
            for part in parts
        )
    )
    assert merged["sum"].value == pytest.approx(sum(everything), abs=1e-9)
    assert merged["max"].value == max(everything)
    assert merged["min"].value == min(everything)


def test_a_mean_of_no_weight_changes_nothing() -> None:
    assert metrics.mean(3.0, 2).merge(metrics.mean(9.0, 0)).value == 3.0
    assert metrics.mean(0.0, 0).merge(metrics.mean(0.0, 0)).weight == 0


def test_a_metric_that_only_some_parts_have_is_kept() -> None:
    assert metrics.to_floats(metrics.merge({"a": metrics.total(1)}, {"b": metrics.total(2)})) == {"a": 1, "b": 2}


def test_metrics_of_different_kinds_do_not_merge() -> None:
    with pytest.raises(ValueError, match="cannot merge a sum with a mean"):
        metrics.merge({"a": metrics.total(1)}, {"a": metrics.mean(1, 1)})


def test_sums_of_steps_are_averaged_over_steps() -> None:
    steps = [{"loss": metrics.to_step_mean(metrics.total(value))} for value in (1.0, 3.0)]
    assert metrics.merge(*steps)["loss"].value == 2.0
    assert metrics.to_step_mean(metrics.maximum(4.0)) == metrics.maximum(4.0)
