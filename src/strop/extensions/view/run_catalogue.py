"""The runs that the view shows: log folders that were named, and those inside folders that were named."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from strop.extensions.view.view_error import ViewError
from strop.extensions.view.viewed_run import ViewedRun

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
