"""OpenAI's HTTP API over the torch engine: models, chat completions and completions, with streaming."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from strop.extensions.serve.answer import Answer
from strop.extensions.serve.completion_request import CompletionRequest, RequestReader
from strop.extensions.serve.http_api import (
    MAX_BODY,
    add_routes,
    answer_error,
    list_models,
    read_beside,
    send_event,
    stream_completions,
)
from strop.extensions.serve.streamed_text import StreamedText
from strop.generation.base import Completion
from strop.generation.torch.torch_engine import TorchEngine
from strop.safety.http_server import bearer_key, check_sender, make_app, parse_json, read_body
from strop.sampling import mix_seed


@dataclass(frozen=True, eq=False)
class ChatServer:
    """Answers requests with completions of an engine, which batches them."""

    engine: TorchEngine
    reader: RequestReader
    api_key: str | None = None
    host: str = "127.0.0.1"  # that it listens on

    def make_app(self) -> web.Application:
        app = make_app(self._check, answer_error, max_body=MAX_BODY)
        app.router.add_get("/health", self._health)
        add_routes(app, self._models, self._complete)
        return app

    def _check(self, request: web.Request) -> None:
        if request.path != "/health":
            check_sender(request, self.host, self.api_key, bearer_key(request))

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.failure is None else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return list_models(request, self.reader.model, self.reader.max_length)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = parse_json(await read_body(request))
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

        async with stream_completions(request) as response:
            running = asyncio.create_task(run_all())
            try:
                while (chunk := await chunks.get()) is not None:
                    await send_event(response, chunk)
                completions = await running
                if asked.include_usage:
                    await send_event(response, answer.format_usage(completions))
            finally:
                running.cancel()
        return response
