"""Publishing of the learner's weights to engines that hold their own copy, with verification."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from strop import metrics
from strop.metrics import Metrics
from strop.monitoring.watchdog.waits import waiting
from strop.weight_sync.base import EngineDied, EngineLost, UpdatableEngine
from strop.weight_sync.exporter import Exporter, TransferContent
from strop.weight_sync.transports.channel import Channel
from strop.weight_sync.verification import (
    Canary,
    VerificationFailed,
    VerificationSchedule,
    verify_arrival,
    verify_fingerprints,
    verify_version,
)


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    separate_devices: bool = False  # engines have their own devices, and keep sampling while the learner trains
    in_flight: bool = False  # running requests are suspended, and continue with the new weights
    recompute: bool = False  # with in_flight: suspended requests recompute their keys and values
    async_training: bool = (
        False  # the learner trains while engines sample; a restarted engine gets the weights of the last publish
    )
    adapters: bool = False  # send only LoRA adapters, over base weights that are sent once
    proof: VerificationSchedule = field(default_factory=VerificationSchedule)
    attempts: int = 4  # per publish; dead engines are restarted before each


@dataclass
class _PublishStats:
    """Cost of one publish, and how much of it was verified."""

    send_seconds: float = 0.0  # seconds
    verify_seconds: float = 0.0  # seconds
    bytes_sent: int = 0  # bytes sent, to all engines
    read_back: int = 0  # tensors
    unread: int = 0  # tensors
    canary: float | None = None  # mean difference, in nats

    def __str__(self) -> str:
        canary = "" if self.canary is None else f", and the canary differs by {self.canary:.2g} nats"
        return (
            f"{self.bytes_sent / 1e6:.0f} MB, {self.read_back} of {self.read_back + self.unread} tensors were read back{canary}"
        )

    def to_metrics(self, total: float) -> dict[str, metrics.Metric]:
        found = {
            "weights/publish_seconds": total,
            "weights/send_seconds": self.send_seconds,
            "weights/proof_seconds": self.verify_seconds,
            "weights/bytes": float(self.bytes_sent),
            "weights/tensors_read_back": float(self.read_back),
            "weights/tensors_not_read_back": float(self.unread),
        }
        if self.canary is not None:
            found["weights/canary_error"] = self.canary
        return {name: metrics.total(value) for name, value in found.items()}


class WeightPublisher:
    """``WeightSync`` for engines. After a failed publish they stay paused, and their weights are undefined."""

    def __init__(
        self,
        exporter: Exporter,
        engines: Sequence[UpdatableEngine],
        options: PublishOptions,
        *,
        canary: Canary | None = None,
        on_published: Callable[[int], None] = lambda version: None,
        drop_engine: Callable[[UpdatableEngine], bool] = lambda engine: False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``exporter`` is the learner's end. ``on_published`` is called with each version that all engines hold. ``drop_engine`` drops an
        engine that cannot be restarted, and returns False if that is not allowed. ``note`` logs a line for the user."""
        self.engines = tuple(engines)
        self._drop_engine = drop_engine
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
        self._reported_unread = False
        self._verification_error: VerificationFailed | None = None
        self._asleep = False

    async def yield_device(self) -> None:
        """Put engines that share the learner's device to sleep. One that dies is restarted by the next publish."""
        if self.options.separate_devices:
            return
        self._asleep = True
        for engine in self.engines:
            try:
                await engine.pause(keep_running=False)
                await engine.sleep()
            except EngineDied as error:
                self._note(f"{error}; it is restarted for the next publish")

    async def publish(self, version: int) -> Metrics:
        started = time.perf_counter()
        async with self._lock:
            if self._verification_error is not None:  # verification failed for a restarted engine, and so did its requests
                raise self._verification_error
            tally = await self._publish_with_retries(version)
        return tally.to_metrics(time.perf_counter() - started)

    async def _publish_with_retries(self, version: int) -> _PublishStats:
        """Publish, and retry if an engine dies."""
        for _ in range(self.options.attempts - 1):
            try:
                return await self._publish(version)
            except EngineDied as error:
                self._note(f"{error}; the publish of version {version} is tried again")
        return await self._publish(version)

    async def _publish(self, version: int) -> _PublishStats:
        await self._restart_dead_engines()
        with waiting("weight sync", on="engines to finish running requests", kind="weight_sync"):
            await asyncio.gather(*(engine.pause(keep_running=self.options.in_flight) for engine in self.engines))
        if self._asleep:
            for engine in self.engines:
                await engine.wake()
            self._asleep = False  # only after all are awake: if one dies here, the retry must still wake the others
        tally = _PublishStats()
        await self._deliver(self.engines, version, tally, verify=self.options.proof.is_due(self.publishes))
        await asyncio.gather(*(engine.resume(version) for engine in self.engines))
        self.version = version
        if self.publishes == 0:
            self._note(f"weights: version {version} is in {', '.join(engine.name for engine in self.engines)}: {tally}")
        self.publishes += 1
        self._on_published(version)
        return tally

    async def _restart_dead_engines(self) -> None:
        """Restart dead engines, and drop those that cannot be restarted. Raises EngineLost if dropping is not allowed."""
        for engine in self.engines:
            if engine.alive:
                continue
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
        self, engines: Sequence[UpdatableEngine], version: int, tally: _PublishStats, *, verify: bool, resend: bool = False
    ) -> None:
        """Send the weights or adapters to ``engines`` and verify them. ``resend``: send those of the last publish."""
        if self.options.adapters:
            await self._send_adapters(engines, version, tally, resend=resend)
        else:
            await self._send_weights(engines, version, tally, verify=verify, content="last" if resend else "weights")
        if self.options.in_flight:  # before the canary, since sampling it also resumes the suspended requests
            for engine in engines:
                await engine.reset_prefix_cache(running=self.options.recompute)
        silent = (
            resend and self.options.async_training
        )  # the learner no longer has the weights of the last publish to compare with
        if verify and self._canary is not None and not silent:
            started = time.perf_counter()
            with waiting("weight sync", on="canary samples", kind="weight_sync"):
                reports = [await self._canary.check(engine) for engine in engines]
            tally.canary = max(report.mean for report in reports)
            tally.verify_seconds += time.perf_counter() - started

    async def _send_adapters(
        self, engines: Sequence[UpdatableEngine], version: int, tally: _PublishStats, *, resend: bool
    ) -> None:
        bare = [engine for engine in engines if id(engine) not in self._with_base]
        if bare:
            await self._send_weights(bare, version, tally, verify=True, content="base")
            self._with_base |= {id(engine) for engine in bare}
        started = time.perf_counter()
        adapters = await self.exporter.export_adapters(resend=resend)
        for engine in engines:
            receipt = await engine.load_adapter(adapters.files, version)
            verify_version(engine.name, receipt, version)
            verify_arrival(engine.name, adapters.fingerprints, receipt)
        tally.bytes_sent += len(adapters.files.weights) * len(engines)
        tally.send_seconds += time.perf_counter() - started

    async def _send_weights(
        self, engines: Sequence[UpdatableEngine], version: int, tally: _PublishStats, *, verify: bool, content: TransferContent
    ) -> None:
        started = time.perf_counter()
        shipment = await self.exporter.prepare(content)
        names = ", ".join(engine.name for engine in engines)
        with waiting("weight sync", on=f"{names} to take version {version}", kind="weight_sync"):
            marks, receipts = await self.channel.transfer(engines, version, shipment.manifest, read_back=verify)
        tally.send_seconds += time.perf_counter() - started
        tally.bytes_sent += shipment.manifest.nbytes * len(engines)
        for engine, receipt in zip(engines, receipts, strict=True):
            verify_version(engine.name, receipt, version)
            verify_arrival(engine.name, marks.sent, receipt)
        if verify:
            started = time.perf_counter()
            for engine in engines:
                report = verify_fingerprints(
                    engine.name, marks.read_back, shipment.aliases, await engine.read_back_fingerprints()
                )
                tally.read_back, tally.unread = report.verified, len(report.unread)
                self._report_unread(engine, report.unread, report.verified)
            tally.verify_seconds += time.perf_counter() - started

    def _report_unread(self, engine: UpdatableEngine, unread: Sequence[str], verified: int) -> None:
        if unread and not self._reported_unread:
            self._reported_unread = True
            self._note(
                f"weights: {verified} of {verified + len(unread)} tensors are verified by reading them back "
                f"from {engine.name}; the others, "
                f"such as {unread[0]}, by their arrival and by the canary"
            )

    async def close(self) -> None:
        await self.channel.close()
