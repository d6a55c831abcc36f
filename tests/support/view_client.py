"""A client of ``strop view``'s server, which runs in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import httpx

from strop.extensions.view.view_routes import ViewServer


@contextmanager
def asking(server: ViewServer) -> Iterator[httpx.Client]:
    """Serve meanwhile. Yields a client that follows no redirects."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(server.serve())
    thread = Thread(target=loop.run_until_complete, args=(asyncio.wait([task]),))
    thread.start()
    try:
        with httpx.Client(base_url=f"http://{server.guard.host}:{server.guard.port}", timeout=60) as client:
            yield client
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        assert not thread.is_alive()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
