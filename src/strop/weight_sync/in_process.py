"""A learner's memory that records how long moving it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from strop import metrics
from strop.metrics import Metric, Metrics
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


class InProcessEngine(Protocol):
    """An engine on the learner's own module. It needs no transfer, and does not run while the learner trains."""

    async def drain(self) -> None:
        """Hold new requests and return when none is running."""
        ...

    def resume(self, version: int) -> None:
        """Serve requests again, with the weights of ``version``."""
        ...


class CountingEngine(Protocol):
    """An engine that counts its work as metrics, each time since the last request."""

    def collect_metrics(self) -> Mapping[str, float]: ...


class InProcessWeights:
    """``WeightSync`` without a transfer. A generator that keeps copies in a faster layout refreshes them when it resumes."""

    def __init__(
        self,
        generators: Sequence[InProcessEngine],
        learner_memory: TimedMemory | None = None,
        counting: CountingEngine | None = None,
    ) -> None:
        """``learner_memory``: the memory that only training needs, offloaded while generators sample; None: it stays on the
        device.

        ``counting``: an engine whose metrics are added to those of a publish."""
        self.generators = generators
        self.learner_memory = learner_memory
        self.counting = counting

    async def yield_device(self) -> None:
        for generator in self.generators:
            await generator.drain()
        if self.learner_memory is not None:
            await self.learner_memory.onload()

    async def publish(self, version: int) -> Metrics:
        started = time.perf_counter()
        if self.learner_memory is not None:
            await self.learner_memory.offload()
        for generator in self.generators:
            generator.resume(version)
        timing = {} if self.learner_memory is None else self.learner_memory.metrics()
        return {"weights/publish_seconds": metrics.total(time.perf_counter() - started), **timing, **self._collect_counts()}

    def _collect_counts(self) -> Metrics:
        return {} if self.counting is None else {name: Metric(value) for name, value in self.counting.collect_metrics().items()}
