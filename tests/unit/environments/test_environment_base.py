"""Rewards: what is counted, what is logged, what is an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from loop.fakes import FakeGenerator
from loop.tiny import tiny_tokenizer
from strop.data.sources.source import DataSource
from strop.environments.base import Environment, EnvironmentConfigError, GeneratedTasks, reward
from strop.environments.compute_rewards import compute_group_rewards, compute_rewards
from strop.environments.function_environment import FunctionEnvironment
from strop.environments.handle import LocalEnvironment
from strop.environments.registry import make_environment
from strop.environments.remote import EnvironmentDescription, connect
from strop.environments.rewards import RewardError, to_number
from strop.models.chat_template import ChatTemplate
from strop.rollouts.episode import EpisodeRules, run_group
from strop.sampling import Sampling
from strop.trainer.step_metrics import environment_metrics, group_metrics
from strop.types import Group, Messages, Rollout, Task, user
from support.environment_servers import EnvironmentServerThread, handle_of

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


# --- Metrics of an environment's own, and rewards and metrics that are no numbers ---------------------------------------------


TOKENIZER = tiny_tokenizer()
DATA = DataSource(size=3)

CALLS = """
from dataclasses import dataclass
from strop.environments.base import Environment, reward
from strop.types import Task, user

@dataclass(frozen=True, kw_only=True)
class Calls(Environment):
    set_to: object = None

    def tasks(self, data):
        return [Task(id=str(index), question="?") for index in range(3)]

    async def respond(self, task, rollout):
        rollout.metrics["calls"] = rollout.metrics.get("calls", 0) + 1
        return (user("next"),)

    @reward()
    def length(self, task, rollout):
        rollout.metrics["long"] = len(rollout.text) > 1
        return len(rollout.text)

    @reward(group=True)
    def rank(self, task, rollouts):
        for place, rollout in enumerate(rollouts):
            rollout.metrics["place"] = place
        return [0.0 for _ in rollouts]
"""


@dataclass(frozen=True, kw_only=True)
class Sets(Environment[Task]):
    """Sets a metric and returns a reward of the test's choice."""

    metric: tuple[Any, Any] = ("calls", 1)
    returned: Any = 1.0

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return [Task(id="t", question="?")]

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        name, value = self.metric
        rollout.metrics[name] = value
        return (user("?"),)

    @reward()
    def given(self, task: Task, rollout: Rollout) -> float:
        value: float = self.returned
        return value


def group_of(environment: Any, task: Any = None, *, samples: int = 4) -> Group:
    return asyncio.run(
        run_group(
            0, "mine", handle_of(environment), task or environment.tasks(DATA)[0], samples=samples,
            generator=FakeGenerator(TOKENIZER), template=ChatTemplate(TOKENIZER), sampling=Sampling(max_new_tokens=6),
            rules=EpisodeRules(max_turns=3, max_length=400), seed=5,
        )
    )  # fmt: skip


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """The environment in this process, and in a server."""
    (tmp_path / "calls.py").write_text(CALLS)
    name = f"{tmp_path / 'calls.py'}:Calls"
    server = EnvironmentServerThread(EnvironmentDescription(alias="mine", name=name, options={}, sources=(DATA,)))
    yield make_environment(name, {}), connect(server.description, [server.transport])
    server.close()


def test_an_environment_sets_metrics_in_turns_rewards_and_rewards_of_groups_here_and_in_another_process(
    calls: tuple[Any, Any],
) -> None:
    here, there = (group_of(environment) for environment in calls)
    assert here.errors == () and [rollout.metrics for rollout in there.rollouts] == [rollout.metrics for rollout in here.rollouts]
    assert [rollout.metrics["place"] for rollout in here.rollouts] == [0.0, 1.0, 2.0, 3.0]
    assert [rollout.metrics["calls"] for rollout in here.rollouts] == [3.0] * 4
    assert all(type(value) is float for rollout in here.rollouts for value in rollout.metrics.values())


def test_metrics_are_logged_as_means_beside_the_reward_of_their_environment(calls: tuple[Any, Any]) -> None:
    group = group_of(calls[0])
    logged = group_metrics([group], [], [0])
    assert logged["train/environments/mine/place"] == 1.5 == environment_metrics([group])["environments/mine/place"]
    assert 0 < logged["train/environments/mine/long"] <= 1


@pytest.mark.parametrize(
    ("metric", "found"),
    [
        (("calls", "three"), "Sets set the metric 'calls' to 'three' on task 't'; a metric is a finite number or a bool"),
        (("calls", None), "Sets set the metric 'calls' to None"),
        (("calls", float("nan")), "Sets set the metric 'calls' to nan"),
        (("calls", 10**400), "Sets set the metric 'calls' to 1000"),
        (
            ("reward", 1.0),
            "Sets set the metric 'reward' on task 't'; the name of a metric is a printable text other than 'reward'",
        ),
        ((3, 1.0), "Sets set the metric 3 on task 't'"),
        (("a\nb", 1.0), r"Sets set the metric 'a\nb' on task 't'"),
    ],
)
def test_a_metric_that_cannot_be_logged_costs_its_group_and_says_why(metric: tuple[Any, Any], found: str) -> None:
    environment = Sets(metric=metric)
    errors = [error for error in group_of(environment, samples=8).errors]
    assert errors and all(found in error for error in errors)


@pytest.mark.parametrize(
    ("returned", "shown"),
    [(10**400, "1000"), (1 + 2j, "(1+2j)"), ("1", "'1'"),
     (torch.ones(2), "tensor([1., 1.])"), (numpy.ones(2), "array([1., 1.])"), (Decimal("1"), "Decimal('1')"), ([1.0], "[1.0]")],
)  # fmt: skip
def test_a_reward_that_is_no_number_is_named_with_its_environment(returned: Any, shown: str) -> None:
    errors = group_of(Sets(returned=returned)).errors
    assert len(errors) == 4 and all(f"RewardError: Sets.given returned {shown}" in error for error in errors)


def test_an_integer_without_a_representation_is_named_by_its_type() -> None:
    assert "returned an object of type int on task 't'" in group_of(Sets(returned=10**5000)).errors[0]


@pytest.mark.parametrize(
    "returned", [numpy.float32(0.5), numpy.array(0.5), numpy.array([0.5]), torch.tensor(0.5), torch.tensor([0.5])]
)
def test_a_number_of_numpy_or_torch_is_a_reward(returned: Any) -> None:
    group = group_of(Sets(returned=returned))
    assert group.errors == () and {rollout.reward for rollout in group.rollouts} == {0.5}


def test_numbers_are_converted_and_nothing_else_is() -> None:
    assert [to_number(value) for value in (True, 2, numpy.bool_(True), torch.tensor(3))] == [1.0, 2.0, 1.0, 3.0]
    assert [to_number(value) for value in ("1", None, [1], float("inf"), torch.zeros(0), object(), 2j)] == [None] * 7


def test_the_text_of_an_exception_is_bounded_wherever_it_comes_from(tmp_path: Path) -> None:
    def shouts(task: Task, rollout: Rollout) -> float:
        raise ValueError("beginning" + "x" * 1_000_000 + "end")

    environment = FunctionEnvironment(reward=shouts)
    tasks = environment.tasks(DataSource(rows=[{"prompt": "?", "answer": "a"}]))
    (error, *_) = group_of(environment, tasks[0]).errors
    assert len(error) < 2500 and "beginning" in error and error.endswith("end") and "characters" in error

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise KeyError

    class Fails(Sets):
        async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
            raise Unprintable

    assert "Unprintable: (its text cannot be read: KeyError)" in str(group_of(Fails(), samples=16).errors)


def test_a_lone_surrogate_in_what_an_environment_says_costs_its_rollout_alone() -> None:
    class Reads(Sets):
        async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
            return (user("read: \udcff"),) if rollout.sample == 1 else None

    group = group_of(Reads())
    assert [rollout.error is None for rollout in group.rollouts] == [True, False, True, True]
    said = r"ValueError: Reads gave a message (user) with a lone surrogate, '\udcff' at position 6, which is not text"
    assert str(group.rollouts[1].error).startswith(said)
