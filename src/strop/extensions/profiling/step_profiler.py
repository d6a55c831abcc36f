"""The driver's side of a profile: starts and stops recording in every process of the run, and writes the trace of a step."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from strop.distributed.base import Cluster
from strop.extensions.profiling.profile_config import ProfileConfig
from strop.monitoring.process_profile import RECORDER, RecordedSpans, Span, begin_profile, end_profile
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.waits import LOOP, wait_listeners, waiting
from strop.runs.monitors.run_listeners import RunSetup
from strop.storage.files import atomic_write
from strop.trainer.listeners import RunListener, StepView

EXCHANGES = 8


class ClockOffset(NamedTuple):
    """Seconds to add to a time of the other process to get our time, with an error bound."""

    offset: float
    error: float


OWN_CLOCK = ClockOffset(0.0, 0.0)


async def exchange_clocks(read_other: Callable[[], Awaitable[float]], exchanges: int = EXCHANGES) -> ClockOffset:
    """Query the ``time.perf_counter`` of another process several times. Return the offset of the fastest answer."""
    best = ClockOffset(0.0, float("inf"))
    for _ in range(exchanges):
        asked = time.perf_counter()
        other = await read_other()
        answered = time.perf_counter()
        error = (answered - asked) / 2
        if error < best.error:
            best = ClockOffset((asked + answered) / 2 - other, error)
    return best


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


def record_wait(wait: waiting) -> None:
    """Keep an ended wait as a span of this process. The training loop's waits are kept by its timer."""
    if wait.who != LOOP:
        ended = time.perf_counter()
        started = ended - (time.monotonic() - wait.since)
        RECORDER.add(_find_track(wait), f"{wait.who}: {wait.on}", started, ended, wait.detail)


def _find_track(wait: waiting) -> str:
    if wait.on.startswith("engine, "):
        return "requests to engines"
    if wait.kind == "environment":
        return "environments"
    return "groups" if wait.on.startswith("group ") else wait.who


PROFILES_FOLDER = "profiles"
ANSWER_SECONDS = 20.0  # time limit for an answer of another process; without one, it is left out of the trace


class ProfiledProcess(Protocol):
    """Another process of the run."""

    name: str
    pid: int | None
    address: str

    def control_profile(self, what: str, operators: bool = False) -> Awaitable[Any]:
        """Call ``strop.monitoring.process_profile.control_profile`` there."""
        ...


@dataclass
class StepProfiler:
    """Profiles some steps of a run. A failed profile only causes a note and never ends the run."""

    folder: Path | None = None  # the run's log folder; None: nothing is profiled
    steps: frozenset[int] = frozenset()
    operators: bool = False
    note: Callable[[str], object] = lambda text: None
    processes: Callable[[], Sequence[ProfiledProcess]] = tuple
    _step: int | None = None
    _clocks: dict[str, ClockOffset] = field(default_factory=dict)
    _notes: dict[str, str] = field(default_factory=dict)

    async def begin(self, step: int) -> None:
        """Start recording if this step is to be profiled."""
        if step not in self.steps:
            return
        self._step, self._clocks, self._notes = step, {}, {}
        await asyncio.gather(*(self._begin_process(process) for process in self.processes()))
        if problem := begin_profile(self.operators):
            self._notes["driver"] = problem
        wait_listeners.append(record_wait)

    async def finish(self, step: int, began: float, ended: float) -> None:
        """Write the trace of the recorded step. ``began`` and ``ended`` are times of ``time.perf_counter``."""
        if step != self._step or self.folder is None:
            return
        own = self._end()
        started = time.perf_counter()
        note = self._notes.get("driver", "")
        driver = ProcessSpans(name="driver", pid=os.getpid(), spans=own.spans, lost=own.lost, operators=own.operators, note=note)
        others = await asyncio.gather(*(self._end_process(process) for process in self.processes()))
        path = self.folder / PROFILES_FOLDER / f"step_{step:06d}.json.gz"
        try:
            trace = make_trace(step, began, ended, [driver, *others])
            await asyncio.to_thread(write_trace, path, trace)
        except (OSError, ValueError) as error:
            self.note(f"warning: the profile of step {step} is not written: {error}")
            return
        worst = max((process.clock.error for process in others), default=0.0)
        clocks = f", clocks of {len(others)} other processes within {1e6 * worst:.0f} us" if others else ""
        seconds = time.perf_counter() - started
        self.note(
            f"profile of step {step}: {path} ({len(trace['traceEvents']):,} events{clocks}, written in {seconds:.1f} s); open it at "
            "ui.perfetto.dev"
        )

    def close(self) -> None:
        """Stop a recording whose step did not end."""
        if self._step is not None:
            self._end()

    def _end(self) -> RecordedSpans:
        self._step = None
        wait_listeners.remove(record_wait)
        return end_profile()

    async def _begin_process(self, process: ProfiledProcess) -> None:
        try:
            self._clocks[process.name] = await asyncio.wait_for(
                exchange_clocks(lambda: process.control_profile("clock")), ANSWER_SECONDS
            )
            problem = await asyncio.wait_for(_as_awaitable(process.control_profile("begin", self.operators)), ANSWER_SECONDS)
            if problem:
                self._notes[process.name] = problem
        except Exception as error:  # it died or is stuck, which is reported elsewhere
            self._notes[process.name] = f"not recorded: {type(error).__name__}: {error}"

    async def _end_process(self, process: ProfiledProcess) -> ProcessSpans:
        found = ProcessSpans(name=process.name, pid=process.pid, address=process.address, note=self._notes.get(process.name, ""))
        if process.name not in self._clocks:
            return replace(found, note=found.note or "not recorded: the process was started during the step")
        try:
            recorded = await asyncio.wait_for(_as_awaitable(process.control_profile("end")), ANSWER_SECONDS)
        except Exception as error:
            return replace(found, note=f"not recorded: {type(error).__name__}: {error}")
        return replace(
            found,
            spans=recorded.spans,
            clock=self._clocks[process.name],
            lost=recorded.lost,
            operators=recorded.operators,
        )


async def _as_awaitable(call: Awaitable[Any]) -> Any:
    return await call


@dataclass(kw_only=True)
class ProfileRecorder(RunListener):
    """Profiles the steps of ``logger.profile``."""

    name = "profile"
    profiler: StepProfiler

    async def on_start(self, step: int, tracker: Tracker) -> None:
        self.profiler.note = tracker.note
        await self.profiler.begin(step + 1)

    async def on_log(self, step: StepView) -> dict[str, float]:
        await self.profiler.finish(step.step, step.timer.started, step.timer.ended)
        await self.profiler.begin(step.step + 1)
        return {}

    async def on_end(self) -> None:
        self.profiler.close()


def make_profile(setup: RunSetup) -> ProfileRecorder | None:
    """Make the recorder of time lines, in this process and in those of a cluster; None if no step is to be profiled."""
    profile, cluster = ProfileConfig.of(setup.config.logger), setup.cluster
    if not profile.steps:
        return None
    profiler = StepProfiler(
        folder=Path(setup.config.logger.log_dir).absolute(),
        steps=frozenset(profile.steps),
        operators=profile.operators,
        processes=(lambda: _list_working(cluster)) if cluster is not None else tuple,
    )
    return ProfileRecorder(profiler=profiler)


def _list_working(cluster: Cluster) -> list[ProfiledProcess]:
    """Return the processes that take part in a run's steps, that is, all except machine monitors."""
    return [process for process in cluster.list_processes() if not process.name.startswith("monitor-")]
