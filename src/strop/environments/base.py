"""The environment interface: tasks, prompts, turns and rewards.

An environment is a frozen dataclass; its fields are its options. It sees tasks and rollouts, never the training loop, an engine
or a device. A new environment is one file, which a configuration names as ``module:Class``. Episodes and evaluations
call it through a handle (``strop.environments.handle``), in this process or another one.

    tasks ->  prompt  ->  policy turn  ->  respond: more messages, or None to end  ->  rewards
                           ^                |
                           +----------------+

Rewards that compare the rollouts of one task are computed when all of them have ended.

An exception from any method, including SystemExit, is recorded on that rollout; its group is dropped and counted, and training continues
(law 7).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar, overload

from strop.data.messages import make_prompt
from strop.data.sources.source import DataSource, Row
from strop.data.sources.streamed import is_streamed
from strop.environments.rewards import RewardFunction, RewardMark, reward_marks
from strop.environments.rewards import reward as reward
from strop.tools.base import ToolConfigError
from strop.tools.tool_options import ToolOptions
from strop.types import Message, Messages, Rollout, Task, user
from strop.user_code import UserCodeError, import_attribute, suggest_names

TaskT = TypeVar("TaskT", bound=Task)
T = TypeVar("T")

DEFAULT_NUM_TASKS = 10_000  # used by generated tasks when data.size is not set


RENAMED = {  # methods of earlier versions
    "first_messages": "prompt, which may be a coroutine function",
    "next_stop_strings": "stop_strings",
    "episode": "session",
}


class EnvironmentConfigError(ValueError):
    """An environment cannot be built as configured. The message says what to set instead."""


def import_user_code(path: str) -> Any:
    """Import ``module:name`` or ``path/to/file.py:name``. Raises EnvironmentConfigError."""
    try:
        return import_attribute(path)
    except UserCodeError as error:
        raise EnvironmentConfigError(str(error)) from error


@dataclass(frozen=True, kw_only=True)
class Environment(ToolOptions, ABC, Generic[TaskT]):
    """Base class of environments. Subclasses must be ``@dataclass(frozen=True, kw_only=True)`` too."""

    # ``module:function``, a ``strop.rollouts.episode.EpisodeRunner`` that runs its episodes; empty: turn by turn, by the methods below
    episode_runner: ClassVar[str] = ""

    reward_weights: Mapping[str, float] = field(default_factory=dict)  # reward name -> weight, overriding the method's own

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls).keys() & RENAMED.keys():
            raise TypeError(f"{cls.__name__}.{name} is not called: rename it to {RENAMED[name]}")
        for name in vars(cls):
            parents = (getattr(base, name, None) for base in cls.__mro__[1:])
            if any(hasattr(parent, "__reward__") for parent in parents) and not hasattr(vars(cls)[name], "__reward__"):
                raise TypeError(f"{cls.__name__}.{name} overrides a reward but is not marked; put @reward(weight=...) on it")
        marked = [name for name, mark in reward_marks(cls).items() if mark.accuracy]
        if len(marked) > 1:
            raise TypeError(f"{cls.__name__} marks {' and '.join(marked)} with accuracy=True; at most one can be the accuracy")

    def __post_init__(self) -> None:
        """Check the reward weights and the tools. Subclasses that override this must call ``super().__post_init__()``."""
        known = self.reward_functions
        for name in self.reward_weights:
            if name not in known:
                raise EnvironmentConfigError(
                    f"reward_weights names {name!r}, which is not a reward of {type(self).__name__}{suggest_names(name, known)}"
                )
        try:
            self.check_tool_options()
        except ToolConfigError as error:
            raise EnvironmentConfigError(str(error)) from error

    @abstractmethod
    def tasks(self, data: DataSource) -> Sequence[TaskT]:
        """Return a finite sequence of tasks. Task i must always be the same, so that a run resumes exactly."""

    def prompt(self, task: TaskT) -> Messages | Awaitable[Messages]:
        """Return the conversation that the policy continues. May be a coroutine function, which then runs inside the session."""
        return (user(task.question),)

    async def respond(self, task: TaskT, rollout: Rollout) -> Messages | None:
        """Return the messages that follow the policy's last turn, or None to end the episode (the default)."""
        return None

    def stop_strings(self, task: TaskT, rollout: Rollout) -> Sequence[str]:
        """Return the texts that end the policy's next turn, in addition to ``policy.generation.stop_strings``. Default: none."""
        return ()

    def session(self, task: TaskT) -> AbstractAsyncContextManager[Any]:
        """Return a context manager that stays open during one episode and its rewards, e.g. a sandbox or a browser. Default: none."""
        return nullcontext()

    def turn_states(self, task: TaskT, rollout: Rollout) -> Sequence[str | None]:
        """Return the state that each of ``rollout.policy_turns`` was taken in, for algorithms that compare turns taken in the same state
        (for GiGPO); None for a turn without one. Called with the rewards. Default: none."""
        return ()

    @cached_property
    def reward_functions(self) -> Mapping[str, RewardFunction]:
        """The rewards by name: the marked methods."""
        kind = type(self)
        return {
            name: RewardFunction(getattr(self, name), mark, f"{kind.__name__}.{name}")
            for name, mark in reward_marks(kind).items()
        }

    @classmethod
    def list_marks(cls, options: Mapping[str, Any]) -> Mapping[str, RewardMark]:
        """Return, by name, how the rewards of an environment with these options count."""
        return reward_marks(cls)

    @property
    def declares_accuracy(self) -> bool:
        """Whether a reward is marked as the accuracy; without one, ``accuracy`` is the reward."""
        return any(each.mark.accuracy for each in self.reward_functions.values())

    def accuracy(self, rollout: Rollout) -> float:
        """Return the value that evaluation averages: the reward marked ``accuracy=True``, else the total reward. Failed rollouts get 0."""
        for name, each in self.reward_functions.items():
            if each.mark.accuracy:
                return rollout.rewards.get(name, 0.0)
        return rollout.reward

    def answer_key(self, task: TaskT, rollout: Rollout) -> str | None:
        """Return the normalized final answer for majority voting (cons@k), or None to abstain."""
        return None

    def reference_turns(self, task: TaskT) -> Sequence[str]:
        """Return turns that solve a task, for ``strop env check``; empty if unknown, or if ``task.answer`` is enough."""
        return ()


@dataclass(frozen=True)
class GeneratedTasks(Sequence[T]):
    """A sequence of ``size`` tasks that are generated on access. ``make`` must depend only on the index."""

    size: int
    make: Callable[[int], T]

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.size))]
        return self.make(range(self.size)[index])


@dataclass(frozen=True, kw_only=True)
class PromptedTask(Task):
    """A task with its conversation, formatted by the data section's prompt options."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class DatasetEnvironment(Environment[PromptedTask]):
    """An environment over the rows of a dataset. A subclass only adds rewards."""

    @property
    def needs_answers(self) -> bool:
        """Whether data without a reference answer column is an error."""
        return True

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        rows, template = data.load_rows(needs_answers=self.needs_answers), data.load_template()

        def make(row: Row) -> PromptedTask:
            messages = make_prompt(row.prompt, template, row.id, row.images)
            return PromptedTask(id=row.id, question=row.question, answer=row.answer, metadata=row.metadata, messages=messages)

        if is_streamed(rows):
            return rows.map(make)
        if len(rows) and data.opened is None:
            make(rows[0])  # report a prompt file that does not fit the prompts now, not in each rollout
        return GeneratedTasks(len(rows), lambda index: make(rows[index]))

    def prompt(self, task: PromptedTask) -> Messages:
        return task.messages
