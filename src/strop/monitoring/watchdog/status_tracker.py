"""A tracker that keeps the latest messages of a run for ``status.json``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from strop.monitoring.trackers.base import NullTracker
from strop.monitoring.watchdog.status import LogEntry

MAX_ENTRIES = 20


class StatusTracker(NullTracker):
    """Keeps the last step, the current activity and the last notes."""

    def __init__(self) -> None:
        self.step = -1
        self.step_time: float | None = None
        self.activity = "starting"
        self.notes: deque[LogEntry] = deque(maxlen=MAX_ENTRIES)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step, self.step_time = step, time.time()

    def note(self, text: str) -> None:
        self.notes.append(LogEntry(time.time(), text))

    def progress(self, text: str) -> None:
        self.activity = text

    def resume(self, step: int) -> None:
        self.step = max(step, 0)
