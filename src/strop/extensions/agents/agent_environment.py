"""Environments whose episodes are driven by an agent: code that calls the policy through OpenAI's or Anthropic's API.

The policy's turns are the completions of the agent's requests; ``prompt`` and ``respond`` are not called. Rewards work as in any
environment.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar

from strop.endings import Ending
from strop.environments.base import Environment, EnvironmentConfigError, TaskT
from strop.environments.rewards import to_number
from strop.extensions.agents.endpoint import Endpoint
from strop.extensions.agents.episode_budget import EpisodeBudget
from strop.user_code import describe_value


@dataclass(frozen=True, kw_only=True)
class AgentResult:
    """The result of one episode."""

    reward: float | None = None  # None: rewards come only from functions
    unscored: bool = False  # the episode cannot be scored: the agent's reward is None
    output: str = ""  # printed or returned text; stored with the rollout
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged with the rollout's


_result: ContextVar[AgentResult | None] = ContextVar("strop_agent_result", default=None)


class AgentTimeout(TimeoutError):
    """An agent took too long."""

    ending = Ending.TIME


class AgentFailed(RuntimeError):
    """An agent did not return a usable result."""

    ending = Ending.CRASH


@dataclass(frozen=True, kw_only=True)
class AgentEnvironment(Environment[TaskT]):
    """Base class of agent environments. A subclass defines ``tasks``, ``run`` and rewards."""

    episode_runner: ClassVar[str] = "strop.extensions.agents.agent_episode:run_agent"
    needed_resources: ClassVar[tuple[str, ...]] = ("gateway",)

    agent_timeout_s: float = 600.0  # wall time of an episode, after which the agent is terminated: a failure of the policy

    max_episode_tokens: int | None = None  # tokens that the policy may sample in an episode; null: no limit
    max_episode_cost: float | None = None  # of an episode, in the currency of the prices; null: no limit
    read_price: float = 0.0  # of a million tokens of prompts
    sampled_price: float = 0.0  # of a million sampled tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_episode_cost is not None and not (self.read_price or self.sampled_price):
            raise EnvironmentConfigError(
                f"max_episode_cost is {self.max_episode_cost:g}, but read_price and sampled_price are 0; set a price per "
                "million tokens, or remove max_episode_cost"
            )
        if self.has_tools:
            raise EnvironmentConfigError(
                "tools are for episodes without an agent: an agent sends its own with its requests; remove env.ALIAS.tools"
            )

    @property
    def episode_limits(self) -> EpisodeBudget:
        return EpisodeBudget(
            max_tokens=self.max_episode_tokens,
            max_cost=self.max_episode_cost,
            read_price=self.read_price,
            sampled_price=self.sampled_price,
        )

    @abstractmethod
    async def run(self, task: TaskT, endpoint: Endpoint) -> Any:
        """Run one episode against ``endpoint``.

        Returns an ``AgentResult``, a number (the reward in ``current_result()``), a text (its output), a mapping of ``reward``,
        ``output`` and ``metrics``, or None. A mapping whose ``reward`` is None means that the episode cannot be scored.
        """

    async def run_agent(self, task: TaskT, endpoint: Endpoint) -> AgentResult:
        """Run one episode within the time limit. Raises AgentTimeout, AgentFailed, and what the agent raises."""
        _result.set(None)
        try:
            async with asyncio.timeout(self.agent_timeout_s) as limit:
                returned = await self.run(task, endpoint)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise AgentTimeout(
                f"the agent took longer than {self.agent_timeout_s:g} s on task {task.id!r} (agent_timeout_s of the environment)"
            ) from error
        result = read_result(returned)
        _result.set(result)
        return result


def current_result() -> AgentResult:
    """Return the result of this episode's agent, for its rewards. It is empty if the agent's last request was refused."""
    return _result.get() or AgentResult()


def read_result(returned: Any) -> AgentResult:
    """Read what an agent returned. Raises AgentFailed."""
    if returned is None or isinstance(returned, AgentResult):
        return returned or AgentResult()
    if isinstance(returned, str):
        return AgentResult(output=returned)
    values = dict(returned) if isinstance(returned, Mapping) else {"reward": returned}
    reward, metrics = values.get("reward"), values.get("metrics", {})
    if reward is not None and to_number(reward) is None:
        raise AgentFailed(f"the agent returned {describe_value(reward)} as its reward, which must be a finite number or a bool")
    if not isinstance(metrics, Mapping) or any(to_number(value) is None for value in metrics.values()):
        raise AgentFailed(f"the agent returned {describe_value(metrics)} as its metrics, which must map names to finite numbers")
    output = values.get("output", "")
    return AgentResult(
        reward=None if reward is None else to_number(reward),
        unscored="reward" in values and reward is None,
        output=output if isinstance(output, str) else json.dumps(output, default=str),
        metrics={str(name): float(value) for name, value in metrics.items()},
    )
