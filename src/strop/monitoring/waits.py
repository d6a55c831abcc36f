"""Open waits: ``with waiting(who, on=what)`` around anything that may hang.

An open wait is an edge from the waiter to the thing it waits for. Its parent is the wait that was open in the context where it began (a
context variable, inherited by asyncio tasks and ``asyncio.to_thread``). If the parent has ended, e.g. for a group that started ahead of
its step, the parent is the wait whose ``on`` is this wait's ``who``.

``status.json`` in the log folder has the state of the run: the watchdog rewrites it every few seconds, and ``strop doctor`` reads it. A
file much older than ``interval`` means that the process has died or is frozen.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

LOOP = "training loop"
WaitKind = Literal["", "environment", "generation", "training", "weight_sync", "checkpoint"]  # selects the limit; "": none

_current_wait: ContextVar[waiting | None] = ContextVar("strop_waiting", default=None)
_open_waits: dict[int, waiting] = {}  # in the order in which they began; single-item changes need no lock
_counter = itertools.count()


class waiting:
    """Register a wait while the block runs: ``with waiting("weight sync", on="engine 1", kind="weight_sync"):``.

    ``who`` and ``on`` are shown to the user; include a number to distinguish instances. ``kind`` selects one of the watchdog's
    limits; ``limit`` (seconds) overrides it. ``detail`` is only displayed. Works in any thread or asyncio task.
    """

    __slots__ = ("detail", "kind", "limit", "number", "on", "parent", "since", "task", "thread", "who")

    def __init__(self, who: str, *, on: str, kind: WaitKind = "", limit: float | None = None, detail: str = "") -> None:
        self.who, self.on, self.kind, self.limit, self.detail = who, on, kind, limit, detail

    def __enter__(self) -> waiting:
        self.parent = _current_wait.get()
        _current_wait.set(self)
        self.thread = threading.get_ident()
        self.task = _current_task()
        self.number = next(_counter)
        self.since = time.monotonic()
        _open_waits[self.number] = self
        return self

    def __exit__(self, *_: object) -> None:
        _open_waits.pop(self.number, None)
        _current_wait.set(self.parent)
        for hear in wait_listeners:
            hear(self)
        self.parent = self.task = None  # a task's context must not keep ended waits alive


wait_listeners: list[
    Callable[[waiting], object]
] = []  # called where a wait ends, with its parents still known; they must not raise


def _current_task() -> asyncio.Task[object] | None:
    loop = asyncio._get_running_loop()  # None outside of a loop; the public function raises, which is too slow here
    return None if loop is None else asyncio.current_task(loop)


class Wait(NamedTuple):
    """A snapshot of an open wait. (A tuple for speed: there may be thousands every few seconds.)"""

    number: int  # unique and increasing
    who: str
    on: str
    detail: str
    kind: WaitKind
    limit: float | None  # seconds; None: no limit
    seconds: float  # since it began
    parent: int | None  # the number of the enclosing wait
    thread: int
    running: bool  # its task is currently running in the event loop, so it is the one that blocks it

    @property
    def overdue(self) -> bool:
        return self.limit is not None and self.seconds > self.limit


def snapshot_waits(
    limits: Mapping[str, float] = MappingProxyType({}), *, loop: asyncio.AbstractEventLoop | None = None
) -> tuple[Wait, ...]:
    """Return all open waits, the oldest first. ``limits`` maps kinds to seconds; 0 or a missing kind means no limit.

    ``loop``: the event loop whose current task is marked as running.
    """
    open_waits = list(_open_waits.values())  # copying is atomic under the GIL
    now, running = time.monotonic(), None if loop is None else asyncio.current_task(loop)
    by_number = {wait.number: wait for wait in open_waits}
    awaited = {wait.on: wait for wait in reversed(open_waits)}  # the oldest if several wait for the same
    return tuple(
        Wait(
            number=wait.number,
            who=wait.who,
            on=wait.on,
            detail=wait.detail,
            kind=wait.kind,
            limit=(limits.get(wait.kind) or None) if wait.limit is None else wait.limit or None,
            seconds=now - wait.since,
            parent=_find_parent(wait, by_number, awaited),
            thread=wait.thread,
            running=running is not None and wait.task is running,
        )
        for wait in open_waits
    )


def _find_parent(wait: waiting, by_number: Mapping[int, waiting], awaited: Mapping[str, waiting]) -> int | None:
    parent = wait.parent
    if parent is not None and parent.number in by_number:
        return parent.number
    by_name = awaited.get(wait.who)
    return None if by_name is None or by_name is wait or by_name.who == wait.on else by_name.number


def wait_chain(wait: Wait, waits: Iterable[Wait]) -> list[Wait]:
    """Return the enclosing waits, from the outermost to this one."""
    by_number = {other.number: other for other in waits}
    chain = [wait]
    while (parent := by_number.get(-1 if chain[-1].parent is None else chain[-1].parent)) is not None and parent not in chain:
        chain.append(parent)
    return chain[::-1]


def describe_wait(wait: Wait, waits: Iterable[Wait]) -> str:
    """Format the chain of a wait: ``training loop -> generation -> group 87 -> environment 'sandbox', turn 2 (task x)``."""
    chain = wait_chain(wait, waits)
    parts = [chain[0].who]
    for item in chain:
        parts += [item.who] if item.who not in (parts[-1], "") else []
        parts.append(f"{item.on} ({item.detail})" if item.detail else item.on)
    return " -> ".join(parts)


STATUS_FILE = "status.json"

StatusState = Literal["running", "finished", "failed", "interrupted"]


@dataclass(frozen=True)
class LogEntry:
    """A message of the run with its time (Unix time)."""

    when: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """The content of ``status.json``. Times are Unix times; durations are in seconds."""

    state: StatusState
    pid: int
    host: str
    process_started: float  # kernel clock ticks; distinguishes processes that reuse a pid. 0: unknown
    started: float
    written: float
    interval: float  # seconds between two writes
    step: int  # the last step that was logged; -1: none yet
    stepped: float | None  # when that step was logged
    doing: str  # the current activity
    loop_silent: float  # seconds for which the event loop has been blocked; 0: it runs
    waits: tuple[Wait, ...]
    versions: Mapping[str, str]  # of Python and packages
    command: str  # that started the process
    checkpoints: str | None  # the folder
    troubles: tuple[str, ...]  # reports of the stalls at this moment
    error: str | None  # the error that ended the run
    notes: tuple[LogEntry, ...]  # the latest notes of the run
    reports: tuple[LogEntry, ...]  # the last reports of the watchdog
    stacks: str | None  # the file with the stacks of all threads at the first stall
    traceback: str | None = None  # of the error, from the first line of user code on, if it passed through any


def write_status(folder: Path, status: Status) -> None:
    """Write the file atomically, without fsync: it is not needed after a power failure."""
    temporary = folder / f".{STATUS_FILE}.tmp"
    values = {**asdict(replace(status, waits=())), "waits": [wait._asdict() for wait in status.waits]}
    temporary.write_text(json.dumps(values, ensure_ascii=False, indent=1), encoding="utf-8", errors="replace")
    os.replace(temporary, folder / STATUS_FILE)


def read_status(folder: Path) -> Status | None:
    """Read the file, or return None if it does not exist. Raises ValueError if its format is not of this version."""
    try:
        values = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    try:
        return Status(
            **{
                **values,
                "waits": tuple(Wait(**wait) for wait in values["waits"]),
                "troubles": tuple(values["troubles"]),
                "notes": _log_entries(values["notes"]),
                "reports": _log_entries(values["reports"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / STATUS_FILE} is not a status of this version ({error}; expected "
            f"{', '.join(field.name for field in fields(Status))})"
        ) from None


def _log_entries(rows: Any) -> tuple[LogEntry, ...]:
    return tuple(LogEntry(**row) for row in rows)


def process_start_time(pid: int) -> float:
    """Return the start time of a process in the kernel's clock ticks, or 0 if unknown."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    state, *rest = stat.rpartition(")")[2].split()
    return 0.0 if state in ("Z", "X") else float(rest[18])  # a zombie counts as dead
