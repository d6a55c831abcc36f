"""The HTTP server through which agents reach the policy: OpenAI's Chat Completions, Completions and Responses, Anthropic's Messages.

Each episode has its own key, which expires with it. The server runs in the training process or in one of its own
(``strop.extensions.agents.gateway.gateway``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from itertools import count
from typing import Any, Protocol

from aiohttp import web

from strop.extensions.agents.endpoint import MODEL
from strop.extensions.agents.gateway.agent_session import AgentSession
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.extensions.agents.gateway.messages_api import MessageAnswer, format_message_error
from strop.extensions.agents.gateway.messages_api import make_chat_body as read_messages_body
from strop.extensions.agents.gateway.responses_api import ResponseAnswer, format_response_error, make_chat_body
from strop.extensions.serve.answer import Answer
from strop.extensions.serve.http_api import (
    add_routes,
    answer_error,
    list_models,
    open_stream,
    read_beside,
    send_event,
    stream_completions,
)
from strop.safety.http_server import Handler, bearer_key, check_sender, listening, make_app, parse_json, read_body
from strop.safety.site_guard import BadRequest

KEEP_ALIVE_SECONDS = 15.0  # between comments in a stream that waits for its completion
RETRY_SECONDS = 1  # after which a refused request may be sent again
SESSION: web.RequestKey[AgentSession] = web.RequestKey("session", AgentSession)
MESSAGES = "/v1/messages"
BUSY = (429, 503, 529)  # statuses after which clients wait and try again; 529 is Anthropic's


class EventSource(Protocol):
    """Formats a streamed answer as events."""

    def begin(self) -> Iterator[dict[str, Any]]: ...

    def finish(self, completion: Any, reply: Any) -> Iterator[dict[str, Any]]: ...


class GatewayServer:
    """Answers the requests of open sessions."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self._sessions: dict[str, AgentSession] = {}  # keyed by a digest of the key, so that timing reveals nothing
        self._answering = 0  # requests

    @contextmanager
    def serving(self, key: str, session: AgentSession) -> Iterator[None]:
        """Serve a session to agents whose key has this digest."""
        self._sessions[key] = session
        try:
            yield
        finally:
            del self._sessions[key]

    @asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[str]:
        """Listen during the context. Yields the address. Raises OSError if the port is not available."""
        place, settings = (self.config.host, port), "gateway.host or gateway.port (0 takes a free port)"
        async with listening(self._make_app(), place, settings=settings, shutdown_s=1.0) as address:
            yield address

    def _make_app(self) -> web.Application:
        app = make_app(self._check, _answer_error, max_body=int(self.config.max_body_mb * 2**20))
        app.middlewares.append(self._keep_task)
        app.router.add_get("/health", self._health)
        add_routes(app, self._models, self._complete)
        app.router.add_post("/v1/responses", self._respond)
        app.router.add_post(MESSAGES, self._answer_message)
        app.router.add_post(f"{MESSAGES}/count_tokens", self._count_tokens)
        return app

    def _check(self, request: web.Request) -> None:
        if request.path == "/health":
            return
        key = request.headers.get("X-Api-Key", "") or bearer_key(request)
        session = self._sessions.get(digest_key(key))
        if session is None:
            raise BadRequest(
                "the API key is missing or wrong, or its episode has ended: send Authorization: Bearer KEY, or x-api-key: KEY",
                status=401,
                code="invalid_api_key",
            )
        check_sender(request, self.config.host, key, key)  # the key is right
        self._refuse_if_busy(request, session)
        session.count_request()
        request[SESSION] = session

    def _refuse_if_busy(self, request: web.Request, session: AgentSession) -> None:
        if len(session.tasks) >= self.config.max_concurrent:
            session.count_throttled()
            raise BadRequest(
                f"the episode has {len(session.tasks)} unanswered requests, the most that gateway.max_concurrent allows: wait and retry",
                status=429,
                code="rate_limit_exceeded",
            )
        if self._answering >= self.config.max_waiting:
            session.count_throttled()
            raise BadRequest(
                f"the gateway has {self._answering} unanswered requests, the most that gateway.max_waiting allows: wait and retry",
                status=529 if request.path.startswith(MESSAGES) else 503,
                code="overloaded",
            )

    @web.middleware
    async def _keep_task(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        session, task = request.get(SESSION), asyncio.current_task()
        if session is None or task is None:
            return await handler(request)
        session.tasks.add(task)
        self._answering += 1
        try:
            return await handler(request)
        finally:
            self._answering -= 1
            session.tasks.discard(task)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"sessions": len(self._sessions), "unanswered": self._answering})

    async def _models(self, request: web.Request) -> web.Response:
        return list_models(request, request.match_info.get("name", MODEL), request[SESSION].options.max_length)

    async def _read_body(self, request: web.Request) -> Any:
        return parse_json(await read_body(request, self.config.body_timeout_s, "gateway.body_timeout_s"))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session, body = request[SESSION], await self._read_body(request)
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
        session, body = request[SESSION], await self._read_body(request)
        chat = make_chat_body(body, session.conversations)
        asked, encoded = await read_beside(request, lambda: session.read(chat, is_chat=True))
        answer = ResponseAnswer(body, chat, model=_model_of(body), prompt_tokens=len(asked.prompts[0]))

        async def complete() -> tuple[Any, Any]:
            (completion,), (reply,) = await session.complete(asked, encoded)
            answer.keep(reply, session.conversations)
            return completion, reply

        if not asked.stream:
            return web.json_response(answer.format_whole(*await complete()))
        return await _stream_events(request, answer, complete, format_response_error, numbered=True)

    async def _answer_message(self, request: web.Request) -> web.StreamResponse:
        session, body = request[SESSION], await self._read_body(request)
        chat = read_messages_body(body)
        asked, encoded = await read_beside(request, lambda: session.read(chat, is_chat=True))
        answer = MessageAnswer(model=_model_of(body), prompt_tokens=len(asked.prompts[0]), stop=asked.stop)

        async def complete() -> tuple[Any, Any]:
            (completion,), (reply,) = await session.complete(asked, encoded)
            return completion, reply

        if not asked.stream:
            return web.json_response(answer.format_whole(*await complete()))
        return await _stream_events(request, answer, complete, format_message_error)

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session, chat = request[SESSION], read_messages_body(await self._read_body(request))
        return web.json_response({"input_tokens": await read_beside(request, lambda: session.count_tokens(chat))})


def _answer_error(error: Exception, request: web.Request) -> web.Response:
    """Answer with an error in the format of the API that was asked."""
    answer = answer_error(error, request)
    if request.path.startswith(MESSAGES):
        answer = web.json_response(format_message_error(error, answer.status), status=answer.status)
    if answer.status in BUSY:
        answer.headers["Retry-After"] = str(RETRY_SECONDS)
    return answer


async def _stream_events(
    request: web.Request,
    answer: EventSource,
    complete: Callable[[], Awaitable[tuple[Any, Any]]],
    describe_error: Callable[[Exception], dict[str, Any]],
    *,
    numbered: bool = False,
) -> web.StreamResponse:
    """Answer with named events."""
    response, sent = await open_stream(request), count()

    async def send(events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            number = {"sequence_number": next(sent)} if numbered else {}
            await send_event(response, {**event, **number}, event["type"])

    await send(answer.begin())
    try:
        completion, reply = await _keep_alive(response, complete())
        await send(answer.finish(completion, reply))
    except ConnectionError:  # the client went away
        raise
    except Exception as error:  # the status was already sent
        await send([describe_error(error)])
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


def digest_key(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
