"""An engine in another process, on any node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from strop.cluster.base import HostDied, NodeLost, Remote
from strop.generation.base import Completion
from strop.sampling import Sampling
from strop.weights.base import AdapterFiles, Answer, ChannelAddress, EngineDied, EngineLost, Held, Manifest, Receipt


class RemoteEngine:
    """An ``Engine`` that forwards every call to an engine in another process. The process ends when the engine is closed or has died."""

    def __init__(self, name: str, receivers: int, host: Callable[[], Awaitable[Remote]]) -> None:
        """``spawn`` starts the process and makes the engine in it, without starting the engine."""
        self.name = name
        self.receivers = receivers
        self.version = -1
        self._host = host
        self._remote: Remote | None = None
        self._counters: Mapping[str, float] = {}

    async def start(self) -> None:
        await self.close()
        try:
            self._remote = await self._host()
        except NodeLost as error:
            raise EngineLost(f"{self.name}: {error}") from error
        except HostDied as error:
            raise EngineDied(f"{self.name}: {error}") from error
        await self._ask("start")

    async def close(self) -> None:
        self.version = -1
        remote, self._remote = self._remote, None
        if remote is not None:
            if remote.alive:
                await _politely(remote)
            await remote.kill()

    @property
    def alive(self) -> bool:
        return self._remote is not None and self._remote.alive

    @property
    def process(self) -> int | None:
        return None if self._remote is None else self._remote.process

    async def generate(self, prompt: Sequence[int], *, sampling: Sampling, seed: int, session: str = "") -> Completion:
        found: Completion = await self._ask("generate", list(prompt), sampling=sampling, seed=seed, session=session)
        return found

    async def ask(self, prompt: Sequence[int], *, sampling: Sampling, seed: int) -> Answer:
        found: Answer = await self._ask("ask", list(prompt), sampling=sampling, seed=seed)
        return found

    async def connect(self, address: ChannelAddress, first: int) -> None:
        await self._ask("connect", address, first)

    async def pause(self, *, keep_running: bool) -> None:
        await self._ask("pause", keep_running=keep_running)

    async def load(self, manifest: Manifest, version: int) -> Receipt:
        self.version = -1
        receipt: Receipt = await self._ask("load", manifest, version)
        return receipt

    async def load_adapter(self, adapter: AdapterFiles, version: int) -> Receipt:
        self.version = -1
        receipt: Receipt = await self._ask("load_adapter", adapter, version)
        return receipt

    async def held(self) -> Mapping[str, tuple[Held, ...]]:
        found: Mapping[str, tuple[Held, ...]] = await self._ask("held")
        return found

    async def forget_prefixes(self, *, running: bool) -> None:
        await self._ask("forget_prefixes", running=running)

    async def unpause(self, version: int) -> None:
        await self._ask("unpause", version)
        self.version = version
        self._counters = await self._ask("counters")

    async def sleep(self) -> None:
        await self._ask("sleep")

    async def wake(self) -> None:
        await self._ask("wake")

    def counters(self) -> Mapping[str, float]:
        """Return the counters as of the last ``resume``."""
        return self._counters

    async def _ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        remote = self._remote
        if remote is None:
            raise EngineDied(f"{self.name}: its process has died")
        try:
            return await remote.call(method, *arguments, **named)
        except HostDied as error:
            raise EngineDied(f"{self.name}: {error}") from error
        except EngineDied:
            await remote.kill()  # the process only wraps an engine that died: restart both
            raise


async def _politely(remote: Remote) -> None:
    """Let the engine end its child processes before its own process is killed."""
    try:
        await remote.call("close")
    except Exception:
        return  # the caller kills it, which also ends its children
