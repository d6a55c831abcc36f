"""Transfers of weights from one sender, or several that each send a part, to several engines."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from strop.device_copies import is_gpu
from strop.weight_sync.base import ChannelAddress, EngineDied, LoadReceipt, Manifest, Receiver, TransportError, UpdatableEngine
from strop.weight_sync.exporter import Exporter, Fingerprints
from strop.weight_sync.transports.manifest import split_manifest

GRACE_SECONDS = 30.0  # seconds that the other participants have to finish after one side of a transfer failed


class Channel:
    """A connection between an exporter and engines. It is reopened for other engines and after a failure."""

    def __init__(self, exporter: Exporter) -> None:
        self.exporter = exporter
        self._connected: tuple[UpdatableEngine, ...] = ()

    async def transfer(
        self, engines: Sequence[UpdatableEngine], version: int, manifest: Manifest, *, read_back: bool
    ) -> tuple[Fingerprints, list[LoadReceipt]]:
        """Send one publish to all ``engines`` and return the sender's fingerprints and the engines' receipts.

        If one side fails, the channel is closed, so that the others fail too instead of waiting.
        """
        await self._connect(engines)
        sending = asyncio.create_task(self.exporter.send(read_back=read_back))
        loading = [asyncio.create_task(engine.load(manifest, version)) for engine in engines]
        done, _ = await asyncio.wait([sending, *loading], return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() is not None for task in done):
            raise await self._collect_failure([sending, *loading])
        return await sending, [await task for task in loading]

    async def _collect_failure(self, tasks: Sequence[asyncio.Task[Any]]) -> BaseException:
        """Close the channel, wait for all tasks to end, and return the error that caused the failure."""
        await self.close()
        _, pending = await asyncio.wait(tasks, timeout=GRACE_SECONDS)
        for task in pending:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return min((result for result in results if isinstance(result, BaseException)), key=_error_rank)

    async def _connect(self, engines: Sequence[UpdatableEngine]) -> None:
        """Connect exactly these engines to a new sender, unless they are connected already."""
        if self._connected and self._connected == tuple(engines):
            return
        self._connected = ()
        address = await self.exporter.open(sum(engine.receivers for engine in engines))
        first = 0
        connecting: list[Awaitable[None]] = []
        for engine in engines:
            connecting.append(engine.connect(address, first))
            first += engine.receivers
        await asyncio.gather(*connecting)
        self._connected = tuple(engines)

    async def close(self) -> None:
        self._connected = ()
        await self.exporter.close()


def _error_rank(error: BaseException) -> int:
    """Rank errors by how likely they are the root cause: a dead process first, a broken channel last."""
    for rank, kind in ((0, EngineDied), (2, TransportError), (3, asyncio.CancelledError)):
        if isinstance(error, kind):
            return rank
    return 1


@dataclass(frozen=True)
class SplitAddress:
    """The addresses of several senders, in the order used to distribute tensors."""

    parts: tuple[ChannelAddress, ...]

    def connect(self, index: int, device: torch.device) -> SplitReceiver:
        """Connect to every sender. Raises TransportError if one is gone."""
        receivers: list[Receiver] = []
        try:
            for part in self.parts:
                receivers.append(part.connect(index, device))
        except BaseException:
            _close_all(receivers)
            raise
        return SplitReceiver(receivers, device)


@dataclass(frozen=True, eq=False)
class _Arrival:
    """An arrived tensor; without one, the end of a part or its error."""

    name: str = ""
    tensor: Tensor | None = None
    error: BaseException | None = None
    taken: threading.Event = field(default_factory=threading.Event)  # the engine is done with the tensor


class SplitReceiver:
    """Receives from several senders at once, each in a thread. A failure in one part ends the whole publish; reconnect after it."""

    def __init__(self, receivers: Sequence[Receiver], device: torch.device) -> None:
        self.receivers, self.device = tuple(receivers), device

    def receive(self, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one publish as they arrive. Raises TransportError like the transports of the parts."""
        arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        stopped = threading.Event()
        parts = [
            (receiver, part)
            for receiver, part in zip(self.receivers, split_manifest(manifest, len(self.receivers)), strict=True)
            if part.entries
        ]
        for receiver, part in parts:
            arguments = (receiver, part, arrivals, stopped)
            threading.Thread(target=self._receive_part, args=arguments, name="strop-weights", daemon=True).start()
        remaining, complete = len(parts), False
        try:
            while remaining:
                arrival = arrivals.get()
                if arrival.error is not None:
                    raise arrival.error
                if arrival.tensor is None:
                    remaining -= 1
                    continue
                try:
                    yield arrival.name, arrival.tensor
                finally:
                    arrival.taken.set()
            complete = True
        finally:
            stopped.set()
            if not complete:
                self.close()  # the other senders' transfers cannot be completed

    def _receive_part(
        self, receiver: Receiver, part: Manifest, arrivals: queue.SimpleQueue[_Arrival], stopped: threading.Event
    ) -> None:
        """Hand over the tensors of one sender, one by one. Runs in its own thread."""
        incoming: Any = receiver.receive(part)  # a generator
        try:
            if is_gpu(self.device):
                torch.get_device_module(self.device).set_device(self.device)
            for name, tensor in incoming:
                arrival = _Arrival(name, tensor)
                arrivals.put(arrival)
                while not arrival.taken.wait(0.5) and not stopped.is_set():
                    pass
                if stopped.is_set():
                    return
            arrivals.put(_Arrival())
        except BaseException as error:
            arrivals.put(_Arrival(error=error))
        finally:
            with suppress(Exception):  # a channel closed in the meantime raises again
                incoming.close()

    def close(self) -> None:
        _close_all(self.receivers)


def _close_all(receivers: Sequence[Receiver]) -> None:
    for receiver in receivers:
        with suppress(Exception):  # the others must be closed too
            receiver.close()
