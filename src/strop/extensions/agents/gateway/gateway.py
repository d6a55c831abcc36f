"""Opens the sessions of agents, in the training process or shared out over processes of their own.

A session stays where it was opened: the address that its agent gets is that of the process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from strop.extensions.agents.endpoint import Endpoint
from strop.extensions.agents.gateway.agent_session import AgentSession, SessionOptions, SessionOutcome
from strop.extensions.agents.gateway.gateway_config import PORT, GatewayConfig
from strop.extensions.agents.gateway.gateway_process import GatewayDied, GatewayProcess
from strop.extensions.agents.gateway.gateway_server import GatewayServer, digest_key
from strop.generation.base import Generator
from strop.models.chat_template import ChatTemplate
from strop.safety.http_server import make_local
from strop.types import Rollout

SESSIONS_HERE = 64  # that the training process serves before the first process starts
SESSIONS_PER_PROCESS = 256


@dataclass(eq=False)
class OpenedSession:
    """A session while its agent runs, and how it ended afterwards."""

    endpoint: Endpoint
    outcome: SessionOutcome = field(default_factory=SessionOutcome)  # once it is closed


class Gateway:
    """Serves the open episodes of one event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.processes: list[GatewayProcess] = []
        self._server = GatewayServer(config)
        self._listening = AsyncExitStack()
        self._address = ""
        self._lock = asyncio.Lock()
        self._users = self._here = 0  # sessions and holders; sessions in this process

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Keep the gateway, and the processes that it has started, between episodes."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            await self._stop()

    @asynccontextmanager
    async def open(
        self, rollout: Rollout, options: SessionOptions, generator: Generator, template: ChatTemplate
    ) -> AsyncIterator[OpenedSession]:
        """Serve an episode. Raises OSError if the gateway cannot listen, GatewayDied if the process that serves the episode dies."""
        key = f"sk-strop-{secrets.token_urlsafe(32)}"
        async with self.held():
            process = self._choose()
            serving = (
                self._open_here(key, rollout, options, generator, template)
                if process is None
                else self._open_there(process, key, rollout, options, generator, template)
            )
            async with serving as opened:
                yield opened

    def _choose(self) -> GatewayProcess | None:
        """Return the process with the fewest sessions; None: this one."""
        most, open_sessions = self.config.processes, self._here + sum(each.load for each in self.processes)
        if most is None:
            shared = self.config.url is not None and PORT not in self.config.url
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            wanted = 0 if shared or open_sessions < SESSIONS_HERE else 1 + open_sessions // SESSIONS_PER_PROCESS
            most = min(wanted, max(1, cores // 4))
        for index in range(len(self.processes), most):
            port = self.config.port and self.config.port + 1 + index
            self.processes.append(GatewayProcess(self.config, port))
        if not most:
            return None
        return min(self.processes, key=lambda each: each.load)

    @asynccontextmanager
    async def _open_here(
        self, key: str, rollout: Rollout, options: SessionOptions, generator: Generator, template: ChatTemplate
    ) -> AsyncIterator[OpenedSession]:
        address = await self._listen()
        session = AgentSession(options=options, generator=generator, template=template, config=self.config)
        opened = OpenedSession(self._make_endpoint(address, key, options))
        self._here += 1
        try:
            with self._server.serving(digest_key(key), session):
                yield opened
        finally:
            self._here -= 1
            await session.close()
        opened.outcome = session.finish(rollout)

    @asynccontextmanager
    async def _open_there(
        self,
        process: GatewayProcess,
        key: str,
        rollout: Rollout,
        options: SessionOptions,
        generator: Generator,
        template: ChatTemplate,
    ) -> AsyncIterator[OpenedSession]:
        loop = asyncio.get_running_loop()
        process.load += 1
        try:
            opened = OpenedSession(self._make_endpoint(await process.start(), key, options))
            async with asyncio.timeout(None) as limit:

                def end() -> None:
                    with suppress(RuntimeError):  # the agent has ended
                        limit.reschedule(loop.time())

                serving = process.serving(digest_key(key), options, generator, template, end)
                async with serving as session:
                    yield opened
            opened.outcome = await session.finish(rollout)
        except TimeoutError:
            if limit.expired():
                raise GatewayDied(process.death) from None
            raise
        finally:
            process.load -= 1

    def _make_endpoint(self, address: str, key: str, options: SessionOptions) -> Endpoint:
        port = address.rpartition(":")[2]
        url = f"{make_local(address)}/v1" if self.config.url is None else self.config.url.replace(PORT, port)
        return Endpoint(base_url=url, api_key=key, sample=options.sample)

    async def _listen(self) -> str:
        """Listen in this process, unless it does already. Returns the address."""
        async with self._lock:
            if not self._address:
                self._address = await self._listening.enter_async_context(self._server.listening(self.config.port))
            return self._address

    async def _stop(self) -> None:
        """Stop listening, and the processes, once no episode is open."""
        async with self._lock:
            if self._users == 0:
                self._address = ""
                await self._listening.aclose()
                processes, self.processes = self.processes, []
                await asyncio.gather(*(each.stop() for each in processes))


_gateways: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Gateway]] = WeakKeyDictionary()


def get_gateway(config: GatewayConfig) -> Gateway:
    """Return the gateway of this event loop with this configuration."""
    return _gateways.setdefault(asyncio.get_running_loop(), {}).setdefault(repr(config), Gateway(config))
