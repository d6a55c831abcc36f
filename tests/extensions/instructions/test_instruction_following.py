"""The environment ``ifeval`` and the verifier of the same name, on rows of one's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError
from strop.environments.compute_rewards import compute_rewards
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.rewards import RewardResult
from strop.extensions.instructions.instruction_following import InstructionFollowing
from strop.types import Rollout, Turn, assistant

ROWS = [
    {
        "prompt": "Name two fruits.",
        "instruction_id_list": ["punctuation:no_comma", "detectable_format:title", "startend:quotation"],
        "kwargs": [{}, {"num_words": None}, None],
    },
    {"prompt": "Say hi.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": ['{"num_words": null}']},
]
THIRD = "<<Fruits>> apples, pears"
LOOSE = 'Here you are:\n"<<Fruits>> apples and pears"'


def score(environment: Environment[Any], reply: str, row: int = 0) -> tuple[RewardResult, Rollout]:
    task = environment.tasks(DataSource(rows=ROWS, input_key="prompt"))[row]
    turn = Turn(author="policy", tokens=torch.tensor([1]), text=reply, logprobs=torch.zeros(1), versions=torch.zeros(1).int())
    rollout = Rollout(task=task, sample=0, seed=0, messages=task.messages, prompt=torch.tensor([1]))
    rollout = rollout.with_turn(turn, assistant(reply))
    return asyncio.run(compute_rewards(environment, task, rollout)), rollout


def test_rewards_are_strict_and_loose_of_a_prompt_and_its_instructions() -> None:
    result, rollout = score(InstructionFollowing(), THIRD)
    strict, loose = result.rewards["instruction_strict"], result.rewards["instruction_loose"]
    assert (result.reward, result.rewards["prompt_loose"], result.rewards["unverified"]) == (0.0, 0.0, 0.0)
    assert strict == loose == pytest.approx(1 / 3)
    assert rollout.metrics["instruction_level_strict"] == pytest.approx(1 / 3 * 3 / 2)  # of the mean of 2 instructions
    result, _ = score(InstructionFollowing(reward_weights={"prompt_strict": 0.0, "instruction_strict": 1.0}), LOOSE)
    assert (result.reward, result.rewards["prompt_loose"]) == (pytest.approx(2 / 3), 1.0)
    assert score(InstructionFollowing(), "hi", row=1)[0].reward == 1.0


def test_the_verifier_gives_all_or_the_share_strictly_or_loosely() -> None:
    rewards = {
        "all": {"verifier": "ifeval"},
        "share": {"verifier": "ifeval", "credit": "fraction"},
        "loose": {"verifier": "ifeval", "loose": True},
    }
    result, _ = score(FunctionEnvironment(rewards=rewards), LOOSE)
    assert dict(result.rewards) == {"all": 0.0, "share": pytest.approx(2 / 3), "loose": 1.0}
    assert result.metrics["all/unverified"] == 0.0
    with pytest.raises(EnvironmentConfigError, match="instruction_id_list and kwargs"):
        FunctionEnvironment(rewards=rewards).tasks(DataSource(rows=[{"prompt": "Hi.", "answer": "x"}], input_key="prompt"))


def test_a_row_that_cannot_be_checked_is_an_error_when_the_run_starts() -> None:
    bad = {**ROWS[1], "instruction_id_list": ["punctuation:no_coma"]}
    with pytest.raises(DataError, match="there is no instruction 'punctuation:no_coma'; did you mean 'punctuation:no_comma'"):
        InstructionFollowing().tasks(DataSource(rows=[*ROWS, bad], input_key="prompt"))
    with pytest.raises(EnvironmentConfigError, match="both must be positive"):
        InstructionFollowing(num_workers=0)
