"""When a run stops before its last step."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.stopping import EarlyStop, StopRequest

METRIC = "validation/loss"


def after(values: Sequence[float], **options: Any) -> EarlyStop:
    watched = EarlyStop(metric=METRIC, **{"higher_is_better": False, **options})
    for value in values:
        watched = watched.update({METRIC: value, "validation/examples": 8.0})
    return watched


def test_a_threshold_is_reached_from_the_better_side() -> None:
    assert after([2.0, 1.01], threshold=1.0).reason is None
    assert after([2.0, 1.0], threshold=1.0).reason == "validation/loss = 1 reached 1"
    assert after([0.5], threshold=1.0).reason is not None
    assert after([0.5, 0.89], threshold=0.9, higher_is_better=True).reason is None
    assert after([0.5, 0.95], threshold=0.9, higher_is_better=True).reason == "validation/loss = 0.95 reached 0.9"


def test_patience_counts_measurements_in_a_row_that_were_not_better_than_the_best() -> None:
    assert after([3, 2, 2.5, 1.9, 1.95], patience=2).reason is None, "an improvement starts the count anew"
    stopped = after([3, 2, 2.5, 2.4], patience=2)
    assert stopped.reason == "validation/loss has not been better than 2 for 2 measurements"
    assert after([3, 2, 2.0], patience=1).reason is not None, "as good as the best is no improvement"
    assert after([3.0], patience=1).reason is None, "the first measurement is the best so far"


def test_an_improvement_may_have_to_be_of_some_size() -> None:
    values = [1.0, 0.995, 0.99, 0.985]
    assert after(values, patience=3).reason is None
    assert after(values, patience=3, smallest_improvement=0.1).reason is not None
    creeping = after([1.0, 0.95, 0.92, 0.85], patience=3, smallest_improvement=0.1)
    assert creeping.reason is None and creeping.best == 0.85, "small steps add up, as they are measured against the best"


def test_a_step_without_a_measurement_changes_nothing() -> None:
    watched = after([2.0, 3.0], patience=2)
    assert watched.update({"train/loss": 0.1}) is watched


def test_a_metric_that_is_never_measured_is_named_with_those_that_are() -> None:
    watched = EarlyStop(metric="validation/acuracy", threshold=0.5)
    with pytest.raises(
        ValueError, match=r"there is no metric validation/acuracy; there are validation/accuracy, validation/loss"
    ):
        watched.update({"validation/loss": 1.0, "validation/accuracy": 0.2, "train/loss": 2.0})


def test_what_was_seen_is_part_of_a_checkpoint() -> None:
    values = [3.0, 2.0, 2.5, 2.4]
    for cut in range(len(values)):
        restored = pickle.loads(pickle.dumps(after(values[:cut], patience=2)))
        for value in values[cut:]:
            restored = restored.update({METRIC: value})
        assert restored == after(values, patience=2) and restored.reason is not None


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=20), st.integers(1, 4), st.booleans())
def test_a_run_stops_at_the_first_stretch_without_improvement(values: list[float], patience: int, higher: bool) -> None:
    """Written once more, with a look at the whole past."""
    watched = EarlyStop(metric=METRIC, higher_is_better=higher, patience=patience)
    signed = values if higher else [-value for value in values]
    for count, value in enumerate(values, start=1):
        watched = watched.update({METRIC: value})
        first_best = signed.index(max(signed[:count]))
        assert watched.best == values[first_best]
        assert watched.without_improvement == count - 1 - first_best
        assert (watched.reason is not None) == (watched.without_improvement >= patience)


def test_nobody_asks_a_run_to_end_unless_told_or_its_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("strop.stopping.time.monotonic", lambda: clock[0])
    assert StopRequest().check() is None and StopRequest(reason="SIGTERM").check() == "SIGTERM"
    timed = StopRequest(deadline=101.0)
    assert timed.check() is None
    clock[0] = 101.0
    assert timed.check() == "the time is up (checkpointing.checkpoint_must_save_by)"
    clock[0] = 50.0
    assert timed.check() is not None, "what was asked for stays so"
    assert StopRequest(deadline=10.0, reason="SIGTERM").check() == "SIGTERM"
