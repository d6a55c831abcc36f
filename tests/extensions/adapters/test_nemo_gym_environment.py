"""NeMo-Gym's protocol, against a stand-in for its resource servers; ``test_installed_packages.py`` has real ones."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import list_marks, make_environment
from strop.extensions.adapters.nemo_gym_environment import NemoGymEnvironment, ResourceServer
from strop.rollouts.episode import EpisodeRules, run_episode
from strop.sampling import Sampling
from strop.types import Rollout
from support.adapter_servers import nemo_gym_counter, served
from support.agents import TEMPLATE, Recorder, check_tree

TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "description": "", "strict": True}
    for name in ("increment_counter", "get_counter_value", "verify")
]
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "add 1, then 2"}], "tools": TOOLS},
    "expected_count": 6,
    "initial_count": 3,
}


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def solve(environment: NemoGymEnvironment, row: dict, *texts: str, **rules: int) -> Rollout:
    generator = Recorder(*texts)
    rollout = asyncio.run(
        run_episode(
            LocalEnvironment(environment),
            environment.tasks(DataSource(rows=[row]))[0],
            0,
            1,
            generator=generator,
            template=TEMPLATE,
            sampling=Sampling(max_new_tokens=200),
            rules=EpisodeRules(**{"max_turns": 9, "max_length": 3000, **rules}),
        )
    )
    if rollout.error is None:
        check_tree(rollout, generator.sampled)
    return rollout


@pytest.fixture
def url():
    with served(nemo_gym_counter()) as address:
        yield address


def test_the_policy_calls_the_tools_of_a_session_and_is_scored_by_the_server(url):
    environment = make_environment("nemo_gym", {"servers": {"counter": {"url": url}}})
    calls = call("increment_counter", count=1) + call("increment_counter", count=2)
    rollout = solve(environment, ROW, calls, call("get_counter_value"), "It is 6.")
    assert rollout.error is None and rollout.rewards == {"score": 1.0}
    assert [message.content for message in rollout.messages if message.role == "tool"] == ['{"success": true}'] * 2 + [
        '{"count": 6}'
    ]
    assert rollout.metrics["component/called"] == 1.0
    assert solve(environment, ROW, "It is 6.").rewards == {"score": 0.0}


def test_errors_of_a_tool_are_told_to_the_policy(url):
    environment = NemoGymEnvironment(servers={"counter": {"url": url}})
    rollout = solve(environment, ROW, call("increment_counter", count="x"), call("verify"), "no")
    assert "count is an integer" in rollout.messages[2].content and "there is no tool" in rollout.messages[4].content


def test_components_of_the_reward_are_rewards_of_their_own(url):
    options = {"servers": {"counter": {"url": url}}, "components": ["correct", "called"]}
    assert tuple(list_marks("nemo_gym", options)) == ("correct", "called")
    assert solve(make_environment("nemo_gym", options), ROW, call("get_counter_value"), "3").rewards == {
        "correct": 0.0,
        "called": 1.0,
    }
    wrong = make_environment("nemo_gym", {**options, "components": ["style"]})
    assert "gave no component 'style'" in str(solve(wrong, ROW, "3").error)


@pytest.mark.parametrize("components", [(), ("correct", "called")])
def test_a_sample_that_the_server_could_not_measure_is_left_out_and_is_not_a_zero(url, components):
    environment = NemoGymEnvironment(servers={"counter": {"url": url}}, components=components)
    rollout = solve(environment, {**ROW, "mask": True}, "3")
    assert rollout.unscored and rollout.error is None and "could not score" in rollout.output


def test_a_server_of_the_gymnasium_kind_is_stepped(url):
    environment = NemoGymEnvironment(servers={"talk": {"url": url, "agent": "gymnasium_agent", "max_steps": 5}})
    rollout = solve(environment, ROW, "go", "stop")
    assert rollout.rewards == {"score": 0.5} and rollout.metrics["steps"] == 2
    assert [message.content for message in rollout.messages] == ["add 1, then 2", "Say stop.", "go", "Again.", "stop"]


def test_the_head_server_says_where_the_resource_server_of_an_agent_is():
    config: dict = {
        "counter": {"resources_servers": {"counter": {"host": "127.0.0.1", "port": 1234}}},
        "counter_agent": {"responses_api_agents": {"simple_agent": {"resources_server": {"name": "counter"}, "max_steps": 3}}},
        "policy_model": {"responses_api_models": {"vllm_model": {"host": "127.0.0.1", "port": 1}}},
    }
    with served(nemo_gym_counter(config)) as head:
        found = NemoGymEnvironment(head_url=head)
        assert found.resource_servers == {"counter_agent": ResourceServer("http://127.0.0.1:1234", "simple_agent", 3)}
        with pytest.raises(EnvironmentConfigError, match="did you mean 'counter_agent'"):
            found.tasks(DataSource(rows=[{**ROW, "agent_ref": {"name": "counter_agnt"}}]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set config to start"),
        ({"config": {"uv_venv_dir": "x"}}, "config_paths is not set"),
        ({"config": {"config_paths": ["a.yaml"]}, "python": "/nowhere/python"}, "cannot be started"),
        ({"config": {"config_paths": ["a.yaml"]}}, "has no nemo-gym; .* set python"),
        ({"servers": {"a": {"url": "http://x"}}, "effort_levels": {"low": 1}}, "effort_levels has no low"),
        ({"servers": {"a": {"url": "http://x", "agent": "swe_agent"}}}, "'swe_agent'"),
        ({"servers": {"a": {"adress": "http://x"}}}, "servers maps the name"),
        ({"head_url": "http://127.0.0.1:9"}, "no head server of NeMo-Gym answers"),
    ],
)
def test_a_section_that_cannot_work_is_an_error_at_the_start(options, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        make_environment("nemo_gym", options)


class Started:
    """What stands for the process with NeMo-Gym: an agent that asks once."""

    def __init__(self, **done: object) -> None:
        self.done, self.rows = done, []

    async def call_async(self, method: str, row: dict, base_url: str, api_key: str) -> dict:
        async with aiohttp.ClientSession() as session:
            body = {"input": "go", "chat_template_kwargs": {"thinking": True}}
            await (await session.post(f"{base_url}/responses", json=body, headers={"x-api-key": api_key})).read()
        self.rows.append(row)
        return self.done


def start(**done: object) -> tuple[NemoGymEnvironment, Started]:
    environment = object.__new__(NemoGymEnvironment)  # the package is not here
    process = Started(**done)
    made = NemoGymEnvironment(servers={"a": {"url": "http://x"}}, effort_levels=EFFORT)
    vars(environment).update({**vars(made), "servers": {}, "config": {"config_paths": ["a.yaml"]}})
    vars(environment).update(process=process, _agents=["one"])
    return environment, process


EFFORT = {"low_string": "briefly", "low_weight": 0.5, "low_ub": 4, "low_penalty": 2.0}


def test_an_agent_of_nemo_gym_gets_its_row_with_an_index_of_the_group_and_of_the_sample():
    environment, process = start(result={"reward": 1.0, "reward_components": {"a": 1.0}}, metrics={"reward": 1.0})
    row = {"responses_create_params": {"input": "x", "temperature": 0.3, "max_output_tokens": 9}, "verifier": 3}
    for _ in range(2):
        rollout = solve(environment, row, "ok")
    assert rollout.rewards == {"score": 1.0} and rollout.metrics["verify/reward"] == rollout.metrics["component/a"] == 1.0
    first, second = process.rows
    assert first["_ng_task_index"] != second["_ng_task_index"] and first["_ng_rollout_index"] == 0
    assert first["agent_ref"] == {"name": "one"} and first["verifier"] == 3
    assert first["responses_create_params"] == {"input": "x", "max_output_tokens": 9}


def test_a_reward_is_shaped_by_the_length_of_an_answer_that_was_to_be_short():
    row = {"responses_create_params": {"input": "Answer briefly."}}
    for text, reward in (("a", 1 + 0.25), ("a" * 7, 1 - 2 * 0.5)):  # with the token that ends the turn
        environment, _ = start(result={"reward": 1.0}, metrics={})
        assert solve(environment, row, text).rewards == {"score": reward}
    environment, _ = start(result={"reward": 1.0}, metrics={})
    assert solve(environment, {"responses_create_params": {"input": "Answer."}}, "a" * 9).rewards == {"score": 1.0}


def test_a_failure_of_the_servers_is_the_rollouts_with_its_cause():
    environment, _ = start(failure="Process `math` finished unexpectedly!", ending="service")
    rollout = solve(environment, {"responses_create_params": {"input": "x"}}, "ok")
    assert rollout.ending == "service" and "`math` finished" in str(rollout.error)


def test_rows_name_agents_that_the_configuration_has():
    environment, _ = start()
    with pytest.raises(EnvironmentConfigError, match="did you mean 'one'"):
        environment.tasks(DataSource(rows=[{**ROW, "agent_ref": {"name": "ones"}}]))
    assert len(environment.tasks(DataSource(rows=[{**ROW, "task_source": "math"}, ROW]))) == 2
