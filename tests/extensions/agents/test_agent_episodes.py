"""Episodes of agents in groups, in other processes, over a publish of weights, and against clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from strop.data.sources.source import DataSource
from strop.environments.registry import make_environment
from strop.environments.remote import EnvironmentDescription, connect
from strop.extensions.agents.external_agent import ExternalAgent
from strop.rollouts.episode import EpisodeRules, run_group
from strop.sampling import Sampling
from strop.types import Group, Rollout
from support.agents import SEED, TASK, TEMPLATE, Recorder, play
from support.environment_servers import EnvironmentServerThread, handle_of


def post(endpoint: Any, messages: list[dict[str, str]], path: str = "chat/completions", **options: Any) -> Any:
    body = json.dumps({"messages": messages, **options}).encode()
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/{path}", body, headers)) as answer:
        return json.loads(answer.read())


TWO_TURNS = """
import json, urllib.request

def run(task, endpoint):
    def ask(messages):
        body = json.dumps({"messages": messages}).encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers)) as answer:
            return json.loads(answer.read())["choices"][0]["message"]
    messages = [{"role": "user", "content": task.question}]
    messages += [ask(messages), {"role": "user", "content": task.answer}]
    return {"reward": len(ask(messages)["content"]), "output": "seen", "metrics": {"steps": 2}}
"""


async def group_of(environment: Any, data: DataSource) -> Group:
    return await run_group(
        0, "mine", handle_of(environment), environment.tasks(data)[1], samples=4, generator=Recorder(), template=TEMPLATE,
        sampling=Sampling(max_new_tokens=20), rules=EpisodeRules(max_turns=4, max_length=400), seed=5,
    )  # fmt: skip


def test_an_agent_in_another_process_gives_the_rollouts_that_it_gives_here(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(TWO_TURNS)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"problem": f"q{n}", "answer": f"a{n}"}) for n in range(3)))
    data = DataSource(dataset_name=str(tmp_path / "rows.jsonl"), input_key="problem", output_key="answer")
    options = {"agent": f"{tmp_path / 'agent.py'}:run"}
    thread = EnvironmentServerThread(EnvironmentDescription(alias="mine", name="agent", options=options, sources=(data,)))
    try:
        there = asyncio.run(group_of(connect(thread.description, [thread.transport]), data))
    finally:
        thread.close()
    here = asyncio.run(group_of(make_environment("agent", options), data))
    for own, other in zip(here.rollouts, there.rollouts, strict=True):
        assert own.error is None and own.rewards == other.rewards and own.reward == other.reward > 0
        assert own.tokens().tolist() == other.tokens().tolist() and own.messages == other.messages
        assert own.output == other.output == "seen" and own.metrics == other.metrics and own.metrics["steps"] == 2
    assert len({rollout.text for rollout in here.rollouts}) > 1


def test_each_token_says_the_weights_that_sampled_it() -> None:
    generator = Recorder()

    def agent(task: Any, endpoint: Any) -> float:
        messages = [{"role": "user", "content": "Hi"}]
        reply = post(endpoint, messages)["choices"][0]["message"]
        generator.fake.version = 1  # new weights are published while the episode runs
        post(endpoint, [*messages, reply, {"role": "user", "content": "So?"}])
        return 1.0

    rollout = play(agent, generator)
    assert [set(turn.versions.tolist()) for turn in rollout.turns] == [{0}, {-1}, {1}]


def test_group_rewards_see_the_rollouts_of_agents() -> None:
    def longest(task: Any, rollouts: list[Rollout]) -> list[bool]:
        most = max(rollout.sampled_tokens for rollout in rollouts)
        return [rollout.sampled_tokens == most for rollout in rollouts]

    def agent(task: Any, endpoint: Any) -> None:
        post(endpoint, [{"role": "user", "content": "Hi"}])

    environment = ExternalAgent(agent=agent, reward=longest)
    group = asyncio.run(
        run_group(
            0,
            "mine",
            handle_of(environment),
            TASK,
            samples=6,
            generator=Recorder(),
            template=TEMPLATE,
            sampling=Sampling(max_new_tokens=20),
            rules=EpisodeRules(max_length=400),
            seed=SEED,
            greedy_baseline=True,
        )
    )
    assert group.errors == () and sorted({rollout.reward for rollout in group.rollouts}) == [0.0, 1.0]


def test_no_key_is_in_a_log_or_in_an_error(caplog: pytest.LogCaptureFixture) -> None:
    keys = []

    def agent(task: Any, endpoint: Any) -> float:
        keys.append(endpoint.api_key)
        post(endpoint, [{"role": "user", "content": "Hi"}], temperature=0.5)
        with pytest.raises(urllib.error.HTTPError):
            post(endpoint, [{"role": "user", "content": "Hi"}], path="nothing")
        raise RuntimeError(f"{endpoint}")

    with caplog.at_level(logging.DEBUG):
        rollout = play(agent)
    assert str(rollout.error).startswith("RuntimeError: Endpoint(base_url='http://127.0.0.1:")
    assert keys[0] not in str(rollout) and keys[0] not in caplog.text and len(keys[0]) > 40


def test_a_body_that_does_not_arrive_is_given_up_and_one_without_a_key_is_not_read() -> None:
    def send(endpoint: Any, headers: str) -> str:
        address = urlsplit(endpoint.base_url)
        with socket.create_connection((address.hostname, address.port)) as connection:
            begin = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n{headers}\r\n"
            connection.sendall((begin + '{"messages": [').encode())
            return connection.recv(300).decode().partition("\r\n")[0]

    def agent(task: Any, endpoint: Any) -> float:
        key = f"Authorization: Bearer {endpoint.api_key}\r\nContent-Type: application/json\r\n"
        begun = time.monotonic()
        assert send(endpoint, "").startswith("HTTP/1.1 401") and time.monotonic() - begun < 1
        assert send(endpoint, key).startswith("HTTP/1.1 408")
        post(endpoint, [{"role": "user", "content": "Hi"}])
        return 1.0

    assert play(agent, environment={}, gateway={"body_timeout_s": 0.3}).error is None


def test_a_request_that_is_not_answered_when_the_agent_ends_is_cancelled() -> None:
    class Slow(Recorder):
        cancelled = 0

        async def generate(self, prompt: Any, **options: Any) -> Any:
            if len(self.sampled) == 1:
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
            return await super().generate(prompt, **options)

    generator = Slow()

    async def agent(task: Any, endpoint: Any) -> float:
        await asyncio.to_thread(post, endpoint, [{"role": "user", "content": "Hi"}])
        left = asyncio.ensure_future(asyncio.to_thread(post, endpoint, [{"role": "user", "content": "Ho"}]))
        await asyncio.sleep(0.2)
        left.add_done_callback(lambda done: done.exception())
        return 1.0

    rollout = play(agent, generator, environment={})
    assert rollout.error is None and generator.cancelled == 1 and len(rollout.policy_turns) == 1
