"""The interface of an environment for episodes and evaluations: in this process (``LocalEnvironment``) or in another
(``strop.environments.remote.RemoteEnvironment``).

    open(task): session and tools          prompt -> policy turn -> respond | answer_calls -> score           grade
                                                  (or run_agent, where an agent drives the episode)
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal

from strop.data.sources.source import DataSource
from strop.environments.base import DatasetEnvironment, Environment, TaskT
from strop.environments.compute_rewards import compute_group_rewards, compute_rewards
from strop.environments.policy_client import PastSelvesRule
from strop.environments.rewards import RewardResult
from strop.tools.base import ParsedReply
from strop.tools.toolbox import ToolOffer, current_toolbox
from strop.types import Messages, Rollout


@dataclass(frozen=True)
class Grade:
    """The data that evaluation needs from a rollout with rewards."""

    accuracy: float
    answer: str | None  # normalized, for majority voting


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of an environment. They are read once, so that missing features need no calls."""

    title: str  # for messages
    has_group_rewards: bool
    declares_accuracy: bool
    responds: bool  # episodes may have more than one policy turn
    episode_runner: str  # what runs its episodes, if an agent drives them (Environment.episode_runner)
    tool_continuation: Literal["turn", "message"] | None  # where the policy continues after a call; None: no tools
    has_session: bool  # something is open during an episode: a session, tools, or an agent's result
    has_stop_strings: bool
    has_answer_key: bool
    accuracy_reward: str | None  # name of the accuracy reward; None: the total reward
    overrides_accuracy: bool  # defines its own ``accuracy``
    needed_resources: tuple[str, ...] = ()  # of this process (strop.environments.resources)
    prompts_are_of_rows: bool = False  # the messages of a PromptedTask are its exact prompt, so that it can be tokenized ahead
    past_selves: PastSelvesRule | None = None  # the earlier selves of the policy that it plays against
    episode_state: Any = None  # what keeps the state of its sessions, for an ``EpisodeKeeper``
    policies: tuple[str, ...] = ()  # further policies that its roles are played by, each trained on its own, and BASE
    episode_limits: Any = None  # what the episode_runner enforces, as the environment defines it

    @property
    def has_tools(self) -> bool:
        return self.tool_continuation is not None


class EnvironmentHandle(ABC, Generic[TaskT]):
    """The methods that episodes and evaluations call. Each may raise any exception of the environment's code."""

    traits: Traits

    @abstractmethod
    def tasks(self, data: DataSource) -> Sequence[TaskT]: ...

    @abstractmethod
    def open(self, task: TaskT) -> AbstractAsyncContextManager[Any]:
        """Return a context manager for one episode and its rewards: the session, and its tools."""

    @abstractmethod
    async def prompt(self, task: TaskT) -> Messages: ...

    @abstractmethod
    async def stop_strings(self, task: TaskT, rollout: Rollout) -> Sequence[str]: ...

    @abstractmethod
    async def respond(self, task: TaskT, rollout: Rollout) -> Messages | None: ...

    @abstractmethod
    async def offer_tools(self) -> ToolOffer | None:
        """Return the open episode's tools for the policy; None without tools."""

    @abstractmethod
    async def answer_calls(self, rollout: Rollout, reply: ParsedReply) -> Messages | None:
        """Return the results of the calls in the policy's last turn, and reports of unreadable ones; None ends the episode."""

    @abstractmethod
    async def run_agent(self, task: TaskT, endpoint: Any) -> Any:
        """Run the agent of an episode, for the ``episode_runner`` that serves the policy at ``endpoint``. Returns the agent's result."""

    @abstractmethod
    async def score(self, task: TaskT, rollout: Rollout) -> RewardResult:
        """Compute the rewards of a rollout. Raises RewardError."""

    @abstractmethod
    async def score_group(self, task: TaskT, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Add the group rewards to the rewards of a task's rollouts. Raises RewardError."""

    @abstractmethod
    async def grade(self, task: TaskT, rollout: Rollout) -> Grade: ...

    @abstractmethod
    def accuracy(self, rollout: Rollout) -> float: ...


@dataclass(frozen=True)
class LocalEnvironment(EnvironmentHandle[TaskT]):
    """An environment in this process."""

    environment: Environment[TaskT]

    @cached_property
    def traits(self) -> Traits:  # type: ignore[override]
        return read_traits(self.environment)

    def tasks(self, data: DataSource) -> Sequence[TaskT]:
        return self.environment.tasks(data)

    def open(self, task: TaskT) -> AbstractAsyncContextManager[Any]:
        return self._open_with_tools(task) if self.traits.has_tools else self.environment.session(task)

    @asynccontextmanager
    async def _open_with_tools(self, task: TaskT) -> AsyncIterator[None]:
        async with self.environment.session(task), self.environment.open_tools():
            yield

    async def prompt(self, task: TaskT) -> Messages:
        messages = self.environment.prompt(task)
        return await messages if inspect.isawaitable(messages) else messages

    async def stop_strings(self, task: TaskT, rollout: Rollout) -> Sequence[str]:
        return self.environment.stop_strings(task, rollout)

    async def respond(self, task: TaskT, rollout: Rollout) -> Messages | None:
        return await self.environment.respond(task, rollout)

    async def offer_tools(self) -> ToolOffer | None:
        toolbox = current_toolbox.get() if self.traits.has_tools else None
        return None if toolbox is None else toolbox.offer

    async def answer_calls(self, rollout: Rollout, reply: ParsedReply) -> Messages | None:
        toolbox = current_toolbox.get()
        if toolbox is None:
            raise RuntimeError(f"{self.traits.title} has no open tools")
        return await toolbox.answer(reply, rollout.metrics)

    async def run_agent(self, task: TaskT, endpoint: Any) -> Any:
        environment: Any = self.environment  # that of the extension whose episode_runner calls this
        return await environment.run_agent(task, endpoint)

    async def score(self, task: TaskT, rollout: Rollout) -> RewardResult:
        return await compute_rewards(self.environment, task, rollout)

    async def score_group(self, task: TaskT, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        return await compute_group_rewards(self.environment, task, rollouts)

    async def grade(self, task: TaskT, rollout: Rollout) -> Grade:
        return Grade(self.environment.accuracy(rollout), self.environment.answer_key(task, rollout))

    def accuracy(self, rollout: Rollout) -> float:
        return self.environment.accuracy(rollout)


def read_prompt(environment: Environment[TaskT], task: TaskT) -> Messages:
    """Return the prompt of a task outside of an episode and of an event loop."""

    async def wait(messages: Awaitable[Messages]) -> Messages:
        return await messages

    messages = environment.prompt(task)
    return asyncio.run(wait(messages)) if inspect.isawaitable(messages) else messages


def read_traits(environment: Environment[Any]) -> Traits:
    kind, rewards = type(environment), environment.reward_functions
    is_agent = bool(kind.episode_runner)
    has_tools = environment.has_tools
    needing = (environment, *(tools for _, tools in environment.tool_sets))
    return Traits(
        title=kind.__name__,
        has_group_rewards=any(each.mark.group for each in rewards.values()),
        declares_accuracy=environment.declares_accuracy,
        responds=is_agent or has_tools or kind.respond is not Environment.respond,
        episode_runner=kind.episode_runner,
        tool_continuation=environment.tool_continuation if has_tools else None,
        has_session=has_tools or is_agent or kind.session is not Environment.session,
        has_stop_strings=kind.stop_strings is not Environment.stop_strings,
        has_answer_key=kind.answer_key is not Environment.answer_key,
        accuracy_reward=next((name for name, each in rewards.items() if each.mark.accuracy), None),
        overrides_accuracy=kind.accuracy is not Environment.accuracy,
        needed_resources=tuple(dict.fromkeys(name for each in needing for name in getattr(each, "needed_resources", ()))),
        prompts_are_of_rows=kind.prompt is DatasetEnvironment.prompt and not (has_tools or is_agent),
        past_selves=getattr(environment, "past_selves", None),
        episode_state=None if is_agent else getattr(environment, "episode_state", None),
        policies=getattr(environment, "policies", ()),
        episode_limits=getattr(environment, "episode_limits", None),
    )
