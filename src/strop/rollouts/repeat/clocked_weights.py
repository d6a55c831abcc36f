"""The weight sync of an engine on a clock: weights change when the engine is empty, at a tick that is written down."""

from __future__ import annotations

from strop import metrics
from strop.metrics import Metrics
from strop.rollouts.repeat.engine_clock import EngineClock
from strop.weight_sync.base import WeightSync


class ClockedWeights:
    """A ``WeightSync`` that adds what the order of events costs."""

    def __init__(self, weights: WeightSync, clock: EngineClock) -> None:
        self.weights, self.clock = weights, clock

    async def yield_device(self) -> None:
        await self.clock.finish_requests()
        await self.weights.yield_device()

    async def publish(self, version: int) -> Metrics:
        published = await self.weights.publish(version)
        self.clock.publish(version)
        waited = self.clock.take_seconds_waited()
        return {
            **published,
            "generation/clock_tick": metrics.total(float(self.clock.now)),
            "timing/generation/waited_for_answers": metrics.total(waited),
        }
