"""Environments of verifiers (its v1 interface: Task, Taskset, Env, Harness), run as they are; the policy is their model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from strop.data.sources.records import is_held_out
from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError, GeneratedTasks, reward
from strop.extensions.adapters.runner_process import RunnerProcess
from strop.extensions.agents.agent_environment import AgentEnvironment, AgentResult, current_result
from strop.extensions.agents.endpoint import Endpoint
from strop.types import Rollout, Task


@dataclass(frozen=True, kw_only=True)
class PlacedTask(Task):
    """A task that lies in another process."""

    index: int


@dataclass(frozen=True, kw_only=True)
class VerifiersEnvironment(AgentEnvironment[PlacedTask]):
    """An environment of verifiers. Its harness asks the policy, and the reward is that of its task."""

    # The section [env] of verifiers' configuration, such as {taskset: {id: gsm8k}, agent: {harness: {id: null}}}. The runtime of the agent
    # is subprocess unless it names one.
    env: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""  # an interpreter that has verifiers and the environment; "" for this one
    path: tuple[str, ...] = ()  # folders with packages of environments that are not installed
    held_out: float = 0.0  # share of the tasks that is for validation and never trained on; 0: both see all tasks
    start_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.env.get("taskset") or {}).get("id"):
            raise EnvironmentConfigError(
                "env.taskset.id is not set; it names the task set, as --env.taskset.id of verifiers does"
            )

    @cached_property
    def process(self) -> RunnerProcess:
        process = RunnerProcess("verifiers_runner.py:VerifiersRunner", "verifiers", "verifiers", self.python, path=self.path)
        process.load(self.start_timeout_s, config=dict(self.env))
        weakref.finalize(self, process.close)
        return process

    def tasks(self, data: DataSource) -> Sequence[PlacedTask]:
        found = self.process.call("tasks", size=None)
        indices = [index for index, task in enumerate(found) if self._is_used(task["key"], data)][: data.size]
        if not indices:
            raise EnvironmentConfigError(
                f"no task of {self.env['taskset']['id']} is left for {data.part}: it has {len(found)}, and held_out is {self.held_out}"
            )

        def make(position: int) -> PlacedTask:
            index = indices[position]
            return PlacedTask(id=found[index]["key"][:16], question=found[index]["question"], index=index)

        return GeneratedTasks(len(indices), make)

    def _is_used(self, key: str, data: DataSource) -> bool:
        return not self.held_out or is_held_out(key, self.held_out) == data.held_out

    async def run(self, task: PlacedTask, endpoint: Endpoint) -> AgentResult:
        result = await self.process.call_async(
            "run", index=task.index, base_url=endpoint.base_url, api_key=endpoint.api_key, model=endpoint.model
        )
        return AgentResult(reward=result["reward"], metrics=result["metrics"])

    @reward(weight=1.0, accuracy=True)
    def score(self, task: PlacedTask, rollout: Rollout) -> float:
        """The sum of the task's rewards with their weights, as verifiers has it; 0 if the conversation became too long."""
        return current_result().reward or 0.0
