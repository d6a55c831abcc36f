"""Profiling calls from outside a process: read its clock, begin, end."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.monitoring.profiling.quiet_profiler import quiet_profiler
from strop.monitoring.profiling.span_recorder import RECORDER, RecordedSpans

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
