"""The sandboxes of a run: how many are open, how many wait ready, and what happens if one cannot be had.

take -> one that is ready, or a new one, tried again where its failure may pass -> use -> give back: destroyed
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from strop.extensions.sandboxes.base import FailureCause, Sandbox, SandboxFailure, SandboxProvider, SandboxSpec

TRIES = 4
PAUSE_S = 0.5  # before the second try; four times as long before each further one
MAX_SKEW_S = 60.0  # of a sandbox's clock: certificates and time stamps of builds fail beyond
READY_S = 600.0  # after which a sandbox that waits is not given out: its provider may have forgotten it
KINDS = 16  # of specifications for which sandboxes wait ready


class WarmPool:
    """Lends sandboxes of one provider. Belongs to one event loop."""

    def __init__(
        self, provider: SandboxProvider, *, max_open: int, ready: int = 0, start_s: float = 600.0, tries: int = TRIES
    ) -> None:
        self.provider, self._ready_per_kind, self._start_s, self._tries = provider, ready, start_s, tries
        self._places = asyncio.Semaphore(max_open)
        self._judges = asyncio.Semaphore(max(1, max_open // 4))  # apart: episodes keep theirs while they wait for one that judges
        self._ready: OrderedDict[SandboxSpec, list[tuple[float, Sandbox]]] = OrderedDict()
        self._filling: set[asyncio.Task[None]] = set()
        self.retried = 0  # creations that failed and were tried again
        self.taken_ready = 0

    @asynccontextmanager
    async def lend(self, spec: SandboxSpec, *, judging: bool = False) -> AsyncIterator[Sandbox]:
        """Yield a new sandbox, and destroy it at the end. ``judging``: for an episode that has one already. Raises SandboxFailure."""
        async with self._judges if judging else self._places:
            sandbox = await self._take(spec)
            try:
                yield sandbox
            finally:
                with suppress(SandboxFailure):
                    await asyncio.shield(sandbox.destroy())

    async def _take(self, spec: SandboxSpec) -> Sandbox:
        key = _freeze(spec)
        while waiting := self._ready.get(key):
            since, sandbox = waiting.pop()
            self._fill(key, spec)
            if time.monotonic() - since < READY_S and (await sandbox.health()).answers:
                self.taken_ready += 1
                return sandbox
            await sandbox.destroy()
        self._fill(key, spec)
        return await self.create(spec)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Create a sandbox, again where its failure may pass. Raises SandboxFailure."""
        for number in range(self._tries):
            try:
                return await self._try(spec)
            except SandboxFailure as failure:
                if not failure.cause.retried or number == self._tries - 1:
                    raise
                self.retried += 1
                pause = max(failure.retry_after_s, PAUSE_S * 4**number)
                await asyncio.sleep(pause * random.uniform(0.75, 1.25))  # many that were refused at once do not return at once
        raise AssertionError

    async def _try(self, spec: SandboxSpec) -> Sandbox:
        try:
            async with asyncio.timeout(self._start_s):
                sandbox = await self.provider.create(spec)
        except TimeoutError as error:
            raise SandboxFailure(
                FailureCause.SLOW,
                f"{spec.image} was not ready in {self._start_s:g} s (sandboxes.start_timeout_s); is it being pulled?",
            ) from error
        health = await sandbox.health()
        if health.answers and abs(health.clock_skew_s or 0.0) <= MAX_SKEW_S:
            return sandbox
        await sandbox.destroy()
        if not health.answers:
            raise SandboxFailure(FailureCause.REFUSED, f"a new sandbox of {spec.image} does not answer")
        raise SandboxFailure(FailureCause.CLOCK, f"the clock of a new sandbox is wrong by {health.clock_skew_s:g} s")

    def _fill(self, key: SandboxSpec, spec: SandboxSpec) -> None:
        """Make sandboxes of this kind in the background, and give up those of kinds that were not asked for the longest."""
        if not self._ready_per_kind:
            return
        waiting = self._ready.setdefault(key, [])
        self._ready.move_to_end(key)
        wanted = self._ready_per_kind - len(waiting)
        unused = self._ready.popitem(last=False)[1] if len(self._ready) > KINDS else []
        work = [self._add(key, spec) for _ in range(wanted)] + [self._drop(sandbox) for _, sandbox in unused]
        for each in work:
            task = asyncio.ensure_future(each)
            self._filling.add(task)
            task.add_done_callback(self._filling.discard)

    async def _add(self, key: SandboxSpec, spec: SandboxSpec) -> None:
        with suppress(SandboxFailure):  # an episode that finds none ready tries itself, and reports why
            sandbox = await self._try(spec)
            waiting = self._ready.get(key)
            if waiting is None or len(waiting) >= self._ready_per_kind:
                await sandbox.destroy()
            else:
                waiting.append((time.monotonic(), sandbox))

    async def _drop(self, sandbox: Sandbox) -> None:
        with suppress(SandboxFailure):
            await sandbox.destroy()

    async def close(self) -> None:
        for task in list(self._filling):
            task.cancel()
        await asyncio.gather(*self._filling, return_exceptions=True)
        self._ready.clear()
        await self.provider.close()


def _freeze(spec: SandboxSpec) -> SandboxSpec:
    """A specification as a key: environments are compared by their content."""
    return replace(spec, environment=tuple(sorted(spec.environment.items())))  # type: ignore[arg-type]
