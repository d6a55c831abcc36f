"""The OpenAI-compatible server that agents reach the policy by, in the process that trains it.

It listens while an episode of an agent is open. Each episode has a key of its own, which ends with it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from aiohttp import web

from strop.environments.agents.endpoint import MODEL, Endpoint
from strop.gateway.agent_session import AgentSession
from strop.gateway.answer import Answer
from strop.gateway.bad_request import BadRequest, format_error
from strop.gateway.gateway_config import GatewayConfig
from strop.gateway.http_api import (
    Handler,
    answer_errors,
    bearer_key,
    list_models,
    open_stream,
    read_beside,
    read_json,
    send_event,
)
from strop.gateway.responses_api import ResponseAnswer, make_chat_body, number_events
from strop.safety.http_requests import refuse_request

KEEP_ALIVE_SECONDS = 15.0  # between the comments of a stream that waits for its completion
SESSION: web.RequestKey[AgentSession] = web.RequestKey("session", AgentSession)


class Gateway:
    """Serves the open episodes of one event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self._sessions: dict[str, AgentSession] = {}  # by a digest of the key, so that looking one up says nothing about it
        self._runner: web.AppRunner | None = None
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
        """Listen, unless it does already. Returns the base URL."""
        async with self._lock:
            if self._runner is None:
                runner = web.AppRunner(self._make_app(), handler_cancellation=True, shutdown_timeout=1.0, access_log=None)
                await runner.setup()
                try:
                    await web.TCPSite(runner, self.config.host, self.config.port).start()
                except OSError as error:
                    await runner.cleanup()
                    raise OSError(
                        f"the gateway cannot listen on {self.config.host}:{self.config.port}: {error.strerror}; set gateway.host and "
                        "gateway.port (0 takes a free port)"
                    ) from error
                self._runner = runner
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.config.host, self.config.host)
            host = f"[{host}]" if ":" in host else host
            return self.config.url or f"http://{host}:{self._runner.addresses[0][1]}/v1"

    async def _stop(self) -> None:
        """Stop listening when the last episode has ended."""
        async with self._lock:
            if self._users == 0 and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    def _make_app(self) -> web.Application:
        app = web.Application(
            middlewares=[answer_errors, self._find_session], client_max_size=int(self.config.max_body_mb * 2**20)
        )
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/responses", self._respond)
        return app

    @web.middleware
    async def _find_session(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        session = self._sessions.get(_digest(bearer_key(request)))
        if session is None:
            raise BadRequest(
                "the API key is missing or wrong, or its episode has ended: send Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )
        if (refused := refuse_request(request, self.config.host, has_key=True)) is not None:
            raise BadRequest(refused[1], status=refused[0])
        session.count_request()
        request[SESSION] = session
        task = asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        try:
            return await handler(request)
        finally:
            session.tasks.discard(task)

    async def _models(self, request: web.Request) -> web.Response:
        return list_models(request, request.match_info.get("name", MODEL), request[SESSION].max_length)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = request[SESSION]
        body = await read_json(request, self.config.body_timeout_s, "gateway.body_timeout_s")
        asked, encoded = await read_beside(
            request, lambda: session.read(body, is_chat=request.path.endswith("/chat/completions"))
        )
        answer = Answer(asked, model=_model_of(body), tokenizer=session.template.tokenizer)
        if not asked.stream:
            return web.json_response(answer.format_whole(*await session.complete(asked, encoded)))
        response = await open_stream(request)
        try:
            completions, replies = await _keep_alive(response, session.complete(asked, encoded))
            for index, (completion, reply) in enumerate(zip(completions, replies, strict=True)):
                for chunk in answer.format_parts(index, completion, reply):
                    await send_event(response, chunk)
            if asked.include_usage:
                await send_event(response, answer.format_usage(completions))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # the status is sent already
            await send_event(response, format_error(error))
        await send_event(response, "[DONE]")
        await response.write_eof()
        return response

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        session = request[SESSION]
        body = await read_json(request, self.config.body_timeout_s, "gateway.body_timeout_s")
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
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # the status is sent already
            failed = {"type": "error", "param": None, "code": None, "message": format_error(error)["error"]["message"]}
            for name, event in number_events(iter([failed]), sent):
                await send_event(response, event, name)
        await response.write_eof()
        return response


async def _keep_alive(response: web.StreamResponse, work: Any) -> Any:
    """Await the work, with a comment in the stream now and then, so that no client or proxy takes the connection for dead."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=KEEP_ALIVE_SECONDS))[0]:
            await response.write(b": waiting for the policy\n\n")
        return task.result()
    finally:
        task.cancel()


def _model_of(body: Any) -> str:
    """Return the name that the agent uses for the policy: any will do."""
    return str(body.get("model") or MODEL)


def _digest(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


_gateways: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Gateway]] = WeakKeyDictionary()


def get_gateway(config: GatewayConfig) -> Gateway:
    """Return the gateway of this event loop with this configuration."""
    return _gateways.setdefault(asyncio.get_running_loop(), {}).setdefault(repr(config), Gateway(config))
