"""A tracker that raises, hangs, is slow, or finds itself in a fork: the run goes on, and what is lost is said."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Mapping

import pytest

from strop.monitoring.trackers.background_tracker import BackgroundTracker
from strop.monitoring.trackers.base import CompositeTracker, NullTracker, StepMedia


class Recorder(NullTracker):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.threads: set[str] = set()
        self.closed = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        self.threads.add(threading.current_thread().name)

    def close(self) -> None:
        self.closed += 1


class Raising(Recorder):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        raise RuntimeError("the service said no")


class Hanging(Recorder):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log(step, metrics)
        threading.Event().wait()


class Slow(Recorder):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        time.sleep(0.02)
        super().log(step, metrics)


def test_calls_are_made_in_order_in_a_thread_of_their_own() -> None:
    inner = Recorder()
    tracker = BackgroundTracker(inner)
    for step in range(50):
        tracker.log(step, {"train/loss": 1.0})
    tracker.close()
    tracker.close()
    assert inner.steps == list(range(50))
    assert inner.threads == {"tracker-Recorder"}
    assert inner.closed == 1 and tracker.failures == []


def test_metrics_are_those_of_the_moment_of_the_call() -> None:
    seen: list[Mapping[str, float]] = []

    class Late(NullTracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            time.sleep(0.05)
            seen.append(metrics)

    tracker, metrics = BackgroundTracker(Late()), {"train/loss": 1.0}
    tracker.log(1, metrics)
    metrics["train/loss"] = 2.0
    tracker.close()
    assert seen == [{"train/loss": 1.0}]


def test_one_that_raises_is_off_with_one_warning_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Raising(), Recorder()
    trackers = CompositeTracker([BackgroundTracker(bad), BackgroundTracker(good)])
    for step in range(5):
        trackers.log(step, {})
    trackers.close()
    assert bad.steps == [0] and good.steps == [0, 1, 2, 3, 4]
    assert caplog.text.count("the service said no") == 1
    assert trackers.failures == ["Raising failed and was off for the rest of this run: RuntimeError: the service said no"]


def test_one_that_hangs_holds_neither_a_step_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    tracker = BackgroundTracker(Hanging(), close_seconds=0.2)
    started = time.perf_counter()
    for step in range(1, 5):
        tracker.log(step, {})
    tracker.close()
    assert time.perf_counter() - started < 5.0
    (failure,) = tracker.failures
    assert failure.startswith("Hanging did not finish within 0.2 s at the end of the run")
    assert failure.endswith("the steps 2 to 4 are not in it") and failure in caplog.text


def test_one_that_hangs_is_said_while_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    inner = Hanging()
    tracker = BackgroundTracker(inner, close_seconds=0.05, clock=lambda: now[0])
    tracker.log(1, {})
    while not inner.steps:
        time.sleep(0.001)
    for now[0] in (100.0, 130.0, 200.0):
        tracker.log(2, {})
    tracker.close()
    assert caplog.text.count("Hanging has not returned for 130 s (log, step 1)") == 1


def test_one_that_is_slow_loses_what_it_has_no_room_for_and_says_how_much(caplog: pytest.LogCaptureFixture) -> None:
    inner = Slow()
    tracker = BackgroundTracker(inner, capacity=5)
    started = time.perf_counter()
    for step in range(100):
        tracker.log(step, {})
    assert time.perf_counter() - started < 1.0
    tracker.close()
    lost = 100 - len(inner.steps)
    assert lost > 50 and inner.steps == sorted(inner.steps)
    assert tracker.failures == [f"Slow was too slow: {lost} calls are not in it"]
    assert caplog.text.count("Slow is slower than the run") == 1


def test_a_full_disk_is_warned_about_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    class Full(Recorder):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            super().log(step, metrics)
            if step < 3:
                raise OSError(errno.ENOSPC, "No space left on device")

    inner = Full()
    tracker = BackgroundTracker(inner)
    for step in range(5):
        tracker.log(step, {})
    tracker.close()
    assert inner.steps == [0, 1, 2, 3, 4] and tracker.failures == ["Full found the disk full: 3 calls are not in it"]
    assert caplog.text.count("tried again at the next step") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_records_nothing_and_does_not_wait() -> None:
    inner = Slow()
    tracker = BackgroundTracker(inner)
    for step in range(10):
        tracker.log(step, {})
    child = os.fork()
    if child == 0:  # while the thread of the parent works, and may hold the lock
        tracker.log(99, {})
        tracker.close()
        os._exit(len(tracker.failures))
    deadline = time.monotonic() + 10
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert ended == (child, 0)
    tracker.close()
    assert inner.steps == list(range(10))


def test_a_tracker_without_the_newer_methods_is_fine(caplog: pytest.LogCaptureFixture) -> None:
    class Old:
        def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
        def note(self, text: str) -> None: ...
        def progress(self, text: str) -> None: ...
        def resume(self, step: int) -> None: ...
        def close(self) -> None: ...

    old: list[object] = [Old(), BackgroundTracker(Old())]  # type: ignore[arg-type]
    trackers = CompositeTracker(old)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        trackers.log_media(1, StepMedia())
        trackers.close()
    assert trackers.failures == [] and not caplog.text
