"""Engines that read their weights from disk, for a model that is not trained."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from strop.generation.base import Engine
from strop.generation.pool import EnginePool
from strop.weight_sync.base import UpdatableEngine


class ServingEngine(Engine, Protocol):
    """An engine that can be started with its own weights."""

    async def use_own_weights(self, version: int) -> None:
        """Serve with the weights that the engine was started with, as ``version``, without a publish."""
        ...


async def start_serving_pool(
    engines: Sequence[ServingEngine], *, max_restarts: int, on_close: Callable[[], object] | None = None
) -> EnginePool:
    """Start engines with their own weights, as one generator. ``on_close`` is called when it is closed."""
    pool = EnginePool(engines, max_restarts=max_restarts, on_close=[] if on_close is None else [on_close])

    async def restart(engine: UpdatableEngine) -> None:
        await engine.start()
        await cast(ServingEngine, engine).use_own_weights(0)

    pool.restart_engine = restart
    try:
        await asyncio.gather(*(restart(engine) for engine in engines))
    except BaseException:
        await pool.close()
        raise
    pool.set_version(0)
    return pool
