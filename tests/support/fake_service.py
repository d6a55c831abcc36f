"""A service on loopback that a test writes, and what stands behind one that makes sandboxes."""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web

from strop.extensions.sandboxes.base import Resources, Sandbox, SandboxSpec
from strop.extensions.sandboxes.local.local_provider import LocalProvider


class FakeService(ABC):
    """``exchanges``: its requests. ``refuses``: answers of the next requests that make something."""

    makes = "/pods", "/sandboxes", "/sandbox"  # how the paths of such requests end

    def __init__(self) -> None:
        self.exchanges: list[dict[str, Any]] = []
        self.refuses: list[tuple[int, dict[str, Any]]] = []

    @abstractmethod
    def routes(self) -> list[web.RouteDef]: ...

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        @web.middleware
        async def record(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            body = await request.read() if request.content_type.endswith("json") else b""
            found = json.loads(body[body.find(b"{") :]) if b"{" in body else None
            self.exchanges.append({"method": request.method, "path": request.path, "body": found})
            if self.refuses and request.method == "POST" and request.path.endswith(self.makes):
                status, values = self.refuses.pop(0)
                return web.json_response(values, status=status, headers={"Retry-After": "7"} if status == 429 else {})
            return await handler(request)

        app = web.Application(client_max_size=1 << 26, middlewares=[record])
        app.add_routes(self.routes())
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        await self.runner.cleanup()


class LocalSandboxes:
    """The sandboxes of a stand-in, which are those of this machine.

    ``images``: references of local images by the names that the service has for them. ``made``: what it knows of each sandbox.
    """

    def __init__(self, provider: LocalProvider, images: dict[str, str]) -> None:
        super().__init__()
        self.provider, self.images = provider, images
        self.numbers = itertools.count()
        self.made: dict[str, dict[str, Any]] = {}
        self.sandboxes: dict[str, Sandbox] = {}

    async def make(self, name: str, image: str, environment: dict[str, str]) -> None:
        spec = SandboxSpec(image=self.images[image], environment=environment, resources=Resources(memory_mb=256, disk_mb=200))
        self.sandboxes[name] = await self.provider.create(spec)

    async def stop(self, name: str) -> None:
        """End a sandbox, if it ever started."""
        if name in self.sandboxes:
            await self.sandboxes.pop(name).destroy()

    async def close(self) -> None:
        await self.provider.close()
