"""A tracker that keeps the latest messages of a run for ``status.json``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from strop.tracking.base import Silent
from strop.watch.status import Said

REMEMBERED = 20


class Diary(Silent):
    """Keeps the last step, the current activity and the last notes."""

    def __init__(self) -> None:
        self.step = -1
        self.stepped: float | None = None
        self.doing = "starting"
        self.notes: deque[Said] = deque(maxlen=REMEMBERED)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step, self.stepped = step, time.time()

    def note(self, text: str) -> None:
        self.notes.append(Said(time.time(), text))

    def progress(self, text: str) -> None:
        self.doing = text

    def resume(self, step: int) -> None:
        self.step = max(step, 0)
