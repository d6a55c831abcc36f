"""What a run does now: its state, who waits for whom, and what it warned of."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from strop.extensions.view.viewed_run import ViewedRun, hide_secret_words
from strop.monitoring.run_starts import read_run_starts
from strop.monitoring.watchdog.doctor import ALIVE, find_newest_checkpoint, find_verdict
from strop.monitoring.watchdog.status import LogEntry, Status
from strop.safety.printable import make_printable
from strop.storage.files import clean_json

HEALTH = "health/"  # metrics that are 1 in a step in which a warning holds


def describe_status(run: ViewedRun) -> dict[str, Any]:
    """Return the status of a run. Times are Unix times, durations seconds. Raises ViewError."""
    status = run.status()
    step = run.metrics.last_step()
    described = {
        "live": run.is_live(),
        "step": step,
        "warnings": _list_warnings(run, step),
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


def _list_warnings(run: ViewedRun, step: int) -> list[dict[str, Any]]:
    """Return the warnings that hold in the last step, and those that held before, with their last step."""
    names = [name for name in run.metrics.names() if name.startswith(HEALTH)]
    found = []
    series = run.metrics.series(names, None, 20_000) if names else {"steps": [], "series": {}}
    for name in names:
        held = [at for at, value in zip(series["steps"], series["series"][name], strict=True) if value]
        if held:
            count = {"first": held[0], "last": held[-1], "steps": len(held)}
            found.append({"name": name.removeprefix(HEALTH), **count, "now": held[-1] == step})
    return found


def _list_incidents(status: Status | None) -> list[dict[str, Any]]:
    """Return what the watchdog reported, and the notes that are warnings, in order of time."""
    if status is None:
        return []
    warned = [note for note in status.notes if note.text.lower().startswith(("warning", "error"))]
    return _list_entries(tuple(sorted((*status.reports, *warned), key=lambda entry: entry.when)))
