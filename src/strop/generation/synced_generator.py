"""A generator together with the weight sync that keeps it up to date with the learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strop.generation.base import Engine, Generator
from strop.generation.generation_config import GenerationConfig
from strop.generation.pool import EnginePool
from strop.metrics import Metric, Metrics
from strop.weight_sync.base import LearnerMemory, WeightSync
from strop.weight_sync.exporter import Exporter
from strop.weight_sync.in_process import TimedMemory
from strop.weight_sync.publisher import PublishOptions, WeightPublisher
from strop.weight_sync.verification import Canary


@dataclass(frozen=True, kw_only=True)
class SyncedGenerator:
    """A generator, and the weight sync that keeps its weights up to date with the learner's."""

    generator: Generator
    weights: WeightSync


class MeteredWeightSync:
    """A ``WeightSync`` that adds the engines' metrics since the last publish."""

    def __init__(self, weights: WeightPublisher, pool: EnginePool) -> None:
        self.weights, self.pool = weights, pool

    async def yield_device(self) -> None:
        await self.weights.yield_device()

    async def publish(self, version: int) -> Metrics:
        metrics = await self.weights.publish(version)
        return {**metrics, **{name: Metric(value) for name, value in self.pool.collect_metrics().items()}}


def make_synced_pool(
    engines: Sequence[Engine],
    exporter: Exporter,
    config: GenerationConfig,
    options: PublishOptions,
    canary: Canary,
    *,
    note: Callable[[str], None],
    allow_shrink: bool = False,
    learner_memory: LearnerMemory | None = None,
) -> SyncedGenerator:
    """Combine engines with their own weights into one generator, with a publisher of the learner's weights.

    ``allow_shrink``: continue without engines that cannot be restarted. ``learner_memory``: the memory of a learner that is
    offloaded while the engines sample.
    """
    pool = EnginePool(
        engines, max_restarts=config.engine_options.max_restarts, allow_shrink=allow_shrink, engine_key=config.engine_key
    )
    weights = WeightPublisher(
        exporter,
        engines,
        config.weight_sync,
        options,
        canary=canary,
        on_published=pool.set_version,
        drop_engine=pool.drop,
        note=note,
        learner_memory=None if learner_memory is None else TimedMemory(learner_memory),
    )
    pool.restart_engine = weights.restart_engine
    pool.on_close.append(weights.close)
    return SyncedGenerator(generator=pool, weights=MeteredWeightSync(weights, pool))
