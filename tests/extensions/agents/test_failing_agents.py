"""Agents that crash, hang or cannot be started: each fault lands in its cause."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import make_run
from loop.tiny import tiny_tokenizer
from strop.data.sources.source import DataSource
from strop.endings import Ending
from strop.environments.base import GeneratedTasks, reward
from strop.extensions.agents.agent_environment import AgentEnvironment
from strop.trainer.run import TrainOptions
from strop.trainer.train import train
from strop.types import Rollout, Task
from support.agents import play as play_agent

ASK = """
import json, os, sys, time, urllib.request
def ask():
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""
COMMANDS = {
    "exits with an error": ("ask(); sys.exit(3)", Ending.CRASH),
    "is killed": ("ask(); os.kill(os.getpid(), 9)", Ending.CRASH),
    "gives no reward": ("ask(); print('done')", Ending.CRASH),
    "hangs": ("ask(); time.sleep(60)", Ending.TIME),
    "hangs before the policy is asked": ("time.sleep(60)", Ending.ERROR),
    "never asks the policy": ("print(1)", Ending.ERROR),
    "finishes": ("ask(); print(0.5)", Ending.STOP),
}


@pytest.mark.parametrize(("code", "ending"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_of_an_agent_that_fails_after_it_asked_the_policy_is_a_failure_of_the_policy(code: str, ending: Ending) -> None:
    limit = 60.0 if "sleep" not in code else 3.0 if "ask()" in code else 0.3
    command = [sys.executable, "-I", "-S", "-c", ASK + code]
    rollout = play_agent(None, environment={"command": command, "agent_timeout_s": limit})
    assert rollout.ending == ending and rollout.counts == (ending != Ending.ERROR)
    assert bool(rollout.policy_turns) == ("ask()" in code)
    assert rollout.reward == (0.5 if ending == Ending.STOP else 0.0) and (rollout.error is None) == (ending == Ending.STOP)


def test_an_agent_that_cannot_be_started_is_no_failure_of_the_policy(tmp_path: Path) -> None:
    broken = tmp_path / "agent"
    broken.write_text("#!/no/such/interpreter")
    broken.chmod(0o755)
    assert play_agent(None, environment={"command": [str(broken)]}).ending == Ending.ENVIRONMENT


@dataclass(frozen=True, kw_only=True)
class Hanging(AgentEnvironment[Task]):
    """An agent that hangs on one call of four."""

    agent_timeout_s: float = 1.0

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(1000, lambda index: Task(id=str(index)))

    async def run(self, task: Task, endpoint: Any) -> float:
        import aiohttp

        body = {"messages": [{"role": "user", "content": "Hi"}]}
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{endpoint.base_url}/chat/completions", json=body) as answer,
        ):
            text = (await answer.json())["choices"][0]["message"]["content"]
        if sum(map(ord, text)) % 4 == 0:
            await asyncio.sleep(60)
        return 1.0

    @reward(weight=1.0, accuracy=True)
    def finished(self, task: Task, rollout: Rollout) -> float:
        return 1.0


def test_an_agent_that_hangs_on_one_call_of_four_trains(tmp_path: Path) -> None:
    options = TrainOptions(max_steps=3, groups_per_step=4, max_errors_in_a_row=8)
    trained, _, tracker = make_run(tiny_tokenizer(), tmp_path, options, environment=Hanging(), samples=8)
    asyncio.run(train(trained))
    hung = [tracker.steps[step]["train/failures/time"] for step in (1, 2, 3)]
    assert trained.step == 3 and 0.05 < sum(hung) / 3 < 0.6
    for step, batch in enumerate(trained.learners["policy"].batches):  # type: ignore[attr-defined]
        assert batch.num_sequences == 4 * 8
        assert tracker.steps[step + 1]["train/reward"] == pytest.approx(1 - hung[step])
