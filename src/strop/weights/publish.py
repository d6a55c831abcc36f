"""Publishing of the learner's weights to engines that hold their own copy, with verification."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from strop import metrics
from strop.metrics import Metrics
from strop.watch.waits import waiting
from strop.weights.base import EngineDied, EngineLost, WeightHolder
from strop.weights.channel import Channel
from strop.weights.export import Content, Exporter
from strop.weights.proof import Canary, ProofFailed, ProofSchedule, prove_arrival, prove_held, prove_version


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    apart: bool = False  # engines have their own devices, and keep sampling while the learner trains
    in_flight: bool = False  # running requests are suspended, and continue with the new weights
    recompute: bool = False  # with in_flight: suspended requests recompute their keys and values
    learner_goes_on: bool = (
        False  # the learner trains while engines sample; a restarted engine gets the weights of the last publish
    )
    adapters: bool = False  # send only LoRA adapters, over base weights that are sent once
    proof: ProofSchedule = field(default_factory=ProofSchedule)
    attempts: int = 4  # per publish; dead engines are restarted before each


@dataclass
class _Tally:
    """Cost of one publish, and how much of it was verified."""

    sending: float = 0.0  # seconds
    proving: float = 0.0  # seconds
    size: int = 0  # bytes sent, to all engines
    read_back: int = 0  # tensors
    unread: int = 0  # tensors
    canary: float | None = None  # mean difference, in nats

    def __str__(self) -> str:
        canary = "" if self.canary is None else f", and the canary differs by {self.canary:.2g} nats"
        return f"{self.size / 1e6:.0f} MB, {self.read_back} of {self.read_back + self.unread} tensors were read back{canary}"

    def metrics(self, total: float) -> dict[str, metrics.Metric]:
        found = {
            "weights/publish_seconds": total,
            "weights/send_seconds": self.sending,
            "weights/proof_seconds": self.proving,
            "weights/bytes": float(self.size),
            "weights/tensors_read_back": float(self.read_back),
            "weights/tensors_not_read_back": float(self.unread),
        }
        if self.canary is not None:
            found["weights/canary_error"] = self.canary
        return {name: metrics.total(value) for name, value in found.items()}


class PublishedWeights:
    """``WeightSync`` for engines. After a failed publish they stay paused, and their weights are undefined."""

    def __init__(
        self,
        exporter: Exporter,
        engines: Sequence[WeightHolder],
        options: PublishOptions,
        *,
        canary: Canary | None = None,
        published: Callable[[int], None] = lambda version: None,
        drop: Callable[[WeightHolder], bool] = lambda engine: False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``exporter`` is the learner's end. ``on_published`` is called with each version that all engines hold. ``drop_engine`` drops an
        engine that cannot be restarted, and returns False if that is not allowed. ``note`` logs a line for the user."""
        self.engines = tuple(engines)
        self._drop = drop
        self.options = options
        self.publishes = 0
        self.version = -1
        self.exporter = exporter
        self.channel = Channel(exporter)
        self._canary = canary
        self._based: set[int] = set()  # ids of the engines that have the base weights for adapters
        self._lock = asyncio.Lock()
        self._published = published
        self._note = note
        self._said_unread = False
        self._failed: ProofFailed | None = None
        self._lent = False

    async def lend_to_learner(self) -> None:
        """Put engines that share the learner's device to sleep. One that dies is restarted by the next publish."""
        if self.options.apart:
            return
        self._lent = True
        for engine in self.engines:
            try:
                await engine.pause(keep_running=False)
                await engine.sleep()
            except EngineDied as error:
                self._note(f"{error}; it is restarted for the next publish")

    async def publish(self, version: int) -> Metrics:
        started = time.perf_counter()
        async with self._lock:
            if self._failed is not None:  # verification failed for a restarted engine, and so did its requests
                raise self._failed
            tally = await self._persist(version)
        return tally.metrics(time.perf_counter() - started)

    async def _persist(self, version: int) -> _Tally:
        """Publish, and retry if an engine dies."""
        for _ in range(self.options.attempts - 1):
            try:
                return await self._publish(version)
            except EngineDied as error:
                self._note(f"{error}; the publish of version {version} is tried again")
        return await self._publish(version)

    async def _publish(self, version: int) -> _Tally:
        await self._start_the_dead()
        with waiting("weight sync", on="engines to finish running requests", kind="weight_sync"):
            await asyncio.gather(*(engine.pause(keep_running=self.options.in_flight) for engine in self.engines))
        if self._lent:
            for engine in self.engines:
                await engine.wake()
            self._lent = False  # only after all are awake: if one dies here, the retry must still wake the others
        tally = _Tally()
        await self._deliver(self.engines, version, tally, prove=self.options.proof.due(self.publishes))
        await asyncio.gather(*(engine.unpause(version) for engine in self.engines))
        self.version = version
        if self.publishes == 0:
            self._note(f"weights: version {version} is in {', '.join(engine.name for engine in self.engines)}: {tally}")
        self.publishes += 1
        self._published(version)
        return tally

    async def _start_the_dead(self) -> None:
        """Restart dead engines, and drop those that cannot be restarted. Raises EngineLost if dropping is not allowed."""
        for engine in self.engines:
            if engine.alive:
                continue
            try:
                await self._start(engine)
            except EngineLost:
                if not self._drop(engine):
                    raise
                self.engines = tuple(other for other in self.engines if other is not engine)

    async def revive(self, engine: WeightHolder) -> None:
        """Restart an engine that died, and send it the weights of the last publish, with full verification."""
        async with self._lock:
            if engine.alive:
                return
            await self._start(engine)
            if self.version < 0:
                return  # the first publish includes it
            try:
                await engine.pause(keep_running=False)
                await self._deliver([engine], self.version, _Tally(), prove=True, again=True)
                await engine.unpause(self.version)
            except BaseException as error:
                self._failed = error if isinstance(error, ProofFailed) else None
                await engine.close()  # its weights are undefined; close it so that no request queues on it
                raise

    async def _start(self, engine: WeightHolder) -> None:
        await self.channel.close()
        self._based.discard(id(engine))
        with waiting("weight sync", on=f"start of {engine.name}"):
            await engine.start()

    async def _deliver(
        self, engines: Sequence[WeightHolder], version: int, tally: _Tally, *, prove: bool, again: bool = False
    ) -> None:
        """Send the weights or adapters to ``engines`` and verify them. ``resend``: send those of the last publish."""
        if self.options.adapters:
            await self._send_adapters(engines, version, tally, again=again)
        else:
            await self._send(engines, version, tally, prove=prove, content="last" if again else "weights")
        if self.options.in_flight:  # before the canary, since sampling it also resumes the suspended requests
            for engine in engines:
                await engine.forget_prefixes(running=self.options.recompute)
        silent = (
            again and self.options.learner_goes_on
        )  # the learner no longer has the weights of the last publish to compare with
        if prove and self._canary is not None and not silent:
            started = time.perf_counter()
            with waiting("weight sync", on="canary samples", kind="weight_sync"):
                reports = [await self._canary.ask(engine) for engine in engines]
            tally.canary = max(report.mean for report in reports)
            tally.proving += time.perf_counter() - started

    async def _send_adapters(self, engines: Sequence[WeightHolder], version: int, tally: _Tally, *, again: bool) -> None:
        bare = [engine for engine in engines if id(engine) not in self._based]
        if bare:
            await self._send(bare, version, tally, prove=True, content="base")
            self._based |= {id(engine) for engine in bare}
        started = time.perf_counter()
        adapters = await self.exporter.adapters(again=again)
        for engine in engines:
            receipt = await engine.load_adapter(adapters.files, version)
            prove_version(engine.name, receipt, version)
            prove_arrival(engine.name, adapters.marks, receipt)
        tally.size += len(adapters.files.weights) * len(engines)
        tally.sending += time.perf_counter() - started

    async def _send(self, engines: Sequence[WeightHolder], version: int, tally: _Tally, *, prove: bool, content: Content) -> None:
        started = time.perf_counter()
        shipment = await self.exporter.prepare(content)
        names = ", ".join(engine.name for engine in engines)
        with waiting("weight sync", on=f"{names} to take version {version}", kind="weight_sync"):
            marks, receipts = await self.channel.transfer(engines, version, shipment.manifest, held=prove)
        tally.sending += time.perf_counter() - started
        tally.size += shipment.manifest.size * len(engines)
        for engine, receipt in zip(engines, receipts, strict=True):
            prove_version(engine.name, receipt, version)
            prove_arrival(engine.name, marks.sent, receipt)
        if prove:
            started = time.perf_counter()
            for engine in engines:
                report = prove_held(engine.name, marks.held, shipment.aliases, await engine.held())
                tally.read_back, tally.unread = report.proven, len(report.unread)
                self._say_unread(engine, report.unread, report.proven)
            tally.proving += time.perf_counter() - started

    def _say_unread(self, engine: WeightHolder, unread: Sequence[str], proven: int) -> None:
        if unread and not self._said_unread:
            self._said_unread = True
            self._note(
                f"weights: {proven} of {proven + len(unread)} tensors are verified by reading them back from {engine.name}; the others, "
                f"such as {unread[0]}, by their arrival and by the canary"
            )

    async def close(self) -> None:
        await self.channel.close()
