"""What a run does now: its state, who waits for whom, and what it warned of."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from strop.extensions.reading.doctor import ALIVE, find_newest_checkpoint, find_verdict
from strop.extensions.view.viewed_run import ViewedRun, ViewError, hide_secret_words
from strop.monitoring.run_starts import read_run_starts
from strop.monitoring.waits import LogEntry, Status
from strop.safety.printable import make_printable
from strop.storage.files import clean_json


def describe_status(run: ViewedRun) -> dict[str, Any]:
    """Return the status of a run. Times are Unix times, durations seconds. Raises ViewError."""
    status = run.status()
    step = run.metrics.last_step()
    described = {
        "live": run.is_live(),
        "step": step,
        "incidents": _list_incidents(status),
        "starts": _list_starts(run),
        "now": time.time(),
    }
    if status is None:
        why = "there is no status.json: the run was started with watchdog.enabled=false, or by an older version"
        return {**described, "verdict": "unknown", "why": why, "phase": None, "waits": [], "notes": [], "reports": []}
    verdict, why = find_verdict(status)
    age = max(time.time() - status.written, 0.0)
    answer: dict[str, Any] = clean_json(
        {
            **described,
            "verdict": verdict,
            "why": make_printable(why),
            "step": max(step, status.step),
            "state": status.state,
            "phase": make_printable(status.doing),
            "doing": make_printable(status.doing),
            "phase_is_current": verdict in ALIVE,
            "heartbeat_age": age,
            "heartbeat_interval": status.interval,
            "started": status.started,
            "written": status.written,
            "stepped": status.stepped,
            "since_step": None
            if status.stepped is None
            else (time.time() if verdict in ALIVE else status.written) - status.stepped,
            "loop_silent": status.loop_silent,
            "waits": [_describe_wait(wait, age if verdict in ALIVE else 0.0) for wait in status.waits],
            "troubles": [make_printable(text) for text in status.troubles],
            "error": None if status.error is None else make_printable(status.error),
            "notes": _list_entries(status.notes),
            "reports": _list_entries(status.reports),
            "stacks": None if status.stacks is None else Path(status.stacks).name,
            "checkpoints": status.checkpoints,
            "checkpoint": find_newest_checkpoint(status),
            "versions": dict(status.versions),
            "pid": status.pid,
            "host": status.host,
            "command": make_printable(hide_secret_words(status.command)),
        }
    )
    return answer


def _list_starts(run: ViewedRun) -> list[dict[str, Any]]:
    """Return each start of the run: when, after which step, by which command, and what it ran on."""
    starts = []
    for start in read_run_starts(run.folder):
        facts = {"time": start.time, "command": hide_secret_words(start.command), **start.hardware, **start.data}
        texts = {make_printable(str(name)): make_printable(str(value)) for name, value in facts.items() if value}
        starts.append({"after_step": start.after_step, "facts": texts})
    return starts


def _describe_wait(wait: Any, age: float) -> dict[str, Any]:
    """Return a wait, with the time that passed since the status was written."""
    values = wait._asdict()
    texts = {name: make_printable(str(values[name])) for name in ("who", "on", "detail", "kind")}
    kept = {name: values[name] for name in ("number", "parent", "limit", "running")}
    return {**kept, **texts, "seconds": wait.seconds + age, "overdue": wait.overdue}


def _list_entries(entries: tuple[LogEntry, ...]) -> list[dict[str, Any]]:
    return [{"when": entry.when, "text": make_printable(entry.text)} for entry in entries]


def _list_incidents(status: Status | None) -> list[dict[str, Any]]:
    """Return what the watchdog reported, and the notes that are warnings, in order of time."""
    if status is None:
        return []
    warned = [note for note in status.notes if note.text.lower().startswith(("warning", "error"))]
    return _list_entries(tuple(sorted((*status.reports, *warned), key=lambda entry: entry.when)))


RESCAN_SECONDS = 2.0
DEEPEST = 4  # folders below one that was named
MOST_RUNS = 2000
RUN_FILES = ("config.yaml", "metrics.jsonl", "status.json")
_SKIPPED = {"rollouts", "validation", "checkpoints", "results", "replays", "exported", "index", "node_modules", "__pycache__"}


class RunCatalogue:
    """Finds runs, and keeps what was read of each."""

    def __init__(self, places: Sequence[Path], parse_yaml: Callable[[str], Any]) -> None:
        self.places = [Path(place).absolute() for place in places]
        self._parse_yaml = parse_yaml
        self._lock = threading.Lock()
        self._runs: dict[Path, ViewedRun] = {}
        self._scanned = -RESCAN_SECONDS

    def list_runs(self) -> list[ViewedRun]:
        """Return the runs that there are now, those that changed last first."""
        with self._lock:
            if time.monotonic() - self._scanned >= RESCAN_SECONDS:
                self._rescan()
                self._scanned = time.monotonic()
            runs = list(self._runs.values())
        return sorted(runs, key=lambda run: run.updated or 0.0, reverse=True)

    def find(self, id: str) -> ViewedRun:
        """Return a run by its id. Raises ViewError."""
        for attempt in range(2):
            with self._lock:
                found = next((run for run in self._runs.values() if run.id == id), None)
            if found is not None and found.folder.is_dir():
                return found
            if not attempt:
                self.list_runs()
        if found is not None:
            raise ViewError(f"the folder of the run {found.name} is gone: {found.folder}", 410)
        raise ViewError(f"there is no run {id[:80]!r} here; the list of runs has those that there are")

    def _rescan(self) -> None:
        folders = dict.fromkeys(folder for place in self.places for folder in _find_run_folders(place))
        self._runs = {folder: run for folder, run in self._runs.items() if folder in folders}
        taken = {run.id for run in self._runs.values()}
        for folder in list(folders)[:MOST_RUNS]:
            if folder not in self._runs:
                id = _make_id(folder, taken)
                taken.add(id)
                self._runs[folder] = ViewedRun(id, folder, self._parse_yaml)


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RUN_FILES)


def _find_run_folders(place: Path, depth: int = 0) -> Iterator[Path]:
    """Yield the log folders in a folder, or the folder itself."""
    if is_run(place):
        yield place
        return
    if depth == DEEPEST:
        return
    try:
        inside = sorted(entry.name for entry in os.scandir(place) if entry.is_dir(follow_symlinks=depth == 0))
    except OSError:
        return
    for name in inside:
        if name not in _SKIPPED and not name.startswith((".", "step_")):
            yield from _find_run_folders(place / name, depth + 1)


def _make_id(folder: Path, taken: set[str]) -> str:
    """Return the folder's name, with letters of its path where another run has that name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.") or "run"
    return name if name not in taken else f"{name}-{sha256(str(folder).encode()).hexdigest()[:8]}"
