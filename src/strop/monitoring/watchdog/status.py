"""``status.json`` in a run's log folder: the state of the run, rewritten every few seconds by its watchdog and read by ``strop doctor``.

A file much older than ``interval`` means that the process has died or is frozen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from strop.monitoring.watchdog.waits import Wait

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
