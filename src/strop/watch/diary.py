"""What a run said of itself, kept for ``status.json``: a tracker."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from strop.tracking.base import Silent
from strop.watch.status import Said

REMEMBERED = 20


class Diary(Silent):
    """The last step, what the run is at, and its last notes."""

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
