"""Environments whose episodes need more than one turn of the policy, where one is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.data.sources.source import DataSource
from strop.environments.agents.external_agent import ExternalAgent
from strop.environments.arithmetic import Arithmetic
from strop.environments.base import Environment, reward
from strop.environments.handle import LocalEnvironment
from strop.runs.dry_run.examine import find_single_turns
from strop.types import Messages, Rollout, Task, user


@dataclass(frozen=True, kw_only=True)
class Calculator(Environment[Task]):
    def tasks(self, data: DataSource) -> Sequence[Task]:
        return [Task(id="0")]

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        return (user("4"),)

    @reward()
    def right(self, task: Task, rollout: Rollout) -> float:
        return 1.0


def test_an_environment_that_answers_needs_more_than_one_turn() -> None:
    environments = {"calculator": LocalEnvironment(Calculator()), "sums": LocalEnvironment(Arithmetic())}
    (found,) = find_single_turns(environments, 1, "grpo")
    assert found.startswith("env.calculator: Calculator answers the policy (respond)")
    assert "set grpo.max_rollout_turns=N" in found
    assert not list(find_single_turns(environments, 2, "grpo")) and not list(
        find_single_turns({"sums": LocalEnvironment(Arithmetic())}, 1, "grpo")
    )


def test_tools_and_agents_need_more_than_one_turn() -> None:
    made = {"sums": Arithmetic(tools="calculator"), "agent": ExternalAgent(agent=print)}
    environments = {name: LocalEnvironment(environment) for name, environment in made.items()}
    tools, agent = find_single_turns(environments, 1, "grpo")
    assert tools.startswith("env.sums: Arithmetic has tools, but grpo.max_rollout_turns is 1")
    assert agent.startswith("env.agent: ExternalAgent runs an agent") and "after the first is refused" in agent
    assert not list(find_single_turns(environments, 2, "grpo"))
