"""Transfers of weights from one sender to several engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from strop.weight_sync.base import EngineDied, LoadReceipt, Manifest, TransportError, UpdatableEngine
from strop.weight_sync.exporter import Exporter, Fingerprints

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
