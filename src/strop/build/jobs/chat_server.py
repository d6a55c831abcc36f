"""OpenAI's HTTP API over the torch engine: models, chat completions and completions, also streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from strop.gateway.answer import Answer
from strop.gateway.bad_request import BadRequest, format_error
from strop.gateway.completion_request import CompletionRequest, RequestReader
from strop.gateway.http_api import (
    MAX_BODY,
    Handler,
    answer_errors,
    bearer_key,
    check_key,
    list_models,
    open_stream,
    read_beside,
    read_json,
    send_event,
)
from strop.gateway.streamed_text import StreamedText
from strop.generation.base import Completion
from strop.generation.torch.torch_engine import TorchEngine
from strop.safety.http_requests import refuse_request
from strop.sampling import mix_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ChatServer:
    """Answers requests with completions of an engine, which batches them."""

    engine: TorchEngine
    reader: RequestReader
    api_key: str | None = None
    host: str = "127.0.0.1"  # that it listens on

    def make_app(self) -> web.Application:
        app = web.Application(middlewares=[answer_errors, self._check_sender], client_max_size=MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        return app

    @web.middleware
    async def _check_sender(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path == "/health":
            return await handler(request)
        if self.api_key is not None:
            check_key(bearer_key(request), self.api_key)
        if (refused := refuse_request(request, self.host, has_key=self.api_key is not None)) is not None:
            raise BadRequest(refused[1], status=refused[0])
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.failure is None else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return list_models(request, self.reader.model, self.reader.max_length)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request)
        asked = await read_beside(request, lambda: self.reader.read(body, is_chat=request.path.endswith("/chat/completions")))
        answer = Answer(asked, model=self.reader.model, tokenizer=self.reader.template.tokenizer)
        if asked.stream:
            return await self._stream(request, asked, answer)
        completions = await asyncio.gather(*(self._generate(asked, index) for index in range(answer.count)))
        return web.json_response(answer.format_whole(completions))

    async def _generate(
        self, asked: CompletionRequest, index: int, on_token: Callable[[int, float], object] | None = None
    ) -> Completion:
        prompt = asked.prompts[index // asked.choices]
        return await self.engine.generate(prompt, sampling=asked.sampling, seed=mix_seed(asked.seed, index), on_token=on_token)

    async def _stream(self, request: web.Request, asked: CompletionRequest, answer: Answer) -> web.StreamResponse:
        response = await open_stream(request)
        chunks: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        async def run(index: int) -> Completion:
            text = StreamedText(self.reader.template.tokenizer, asked.stop)

            def send(token: int, logprob: float) -> None:
                part = text.push(token)
                if part or asked.logprobs:
                    chunks.put_nowait(answer.format_part(index, part, [token], [logprob]))

            if asked.is_chat:
                chunks.put_nowait(answer.format_role(index))
            completion = await self._generate(asked, index, send)
            if rest := text.finish():
                chunks.put_nowait(answer.format_part(index, rest, [], []))
            chunks.put_nowait(answer.format_end(index, completion))
            return completion

        async def run_all() -> Sequence[Completion]:
            try:
                return await asyncio.gather(*(run(index) for index in range(answer.count)))
            finally:
                chunks.put_nowait(None)

        running = asyncio.create_task(run_all())
        try:
            while (chunk := await chunks.get()) is not None:
                await send_event(response, chunk)
            completions = await running
            if asked.include_usage:
                await send_event(response, answer.format_usage(completions))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:  # the status is sent already
            log.exception("a streamed request failed")
            await send_event(response, format_error(error))
        finally:
            running.cancel()
        await send_event(response, "[DONE]")
        await response.write_eof()
        return response
