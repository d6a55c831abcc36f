"""A ``per_turn`` reward: what it may return, what becomes of it, and what is said of anything else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from strop.algorithms.base import Plan
from strop.data.sources.source import DataSource
from strop.environments.arithmetic import Arithmetic
from strop.environments.base import Environment, EnvironmentConfigError, reward
from strop.environments.compute_rewards import compute_rewards
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.rewards import RewardError, RewardResult
from strop.rollouts.episode import _with_rewards
from strop.rollouts.reward_shaping_config import RewardScalingConfig
from strop.types import Rollout, StepReward, Task, observation_turn
from support.rollouts import make_rollout, sampled_turn

TASK = Task(id="one")


@dataclass(frozen=True, kw_only=True)
class Steps(Environment[Task]):
    """Rewards with what it is given."""

    given: Any = None

    def tasks(self, data: DataSource) -> list[Task]:
        return [TASK]

    @reward(weight=2.0, per_turn=True)
    def steps(self, task: Task, rollout: Rollout) -> Any:
        return self.given

    @reward(weight=1.0)
    def outcome(self, task: Task, rollout: Rollout) -> float:
        return 0.25


def rollout() -> Rollout:
    """Turns of three and two tokens, and one of the environment between them."""
    return make_rollout([1, 2], sampled_turn([3, 4, 5]), observation_turn([6], "no"), sampled_turn([7, 8]))


def score(given: Any) -> RewardResult:
    return asyncio.run(compute_rewards(Steps(given=given), TASK, rollout()))


@pytest.mark.parametrize(
    ("given", "steps", "total"),
    [
        ([0.5, 1], [(2, 1.0), (4, 2.0)], 1.5),
        ([True, None], [(2, 2.0)], 1.0),
        ([{0: 0.5, 2: 0.25}, {1: -1}], [(0, 1.0), (2, 0.5), (4, -2.0)], -0.25),
        ([None, {}], [], 0.0),
        ([0.0, 0.0], [(2, 0.0), (4, 0.0)], 0.0),
    ],
)
def test_each_step_has_a_weighted_reward_at_its_last_token_and_the_sum_is_the_rollouts(given, steps, total) -> None:
    found = score(given)
    assert found.step_rewards == tuple(StepReward(*step) for step in steps)
    assert found.rewards == {"steps": total, "outcome": 0.25}
    assert found.reward == pytest.approx(2 * total + 0.25)


@pytest.mark.parametrize(
    "given",
    [1.0, "12", [1.0], [1.0, 2.0, 3.0], [1.0, float("nan")], [1.0, "good"], [{3: 1.0}, 0], [{-1: 1.0}, 0], [{"1": 1.0}, 0]],
)
def test_anything_else_names_the_reward_and_what_it_should_return(given: Any) -> None:
    with pytest.raises(RewardError, match=r"Steps.steps returned .* one item for each of the 2 turns of the policy"):
        score(given)


def test_scaling_a_reward_scales_those_of_its_steps() -> None:
    scaling = RewardScalingConfig(enabled=True, source_min=0.0, source_max=4.0, target_min=-1.0, target_max=1.0)
    scored = _with_rewards(rollout(), score([0.5, 1]), scaling)
    assert scored.reward == pytest.approx(3.25 / 2 - 1)
    assert [step.reward for step in scored.step_rewards] == [0.5, 1.0]


@pytest.mark.parametrize("source", [(-1.0, 6.0), (2.0, 12.0)])
def test_where_the_source_does_not_begin_at_zero_a_steps_reward_has_the_slope_alone(source: tuple[float, float]) -> None:
    """Another reward of a step moves the rollout's by as much as its own; at the beginning of the source nothing is added to it."""
    scaling = RewardScalingConfig(enabled=True, source_min=source[0], source_max=source[1], target_min=-3.0, target_max=1.0)
    less, more = (_with_rewards(rollout(), score([1.0, last]), scaling) for last in (0.5, 1.25))
    steps = [[step.reward for step in found.step_rewards] for found in (less, more)]
    slope = 4.0 / (source[1] - source[0])
    assert steps == [pytest.approx([2 * slope, slope]), pytest.approx([2 * slope, 2.5 * slope])]
    assert more.reward - less.reward == pytest.approx(steps[1][1] - steps[0][1])


def test_a_function_may_reward_turns() -> None:
    def steps(task: Task, rollout: Rollout) -> list[float]:
        return [1.0] * len(rollout.policy_turns)

    environment = FunctionEnvironment(reward={"function": steps, "per_turn": True, "weight": 0.5})
    found = asyncio.run(compute_rewards(environment, TASK, rollout()))
    assert [(step.token, step.reward) for step in found.step_rewards] == [(2, 0.5), (4, 0.5)]


def test_a_reward_is_not_of_a_group_and_per_turn_at_once() -> None:
    with pytest.raises(TypeError, match="for a group or per_turn, not both"):
        reward(group=True, per_turn=True)(lambda task, rollout: 0.0)
    given = {"function": lambda task, rollouts: [0.0], "per_turn": True}
    with pytest.raises(EnvironmentConfigError, match="is of a group and per_turn; set one of them to false"):
        _ = FunctionEnvironment(reward=given).reward_functions


def test_credit_for_steps_is_refused_where_nothing_rewards_them() -> None:
    StepRelative = pytest.importorskip("strop.extensions.policy_gradients.turn_credit").StepRelative
    assert Steps.list_marks({})["steps"].per_turn and not any(mark.per_turn for mark in Arithmetic.list_marks({}).values())
    given = {"rewards": {"a": {"function": lambda task, rollout: [], "per_turn": True}, "b": lambda task, rollout: 0.0}}
    assert [name for name, mark in FunctionEnvironment.list_marks(given).items() if mark.per_turn] == ["a"]
    (problem,) = StepRelative().validate(Plan(group_size=4, step_rewards=False))
    assert "no environment of this run rewards steps; mark a reward with per_turn=True" in problem
