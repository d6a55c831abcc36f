"""The server of ``strop view``: an HTTP server on one address, loopback unless told otherwise, that only who has its token can use."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.view.access_guard import AccessGuard, GuardedApp
from strop.view.run_catalogue import RunCatalogue
from strop.view.view_routes import ViewRoutes

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Where the view listens, and whether it asks for a token."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    token: str | None = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)


class ViewServer:
    """A view of runs that listens from the moment it is made. Raises OSError if the address cannot be listened on."""

    def __init__(self, places: Sequence[Path], options: ViewOptions, parse_yaml: Callable[[str], Any]) -> None:
        """``parse_yaml`` reads the configuration of runs that have no history of it."""
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        self._socket = socket.create_server((options.host, options.port), family=family)
        self.guard = AccessGuard(token=options.token, host=options.host, port=self._socket.getsockname()[1])
        self.catalogue = RunCatalogue(places, parse_yaml)
        self._server: Any = None
        self._routes = ViewRoutes(self.catalogue)
        self.app = GuardedApp(self._routes.make_app(), self.guard)

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.guard.host, self.guard.host)
        host = f"[{host}]" if ":" in host else host
        token = "" if self.guard.token is None else f"?token={self.guard.token}"
        return f"http://{host}:{self.guard.port}/{token}"

    def run(self) -> None:
        """Serve until the process is interrupted, or ``stop`` is called."""
        import uvicorn

        config = uvicorn.Config(
            self.app, loop="asyncio", http="h11", ws="none", lifespan="off", log_level="warning", access_log=False,
            server_header=False, date_header=False, proxy_headers=False, timeout_graceful_shutdown=2,
        )  # fmt: skip
        threading.Thread(target=self._routes.warm_up, name="warming up", daemon=True).start()
        try:
            self._server = uvicorn.Server(config)
            self._server.run(sockets=[self._socket])
        finally:
            self.close()

    def stop(self) -> None:
        """End ``run``, from another thread."""
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()
