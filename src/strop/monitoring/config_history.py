"""``config_history.jsonl``: the settings of a run by step, and how it finished.

The first line has the whole configuration; each start with other settings adds a line with the changes, as {key: [old, new]};
the last line of a finished run has its step and its end. A resumed run drops the lines of later steps, as it drops their metrics.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strop.storage.files import atomic_write

HISTORY_FILE = "config_history.jsonl"

# Why a run is finished: its last step, its last task, or a validation metric.
End = Literal["steps", "tasks", "early_stop"]


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """The end of a run that has nothing left to do."""

    step: int
    end: End
    time: str


def record_start(folder: Path, *, step: int, config: Mapping[str, Any], changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Record the settings of a run that continues after ``step``; -1 or 0 means a new run."""
    lines = [line for line in _read(folder) if line.get("from_step", step + 2) <= step] if step > 0 else []
    if not lines:
        lines = [{"from_step": max(step, 0) + 1, "time": _now(), "config": config}]
    elif changed:
        lines.append({"from_step": step + 1, "time": _now(), "changed": changed})
    _write(folder, lines)


def record_finish(folder: Path, *, step: int, end: End) -> None:
    """Record that the run is finished."""
    lines = [line for line in _read(folder) if "finished" not in line]
    _write(folder, [*lines, {"finished": step, "end": end, "time": _now()}])


def read_finish(folder: Path) -> FinishedRun | None:
    """Return how the run in a log folder finished; None if it did not."""
    lines = _read(folder)
    last = lines[-1] if lines else {}
    return FinishedRun(step=last["finished"], end=last["end"], time=last["time"]) if "finished" in last else None


def read_changes(folder: Path) -> list[tuple[int, Mapping[str, tuple[Any, Any]]]]:
    """Return (first step, {key: (old, new)}) of each start of a run with other settings, in order."""
    lines = [line for line in _read(folder) if "changed" in line]
    return [(int(line["from_step"]), {key: (old, new) for key, (old, new) in line["changed"].items()}) for line in lines]


def read_first_config(folder: Path) -> Mapping[str, Any]:
    """Return the configuration that a run began with; empty if it was not recorded."""
    lines = _read(folder)
    return dict(lines[0].get("config", {})) if lines else {}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def _read(folder: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in (folder / HISTORY_FILE).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def _write(folder: Path, lines: list[dict[str, Any]]) -> None:
    with atomic_write(folder / HISTORY_FILE) as temporary:
        temporary.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
