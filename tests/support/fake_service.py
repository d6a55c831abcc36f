"""A service on loopback that a test writes."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Self

from aiohttp import web


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
