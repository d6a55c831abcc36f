"""Several engines as one generator: prefix-aware routing, and restarts of dead engines.

A request goes to the engine that most likely has its prefix cached: turns of a conversation to the engine of the previous turn, samples of
one prompt to the engine of the first sample. A cached prefix is not worth a longer queue, so an engine with many more requests than the
others gets no new ones.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from strop.generation.base import GAUGES, Completion, Engine, Generator
from strop.generation.generation_config import GenerationConfig
from strop.metrics import Metric, Metrics
from strop.monitoring.waits import waiting
from strop.sampling import Sampling
from strop.types import PromptImage
from strop.weight_sync.base import EngineDied, EngineLost, LearnerMemory, UpdatableEngine, WeightSync
from strop.weight_sync.exporter import Exporter
from strop.weight_sync.in_process import TimedMemory
from strop.weight_sync.publisher import PublishOptions, WeightPublisher
from strop.weight_sync.verification import Canary

log = logging.getLogger(__name__)

RestartEngine = Callable[[UpdatableEngine], Awaitable[None]]
"""Restart an engine and load weights into it."""

MAX_ROUTES = 65_536  # prompts and sessions with a remembered engine


class Router:
    """Prefix-aware routing of requests to engines. Remembers session names and whole prompts, and evicts the least recently used."""

    def __init__(self, engines: int, *, imbalance: int = 8) -> None:
        """A request leaves its preferred engine if that engine has over ``imbalance`` requests, and over a quarter, more than the
        least busy one.
        """
        self.running = [0] * engines
        self.imbalance = imbalance
        self._owners: OrderedDict[str | tuple[int | str, ...], int] = OrderedDict()

    def route(self, prompt: tuple[int | str, ...], session: str, exclude: Collection[int] = ()) -> int:
        """Return the index of the engine for a request, skipping engines in ``exclude``. The caller updates ``running``.

        ``prompt``: its tokens, then the digests of its images.
        """
        least = min((index for index in range(len(self.running)) if index not in exclude), key=self.running.__getitem__)
        owner = self._owners.get(session) if session else None
        if owner is None:
            owner = self._owners.get(prompt)
        if (
            owner is None
            or owner in exclude
            or self.running[owner] > self.running[least] + max(self.imbalance, self.running[least] // 4)
        ):
            owner = least
        for key in (session, prompt):
            if key:
                self._owners[key] = owner
                self._owners.move_to_end(key)
        while len(self._owners) > MAX_ROUTES:
            self._owners.popitem(last=False)
        return owner


class EnginePool:
    """A ``Generator`` over several engines. When an engine dies, its requests are issued again with the same seeds after its
    restart.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        max_restarts: int = 3,
        allow_shrink: bool = False,
        engine_key: str = "vllm_cfg",
        on_close: Sequence[Callable[[], object]] = (),
    ) -> None:
        """Create a pool.

        Args:
            engines: The engines, in the order of their indices.
            max_restarts: Restarts of one engine without a completed request in between, after which the run ends.
            allow_shrink: Drop an engine whose node is lost, as long as another one is left.
            engine_key: Section of the engines in ``policy.generation``, for messages.
            on_close: Callbacks that run after all engines are closed.
        """
        self.engines = tuple(engines)
        self.version = -1  # of the last publish that all engines hold
        self.restart_engine: RestartEngine | None = None  # set by the weight publisher
        self.max_restarts = max_restarts
        self.allow_shrink = allow_shrink
        self.engine_key = engine_key
        self.restarts = 0  # in total, over all engines
        self.on_close = list(on_close)
        self._failures = [0] * len(self.engines)  # restarts in a row, for each engine
        self._reviving: dict[int, asyncio.Task[None]] = {}
        # Why a restarted engine could not get its weights; cleared by the next publish.
        self._sync_errors: dict[int, Exception] = {}
        self._dropped: set[int] = set()  # indices of dropped engines
        self._router = Router(len(self.engines))
        self._last_counters: dict[str, float] = {}

    async def generate(
        self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "", images: Sequence[PromptImage] = ()
    ) -> Completion:
        key: tuple[int | str, ...] = (*prompt, *(image.digest for image in images))
        shown: dict[str, Any] = {"images": images} if images else {}
        while True:
            index = self._router.route(key, session, self._dropped)
            await self._await_usable(index)
            self._router.running[index] += 1
            try:
                completion = await self.engines[index].generate(prompt, sampling=sampling, seed=seed, session=session, **shown)
                self._failures[index] = 0
                return completion
            except EngineDied as error:
                await self._await_restart(index, error)
            finally:
                self._router.running[index] -= 1

    async def _await_restart(self, index: int, error: EngineDied) -> None:
        """Wait until the engine is restarted; the first caller restarts it. Raises EngineDied after too many restarts."""
        if index not in self._reviving and not self.engines[index].alive:
            self._reviving[index] = asyncio.create_task(self._restart(index, error))
            self._reviving[index].add_done_callback(lambda task: self._reviving.pop(index, None))
        await self._await_usable(index)

    async def _await_usable(self, index: int) -> None:
        """Wait for a restart in progress. Raises its error: a request to an engine without weights would wait forever."""
        if (task := self._reviving.get(index)) is not None:
            with waiting("request", on=f"restart of {self.engines[index].name}, which died"):
                await asyncio.shield(task)
        if (sync_error := self._sync_errors.get(index)) is not None:
            raise sync_error

    async def _restart(self, index: int, error: EngineDied) -> None:
        """Restart the engine until it is alive and has weights; without weights its requests would wait."""
        engine = self.engines[index]
        while not engine.alive:
            if self.restart_engine is None or self._failures[index] >= self.max_restarts:
                raise EngineDied(
                    f"{error}; it was restarted {self._failures[index]} times without completing a request "
                    f"(policy.generation.{self.engine_key}.max_restarts), so another restart will not help: see the engine's own output "
                    "for the cause"
                ) from error
            self._failures[index] += 1
            self.restarts += 1
            log.warning("%s; it is restarted, and its requests are issued again", error)
            try:
                await self.restart_engine(engine)
            except EngineLost:
                if not self.drop(engine):
                    raise
                return
            except EngineDied as restart_error:
                error = restart_error
            except Exception as sync_error:
                self._sync_errors[index] = sync_error
                raise

    def drop(self, engine: UpdatableEngine) -> bool:
        """Drop an engine that cannot be restarted, if that is allowed and another one is left. Return whether it was dropped."""
        index = next(index for index, other in enumerate(self.engines) if other is engine)
        if index in self._dropped:
            return True
        if not self.allow_shrink or len(self._dropped) + 1 >= len(self.engines):
            return False
        self._dropped.add(index)
        log.warning(
            "%s cannot be restarted; its requests go to the %d others", engine.name, len(self.engines) - len(self._dropped)
        )
        return True

    def set_version(self, version: int) -> None:
        """Record that all engines hold the weights of ``version``."""
        self.version = version
        self._sync_errors.clear()

    def collect_metrics(self) -> Mapping[str, float]:
        """Return rates since the previous call, and the current state of the engines."""
        counters: dict[str, float] = {}
        for name, value in itertools.chain.from_iterable(engine.counters().items() for engine in self.engines):
            counters[name] = counters.get(name, 0.0) + value
        deltas = {name: max(0.0, value - self._last_counters.get(name, 0.0)) for name, value in counters.items()}
        self._last_counters = counters
        result = {
            "generation/preemptions": deltas.get("preemptions", 0.0),
            "generation/restarts": float(self.restarts),
            "generation/engines": float(len(self.engines) - len(self._dropped)),
        }
        if deltas.get("prefix_queries"):
            result["generation/prefix_hit_rate"] = deltas.get("prefix_hits", 0.0) / deltas["prefix_queries"]
        if deltas.get("drafted_tokens"):
            result["generation/acceptance_rate"] = deltas.get("accepted_tokens", 0.0) / deltas["drafted_tokens"]
        if steps := deltas.get("engine_steps"):
            result |= {f"generation/{name}": deltas[name] / steps for name in GAUGES if name in deltas}
        return result

    async def close(self) -> None:
        for task in list(self._reviving.values()):
            task.cancel()
        await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)
        for close in self.on_close:
            if inspect.isawaitable(pending := close()):
                await pending


# Engines that read their weights from disk, for a model that is not trained.


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


# A generator together with the weight sync that keeps it up to date with the learner.


@dataclass(frozen=True, kw_only=True)
class SyncedGenerator:
    """A generator, and the weight sync that keeps its weights up to date with the learner's."""

    generator: Generator
    weights: WeightSync
    policies: Mapping[str, Generator] = field(default_factory=dict)  # further policies, by name


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
