"""What one process records of a profiled step: its spans, and an operator trace. Without a profile nothing is kept."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

MAX_SPANS = 200_000  # per process and step; further spans are only counted


class Span(NamedTuple):
    """A timed activity. Times are in seconds of this process's ``time.perf_counter``."""

    track: str  # the row to draw it in: training loop, learner, requests to engines, ...
    name: str
    started: float
    ended: float
    detail: str = ""
    thread: int = 0  # native id, as torch's profiler numbers threads; 0: not known


class RecordedSpans(NamedTuple):
    """A process's recording of a step."""

    spans: list[Span]
    lost: int  # spans beyond MAX_SPANS
    operators: str | None = None  # torch's own trace, as JSON


class SpanRecorder:
    """Keeps spans from any thread, including spans that began before the recording and end in it."""

    def __init__(self) -> None:
        self._spans: list[Span] | None = None
        self._lost = 0
        self._lock = threading.Lock()

    @property
    def is_recording(self) -> bool:
        return self._spans is not None

    def begin(self) -> None:
        """Start recording, and drop earlier recordings."""
        with self._lock:
            self._spans, self._lost = [], 0

    def end(self) -> RecordedSpans:
        """End the recording and return its spans; none if there was no recording."""
        with self._lock:
            spans, self._spans = self._spans, None
            return RecordedSpans(spans or [], self._lost)

    def add(self, track: str, name: str, started: float, ended: float, detail: str = "") -> None:
        """Keep a finished span while a step is recorded."""
        if self._spans is None:
            return
        with self._lock:
            if self._spans is None:
                return
            if len(self._spans) >= MAX_SPANS:
                self._lost += 1
                return
            self._spans.append(Span(track, name, started, ended, detail, threading.get_native_id()))

    def span(self, track: str, name: str, detail: str = "") -> TimedBlock:
        """Return a context manager that records the time of its block."""
        return TimedBlock(self, track, name, detail)


class TimedBlock:
    """A block that is kept if a step is being recorded when it ends. A class for speed, because every engine step enters one."""

    __slots__ = ("_detail", "_name", "_recorder", "_started", "_track")

    def __init__(self, recorder: SpanRecorder, track: str, name: str, detail: str) -> None:
        self._recorder, self._track, self._name, self._detail = recorder, track, name, detail

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._recorder.is_recording:
            self._recorder.add(self._track, self._name, self._started, time.perf_counter(), self._detail)


RECORDER = SpanRecorder()  # of this process


LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler's library from printing when it starts and stops, unless an environment variable sets its log level."""
    before = os.environ.get(LEVEL)
    os.environ[LEVEL] = before or "6"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(LEVEL, None)


MARK = "strop clock"  # ranges with known times on our clock, used to align torch's
MARKS = 8


class OperatorTrace:
    """Records torch's operators of all threads. ``end`` must follow ``begin``, in the same thread."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._marks: list[tuple[float, float]] = []

    def begin(self) -> None:
        """Start recording. Raises RuntimeError if another profiler is already active in this process."""
        import torch
        from torch._C._profiler import _ExperimentalConfig

        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        settings = _ExperimentalConfig(profile_all_threads=True, trace_only=True)
        profile = torch.profiler.profile(activities=kinds, experimental_config=settings)
        with quiet_profiler():
            profile.start()
        self._marks = []
        for _ in range(MARKS):
            before = time.perf_counter()
            with torch.profiler.record_function(MARK):
                pass
            self._marks.append((before, time.perf_counter()))
        self._profile = profile

    def end(self) -> str | None:
        """Stop recording. Return the events as JSON, with times in microseconds of this process's ``perf_counter``; None if
        nothing was recorded.
        """
        if self._profile is None:
            return None
        profile, self._profile = self._profile, None
        with quiet_profiler():
            profile.stop()
        handle, name = tempfile.mkstemp(suffix=".json")
        os.close(handle)
        try:
            profile.export_chrome_trace(name)
            trace = json.loads(Path(name).read_text(encoding="utf-8", errors="replace"))
        finally:
            Path(name).unlink(missing_ok=True)
        events, shift = align_events(trace, self._marks)
        kept = ("name", "cat", "ts", "dur", "pid", "tid")
        return json.dumps(
            [
                {**{key: event[key] for key in kept if key in event}, "ts": event["ts"] + shift}
                for event in events
                if event.get("cat") not in ("Trace", "overhead")
            ]
        )


def align_events(trace: dict[str, Any], marks: Sequence[tuple[float, float]]) -> tuple[list[dict[str, Any]], float]:
    """Return the events with a duration, and the offset of their ``ts`` to our clock, in microseconds.

    ``marks``: our times (seconds) before and after each range MARK. The range with the shortest interval around it determines the
    offset of torch's clock, with an error of at most half the interval.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event and "ts" in event]
    found = sorted((event["ts"], event["dur"]) for event in events if event.get("name") == MARK)
    around = [
        (after - before - 1e-6 * dur, before, after, ts + dur / 2)
        for (before, after), (ts, dur) in zip(marks, found, strict=False)
    ]
    _, before, after, middle = min(around, default=(0.0, 0.0, 0.0, 0.0))
    return [event for event in events if event.get("name") != MARK], 1e6 * (before + after) / 2 - middle


_operators = OperatorTrace()


def control_profile(what: str, operators: bool = False) -> Any:
    """Do one of: ``clock`` (return ``time.perf_counter``), ``begin``, ``end`` (return RecordedSpans)."""
    if what == "clock":
        return time.perf_counter()
    return begin_profile(operators) if what == "begin" else end_profile()


def begin_profile(operators: bool) -> str:
    """Start recording this process. Return why torch's operators are not recorded; empty if they are, or were not requested."""
    problem = ""
    if operators:
        try:
            _operators.begin()
        except (RuntimeError, ImportError, TypeError) as error:  # another profiler, or a torch without these settings
            problem = f"torch's operators are not recorded: {error}"
    RECORDER.begin()
    return problem


def end_profile() -> RecordedSpans:
    """End the recording of this process and return it."""
    return RECORDER.end()._replace(operators=_operators.end())
