"""The OpenAI-compatible server through which agents reach the policy, in the training process.

It listens while an agent's episode is open. Each episode has its own key, which expires with it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from strop.extensions.agents.endpoint import MODEL, Endpoint
from strop.extensions.agents.gateway.agent_session import AgentSession
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.extensions.agents.gateway.responses_api import ResponseAnswer, make_chat_body, number_events
from strop.extensions.serve.answer import Answer
from strop.extensions.serve.http_api import (
    add_routes,
    answer_error,
    format_error,
    list_models,
    open_stream,
    read_beside,
    send_event,
    stream_completions,
)
from strop.safety.http_server import Handler, bearer_key, check_sender, listening, make_app, make_local, parse_json, read_body
from strop.safety.site_guard import BadRequest

KEEP_ALIVE_SECONDS = 15.0  # between comments in a stream that waits for its completion
SESSION: web.RequestKey[AgentSession] = web.RequestKey("session", AgentSession)


class Gateway:
    """Serves the open episodes of one event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self._sessions: dict[str, AgentSession] = {}  # keyed by a digest of the key, so that timing reveals nothing
        self._listening = AsyncExitStack()
        self._address = ""
        self._lock = asyncio.Lock()
        self._users = 0

    @asynccontextmanager
    async def open(self, session: AgentSession) -> AsyncIterator[Endpoint]:
        """Serve an episode. Raises OSError if the gateway cannot listen."""
        key = f"sk-strop-{secrets.token_urlsafe(32)}"
        self._users += 1
        try:
            address = await self._start()
            self._sessions[_digest(key)] = session
            yield Endpoint(base_url=address, api_key=key)
        finally:
            self._sessions.pop(_digest(key), None)
            self._users -= 1
            await session.close()
            await self._stop()

    async def _start(self) -> str:
        """Start listening, unless it does already. Returns the base URL."""
        async with self._lock:
            if not self._address:
                place, settings = (self.config.host, self.config.port), "gateway.host or gateway.port (0 takes a free port)"
                server = listening(self._make_app(), place, settings=settings, shutdown_s=1.0)
                self._address = await self._listening.enter_async_context(server)
            return self.config.url or f"{make_local(self._address)}/v1"

    async def _stop(self) -> None:
        """Stop listening when the last episode has ended."""
        async with self._lock:
            if self._users == 0:
                self._address = ""
                await self._listening.aclose()

    def _make_app(self) -> web.Application:
        app = make_app(self._find_session, answer_error, max_body=int(self.config.max_body_mb * 2**20))
        app.middlewares.append(self._keep_task)
        add_routes(app, self._models, self._complete)
        app.router.add_post("/v1/responses", self._respond)
        return app

    def _find_session(self, request: web.Request) -> None:
        session = self._sessions.get(_digest(key := bearer_key(request)))
        if session is None:
            raise BadRequest(
                "the API key is missing or wrong, or its episode has ended: send Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )
        check_sender(request, self.config.host, key, key)  # the key is right
        session.count_request()
        request[SESSION] = session

    @web.middleware
    async def _keep_task(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        task, tasks = asyncio.current_task(), request[SESSION].tasks
        assert task is not None
        tasks.add(task)
        try:
            return await handler(request)
        finally:
            tasks.discard(task)

    async def _models(self, request: web.Request) -> web.Response:
        return list_models(request, request.match_info.get("name", MODEL), request[SESSION].max_length)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = request[SESSION]
        body = parse_json(await read_body(request, self.config.body_timeout_s, "gateway.body_timeout_s"))
        asked, encoded = await read_beside(
            request, lambda: session.read(body, is_chat=request.path.endswith("/chat/completions"))
        )
        answer = Answer(asked, model=_model_of(body), tokenizer=session.template.tokenizer)
        if not asked.stream:
            return web.json_response(answer.format_whole(*await session.complete(asked, encoded)))
        async with stream_completions(request) as response:
            completions, replies = await _keep_alive(response, session.complete(asked, encoded))
            for index, (completion, reply) in enumerate(zip(completions, replies, strict=True)):
                for chunk in answer.format_parts(index, completion, reply):
                    await send_event(response, chunk)
            if asked.include_usage:
                await send_event(response, answer.format_usage(completions))
        return response

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        session = request[SESSION]
        body = parse_json(await read_body(request, self.config.body_timeout_s, "gateway.body_timeout_s"))
        chat = make_chat_body(body, session.conversations)
        asked, encoded = await read_beside(request, lambda: session.read(chat, is_chat=True))
        answer = ResponseAnswer(body, chat, model=_model_of(body), prompt_tokens=len(asked.prompts[0]))
        if not asked.stream:
            (completion,), (reply,) = await session.complete(asked, encoded)
            answer.keep(reply, session.conversations)
            return web.json_response(answer.format_whole(completion, reply))
        response = await open_stream(request)
        sent = 0
        for name, event in number_events(answer.begin()):
            await send_event(response, event, name)
            sent += 1
        try:
            (completion,), (reply,) = await _keep_alive(response, session.complete(asked, encoded))
            answer.keep(reply, session.conversations)
            for name, event in number_events(answer.finish(completion, reply), sent):
                await send_event(response, event, name)
        except ConnectionError:  # the client went away
            raise
        except Exception as error:  # the status was already sent
            failed = {"type": "error", "param": None, "code": None, "message": format_error(error)["error"]["message"]}
            for name, event in number_events(iter([failed]), sent):
                await send_event(response, event, name)
        await response.write_eof()
        return response


async def _keep_alive(response: web.StreamResponse, work: Any) -> Any:
    """Await the work, sending occasional comments in the stream so that no client or proxy considers the connection dead."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=KEEP_ALIVE_SECONDS))[0]:
            await response.write(b": waiting for the policy\n\n")
        return task.result()
    finally:
        task.cancel()


def _model_of(body: Any) -> str:
    """Return the agent's name for the policy: any name works."""
    return str(body.get("model") or MODEL)


def _digest(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


_gateways: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Gateway]] = WeakKeyDictionary()


def get_gateway(config: GatewayConfig) -> Gateway:
    """Return the gateway of this event loop with this configuration."""
    return _gateways.setdefault(asyncio.get_running_loop(), {}).setdefault(repr(config), Gateway(config))
