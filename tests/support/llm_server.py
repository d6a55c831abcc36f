"""An OpenAI-compatible endpoint on loopback, in a thread, whose answers a test writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any], int], Any]
"""Gets the request and its number; returns the text of a reply, or (status, headers, body)."""


@dataclass
class LlmServer:
    answer: Answer
    delay: float = 0.0  # seconds before each answer
    base_url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0

    async def serve(self, request: web.Request) -> web.Response:
        asked = await request.json()
        number = len(self.requests)
        self.requests.append(asked)
        self.headers.append(dict(request.headers))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            await asyncio.sleep(self.delay)
            given = self.answer(asked, number)
        finally:
            self._now -= 1
        if isinstance(given, tuple):
            status, headers, body = given
            return web.Response(status=status, headers=headers, text=body)
        prompt = sum(len(message["content"].split()) for message in asked["messages"])
        return web.json_response(
            {
                "choices": [{"index": 0, "message": {"role": "assistant", "content": given}, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": prompt, "completion_tokens": len(given.split())},
            }
        )


@contextmanager
def llm_server(answer: Answer, delay: float = 0.0) -> Iterator[LlmServer]:
    server = LlmServer(answer, delay)
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", server.serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
