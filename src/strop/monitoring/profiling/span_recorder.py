"""The spans of this process while a step is recorded. Otherwise ``is_recording`` is a comparison, and nothing is kept."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

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
