"""The server of ``strop view``: an HTTP server on one address, loopback unless told otherwise, that only who has its token can use."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.extensions.view.access_guard import AccessGuard
from strop.extensions.view.run_catalogue import RunCatalogue
from strop.extensions.view.view_routes import ViewRoutes
from strop.safety.http_server import listening, make_address, make_local, naming_address, stop_event

REQUESTS = 40  # that are answered at a time, each in a thread


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
        with naming_address(options.host, options.port):
            self._socket = socket.create_server((options.host, options.port), family=family)
        self.guard = AccessGuard(token=options.token, host=options.host, port=self._socket.getsockname()[1])
        self.catalogue = RunCatalogue(places, parse_yaml)
        self.api = ViewRoutes(self.catalogue, self.guard)

    @property
    def address(self) -> str:
        """The address to open, with the token."""
        token = "" if self.guard.token is None else f"?token={self.guard.token}"
        return f"{make_local(make_address(self.guard.host, self.guard.port))}/{token}"

    async def serve(self) -> None:
        """Serve until Ctrl-C. SIGTERM ends the process at once: it writes only whole files."""
        stopped = stop_event([signal.SIGINT])
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(REQUESTS))
        async with listening(self.api.make_app(), self._socket, cancels=False):
            await stopped.wait()

    def close(self) -> None:
        self._socket.close()
