"""Weight sync within one process, where the generator runs the learner's own module."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from strop import metrics
from strop.metrics import Metrics


class InProcessEngine(Protocol):
    """An engine on the learner's own module. It needs no transfer, and does not run while the learner trains."""

    async def drain(self) -> None:
        """Hold new requests and return when none is running."""
        ...

    def resume(self, version: int) -> None:
        """Serve requests again, with the weights of ``version``."""
        ...


class InProcessWeights:
    """``WeightSync`` without a transfer. A generator that keeps copies in a faster layout refreshes them when it resumes."""

    def __init__(self, generators: Sequence[InProcessEngine]) -> None:
        self.generators = generators

    async def yield_device(self) -> None:
        for generator in self.generators:
            await generator.drain()

    async def publish(self, version: int) -> Metrics:
        started = time.perf_counter()
        for generator in self.generators:
            generator.resume(version)
        return {"weights/publish_seconds": metrics.total(time.perf_counter() - started)}
