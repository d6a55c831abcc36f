"""Weights sent to engines that hold their own, and proven to have arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from strop import metrics
from strop.metrics import Metrics
from strop.watch.waits import waiting
from strop.weights.base import AdapterFiles, EngineDied, WeightHolder
from strop.weights.channel import Channel, MakeSender
from strop.weights.manifest import large_in_the_middle, manifest_of
from strop.weights.proof import Canary, ProofFailed, ProofSchedule, prove_arrival, prove_held, prove_version
from strop.weights.source import Outgoing, Snapshot, distinct


class AdapterSource(Protocol):
    """A learner that trains adapters alone."""

    def base(self) -> Iterable[tuple[str, Tensor]]:
        """The weights that the adapters stand on, which do not change."""
        ...

    def files(self) -> AdapterFiles: ...

    def marks(self, dtype: torch.dtype) -> Mapping[str, int]:
        """The fingerprints of the adapters as an engine of this type holds them."""
        ...


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    dtype: torch.dtype  # in which engines hold weights
    apart: bool = False  # engines have devices of their own, and go on while the learner works
    in_flight: bool = False  # requests that run are stopped where they are and go on with the new weights
    recompute: bool = False  # ... and read what they have so far again
    keep_copy: bool = False  # of what was published last: an engine may have to start anew while the learner has gone on
    proof: ProofSchedule = field(default_factory=ProofSchedule)
    attempts: int = 4  # at one publish, each after engines that died were started anew


@dataclass
class _Tally:
    """What one publish cost, in seconds, and what it proved."""

    sending: float = 0.0
    proving: float = 0.0
    size: int = 0
    read_back: int = 0
    unread: int = 0
    canary: float | None = None

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
    """``WeightSync`` for engines. A publish that fails in the middle leaves them paused, with weights of no version."""

    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        engines: Sequence[WeightHolder],
        make_sender: MakeSender,
        options: PublishOptions,
        *,
        canary: Canary | None = None,
        adapters: AdapterSource | None = None,
        published: Callable[[int], None] = lambda version: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``weights`` gives the learner's under canonical names; ``published`` is told each version that all engines hold."""
        self.engines = engines
        self.options = options
        self.publishes = 0
        self.version = -1
        self._weights = weights
        self.channel = Channel(make_sender)
        self._canary = canary
        self._adapters = adapters
        self._based: set[int] = set()  # identities of the engines that hold the base which adapters stand on
        self._snapshot = Snapshot() if options.keep_copy and adapters is None else None
        self._last: list[tuple[str, Tensor]] = []
        self._last_adapters: tuple[AdapterFiles, Mapping[str, int]] | None = None
        self._aliases: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self._published = published
        self._note = note
        self._said_unread = False
        self._failed: ProofFailed | None = None
        self._lent = False

    async def lend_to_learner(self) -> None:
        if self.options.apart:
            return
        self._lent = True
        for engine in self.engines:
            await engine.pause(keep_running=False)
            await engine.sleep()

    async def publish(self, version: int) -> Metrics:
        started = time.perf_counter()
        async with self._lock:
            if self._failed is not None:  # for an engine that was started anew, whose requests were told so
                raise self._failed
            tally = await self._persist(version)
        return tally.metrics(time.perf_counter() - started)

    async def _persist(self, version: int) -> _Tally:
        """Publish, again where an engine died meanwhile."""
        for _ in range(self.options.attempts - 1):
            try:
                return await self._publish(version)
            except EngineDied as error:
                self._note(f"{error}; the publish of version {version} is tried again")
        return await self._publish(version)

    async def _publish(self, version: int) -> _Tally:
        for engine in self.engines:
            if not engine.alive:
                await self._start(engine)
        with waiting("weight sync", on="engines that finish what they run", kind="weight_sync"):
            await asyncio.gather(*(engine.pause(keep_running=self.options.in_flight) for engine in self.engines))
        if self._lent:
            for engine in self.engines:
                await engine.wake()
            self._lent = False  # only now: where one dies on the way the others are still to be woken
        tally = _Tally()
        await self._deliver(self.engines, version, tally, prove=self.options.proof.due(self.publishes))
        await asyncio.gather(*(engine.unpause(version) for engine in self.engines))
        self.version = version
        if self.publishes == 0:
            self._note(f"weights: version {version} is in {', '.join(engine.name for engine in self.engines)}: {tally}")
        self.publishes += 1
        self._published(version)
        return tally

    async def revive(self, engine: WeightHolder) -> None:
        """Start an engine that died and give it the weights of the last publish, proven like the first ones."""
        async with self._lock:
            if engine.alive:
                return
            await self._start(engine)
            if self.version < 0:
                return  # the first publish will find it
            try:
                await engine.pause(keep_running=False)
                await self._deliver([engine], self.version, _Tally(), prove=True, again=True)
                await engine.unpause(self.version)
            except BaseException as error:
                self._failed = error if isinstance(error, ProofFailed) else None
                await engine.close()  # nobody may wait for an engine that holds nobody knows what
                raise

    async def _start(self, engine: WeightHolder) -> None:
        self.channel.close()
        self._based.discard(id(engine))
        with waiting("weight sync", on=f"start of {engine.name}"):
            await engine.start()

    async def _deliver(
        self, engines: Sequence[WeightHolder], version: int, tally: _Tally, *, prove: bool, again: bool = False
    ) -> None:
        """Send what is to be sent to ``engines`` and prove it; ``again`` is the last publish once more."""
        if self._adapters is None:
            await self._send(engines, version, tally, prove=prove, tensors=self._current(again))
        else:
            await self._send_adapters(engines, version, tally, adapters=self._adapters, again=again)
        if self.options.in_flight:  # before the canary, for whose sake the engine goes on, with the requests that were stopped
            for engine in engines:
                await engine.forget_prefixes(running=self.options.recompute)
        learner_has_gone_on = again and self.options.keep_copy  # and says nothing about the weights of the last publish any more
        if prove and self._canary is not None and not learner_has_gone_on:
            started = time.perf_counter()
            with waiting("weight sync", on="the canary's answers", kind="weight_sync"):
                reports = [await self._canary.ask(engine) for engine in engines]
            tally.canary = max(report.mean for report in reports)
            tally.proving += time.perf_counter() - started

    def _current(self, again: bool) -> list[tuple[str, Tensor]]:
        """The tensors to send: the learner's, or those of the last publish where it may have changed them since."""
        if again and self._snapshot is not None:
            return self._last
        found = distinct(self._weights())
        self._aliases = found.aliases
        self._last = large_in_the_middle(found.tensors)
        if self._snapshot is not None:
            self._last = self._snapshot.take(self._last, self.options.dtype)
        return self._last

    async def _send_adapters(
        self, engines: Sequence[WeightHolder], version: int, tally: _Tally, *, adapters: AdapterSource, again: bool
    ) -> None:
        bare = [engine for engine in engines if id(engine) not in self._based]
        if bare:
            found = distinct(adapters.base())
            self._aliases = found.aliases
            await self._send(bare, version, tally, prove=True, tensors=list(found.tensors))
            self._based |= {id(engine) for engine in bare}
        started = time.perf_counter()
        if self._last_adapters is None or not (again and self.options.keep_copy):
            self._last_adapters = adapters.files(), adapters.marks(self.options.dtype)
        files, marks = self._last_adapters
        for engine in engines:
            receipt = await engine.load_adapter(files, version)
            prove_version(engine.name, receipt, version)
            prove_arrival(engine.name, marks, receipt)
        tally.size += len(files.weights) * len(engines)
        tally.sending += time.perf_counter() - started

    async def _send(
        self, engines: Sequence[WeightHolder], version: int, tally: _Tally, *, prove: bool, tensors: list[tuple[str, Tensor]]
    ) -> None:
        started = time.perf_counter()
        outgoing = Outgoing(tensors, manifest_of(tensors, self.options.dtype), held=prove)
        names = ", ".join(engine.name for engine in engines)
        with waiting("weight sync", on=f"{names} to take version {version}", kind="weight_sync"):
            receipts = await self.channel.transfer(engines, version, outgoing)
        tally.sending += time.perf_counter() - started
        tally.size += outgoing.manifest.size * len(engines)
        for engine, receipt in zip(engines, receipts, strict=True):
            prove_version(engine.name, receipt, version)
            prove_arrival(engine.name, outgoing.sent_marks, receipt)
        if prove:
            started = time.perf_counter()
            for engine in engines:
                report = prove_held(engine.name, outgoing.held_marks, self._aliases, await engine.held())
                tally.read_back, tally.unread = report.proven, len(report.unread)
                self._say_unread(engine, report.unread, report.proven)
            tally.proving += time.perf_counter() - started

    def _say_unread(self, engine: WeightHolder, unread: Sequence[str], proven: int) -> None:
        if unread and not self._said_unread:
            self._said_unread = True
            self._note(
                f"weights: {proven} of {proven + len(unread)} tensors are proven by reading them back out of {engine.name}; the others, "
                f"such as {unread[0]}, by their arrival and by the canary"
            )

    def close(self) -> None:
        self.channel.close()
