"""A learner's memory that records how long moving it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from strop import metrics
from strop.metrics import Metrics
from strop.weight_sync.base import LearnerMemory


class TimedMemory:
    """A ``LearnerMemory`` that counts the seconds since its last ``metrics``."""

    def __init__(self, memory: LearnerMemory) -> None:
        self.memory = memory
        self._seconds = 0.0

    async def offload(self) -> None:
        with self._timed():
            await self.memory.offload()

    async def onload(self) -> None:
        with self._timed():
            await self.memory.onload()

    def metrics(self) -> Metrics:
        seconds, self._seconds = self._seconds, 0.0
        return {"timing/train/offload": metrics.total(seconds)}

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started
