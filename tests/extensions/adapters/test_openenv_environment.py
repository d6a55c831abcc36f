"""OpenEnv's protocol, against a stand-in for its server; ``test_installed_packages.py`` has the real one."""

from __future__ import annotations

import asyncio
import json

import pytest

from strop.environments.base import EnvironmentConfigError
from strop.extensions.adapters.openenv_environment import OpenEnvEnvironment, OpenEnvError
from support.adapter_episodes import episode, play
from support.adapter_servers import openenv_echo, served


@pytest.fixture
def url():
    with served(openenv_echo()) as address:
        yield address


def test_an_episode_is_a_session_with_the_servers_rewards_by_turn(url):
    environment = OpenEnvEnvironment(base_url=url, instruction="Talk.", observation_field="echoed_message", solved_at=1.0)
    seen, result = play(environment, ["hello", "I say <action>hello again</action>", "bye"])
    assert seen[0].startswith("Talk.\n\nready ") and seen[1:] == ["hello", "hello again", None]
    assert [step.reward for step in result.step_rewards] == pytest.approx([0.5, 1.1, 0.3])
    assert result.rewards == {"score": pytest.approx(1.9), "solved": 1.0}
    assert play(environment, [])[0] == play(environment, [])[0] != play(environment, [], index=1)[0]


def test_an_observation_of_several_fields_is_json(url):
    seen, _ = play(OpenEnvEnvironment(base_url=url), ["tea"])
    assert json.loads(seen[1]) == {"echoed_message": "tea", "message_length": 3}


def test_more_episodes_than_the_server_has_sessions_wait_for_one(url):
    environment = OpenEnvEnvironment(base_url=url)

    async def many() -> list[float]:
        return [result.reward for _, result in await asyncio.gather(*(episode(environment, ["a" * n]) for n in range(1, 5)))]

    assert asyncio.run(many()) == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_a_server_that_crashes_or_stays_full_is_an_error_of_the_rollout(url):
    with pytest.raises(OpenEnvError, match="EXECUTION_ERROR: it crashed"):
        play(OpenEnvEnvironment(base_url=url), ["crash"])
    with served(openenv_echo(max_sessions=0)) as full, pytest.raises(OpenEnvError, match="CAPACITY_REACHED"):
        play(OpenEnvEnvironment(base_url=full, timeout_s=0.2), ["a"])


def test_what_the_server_does_not_have_is_an_error_at_the_start(url):
    with pytest.raises(EnvironmentConfigError, match="did you mean 'message'"):
        OpenEnvEnvironment(base_url=url, action_field="mesage")
    with pytest.raises(EnvironmentConfigError, match="no server of OpenEnv answers"):
        OpenEnvEnvironment(base_url="http://127.0.0.1:9", action_field="x")
