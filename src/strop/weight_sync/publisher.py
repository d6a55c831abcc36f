"""Publishing of the learner's weights to engines that hold their own copy, with verification."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from strop import metrics
from strop.metrics import Metrics
from strop.monitoring.waits import waiting
from strop.weight_sync.base import EngineDied, EngineLost, UpdatableEngine
from strop.weight_sync.exporter import Exporter, TransferContent
from strop.weight_sync.in_process import TimedMemory
from strop.weight_sync.transports.channel import Channel
from strop.weight_sync.verification import (
    Canary,
    VerificationFailed,
    is_verification_due,
    verify_arrival,
    verify_complete,
    verify_fingerprints,
    verify_version,
)
from strop.weight_sync.weight_sync_config import WeightSyncConfig

T = TypeVar("T")

PUBLISH_ATTEMPTS = 4  # dead engines are restarted before each


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """When weights change, and what is sent."""

    separate_devices: bool = False  # engines have their own devices, and keep sampling while the learner trains
    in_flight: bool = False  # running requests are suspended, and continue with the new weights
    recompute: bool = False  # with in_flight: suspended requests recompute their keys and values
    async_training: bool = False  # the learner trains while engines sample; a restarted engine gets the last published weights
    adapters: bool = False  # send only LoRA adapters, over base weights that are sent once


@dataclass
class _PublishStats:
    """Cost of one publish, and the verified share of it."""

    send_seconds: float = 0.0
    verify_seconds: float = 0.0
    bytes_sent: int = 0  # to all engines together
    read_back: int = 0  # tensors verified by reading them back
    unread: int = 0  # tensors that cannot be read back
    canary: float | None = None  # mean absolute difference of log-probabilities, in nats

    def __str__(self) -> str:
        canary = "" if self.canary is None else f", and the canary differs by {self.canary:.2g} nats"
        return (
            f"{self.bytes_sent / 1e6:.0f} MB, {self.read_back} of {self.read_back + self.unread} tensors were read back{canary}"
        )

    def to_metrics(self, total: float) -> dict[str, metrics.Metric]:
        values = {
            "weights/publish_seconds": total,
            "weights/send_seconds": self.send_seconds,
            "weights/proof_seconds": self.verify_seconds,
            "weights/bytes": float(self.bytes_sent),
            "weights/tensors_read_back": float(self.read_back),
            "weights/tensors_not_read_back": float(self.unread),
        }
        if self.canary is not None:
            values["weights/canary_error"] = self.canary
        return {name: metrics.total(value) for name, value in values.items()}


class WeightPublisher:
    """``WeightSync`` for engines. After a failed publish they stay paused, and their weights are undefined."""

    def __init__(
        self,
        exporter: Exporter,
        engines: Sequence[UpdatableEngine],
        config: WeightSyncConfig,
        options: PublishOptions,
        *,
        canary: Canary | None = None,
        on_published: Callable[[int], None] = lambda version: None,
        drop_engine: Callable[[UpdatableEngine], bool] = lambda engine: False,
        note: Callable[[str], None] = lambda text: None,
        learner_memory: TimedMemory | None = None,
    ) -> None:
        """Create a publisher.

        Args:
            exporter: The learner's end.
            engines: The engines to publish to.
            config: When to verify.
            options: When weights change, and what is sent.
            canary: Compares log-probabilities of engine and learner; None: no such check.
            on_published: Called with each version that all engines hold.
            drop_engine: Drops an engine that cannot be restarted; returns False if that is not allowed.
            note: Logs a line for the user.
            learner_memory: The memory of a learner that is offloaded while the engines sample; None: it stays on the device.
        """
        self.engines = tuple(engines)
        self._drop_engine = drop_engine
        self.config = config
        self.options = options
        self.publishes = 0
        self.version = -1
        self.exporter = exporter
        self.channel = Channel(exporter)
        self._canary = canary
        self._with_base: set[int] = set()  # ids of the engines that have the base weights for adapters
        self._lock = asyncio.Lock()
        self._on_published = on_published
        self._note = note
        self.learner_memory = learner_memory
        self._reported_unread = False
        self._verification_error: VerificationFailed | None = None
        self._asleep = False

    async def yield_device(self) -> None:
        """Put engines that share the learner's device to sleep. An engine that dies here is restarted by the next publish."""
        if self.options.separate_devices:
            return
        self._asleep = True
        await _at_once(self.engines, self._put_to_sleep)
        # Only when all are asleep: vLLM's sleep fails if the free memory of its GPU falls meanwhile.
        if self.learner_memory is not None:
            await self.learner_memory.onload()

    async def _put_to_sleep(self, engine: UpdatableEngine) -> None:
        try:
            await engine.pause(keep_running=False)
            await engine.sleep()
        except EngineDied as error:
            self._note(f"{error}; it is restarted for the next publish")

    async def publish(self, version: int) -> Metrics:
        started = time.perf_counter()
        async with self._lock:
            if self._verification_error is not None:  # verification of a restarted engine failed, and its requests with it
                raise self._verification_error
            if self.learner_memory is not None:  # before engines start or wake; the weights are sent from CPU memory
                await self.learner_memory.offload()
            stats = await self._publish_with_retries(version)
        timing = {} if self.learner_memory is None else self.learner_memory.metrics()
        return {**stats.to_metrics(time.perf_counter() - started), **timing}

    async def _publish_with_retries(self, version: int) -> _PublishStats:
        """Publish, and retry if an engine dies."""
        for _ in range(PUBLISH_ATTEMPTS - 1):
            try:
                return await self._publish(version)
            except EngineDied as error:
                self._note(f"{error}; the publish of version {version} is tried again")
        return await self._publish(version)

    async def _publish(self, version: int) -> _PublishStats:
        await self._restart_dead_engines()
        with waiting("weight sync", on="engines to finish running requests", kind="weight_sync"):
            await _at_once(self.engines, lambda engine: engine.pause(keep_running=self.options.in_flight))
        if self._asleep:
            await _at_once(self.engines, lambda engine: engine.wake())
            self._asleep = False  # only after all are awake: if one dies here, the retry must still wake the others
        stats = _PublishStats()
        await self._deliver(self.engines, version, stats, verify=is_verification_due(self.config, self.publishes))
        await _at_once(self.engines, lambda engine: engine.resume(version))
        self.version = version
        if self.publishes == 0:
            self._note(f"weights: version {version} is in {', '.join(engine.name for engine in self.engines)}: {stats}")
        self.publishes += 1
        self._on_published(version)
        return stats

    async def _restart_dead_engines(self) -> None:
        """Restart dead engines, and drop those that cannot be restarted. Raises EngineLost if dropping is not allowed.

        All start at once. With an empty compile cache, engines of one machine then compile the same code in parallel, which takes
        no longer than for one. vLLM writes its compiled files atomically, so engines can share a cache.
        """
        await _at_once([engine for engine in self.engines if not engine.alive], self._start_or_drop)

    async def _start_or_drop(self, engine: UpdatableEngine) -> None:
        try:
            await self._start(engine)
        except EngineLost:
            if not self._drop_engine(engine):
                raise
            self.engines = tuple(other for other in self.engines if other is not engine)

    async def restart_engine(self, engine: UpdatableEngine) -> None:
        """Restart an engine that died, and send it the weights of the last publish, with full verification."""
        async with self._lock:
            if engine.alive:
                return
            await self._start(engine)
            if self.version < 0:
                return  # the first publish includes it
            try:
                await engine.pause(keep_running=False)
                await self._deliver([engine], self.version, _PublishStats(), verify=True, resend=True)
                await engine.resume(self.version)
            except BaseException as error:
                self._verification_error = error if isinstance(error, VerificationFailed) else None
                await engine.close()  # its weights are undefined; close it so that no request queues on it
                raise

    async def _start(self, engine: UpdatableEngine) -> None:
        await self.channel.close()
        self._with_base.discard(id(engine))
        with waiting("weight sync", on=f"start of {engine.name}"):
            await engine.start()

    async def _deliver(
        self, engines: Sequence[UpdatableEngine], version: int, stats: _PublishStats, *, verify: bool, resend: bool = False
    ) -> None:
        """Send the weights or adapters to ``engines`` and verify them. ``resend``: send those of the last publish."""
        if self.options.adapters:
            await self._send_adapters(engines, version, stats, resend=resend)
        else:
            await self._send_weights(engines, version, stats, verify=verify, content="last" if resend else "weights")
        if self.options.in_flight:  # before the canary, since sampling it also resumes the suspended requests
            await _at_once(engines, lambda engine: engine.reset_prefix_cache(running=self.options.recompute))
        # With async training the learner no longer has the weights of the last publish to compare with.
        skip_canary = resend and self.options.async_training
        if verify and self._canary is not None and not skip_canary:
            started = time.perf_counter()
            with waiting("weight sync", on="canary samples", kind="weight_sync"):
                reports = [await self._canary.check(engine) for engine in engines]
            stats.canary = max(report.mean for report in reports)
            stats.verify_seconds += time.perf_counter() - started

    async def _send_adapters(
        self, engines: Sequence[UpdatableEngine], version: int, stats: _PublishStats, *, resend: bool
    ) -> None:
        without_base = [engine for engine in engines if id(engine) not in self._with_base]
        if without_base:
            await self._send_weights(without_base, version, stats, verify=True, content="base")
            self._with_base |= {id(engine) for engine in without_base}
        started = time.perf_counter()
        adapters = await self.exporter.export_adapters(resend=resend)
        receipts = await _at_once(engines, lambda engine: engine.load_adapter(adapters.files, version))
        for engine, receipt in zip(engines, receipts, strict=True):
            verify_version(engine.name, receipt, version)
            verify_arrival(engine.name, adapters.fingerprints, receipt)
        stats.bytes_sent += len(adapters.files.weights) * len(engines)
        stats.send_seconds += time.perf_counter() - started

    async def _send_weights(
        self, engines: Sequence[UpdatableEngine], version: int, stats: _PublishStats, *, verify: bool, content: TransferContent
    ) -> None:
        started = time.perf_counter()
        plan = await self.exporter.prepare(content)
        names = ", ".join(engine.name for engine in engines)
        with waiting("weight sync", on=f"{names} to take version {version}", kind="weight_sync"):
            fingerprints, receipts = await self.channel.transfer(engines, version, plan.manifest, read_back=verify)
        stats.send_seconds += time.perf_counter() - started
        stats.bytes_sent += plan.manifest.nbytes * len(engines)
        verify_complete(plan.manifest, fingerprints.sent)
        for engine, receipt in zip(engines, receipts, strict=True):
            verify_version(engine.name, receipt, version)
            verify_arrival(engine.name, fingerprints.sent, receipt)
        if verify:
            started = time.perf_counter()
            held = await _at_once(engines, lambda engine: engine.read_back_fingerprints())
            for engine, found in zip(engines, held, strict=True):
                report = verify_fingerprints(
                    engine.name, fingerprints.read_back, plan.aliases, found, experts=fingerprints.experts
                )
                stats.read_back, stats.unread = report.verified, len(report.unread)
                self._report_unread(engine, report.unread, report.verified)
            stats.verify_seconds += time.perf_counter() - started

    def _report_unread(self, engine: UpdatableEngine, unread: Sequence[str], verified: int) -> None:
        if unread and not self._reported_unread:
            self._reported_unread = True
            self._note(
                f"weights: {verified} of {verified + len(unread)} tensors are verified by reading them back from "
                f"{engine.name}; the others, such as {unread[0]}, by their arrival and by the canary"
            )

    async def close(self) -> None:
        await self.channel.close()


async def _at_once(engines: Sequence[UpdatableEngine], call: Callable[[UpdatableEngine], Awaitable[T]]) -> list[T]:
    """Await ``call`` for all engines concurrently, each to completion, so that none is left in an intermediate state. Return
    their results.

    Raises the first error; EngineDied only if there is no other, because the engine is then restarted and the publish retried.
    """
    results = await asyncio.gather(*map(call, engines), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, EngineDied))
    return cast(list[T], results)
