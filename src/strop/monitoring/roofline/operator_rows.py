"""Operators of a recorded step, each once: what is nested in a counted operator belongs to it, what only calls others has its own time.

Torch's profiler nests events by time within a thread. Walking them in that order, an operator whose work is known takes all of its time,
and everything inside it is part of it. Any other keeps the time that nothing inside it takes. So the times of a thread sum to that of
its outermost events, and no FLOP is counted twice.

On a GPU an operator's time is that of its kernels, found by the profiler's correlation ("External id"); that of the host is kept beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strop.monitoring.roofline.operator_event import read_inputs
from strop.monitoring.roofline.operator_work import (
    ATTENTION,
    DISPATCH,
    KERNELS,
    LOGPROBS,
    OUTSIDE,
    PRODUCTS,
    SOFTMAX,
    OperatorWork,
    count_kernel,
    count_work,
)

HOST, DEVICE = ("cpu_op", "user_annotation"), ("kernel", "gpu_memcpy", "gpu_memset")
MOST_ROWS = 400  # of a process; the shortest are summed by pass and kind

# Functions of Strop whose operators are known better by what they are part of. Products keep their own kind, but in attention.
PARTS: Mapping[str, str] = {
    "_TiledLogprobs": LOGPROBS,
    "_ChunkLogprobs": LOGPROBS,
    "_RmsNorm": SOFTMAX,
    "_PieceAttention": ATTENTION,
    "_RingAttention": ATTENTION,
    "_ExactAttention": ATTENTION,
}


@dataclass(frozen=True)
class TimedPass:
    """A span of this process that operators belong to. Times are of ``time.perf_counter``, in seconds."""

    name: str  # forward, backward, decode, ...
    started: float
    ended: float
    thread: int  # native id
    is_kernel: bool = False  # a call of Strop's own kernels, in which torch sees nothing
    detail: str = ""


@dataclass(frozen=True)
class OperatorRow:
    """The calls of one operator with the same shapes within one kind of pass."""

    phase: str  # forward, backward, decode, ...; empty outside of them
    kind: str
    name: str
    shapes: str
    precision: str
    calls: int
    seconds: float  # of the device that computes
    flops: float
    moved: float  # bytes
    counted: bool  # whether FLOPs and bytes are known
    host_seconds: float = 0.0  # on a GPU: of the calls on the host


@dataclass
class _Node:
    """An event that is open while the events of a thread are walked."""

    end: float
    phase: str
    part: str
    row: int  # whose time it is
    counted: bool  # what is inside belongs to it


@dataclass
class _Entry:
    """One call that has a row, or the own time of one that only calls others."""

    phase: str
    name: str
    work: OperatorWork
    seconds: float
    thread: int
    middle: float  # when, in seconds
    device_seconds: float = 0.0


@dataclass
class _Walk:
    """The entries of a process, and which entry an external id belongs to."""

    entries: list[_Entry] = field(default_factory=list)
    owners: dict[int, int] = field(default_factory=dict)


def list_rows(events: Iterable[Mapping[str, Any]], shift: float, passes: Sequence[TimedPass]) -> list[OperatorRow]:
    """Return the operators of a step, the longest first.

    Args:
        events: Torch's own, with ``args``; ``ts`` and ``dur`` in microseconds.
        shift: What to add to ``ts`` for the clock of the passes, in microseconds.
        passes: What this process did. An operator belongs to the innermost in its thread that holds it, or else in any thread.
    """
    threads: dict[int, list[tuple[float, float, Mapping[str, Any] | TimedPass]]] = {}
    device: list[Mapping[str, Any]] = []
    for event in events:
        if event.get("cat") in HOST:
            start = (event["ts"] + shift) * 1e-6
            threads.setdefault(_as_int(event.get("tid")), []).append((start, start + event["dur"] * 1e-6, event))
        elif event.get("cat") in DEVICE:
            device.append(event)
    for each in passes:
        if each.thread in threads:
            threads[each.thread].append((each.started, each.ended, each))
    walk = _Walk()
    for thread, found in threads.items():
        _walk_thread(thread, sorted(found, key=lambda item: (item[0], -item[1])), walk)
    if device:
        _place_kernels(walk, device)
    _find_phases(walk.entries, passes)
    return _sum_rows(walk.entries, on_device=bool(device))


def _walk_thread(thread: int, items: Sequence[tuple[float, float, Mapping[str, Any] | TimedPass]], walk: _Walk) -> None:
    """Add the entries of one thread, whose events are in the order in which they began, outer ones first."""
    stack: list[_Node] = []
    for start, end, event in items:
        while stack and stack[-1].end <= start:
            stack.pop()
        outer = stack[-1] if stack else _Node(float("inf"), "", "", -1, False)
        if outer.counted:
            if not isinstance(event, TimedPass):
                _own(walk, event, outer.row)
            stack.append(replace(outer, end=end))
            continue
        if outer.row >= 0:
            walk.entries[outer.row].seconds -= min(end, outer.end) - start
        node, entry = _open(event, start, end, outer, thread, len(walk.entries))
        walk.entries.append(entry)
        if not isinstance(event, TimedPass):
            _own(walk, event, node.row)
        stack.append(node)


def _open(
    event: Mapping[str, Any] | TimedPass, start: float, end: float, outer: _Node, thread: int, row: int
) -> tuple[_Node, _Entry]:
    """Return an event as the innermost open one, and its entry."""
    phase, part = outer.phase, outer.part
    if isinstance(event, TimedPass):
        counted, name = event.is_kernel, event.name if event.is_kernel else "Python and what torch does not report"
        work = count_kernel(event.detail) if counted else OperatorWork(OUTSIDE, counted=False)
        phase = outer.phase if counted else event.name
    else:
        name = str(event["name"])
        part = next((PARTS[each] for each in PARTS if each in name), part)
        found = count_work(name, read_inputs(event.get("args") or {}))
        counted = found is not None
        work = found or OperatorWork(DISPATCH, counted=False)
        if part and counted and (work.kind != PRODUCTS or part == ATTENTION):
            work = replace(work, kind=part)
    entry = _Entry(phase, name, work, end - start, thread, (start + end) / 2)
    return _Node(end, phase, part, row, counted), entry


def _own(walk: _Walk, event: Mapping[str, Any], row: int) -> None:
    identity = (event.get("args") or {}).get("External id")
    if identity is not None and row >= 0:
        walk.owners[identity] = row


def _place_kernels(walk: _Walk, events: Sequence[Mapping[str, Any]]) -> None:
    """Give each kernel's time to the operator that launched it; what none launched has an entry of its own."""
    for event in events:
        row = walk.owners.get((event.get("args") or {}).get("External id", -1))
        if row is None:
            row = len(walk.entries)
            walk.entries.append(_Entry("", str(event["name"]), OperatorWork(KERNELS, counted=False), 0.0, 0, 0.0))
        walk.entries[row].device_seconds += event["dur"] * 1e-6


def _find_phases(entries: Sequence[_Entry], passes: Sequence[TimedPass]) -> None:
    """Find the pass of entries in threads that have none of their own: a backward pass on a GPU has a thread to itself."""
    spans = sorted((each for each in passes if not each.is_kernel), key=lambda each: each.started)
    starts = [each.started for each in spans]
    longest = max((each.ended - each.started for each in spans), default=0.0)
    for entry in entries:
        if entry.phase or not entry.middle:
            continue
        last = bisect_right(starts, entry.middle)
        first = bisect_right(starts, entry.middle - longest)
        around = [each for each in spans[first:last] if each.ended >= entry.middle]
        if around:
            entry.phase = min(around, key=lambda each: each.ended - each.started).name


def _sum_rows(entries: Iterable[_Entry], *, on_device: bool) -> list[OperatorRow]:
    sums: dict[tuple[Any, ...], list[float]] = {}
    for each in entries:
        seconds, work = each.device_seconds if on_device else max(each.seconds, 0.0), each.work
        named = work.counted or work.kind not in (DISPATCH, OUTSIDE)
        key = (each.phase, work.kind, each.name if named else work.kind, work.shapes, work.precision, work.counted)
        total = sums.setdefault(key, [0.0] * 5)
        amounts = (1, seconds, work.flops, work.moved, max(each.seconds, 0.0) if on_device else 0.0)
        sums[key] = [before + more for before, more in zip(total, amounts, strict=True)]
    rows = [
        OperatorRow(phase, kind, name, shapes, precision, int(calls), seconds, flops, moved, counted, host)
        for (phase, kind, name, shapes, precision, counted), (calls, seconds, flops, moved, host) in sums.items()
    ]
    return _shorten(sorted(rows, key=lambda row: -row.seconds))


def _shorten(rows: list[OperatorRow]) -> list[OperatorRow]:
    """Sum the shortest rows by pass, kind and number format, so that nothing is lost and a table stays small."""
    kept, rest = rows[:MOST_ROWS], {}  # type: ignore[var-annotated]
    for row in rows[MOST_ROWS:]:
        key = (row.phase, row.kind, row.precision, row.counted)
        before = rest.get(key)
        rest[key] = replace(row, name="others", shapes="") if before is None else _add(before, row)
    return sorted([*kept, *rest.values()], key=lambda row: -row.seconds)


def _add(row: OperatorRow, more: OperatorRow) -> OperatorRow:
    return replace(
        row,
        calls=row.calls + more.calls,
        seconds=row.seconds + more.seconds,
        flops=row.flops + more.flops,
        moved=row.moved + more.moved,
        host_seconds=row.host_seconds + more.host_seconds,
    )


def _as_int(value: Any) -> int:
    return value if isinstance(value, int) else -1
