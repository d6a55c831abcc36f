"""The client of OpenAI-compatible endpoints against a server that answers, fails and throttles."""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import time

import pytest

from strop.endings import Ending
from strop.environments.base import EnvironmentConfigError
from strop.extensions.judges import llm_client
from strop.extensions.judges.llm_client import LlmClient, LlmError, get_llm_client, read_retry_after
from strop.extensions.judges.llm_endpoint import LlmEndpoint, make_endpoint
from strop.types import Message, ToolCall, system, user
from support.llm_server import llm_server

QUESTION = (system("Judge."), user("What is 1 + 1 ?"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(llm_client, "FIRST_BACKOFF_S", 0.01)


def ask(client, *questions, **sampling):
    async def all_of_them():
        return await asyncio.gather(*(client.complete(each, **sampling) for each in questions or (QUESTION,)))

    return asyncio.run(all_of_them())


def test_a_question_is_asked_and_its_tokens_and_costs_are_counted():
    with llm_server(lambda request, number: "It is 2") as server:
        client = LlmClient(LlmEndpoint(base_url=server.base_url, model="m", input_price=2.0, output_price=10.0))
        (reply,) = ask(client, temperature=0.5, seed=7, top_p=0.9)
    assert (reply.text, reply.input_tokens, reply.output_tokens) == ("It is 2", 7, 3)
    assert reply.cost == pytest.approx((7 * 2 + 3 * 10) / 1e6) == client.usage.cost
    assert (client.usage.replies, client.usage.input_tokens, client.usage.failures) == (1, 7, 0)
    (request,) = server.requests
    assert request["messages"] == [{"role": "system", "content": "Judge."}, {"role": "user", "content": "What is 1 + 1 ?"}]
    assert (request["temperature"], request["seed"], request["top_p"], request["model"]) == (0.5, 7, 0.9, "m")


def test_the_key_comes_from_the_environment_and_is_in_no_message_or_log(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", "sk-hidden-123")
    caplog.set_level(logging.DEBUG)
    with llm_server(lambda request, number: (401, {}, "bad key: sk-hidden-123")) as server:
        client = LlmClient(LlmEndpoint(base_url=server.base_url, model="m", api_key_env="JUDGE_KEY"))
        with pytest.raises(LlmError, match=r"401.*redacted.*api_key_env") as caught:
            ask(client)
    assert server.headers[0]["Authorization"] == "Bearer sk-hidden-123" and len(server.requests) == 1
    assert "sk-hidden" not in f"{caught.value} {caplog.text} {client.endpoint}"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(EnvironmentConfigError, match="JUDGE_KEY, which is not set"):
        LlmClient(LlmEndpoint(base_url=server.base_url, model="m", api_key_env="JUDGE_KEY"))
    with pytest.raises(EnvironmentConfigError) as caught:
        LlmEndpoint(base_url="http://x", model="m", api_key_env="sk-hidden-123")
    assert "sk-hidden" not in str(caught.value)


def test_what_may_pass_is_asked_again_and_what_may_not_is_not():
    statuses = [(500, {}, "oops"), (429, {"Retry-After": "0.05"}, "slow down"), (200, {}, "not json"), (503, {}, "")]
    with llm_server(lambda request, number: statuses[number] if number < 4 else "yes") as server:
        client = LlmClient(LlmEndpoint(base_url=server.base_url, model="m"))
        (reply,) = ask(client)
    assert (reply.text, reply.retries, client.usage.retries, len(server.requests)) == ("yes", 4, 4, 5)
    for refused in (
        (400, {}, "no such field"),
        (404, {}, ""),
        (429, {}, '{"code": "insufficient_quota"}'),
        (302, {"Location": "/x"}, ""),
    ):
        with llm_server(lambda request, number, refused=refused: refused) as server:
            with pytest.raises(LlmError, match=f"refused: status {refused[0]}") as caught:
                ask(LlmClient(LlmEndpoint(base_url=server.base_url, model="m")))
            assert caught.value.ending == (Ending.PROVIDER_LIMIT if refused[0] == 429 else Ending.SERVICE)
            assert len(server.requests) == 1


def test_a_server_that_stays_broken_silent_or_away_is_an_error_that_says_so():
    with llm_server(lambda request, number: (500, {}, "out of memory")) as server:
        client = LlmClient(LlmEndpoint(base_url=server.base_url, model="m", max_retries=2))
        with pytest.raises(LlmError, match="out of memory; 3 attempts failed"):
            ask(client)
        assert client.usage.failures == 1 and len(server.requests) == 3
    with pytest.raises(LlmError, match="gave no reply: Client") as caught:
        ask(LlmClient(LlmEndpoint(base_url=server.base_url, model="m", max_retries=1)))
    assert caught.value.ending == Ending.SERVICE
    with llm_server(lambda request, number: "late", delay=1.0) as server, pytest.raises(LlmError, match=r"timeout_s \(0.1 s\)"):
        ask(LlmClient(LlmEndpoint(base_url=server.base_url, model="m", max_retries=0, timeout_s=0.1)))
    tomorrow = (429, {"Retry-After": "3600"}, "tomorrow")
    with (
        llm_server(lambda request, number: tomorrow) as server,
        pytest.raises(LlmError, match="3600 s, which is more than max_backoff_s") as caught,
    ):
        ask(LlmClient(LlmEndpoint(base_url=server.base_url, model="m")))
    assert caught.value.ending == Ending.PROVIDER_LIMIT


def test_a_server_that_asks_to_wait_is_left_alone_by_everybody():
    times = []

    def answer(request, number):
        times.append(time.monotonic())
        return (429, {"retry-after-ms": "300"}, "") if number == 0 else "yes"

    with llm_server(answer) as server:
        client = LlmClient(LlmEndpoint(base_url=server.base_url, model="m", concurrency=1))
        ask(client, *((user(f"question {number}"),) for number in range(3)))
    assert times[1] - times[0] >= 0.29


def test_retry_after_is_read_in_seconds_milliseconds_and_as_a_date():
    assert read_retry_after({"retry-after-ms": "1500", "Retry-After": "9"}) == 1.5
    assert read_retry_after({"Retry-After": "9"}) == 9.0
    assert 25 < (read_retry_after({"Retry-After": email.utils.formatdate(time.time() + 30, usegmt=True)}) or 0) <= 30
    assert read_retry_after({"Retry-After": "soon"}) is None and read_retry_after({}) is None


def test_no_more_requests_are_in_flight_than_the_concurrency_allows():
    with llm_server(lambda request, number: "yes", delay=0.02) as server:
        client = LlmClient(LlmEndpoint(base_url=server.base_url, model="m", concurrency=3))
        ask(client, *((user(f"question {number}"),) for number in range(12)))
    assert server.most_at_once == 3 and len(server.requests) == 12


def test_the_same_question_is_asked_once_also_at_the_same_time():
    with llm_server(lambda request, number: f"reply {number}", delay=0.05) as server:
        client = LlmClient(LlmEndpoint(base_url=server.base_url, model="m", output_price=1.0))
        first = ask(client, QUESTION, QUESTION, QUESTION)
        (again,) = ask(client, QUESTION)
        assert {reply.text for reply in (*first, again)} == {"reply 0"} and again.cached and again.cost == 0
        assert len(server.requests) == 1 and client.usage.cached == 3
        (other,) = ask(client, QUESTION, sample=1)
        (warmer,) = ask(client, QUESTION, temperature=1.0)
        assert (other.text, warmer.text) == ("reply 1", "reply 2")
        off = LlmClient(LlmEndpoint(base_url=server.base_url, model="m", cache="off"))
        assert [reply.text for reply in (*ask(off), *ask(off))] == ["reply 3", "reply 4"]


def test_replies_on_disk_outlive_the_process_and_a_broken_file_is_asked_again(tmp_path, caplog):
    with llm_server(lambda request, number: f"reply {number}") as server:
        endpoint = LlmEndpoint(base_url=server.base_url, model="m", cache="disk", cache_dir=str(tmp_path))
        assert ask(LlmClient(endpoint))[0].text == "reply 0"
        later = ask(LlmClient(endpoint))[0]
        assert (later.text, later.cached, later.input_tokens) == ("reply 0", True, 7)
        (file,) = tmp_path.glob("*/*.json")
        assert set(json.loads(file.read_text())) == {"text", "finish_reason", "input_tokens", "output_tokens"}
        file.write_text("{")
        assert ask(LlmClient(endpoint))[0].text == "reply 1" and "cannot be read" in caplog.text


def test_a_failure_is_not_cached():
    with llm_server(lambda request, number: (500, {}, "") if number == 0 else "yes") as server:
        client = LlmClient(LlmEndpoint(base_url=server.base_url, model="m", max_retries=0))
        with pytest.raises(LlmError):
            ask(client)
        assert ask(client)[0].text == "yes"


def test_a_caller_that_gives_up_does_not_take_the_reply_from_others():
    async def give_up(client):
        impatient = asyncio.ensure_future(client.complete(QUESTION))
        patient = asyncio.ensure_future(client.complete(QUESTION))
        await asyncio.sleep(0.05)
        impatient.cancel()
        return await patient

    with llm_server(lambda request, number: "yes", delay=0.2) as server:
        assert asyncio.run(give_up(LlmClient(LlmEndpoint(base_url=server.base_url, model="m")))).text == "yes"
        assert len(server.requests) == 1


def test_one_process_has_one_client_of_an_endpoint_for_all_event_loops():
    with llm_server(lambda request, number: "yes") as server:
        first, second = (get_llm_client(LlmEndpoint(base_url=server.base_url, model="m")) for _ in range(2))
        assert first is second and get_llm_client(LlmEndpoint(base_url=server.base_url, model="other")) is not first
        assert [ask(first)[0].text, ask(second)[0].text] == ["yes", "yes"] and len(server.requests) == 1


def test_tool_calls_are_written_as_the_api_reads_them():
    call = Message("assistant", "", tool_calls=(ToolCall("add", {"a": 1}, "c1"),), reasoning="hm")
    with llm_server(lambda request, number: "yes") as server:
        ask(
            LlmClient(LlmEndpoint(base_url=server.base_url, model="m")),
            (user("1?"), call, Message("tool", "2", tool_call_id="c1")),
        )
    written = server.requests[0]["messages"]
    assert (
        written[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        and "reasoning_content" not in written[1]
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"base_url": "localhost:8000", "model": "m"}, "base_url is 'localhost:8000'"),
        ({"base_url": "http://x"}, "needs model"),
        ({"base_url": "http://x", "model": "m", "concurency": 3}, "did you mean 'concurrency'"),
        ({"base_url": "http://x", "model": "m", "concurrency": 0}, "at least 1"),
        ({"base_url": "http://x", "model": "m", "timeout_s": "3"}, "a positive number"),
        ({"base_url": "http://x", "model": "m", "cache": "disk"}, "cache_dir"),
        ({"base_url": "http://x", "model": "m", "cache": "ram"}, "memory, disk or off"),
        ({"base_url": "http://x", "model": "m", "input_price": -1}, "price"),
    ],
)
def test_an_endpoint_that_cannot_work_is_refused(options, says):
    with pytest.raises(EnvironmentConfigError, match=says):
        make_endpoint(options)
