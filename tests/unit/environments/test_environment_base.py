"""Rewards: what is counted, what is logged, what is an error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError, GeneratedTasks, reward
from strop.environments.compute_rewards import compute_group_rewards, compute_rewards
from strop.environments.handle import LocalEnvironment
from strop.environments.rewards import RewardError
from strop.types import Rollout, Task

TASK = Task(id="t1", question="Say yes.")


@dataclass(frozen=True, kw_only=True)
class Yes(Environment[Task]):
    broken: float = 0.0

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(3, lambda index: Task(id=str(index)))

    @reward(weight=2.0, accuracy=True)
    def correct(self, task: Task, rollout: Rollout) -> bool:
        return rollout.text == "yes"

    @reward(weight=0.5)
    async def polite(self, task: Task, rollout: Rollout) -> float:
        await asyncio.sleep(0)
        return 1.0

    @reward(weight=0.0)
    def logged(self, task: Task, rollout: Rollout) -> float:
        return self.broken


def test_the_reward_is_the_weighted_sum_and_each_reward_is_named(wrote):
    scored = asyncio.run(compute_rewards(Yes(broken=7.0), TASK, wrote(TASK, "yes")))
    assert scored.rewards == {"correct": 1.0, "polite": 1.0, "logged": 7.0}
    assert scored.reward == 2.5


def test_a_weight_for_an_unknown_reward_names_the_nearest():
    with pytest.raises(EnvironmentConfigError, match="did you mean 'polite'"):
        Yes(reward_weights={"polit": 1.0})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", [1.0]])
def test_a_reward_that_is_no_finite_number_is_an_error_that_names_the_method(wrote, value):
    with pytest.raises(RewardError, match=r"Yes\.logged returned .* on task 't1'"):
        asyncio.run(compute_rewards(Yes(broken=value), TASK, wrote(TASK, "yes")))


@dataclass(frozen=True, kw_only=True)
class Huge(Yes):
    of_group: bool = False

    @reward()
    def huge(self, task: Task, rollout: Rollout) -> float:
        return 0.0 if self.of_group else 1e308

    @reward(weight=2.0)
    def huger(self, task: Task, rollouts: Sequence[Rollout]) -> list[float]:
        return [1.5e308 if self.of_group else 0.0 for _ in rollouts]


def test_rewards_that_are_finite_and_sum_to_infinity_are_an_error_that_names_the_reward(wrote):
    rollout = wrote(TASK, "yes")
    with pytest.raises(RewardError, match=r"the rewards of Huge sum to inf on task 't1': huge returned 1e\+308"):
        asyncio.run(compute_rewards(Huge(reward_weights={"huge": 10.0}), TASK, rollout))
    with pytest.raises(RewardError, match=r"sum to inf on task 't1': huger returned 1\.5e\+308"):
        asyncio.run(compute_group_rewards(Huge(of_group=True), TASK, [rollout]))


def test_overriding_a_reward_without_marking_it_is_an_error():
    with pytest.raises(TypeError, match="overrides a reward but is not marked"):

        class Forgotten(Yes):
            def correct(self, task: Task, rollout: Rollout) -> bool:
                return True


def test_two_accuracies_are_an_error():
    with pytest.raises(TypeError, match="at most one"):

        class Two(Yes):
            @reward(accuracy=True)
            def also(self, task: Task, rollout: Rollout) -> bool:
                return True


def test_a_method_of_rollouts_is_called_once_for_the_group(wrote):
    @dataclass(frozen=True, kw_only=True)
    class Compared(Yes):
        @reward(weight=0.5)
        def longest(self, task: Task, rollouts: Sequence[Rollout]) -> list[bool]:
            most = max(len(rollout.text) for rollout in rollouts)
            return [len(rollout.text) == most for rollout in rollouts]

        @reward(group=True)
        async def first(self, task: Task, attempts: Sequence[Rollout]) -> list[bool]:
            return [attempt is attempts[0] for attempt in attempts]

    environment = Compared(reward_weights={"first": 3.0})
    assert LocalEnvironment(environment).traits.has_group_rewards and not LocalEnvironment(Yes()).traits.has_group_rewards
    assert tuple(environment.list_marks({})) == ("correct", "polite", "logged", "longest", "first")
    rollouts = [wrote(TASK, "yes"), wrote(TASK, "indeed")]
    assert set(asyncio.run(compute_rewards(environment, TASK, rollouts[0])).rewards) == {"correct", "polite", "logged"}
    scored = asyncio.run(compute_group_rewards(environment, TASK, rollouts))
    assert [result.rewards for result in scored] == [{"longest": 0.0, "first": 1.0}, {"longest": 1.0, "first": 0.0}]
    assert [result.reward for result in scored] == [3.0, 0.5]


def test_the_decorator_without_parentheses_is_an_error():
    with pytest.raises(TypeError, match="with parentheses"):
        reward(lambda self, task, rollout: 1.0)  # type: ignore[arg-type]


def test_accuracy_is_the_marked_reward_and_zero_for_a_failed_rollout(wrote):
    from dataclasses import replace

    environment, rollout = Yes(), wrote(TASK, "no")
    assert environment.accuracy(rollout) == 0.0
    assert environment.accuracy(replace(rollout, rewards={"correct": 1.0}, reward=2.5)) == 1.0


def test_generated_tasks_are_made_when_asked_for_and_bounded():
    made: list[int] = []
    tasks = GeneratedTasks(3, lambda index: made.append(index) or index)
    assert made == []
    assert tasks[-1] == 2 and tasks[0:2] == [0, 1] and list(tasks) == [0, 1, 2]
    with pytest.raises(IndexError):
        tasks[3]


@pytest.mark.parametrize("name", ["first_messages", "next_stop_strings", "episode"])
def test_a_method_of_an_earlier_version_is_refused_with_its_new_name(name: str) -> None:
    with pytest.raises(TypeError, match=rf"Mine\.{name} is not called: rename it to (prompt|stop_strings|session)"):
        type("Mine", (Yes,), {name: lambda self, task: ()})
