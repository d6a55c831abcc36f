"""A strict reader of Chrome traces: the parts of the trace-event format that Perfetto's importer relies on, checked one by one."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METADATA = {
    "process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index", "thread_name": "name",
    "thread_sort_index": "sort_index",
}  # fmt: skip


@dataclass(frozen=True)
class TraceSpan:
    """A complete event, with the names of its process and thread. Times in microseconds."""

    process: str
    thread: str
    category: str
    name: str
    ts: float
    dur: float
    detail: str


def read_trace(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace


def check_trace(trace: Mapping[str, Any]) -> list[TraceSpan]:
    """Return the spans. Fails for an event that breaks the format, a thread without a name, and spans of a thread that do not nest."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] in ("ms", "ns")
    processes: dict[int, str] = {}
    threads: dict[tuple[int, int], str] = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M") and isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int and type(event["ts"]) in (int, float)
        if event["ph"] == "M":
            assert set(event["args"]) == {METADATA[event["name"]]}
            if event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                threads[event["pid"], event["tid"]] = event["args"]["name"]
    assert len(set(processes.values())) == len(processes)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(type(event.get("dur")) in (int, float) and event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    rows: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for event in events:
        rows[event["pid"], event["tid"]].append(event)
    for row in rows.values():
        check_nesting(row)
    return [
        TraceSpan(
            processes[event["pid"]], threads_name(threads, event), event.get("cat", ""), event["name"], event["ts"], event["dur"],
            event.get("args", {}).get("detail", ""),
        )
        for event in events
    ]  # fmt: skip


def threads_name(threads: Mapping[tuple[int, int], str], event: Mapping[str, Any]) -> str:
    key = event["pid"], event["tid"]
    assert key in threads, f"thread {key} has no name"
    return threads[key]


def check_nesting(events: Iterable[Mapping[str, Any]]) -> None:
    """Fail unless every two events are apart or one is inside the other, to half a nanosecond."""
    open_ends: list[float] = []
    for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= start + 5e-4:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1] + 5e-4, event
        open_ends.append(end)


def sum_phases(spans: Iterable[TraceSpan]) -> dict[str, float]:
    """Return the seconds of each phase of the driver's training loop."""
    sums: dict[str, float] = {}
    for span in spans:
        if (span.process, span.thread) == ("driver", "training loop"):
            sums[span.name] = sums.get(span.name, 0.0) + span.dur / 1e6
    return sums
