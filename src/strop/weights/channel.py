"""One sender and the engines that listen to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from strop.weights.base import EngineDied, Receipt, Sender, TransportError, WeightHolder
from strop.weights.source import Outgoing

MakeSender = Callable[[int], Sender]
"""For a number of receivers."""

GRACE = 30.0  # seconds in which the others may end, after one side of a transfer failed


class Channel:
    """Made for the engines that are sent to, and made anew where these are others, or after a failure."""

    def __init__(self, make_sender: MakeSender) -> None:
        self.make_sender = make_sender
        self._sender: Sender | None = None
        self._connected: tuple[WeightHolder, ...] = ()

    async def transfer(self, engines: Sequence[WeightHolder], version: int, outgoing: Outgoing) -> list[Receipt]:
        """All receive while one sends. Where one fails the others are told, and nobody waits for who will not come."""
        sender = await self._connect(engines)
        sending = asyncio.create_task(asyncio.to_thread(sender.send, outgoing.manifest, outgoing))
        loading = [asyncio.create_task(engine.load(outgoing.manifest, version)) for engine in engines]
        done, _ = await asyncio.wait([sending, *loading], return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() is not None for task in done):
            raise await self._failure([sending, *loading])
        return [await task for task in loading]

    async def _failure(self, tasks: Sequence[asyncio.Task[Any]]) -> BaseException:
        """What went wrong, once nobody is at work any more."""
        await asyncio.to_thread(self.close)
        _, stuck = await asyncio.wait(tasks, timeout=GRACE)
        for task in stuck:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        return min((end for end in ends if isinstance(end, BaseException)), key=_rank)

    async def _connect(self, engines: Sequence[WeightHolder]) -> Sender:
        """The sender to exactly these engines."""
        if self._sender is not None and self._connected == tuple(engines):
            return self._sender
        await asyncio.to_thread(self.close)
        self._sender = self.make_sender(sum(engine.receivers for engine in engines))
        first = 0
        connecting: list[Awaitable[None]] = []
        for engine in engines:
            connecting.append(engine.connect(self._sender.address, first))
            first += engine.receivers
        await asyncio.gather(*connecting)
        self._connected = tuple(engines)
        return self._sender

    def close(self) -> None:
        sender, self._sender, self._connected = self._sender, None, ()
        if sender is not None:
            sender.close()


def _rank(error: BaseException) -> int:
    """A process that died is the cause of what the others say, and a broken channel the consequence of anything else."""
    for place, kind in ((0, EngineDied), (2, TransportError), (3, asyncio.CancelledError)):
        if isinstance(error, kind):
            return place
    return 1
