"""The seam between a learner that changes weights and generators that hold them."""

from __future__ import annotations

from typing import Protocol

from strop.metrics import Metrics


class WeightSync(Protocol):
    """Publishes learner weights to generators, and takes the device back while the learner works."""

    async def lend_to_learner(self) -> None:
        """Generators finish what they run, hold what comes, and give up what they share with the learner."""
        ...

    async def publish(self, version: int) -> Metrics:
        """Every generator holds the learner's weights, under ``version``, when this returns."""
        ...
