"""Spans of several processes as one Chrome trace (JSON, gzip), readable by Perfetto and chrome://tracing.

Each process is a process of the trace, with a thread for each track. Spans of one track that overlap without one inside the other, such as
requests that an engine answers at once, are put on several threads of that track: on each thread spans nest. Format: "Trace Event Format",
Google, events of phase X (complete) and M (metadata); times in microseconds from the beginning of the step.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.monitoring.profiling.clock_exchange import OWN_CLOCK, ClockOffset
from strop.monitoring.profiling.span_recorder import Span
from strop.storage.atomic_file import atomic_write

FIRST_TRACKS = ("step", "training loop", "learner", "weight sync", "groups", "requests to engines", "engine", "environments")
OPERATOR_THREADS = 10_000  # threads of torch's operators are numbered from here on


@dataclass(frozen=True, kw_only=True)
class ProcessSpans:
    """One process's activity during a step."""

    name: str  # training loop, learner-0, engine-1, ...
    pid: int | None = None
    address: str = ""
    spans: Sequence[Span] = ()
    clock: ClockOffset = OWN_CLOCK
    lost: int = 0
    operators: str | None = None  # torch's events, in microseconds of the process's clock
    note: str = ""  # why nothing, or not everything, was recorded


@dataclass
class _Lane:
    """A thread of a track: the ends of the spans that are open at the newest one."""

    open_ends: list[float] = field(default_factory=list)

    def takes(self, span: Span) -> bool:
        while self.open_ends and self.open_ends[-1] <= span.started:
            self.open_ends.pop()
        if self.open_ends and span.ended > self.open_ends[-1]:
            return False
        self.open_ends.append(span.ended)
        return True


def make_trace(step: int, began: float, ended: float, processes: Sequence[ProcessSpans]) -> dict[str, Any]:
    """Return the trace of a step that lasted from ``began`` to ``ended`` on the driver's clock.

    Spans that began before the step are cut at its beginning, which is noted in their details."""
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes, 1):
        events += _name_process(number, process)
        tracks: dict[str, list[Span]] = {}
        for span in process.spans:
            tracks.setdefault(span.track, []).append(_move(span, process.clock.offset - began))
        thread = 0
        for track in sorted(tracks, key=_rank):
            lanes = split_lanes(tracks[track])
            for index, spans in enumerate(lanes):
                thread += 1
                events += _name_thread(number, thread, track if len(lanes) == 1 else f"{track} {index + 1}")
                events += [_make_event(number, thread, span) for span in spans]
        events += _place_operators(number, process, began, ended)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "step": step,
            "seconds": ended - began,
            "processes": {process.name: _describe(process) for process in processes},
        },
    }


def write_trace(path: Path, trace: Mapping[str, Any]) -> None:
    """Write a trace, whole or not at all. Raises OSError."""
    with atomic_write(path) as temporary:
        temporary.write_bytes(
            gzip.compress(json.dumps(trace, allow_nan=False).encode("utf-8", errors="replace"), compresslevel=5, mtime=0)
        )


def split_lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Distribute the spans over few rows by first fit, such that any two spans of a row are disjoint or nested."""
    lanes: list[_Lane] = []
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda each: (each.started, -each.ended)):
        place = next((index for index, lane in enumerate(lanes) if lane.takes(span)), len(lanes))
        if place == len(lanes):
            lanes.append(_Lane([span.ended]))
            rows.append([])
        rows[place].append(span)
    return rows


def _move(span: Span, shift: float) -> Span:
    started, ended = span.started + shift, span.ended + shift
    if started >= 0:
        return span._replace(started=started, ended=ended)
    detail = f"{span.detail}; began {-started:.3f} s before the step".lstrip("; ")
    return span._replace(started=0.0, ended=max(ended, 0.0), detail=detail)


def _rank(track: str) -> tuple[int, str]:
    return (FIRST_TRACKS.index(track) if track in FIRST_TRACKS else len(FIRST_TRACKS), track)


def _make_event(process: int, thread: int, span: Span) -> dict[str, Any]:
    event = {
        "ph": "X", "pid": process, "tid": thread, "cat": span.track, "name": span.name,
        "ts": (start := round(span.started * 1e6, 3)), "dur": round(round(span.ended * 1e6, 3) - start, 3),
    }  # fmt: skip  # the end is rounded, not the duration, so that spans still nest
    return {**event, "args": {"detail": span.detail}} if span.detail else event


def _name_process(number: int, process: ProcessSpans) -> list[dict[str, Any]]:
    where = ", ".join(part for part in (f"process {process.pid}" if process.pid else "", process.address) if part)
    common = {"ph": "M", "pid": number, "tid": 0, "ts": 0}
    return [
        {**common, "name": "process_name", "args": {"name": process.name}},
        {**common, "name": "process_labels", "args": {"labels": where}},
        {**common, "name": "process_sort_index", "args": {"sort_index": number}},
    ]


def _name_thread(process: int, thread: int, name: str) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": process, "tid": thread, "ts": 0}
    return [
        {**common, "name": "thread_name", "args": {"name": name}},
        {**common, "name": "thread_sort_index", "args": {"sort_index": thread}},
    ]


def _place_operators(number: int, process: ProcessSpans, began: float, ended: float) -> list[dict[str, Any]]:
    """Return torch's events of the step on separate threads. Events of one thread may overlap, for example messages in transit."""
    if process.operators is None:
        return []
    shift, threads = (process.clock.offset - began) * 1e6, {}  # type: ignore[var-annotated]
    for event in json.loads(process.operators):
        start = event["ts"] + shift
        if 0 <= start <= (ended - began) * 1e6:
            thread = f"torch, thread {event.get('tid')}"
            nanoseconds = (
                round(start * 1e3),
                round((start + event["dur"]) * 1e3),
            )  # both ends are rounded, so that events still nest
            threads.setdefault(thread, []).append(Span(event.get("cat", ""), event["name"], *nanoseconds))
    found: list[dict[str, Any]] = []
    place = OPERATOR_THREADS
    for thread, spans in threads.items():
        lanes = split_lanes(spans)
        for index, lane in enumerate(lanes):
            found += _name_thread(number, place, thread if len(lanes) == 1 else f"{thread}, {index + 1}")
            common = {"ph": "X", "pid": number, "tid": place}
            found += [
                {
                    **common,
                    "cat": span.track,
                    "name": span.name,
                    "ts": span.started / 1e3,
                    "dur": (span.ended - span.started) / 1e3,
                }
                for span in lane
            ]
            place += 1
    return found


def _describe(process: ProcessSpans) -> dict[str, Any]:
    return {
        "spans": len(process.spans),
        "lost": process.lost,
        "clock_offset_seconds": process.clock.offset,
        "clock_error_seconds": process.clock.error,
        **({"note": process.note} if process.note else {}),
    }
