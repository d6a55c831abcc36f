"""``status.json`` in a run's log folder: how the run stands, rewritten every few seconds by its watchdog, read by ``strop doctor``.

A file that was not rewritten for longer than ``interval`` tells as much as one that was: the process is gone, or stands still.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from strop.watch.waits import Wait

FILE_NAME = "status.json"

State = Literal["running", "finished", "failed", "interrupted"]


@dataclass(frozen=True)
class Said:
    """A line that the run said, and when (seconds since 1970)."""

    when: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Status:
    """Times are seconds since 1970, durations seconds."""

    state: State
    pid: int
    host: str
    process_started: float  # in the kernel's clock; tells this process from a later one with its pid. 0: not known
    started: float
    written: float
    interval: float  # the file is rewritten this often
    step: int  # the last step that was logged; -1: none yet
    stepped: float | None  # when it was
    doing: str  # the phase, in the run's own words
    loop_silent: float  # for how long the event loop did not run
    waits: tuple[Wait, ...]
    versions: Mapping[str, str]  # of the software
    command: str  # that started the process
    checkpoints: str | None  # the folder
    troubles: tuple[str, ...]  # what is over its limit now
    error: str | None  # that ended the run
    notes: tuple[Said, ...]  # what the run said last
    reports: tuple[Said, ...]  # what the watchdog found last
    stacks: str | None  # the file with the stacks of all threads, as they were when a limit was first exceeded


def write_status(folder: Path, status: Status) -> None:
    """Replaces the file in one move. It is not flushed to disk: after a power cut nobody asks who waited for whom."""
    draft = folder / f".{FILE_NAME}.tmp"
    values = {**asdict(replace(status, waits=())), "waits": [wait._asdict() for wait in status.waits]}
    draft.write_text(json.dumps(values, ensure_ascii=False, indent=1), encoding="utf-8")
    os.replace(draft, folder / FILE_NAME)


def read_status(folder: Path) -> Status | None:
    """None where there is no such file. Raises ValueError where it is not one of this version."""
    try:
        found = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    try:
        return Status(
            **{
                **found,
                "waits": tuple(Wait(**wait) for wait in found["waits"]),
                "troubles": tuple(found["troubles"]),
                "notes": _said(found["notes"]),
                "reports": _said(found["reports"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{folder / FILE_NAME} is not a status of this version ({error}; expected {', '.join(field.name for field in fields(Status))})"
        ) from None


def _said(rows: Any) -> tuple[Said, ...]:
    return tuple(Said(**row) for row in rows)


def process_started(pid: int) -> float:
    """When a process began, in the kernel's clock ticks; 0 where that cannot be known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0.0
    state, *rest = stat.rpartition(")")[2].split()
    return 0.0 if state in ("Z", "X") else float(rest[18])  # a zombie is no process that does anything
