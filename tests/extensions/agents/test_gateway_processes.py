"""The gateway in processes of its own: the same rollouts as in the training process, back-pressure, health, and a process that dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
import torch

from strop.base_config import validate_section
from strop.endings import Ending
from strop.extensions.agents.gateway.gateway import Gateway, get_gateway
from strop.extensions.agents.gateway.gateway_config import GatewayConfig
from strop.generation.base import RequestTooLong
from strop.models.routing.router_config import ROUTES
from strop.types import Rollout
from support.agents import Recorder, check_tree, play_async


def work(task: Any, endpoint: Any) -> float:
    """Plan, retry, go on, let a sub-agent look, compact: through both APIs."""
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    other = anthropic.Anthropic(base_url=endpoint.environ["ANTHROPIC_BASE_URL"], api_key=endpoint.api_key, max_retries=0)

    def ask(messages: list[Any]) -> str:
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content

    first = [{"role": "user", "content": "Plan."}]
    plan = ask(first)
    ask(first)
    talk: Any = [*first, {"role": "assistant", "content": plan}, {"role": "user", "content": "Do it."}]
    done = other.messages.create(model="m", max_tokens=50, messages=talk).content[0].text  # type: ignore[union-attr]
    other.messages.create(model="m", max_tokens=50, system="You help.", messages=[{"role": "user", "content": "Look."}])
    ask([{"role": "user", "content": f"Summary: {done}"}])
    return float(ask([*talk, {"role": "assistant", "content": done}, {"role": "user", "content": "Last."}]) != "")


class Routed(Recorder):
    """Records which experts read each token, as an engine of a mixture does."""

    async def generate(self, prompt: Any, **options: Any) -> Any:
        completion = await super().generate(prompt, **options)
        read = len(prompt) + len(completion.tokens) - 1
        completion.columns[ROUTES] = torch.arange(read, dtype=torch.int16)[:, None, None]  # type: ignore[index]
        return completion


def equal_turns(one: Rollout, other: Rollout) -> bool:
    pairs = list(zip(one.policy_turns, other.policy_turns, strict=True))
    return all(
        torch.equal(left.tokens, right.tokens)
        and torch.equal(left.logprobs, right.logprobs)
        and torch.equal(left.columns[ROUTES], right.columns[ROUTES])
        and (left.text, left.opening, left.num_messages) == (right.text, right.opening, right.num_messages)
        for left, right in pairs
    )


def run_with_process(run: Callable[[Any], Awaitable[None]], **keys: Any) -> None:
    """Run with a gateway whose one process stays between episodes."""

    async def main() -> None:
        gateway = get_gateway(validate_section(GatewayConfig, {"processes": 1, **keys}))
        async with gateway.held():
            await run(gateway)

    asyncio.run(main())


@pytest.mark.slow
def test_a_process_gives_the_rollouts_of_the_training_process_and_its_death_only_ends_its_episodes() -> None:
    async def run(gateway: Any) -> None:
        there, here = Routed(), Routed()
        own = await play_async(work, there, environment={}, gateway={"processes": 1})
        same = await play_async(work, here, environment={}, gateway={"processes": 0})
        assert own.error is None and own.reward == 1.0 and own.messages == same.messages and own.metrics == same.metrics
        assert equal_turns(own, same) and torch.equal(own.prompt, same.prompt)
        assert [(each.parent, each.start) for each in own.branches] == [(each.parent, each.start) for each in same.branches]
        check_tree(own, there.sampled)
        assert len(own.branches) == 3 and own.ending is Ending.STOP
        await refuse(gateway)
        await fail()
        await kill(gateway)

    run_with_process(run)


async def refuse(gateway: Any) -> None:
    """What an engine cannot serve is the agent's error there too; a retry with a shorter history goes on."""

    class Short(Recorder):
        async def generate(self, prompt: Any, **options: Any) -> Any:
            if len(prompt) > 60:
                raise RequestTooLong("the prompt does not fit")
            return await super().generate(prompt, **options)

    def agent(task: Any, endpoint: Any) -> float:
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
        with pytest.raises(openai.BadRequestError, match="does not fit"):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 99}])
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        with urllib.request.urlopen(endpoint.base_url.removesuffix("/v1") + "/health") as answer:
            assert json.load(answer) == {"sessions": 1, "unanswered": 0}
        return 0.5

    rollout = await play_async(agent, Short(), environment={}, gateway={"processes": 1})
    assert rollout.error is None and rollout.reward == 0.5 and rollout.metrics["gateway/refused"] == 1


async def fail() -> None:
    """The error of an engine is the rollout's, with its own type and text."""

    class Broken(Recorder):
        async def generate(self, prompt: Any, **options: Any) -> Any:
            raise RuntimeError("the engine is gone")

    rollout = await play_async(work, Broken(), environment={}, gateway={"processes": 1})
    assert rollout.error == "RuntimeError: the engine is gone" and rollout.ending is Ending.ENGINE


async def kill(gateway: Any) -> None:
    """An episode whose process is killed ends by its cause, at once; one elsewhere and one that comes later are not touched."""
    asked = asyncio.Event()

    class Slow(Recorder):
        async def generate(self, prompt: Any, **options: Any) -> Any:
            asked.set()
            await asyncio.sleep(60)
            return await super().generate(prompt, **options)

    lost = asyncio.ensure_future(play_async(work, Slow(), environment={}, gateway={"processes": 1}))
    await asked.wait()
    pid = gateway.processes[0].pid
    os.kill(pid, signal.SIGKILL)
    elsewhere = await play_async(work, environment={}, gateway={"processes": 0})
    async with asyncio.timeout(10):
        rollout = await lost
    assert rollout.ending is Ending.SERVICE and not rollout.counts
    assert f"process {pid} was ended by SIGKILL" in str(rollout.error)
    later = await play_async(work, environment={}, gateway={"processes": 1})
    assert elsewhere.reward == later.reward == 1.0 and gateway.processes[0].pid not in (None, pid)


def post(endpoint: Any, path: str) -> tuple[int, Any, str | None]:
    body = json.dumps({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(endpoint.base_url + path, body, headers)) as answer:
            return answer.status, json.load(answer), None
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), error.headers["Retry-After"]


@pytest.mark.parametrize(("limit", "statuses"), [("max_concurrent", (429, 429)), ("max_waiting", (503, 529))])
def test_more_requests_than_a_session_or_a_process_may_have_are_told_to_wait(limit: str, statuses: tuple[int, int]) -> None:
    refused = asyncio.Event()

    class Waiting(Recorder):
        async def generate(self, prompt: Any, **options: Any) -> Any:
            await refused.wait()
            return await super().generate(prompt, **options)

    async def agent(task: Any, endpoint: Any) -> float:
        first = asyncio.ensure_future(asyncio.to_thread(post, endpoint, "/chat/completions"))
        await asyncio.sleep(0.3)
        status, body, after = await asyncio.to_thread(post, endpoint, "/chat/completions")
        assert (status, after) == (statuses[0], "1") and f"gateway.{limit} allows" in body["error"]["message"]
        status, body, after = await asyncio.to_thread(post, endpoint, "/messages")
        assert (status, after) == (statuses[1], "1") and body["error"]["type"] in ("rate_limit_error", "overloaded_error")
        refused.set()
        assert (await first)[0] == 200
        return 1.0

    rollout = asyncio.run(play_async(agent, Waiting(), environment={}, gateway={limit: 1}))
    assert rollout.error is None and rollout.metrics["gateway/throttled"] == 2 and rollout.metrics["gateway/requests"] == 1


def test_a_silent_process_is_killed_but_not_because_the_training_process_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    from strop.extensions.agents.gateway import gateway_process

    async def watch() -> tuple[int | None, bool]:
        process = await asyncio.create_subprocess_exec("sleep", "60")
        watched = gateway_process.GatewayProcess(validate_section(GatewayConfig, {}), 0)
        watched._process = process
        watching = asyncio.ensure_future(watched._watch(process))
        await asyncio.sleep(0)
        time.sleep(1.6)  # longer than a process may be silent
        await asyncio.sleep(0.05)
        alive = process.returncode is None
        await watching
        return await process.wait(), alive

    monkeypatch.setattr(gateway_process, "SILENCE_SECONDS", 1.5)
    assert asyncio.run(watch()) == (-signal.SIGKILL, True)


def test_the_number_of_processes_follows_sessions_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    gateway = Gateway(validate_section(GatewayConfig, {"port": 8000}))
    for sessions, processes in ((0, 0), (63, 0), (64, 1), (255, 1), (256, 2), (2000, 4)):
        gateway._here = sessions
        assert (gateway._choose() is None) == (processes == 0) and len(gateway.processes) == processes
    assert [each._port for each in gateway.processes] == [8001, 8002, 8003, 8004]
    one_address = Gateway(validate_section(GatewayConfig, {"url": "http://proxy/v1"}))
    one_address._here = 2000
    assert one_address._choose() is None


def test_one_address_for_several_processes_is_refused() -> None:
    config = validate_section(GatewayConfig, {"processes": 2, "url": "http://proxy/v1"})
    (problem,) = config.errors("gateway")
    assert problem.key == "gateway.processes" and "{port}" in problem.fix
    assert not list(validate_section(GatewayConfig, {"processes": 2, "url": "http://proxy:{port}/v1"}).errors("gateway"))
