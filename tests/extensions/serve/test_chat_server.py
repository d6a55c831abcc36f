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

from loop.tiny import build_tiny
from strop.base_config import validate_section
from strop.extensions.serve.chat_server import ChatServer
from strop.extensions.serve.completion_request import RequestReader
from strop.extensions.serve.streamed_text import StreamedText
from strop.generation.torch.torch_config import TorchGenerationConfig
from strop.generation.torch.torch_engine import make_torch_engine
from strop.learner.model_config import ModelConfig
from strop.runs.models import load_policy
from strop.safety.http_server import listening
from support.hostile_bodies import REFUSED, send

KEY, NAME, LENGTH = "secret", "mine/tiny", 96
HELLO = [{"role": "user", "content": "1+1="}]


class Served:
    """A server in the event loop of another thread."""

    def __init__(self, folder: Path, key: str | None = KEY) -> None:
        self.folder, self.key = folder, key
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
        server = ChatServer(self.engine, RequestReader(NAME, policy.template, LENGTH), self.key)
        async with listening(server.make_app(), ("127.0.0.1", 0), shutdown_s=1) as self.address:
            self.ready.set()
            await self.stop.wait()
            await self.engine.close()

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


def still_answers(served: Served) -> None:
    assert served.post({"messages": HELLO, "max_tokens": 2})[0] == 200
    assert served.engine.failure is None
    with urllib.request.urlopen(f"{served.address}/health") as answer:
        assert answer.status == 200


def test_no_request_in_valid_json_stops_the_server(served: Served) -> None:
    for path, body in REFUSED:
        status, answer = served.post(body, path=path)
        assert 400 <= status < 500 and answer["error"]["type"] == "invalid_request_error", (path, body, answer)
    still_answers(served)


def test_a_prompt_that_is_too_long_however_it_is_read_is_refused_before_it_is_tokenized(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader_of = RequestReader._encode_messages
    tokenized: list[int] = []
    monkeypatch.setattr(RequestReader, "_encode_messages", lambda *given: (tokenized.append(1), reader_of(*given))[1])
    long = "1" * (64 * LENGTH)
    for body in (
        {"messages": [{"role": "user", "content": long}]},
        {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": long}]}]},
    ):
        status, answer = served.post(body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "characters" in answer["error"]["message"]
    assert served.post({"prompt": [long, "1"]}, path="completions")[1]["error"]["code"] == "context_length_exceeded"
    assert not tokenized
    still_answers(served)


def test_a_large_prompt_is_tokenized_beside_the_other_requests(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = RequestReader._encode_messages

    def record(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return encode(*given)

    monkeypatch.setattr(RequestReader, "_encode_messages", record)
    served.post({"messages": HELLO, "max_tokens": 1})
    served.post({"messages": HELLO, "max_tokens": 1, "user": "x" * 2**17})
    assert threads[0] == served.thread.name and threads[1] != served.thread.name


SAME = {"Origin": "{address}", "Sec-Fetch-Site": "same-origin"}
FOREIGN: list[tuple[dict[str, str], int]] = [
    ({"Host": "evil.example"}, 421), ({"Host": "evil.example:{port}"}, 421), ({"Host": "127.0.0.1"}, 421), ({"Host": ""}, 421),
    ({"Origin": "http://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Origin": "http://127.0.0.1:1"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403), ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Content-Type": "text/plain"}, 415), ({"Content-Type": "application/x-www-form-urlencoded"}, 415), ({"Content-Type": ""}, 415),
]  # fmt: skip


def test_without_a_key_no_web_page_and_no_rebound_name_uses_the_server(served: Served) -> None:
    open_to_all = Served(served.folder, key=None)
    body = {"messages": HELLO, "max_tokens": 1}
    port = open_to_all.address.rpartition(":")[2]
    try:
        for headers, status in FOREIGN:
            given = {name: value.format(port=port) for name, value in headers.items()}
            assert send(open_to_all.address, "/v1/chat/completions", body, given)[0] == status, headers
            if status != 415:
                assert send(open_to_all.address, "/v1/models", b"", given, "GET")[0] == status, headers
        for headers in ({}, {"Host": f"localhost:{port}"}, SAME):
            given = {name: value.format(address=open_to_all.address) for name, value in headers.items()}
            assert send(open_to_all.address, "/v1/chat/completions", body, given)[0] == 200, headers
    finally:
        open_to_all.close()


def test_behind_a_key_another_name_may_lead_to_the_server_and_no_other_site(served: Served) -> None:
    body, key = {"messages": HELLO, "max_tokens": 1}, {"Authorization": f"Bearer {KEY}"}
    assert send(served.address, "/v1/chat/completions", body, {**key, "Host": "models.example"})[0] == 200
    assert send(served.address, "/v1/chat/completions", body, {**key, "Origin": "http://evil.example"})[0] == 403


@pytest.mark.parametrize("text", ["a stop in the middle", "half a sto", "an umlaut ä and 漢字 and 🙂 end", "st st sto stop"])
def test_streamed_text_is_whole_characters_before_the_stop(text: str) -> None:
    class Bytes:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode(errors="replace")

    stream = StreamedText(Bytes(), ("stop",))
    parts = [stream.push(token) for token in text.encode()] + [stream.finish()]
    assert "".join(parts) == text.partition("stop")[0] and "\ufffd" not in "".join(parts)
