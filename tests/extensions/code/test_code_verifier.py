"""The verifier ``code``: tests of a row as one of several rewards."""

from __future__ import annotations

import asyncio

import pytest
import torch

from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.compute_rewards import compute_rewards
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.rewards import RewardResult
from strop.environments.verifier_registry import make_verifier
from strop.types import Rollout, Turn, assistant

MBPP = {"text": "Add two numbers.", "test_list": ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]}
ECHO = {"question": "Echo.", "input_output": {"inputs": ["7\n"], "outputs": ["7\n"]}}
HALF = "```python\ndef add(a, b): return 3\n```"
RIGHT = "```python\ndef add(a, b): return a + b\n```"


def score(row: dict, reply: str, rewards: dict) -> RewardResult:
    environment = FunctionEnvironment(rewards=rewards)
    task = environment.tasks(DataSource(rows=[row], input_key="text" if "text" in row else "question"))[0]
    turn = Turn(author="policy", tokens=torch.tensor([1]), text=reply, logprobs=torch.zeros(1), versions=torch.zeros(1).int())
    rollout = Rollout(task=task, sample=0, seed=0, messages=task.messages, prompt=torch.tensor([1]))
    return asyncio.run(compute_rewards(environment, task, rollout.with_turn(turn, assistant(reply))))


def test_tests_of_a_row_are_a_reward_beside_others() -> None:
    rewards = {
        "tests": {"verifier": "code", "credit": "fraction"},
        "all": {"verifier": "code", "gate": {"reward": "tests", "at_least": 0.5}},
        "fenced": {"verifier": "regex", "pattern": "```", "weight": 0.5},
    }
    result = score(MBPP, HALF, rewards)
    assert dict(result.rewards) == {"tests": 0.5, "all": 0.0, "fenced": 1.0} and result.reward == 1.0
    assert (result.metrics["tests/passed"], result.metrics["tests/compiles"], result.metrics["all/timeouts"]) == (0.5, 1.0, 0.0)
    assert dict(score(MBPP, RIGHT, rewards).rewards) == {"tests": 1.0, "all": 1.0, "fenced": 1.0}
    assert score(MBPP, "no program", rewards).rewards["tests"] == 0.0


def test_other_languages_are_graded_by_standard_input() -> None:
    assert score(ECHO, "```bash\ncat\n```", {"run": {"verifier": "code", "language": "bash"}}).reward == 1.0


def test_the_row_of_a_problem_may_stand_in_a_column() -> None:
    row = {"text": "Write it.", "info": {"hidden": MBPP}}
    assert score(row, RIGHT, {"run": {"verifier": "code", "problem": "info.hidden"}}).reward == 1.0


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "hello"}, {}, "no kind of code problem"),
        (MBPP, {"problem": "info"}, "set problem to one that does"),
        (MBPP, {"language": "c"}, "tests of Python functions"),
        (MBPP | {"test_list": []}, {}, "has no tests"),
    ],
)
def test_a_row_that_cannot_be_graded_is_an_error_when_the_run_starts(row, options, message) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        score(row, "", {"run": {"verifier": "code", **options}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tests": 0}, "max_tests is 0"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"credit": "fraction", "stop_early": True}, "credit=fraction needs every test"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        make_verifier("code", options)
