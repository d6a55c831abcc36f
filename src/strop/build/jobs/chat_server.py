"""OpenAI's HTTP API over the torch engine: models, chat completions and completions, also streamed."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from strop.build.jobs.completion_request import BadRequest, CompletionRequest, RequestReader
from strop.build.jobs.streamed_text import StreamedText, cut_at_stop
from strop.generation.base import Completion
from strop.generation.torch.torch_engine import TorchEngine
from strop.sampling import mix_seed

log = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20  # bytes
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, eq=False)
class ChatServer:
    """Answers requests with completions of an engine, which batches them."""

    engine: TorchEngine
    reader: RequestReader
    api_key: str | None = None

    def make_app(self) -> web.Application:
        app = web.Application(middlewares=[self._answer_errors], client_max_size=MAX_BODY)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        return app

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and turn every error into OpenAI's JSON."""
        try:
            self._check_key(request)
            return await handler(request)
        except BadRequest as error:
            return web.json_response(format_error(error), status=error.status)
        except web.HTTPException as error:
            return web.json_response(
                format_error(BadRequest(f"{request.method} {request.path}: {error.reason}", status=error.status)),
                status=error.status,
            )
        except Exception as error:
            log.exception("a request failed")
            return web.json_response(format_error(error), status=500)

    def _check_key(self, request: web.Request) -> None:
        expected = "" if self.api_key is None else f"Bearer {self.api_key}"
        given = request.headers.get("Authorization", "")
        if expected and request.path != "/health" and not hmac.compare_digest(given.encode(), expected.encode()):
            raise BadRequest(
                "the API key is missing or wrong: send Authorization: Bearer KEY", status=401, code="invalid_api_key"
            )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.engine.failure is None else 503)

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self.reader.model,
            "object": "model",
            "created": 0,
            "owned_by": "strop",
            "max_model_len": self.reader.max_length,
        }
        name = request.match_info.get("name")
        if name not in (None, self.reader.model):
            raise BadRequest(f"the model {name!r} does not exist", "model", status=404, code="model_not_found")
        return web.json_response({"object": "list", "data": [model]} if name is None else model)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if request.content_type != "application/json":  # what a web page may send to this machine without being asked
            raise BadRequest(f"the content type must be application/json; found {request.content_type}", status=415)
        try:
            body = await request.json()
        except (ValueError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is not valid JSON: {error}") from error
        asked = self.reader.read(body, is_chat=request.path.endswith("/chat/completions"))
        answer = _Answer(self.reader, asked)
        if asked.stream:
            return await self._stream(request, asked, answer)
        completions = await asyncio.gather(*(self._generate(asked, index) for index in range(answer.count)))
        return web.json_response(answer.format_whole(completions))

    async def _generate(
        self, asked: CompletionRequest, index: int, on_token: Callable[[int, float], object] | None = None
    ) -> Completion:
        prompt = asked.prompts[index // asked.choices]
        return await self.engine.generate(prompt, sampling=asked.sampling, seed=mix_seed(asked.seed, index), on_token=on_token)

    async def _stream(self, request: web.Request, asked: CompletionRequest, answer: _Answer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
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
                await _send(response, json.dumps(chunk))
            completions = await running
            if asked.include_usage:
                await _send(response, json.dumps(answer.format_usage(completions)))
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:  # the status is sent already
            log.exception("a streamed request failed")
            await _send(response, json.dumps(format_error(error)))
        finally:
            running.cancel()
        await _send(response, "[DONE]")
        await response.write_eof()
        return response


class _Answer:
    """Formats what OpenAI's API returns for one request."""

    def __init__(self, reader: RequestReader, asked: CompletionRequest) -> None:
        self.asked = asked
        self.tokenizer = reader.template.tokenizer
        self.count = len(asked.prompts) * asked.choices
        self.kind = "chat.completion" if asked.is_chat else "text_completion"
        prefix = "chatcmpl" if asked.is_chat else "cmpl"
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": reader.model}

    def format_whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        choices = [self._format_choice(index, completion) for index, completion in enumerate(completions)]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self._count_tokens(completions)}

    def format_role(self, index: int) -> dict[str, Any]:
        return self._chunk(
            [{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}]
        )

    def format_part(self, index: int, text: str, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        content = {"delta": {"content": text}} if self.asked.is_chat else {"text": text}
        return self._chunk(
            [{"index": index, **content, "logprobs": self._format_logprobs(tokens, logprobs), "finish_reason": None}]
        )

    def format_end(self, index: int, completion: Completion) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {}} if self.asked.is_chat else {"text": ""}
        return self._chunk([{"index": index, **content, "logprobs": None, "finish_reason": _finish_reason(completion)}])

    def format_usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": self._count_tokens(completions)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": "chat.completion.chunk" if self.asked.is_chat else self.kind, "choices": choices}

    def _format_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        text = cut_at_stop(completion.text, self.asked.stop)
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.asked.is_chat else {"text": text}
        logprobs = self._format_logprobs(completion.tokens.tolist(), completion.logprobs.tolist())
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": _finish_reason(completion)}

    def _format_logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        texts = [self.tokenizer.decode([token]) for token in tokens]
        if not self.asked.is_chat:
            return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": []}
        pairs = zip(texts, logprobs, strict=True)
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
            ]
        }

    def _count_tokens(self, completions: Sequence[Completion]) -> dict[str, int]:
        prompt, sampled = sum(map(len, self.asked.prompts)), sum(len(completion.tokens) for completion in completions)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def format_error(error: Exception) -> dict[str, Any]:
    """Return an error as OpenAI's API does. What failed inside the server is not told to the client."""
    if isinstance(error, BadRequest):
        kind = "authentication_error" if error.status == 401 else "invalid_request_error"
        return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}
    return {"error": {"message": "the server failed; its log says why", "type": "server_error", "param": None, "code": None}}


def _finish_reason(completion: Completion) -> str:
    return "stop" if completion.stopped else "length"


async def _send(response: web.StreamResponse, data: str) -> None:
    await response.write(f"data: {data}\n\n".encode())
