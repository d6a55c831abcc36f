"""The server over the torch engine answers as OpenAI's API does: whole and streamed, alone and together."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from loop.tiny import build_tiny
from strop.base_config import validate_section
from strop.build.jobs.chat_server import ChatServer
from strop.build.models import load_policy
from strop.gateway.completion_request import RequestReader
from strop.gateway.streamed_text import StreamedText
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import make_torch_engine
from strop.learner.model_config import ModelConfig

KEY, NAME, LENGTH = "secret", "mine/tiny", 96
HELLO = [{"role": "user", "content": "1+1="}]


class Served:
    """A server in the event loop of another thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ready = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self.thread.start()
        self.ready.wait(60)

    async def _main(self) -> None:
        self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
        model = {
            "model_name": str(self.folder),
            "precision": "float32",
            "device": "cpu",
            "num_threads": 1,
            "tokenizer": {"name": str(self.folder)},
        }
        policy = load_policy(validate_section(ModelConfig, model))
        config = validate_section(TorchGenerationConfig, {"kv_cache_memory_gb": 0.01})
        self.engine = make_torch_engine(policy.network, policy.tokenizer, config, length=LENGTH, stop_ids=policy.stop_ids)
        self.engine.resume(0)
        server = ChatServer(self.engine, RequestReader(NAME, policy.template, LENGTH), KEY)
        runner = web.AppRunner(server.make_app(), handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self.ready.set()
        await self.stop.wait()
        await self.engine.close()
        await runner.cleanup()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(20)
        assert not self.thread.is_alive()

    def post(
        self, body: Any, *, path: str = "chat/completions", key: str = KEY, kind: str = "application/json"
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": kind}
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{self.address}/v1/{path}", data, headers)) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(build_tiny(tmp_path_factory.mktemp("served") / "tiny"))
    yield server
    server.close()


@pytest.fixture
def client(served: Served) -> Any:
    return pytest.importorskip("openai").OpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0)


def test_the_model_is_listed_and_answers_a_chat(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME
    answer = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=8, seed=1, n=3, temperature=1.0, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
    assert answer.usage.completion_tokens == sum(len(choice.logprobs.content) for choice in answer.choices)
    assert all(entry.logprob <= 0 for entry in answer.choices[0].logprobs.content)
    again = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=8, seed=1, n=3, temperature=1.0)
    assert [choice.message.content for choice in again.choices] == [choice.message.content for choice in answer.choices]


def test_a_stream_has_the_text_of_the_whole_answer(client: Any) -> None:
    options = {"model": NAME, "messages": HELLO, "max_tokens": 24, "seed": 5, "n": 2, "temperature": 1.0, "stop": ["7", "12"]}
    whole = client.chat.completions.create(**options)
    texts, reasons, usage = ["", ""], ["", ""], None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices] and not any(
        stop in text for text in texts for stop in ("7", "12")
    )
    assert reasons == [choice.finish_reason for choice in whole.choices] and usage == whole.usage


def test_plain_completions_are_answered_too(client: Any) -> None:
    answer = client.completions.create(model=NAME, prompt=["1+1=", "2+2="], max_tokens=4, temperature=0, logprobs=0)
    assert len(answer.choices) == 2 and len(answer.choices[0].logprobs.tokens) == len(answer.choices[0].logprobs.token_logprobs)
    streamed = client.completions.create(model=NAME, prompt="1+1=", max_tokens=4, temperature=0, stream=True)
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == answer.choices[0].text


def test_requests_at_the_same_time_are_batched_and_answered_as_alone(served: Served) -> None:
    bodies = [
        {"messages": [{"role": "user", "content": f"{n}+1="}], "max_tokens": 40, "seed": n, "temperature": 1.0} for n in range(12)
    ]
    alone = [served.post(body)[1]["choices"][0]["message"] for body in bodies]
    steps = served.engine.counters.decode_steps
    with ThreadPoolExecutor(12) as pool:
        together = [answer["choices"][0]["message"] for _, answer in pool.map(served.post, bodies)]
    assert together == alone
    assert served.engine.counters.decode_steps - steps < steps


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "messages must be a list of at least one message"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content must be a text"),
        ({"messages": HELLO, "model": "other"}, 404, f"this server has '{NAME}'"),
        ({"messages": HELLO, "temperature": "hot"}, 400, "temperature must be a number; found 'hot'"),
        ({"messages": HELLO, "temperature": 3}, 400, "temperature must be between 0 and 2"),
        ({"messages": HELLO, "n": 0}, 400, "n must be between 1 and 128"),
        ({"messages": HELLO, "max_tokens": 1.5}, 400, "max_tokens must be a whole number"),
        ({"messages": HELLO, "tools": [{}]}, 400, "tools is not supported by the torch engine"),
        ({"messages": [{"role": "user", "content": "1" * 200}]}, 400, f"the server allows {LENGTH}"),
        (b"{", 400, "the body is not valid JSON"),
        ([], 400, "the request must be a JSON object"),
    ],
)
def test_a_bad_request_is_answered_with_the_reason(served: Served, body: Any, status: int, said: str) -> None:
    code, answer = served.post(body)
    assert code == status and said in answer["error"]["message"] and answer["error"]["type"] == "invalid_request_error"


def test_only_requests_with_the_key_and_as_json_are_answered(served: Served) -> None:
    code, answer = served.post({"messages": HELLO}, key="wrong")
    assert code == 401 and answer["error"]["code"] == "invalid_api_key"
    assert served.post({"messages": HELLO}, kind="text/plain")[0] == 415
    assert served.post({}, path="embeddings")[0] == 404
    with urllib.request.urlopen(f"{served.address}/health") as answer:
        assert answer.status == 200


def test_a_client_that_goes_away_frees_its_slots(client: Any, served: Served) -> None:
    stream = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=90, n=8, stream=True, temperature=1.0)
    next(iter(stream))
    stream.close()
    assert served.post({"messages": HELLO, "max_tokens": 2})[0] == 200


@pytest.mark.parametrize("text", ["a stop in the middle", "half a sto", "an umlaut ä and 漢字 and 🙂 end", "st st sto stop"])
def test_streamed_text_is_whole_characters_before_the_stop(text: str) -> None:
    class Bytes:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode(errors="replace")

    stream = StreamedText(Bytes(), ("stop",))
    parts = [stream.push(token) for token in text.encode()] + [stream.finish()]
    assert "".join(parts) == text.partition("stop")[0] and "\ufffd" not in "".join(parts)
