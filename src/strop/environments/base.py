"""What an environment is: tasks, prompts, turns and rewards.

An environment is a frozen dataclass whose fields are its options. It sees tasks and rollouts, never the loop, an engine
or a device. A new one is one file, named in a configuration as ``module:Class``.

    tasks ->  prompt  ->  the policy writes  ->  respond: more messages, or None to end  ->  rewards
                               ^                           |
                               +---------------------------+

Whatever a method raises is recorded on that rollout, its group is dropped and counted, and training goes on (law 7).
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Generic, TypeVar, overload

from strop.data.errors import nearest
from strop.data.source import DataSource
from strop.types import Message, Messages, Rollout, Task, user

TaskT = TypeVar("TaskT", bound=Task)
T = TypeVar("T")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])

GENERATED_SIZE = 10_000  # tasks of a generator when data.size does not say


class RewardError(Exception):
    """A reward that raised, or that is no finite number. Names the environment and the method."""


class EnvironmentConfigError(ValueError):
    """An environment that cannot be made as configured; the message says what to set instead."""


@dataclass(frozen=True)
class RewardMark:
    weight: float
    accuracy: bool


def reward(weight: float = 1.0, *, accuracy: bool = False) -> Callable[[MethodT], MethodT]:
    """Mark a method ``(self, task, rollout) -> float | bool``, plain or async, as a reward, logged by its name.

    The rollout's reward is the weighted sum; weight 0 is logged and not counted. ``accuracy=True`` marks the one
    whose value evaluation reports as accuracy.
    """
    if callable(weight):
        raise TypeError("write @reward() or @reward(weight=...), with parentheses")

    def mark(method: MethodT) -> MethodT:
        method.__reward__ = RewardMark(weight, accuracy)  # type: ignore[attr-defined]
        return method

    return mark


@dataclass(frozen=True, kw_only=True)
class Environment(ABC, Generic[TaskT]):
    """Tasks, prompts, turns and rewards. Subclasses are ``@dataclass(frozen=True, kw_only=True)`` too."""

    reward_weights: Mapping[str, float] = field(default_factory=dict)  # reward name -> a weight other than the method's own

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            parents = (getattr(base, name, None) for base in cls.__mro__[1:])
            if any(hasattr(parent, "__reward__") for parent in parents) and not hasattr(vars(cls)[name], "__reward__"):
                raise TypeError(f"{cls.__name__}.{name} overrides a reward but is not marked; put @reward(weight=...) on it")
        marked = [name for name, mark in reward_marks(cls).items() if mark.accuracy]
        if len(marked) > 1:
            raise TypeError(f"{cls.__name__} marks {' and '.join(marked)} with accuracy=True; at most one can be the accuracy")

    def __post_init__(self) -> None:
        """Subclasses that define this call it through ``super()``."""
        for name in self.reward_weights:
            if name not in (known := reward_marks(type(self))):
                where = f"which is no reward of {type(self).__name__}"
                raise EnvironmentConfigError(f"reward_weights names {name!r}, {where}{nearest(name, known)}")

    @abstractmethod
    def tasks(self, data: DataSource) -> Sequence[TaskT]:
        """The tasks, finite and by index, so that a run resumes exactly. Task i is the same whenever it is asked for."""

    def prompt(self, task: TaskT) -> Messages:
        """The conversation the policy continues."""
        return (user(task.question),)

    async def respond(self, task: TaskT, rollout: Rollout) -> Messages | None:
        """What the environment says to the policy's last turn, or None when the episode is over (the default)."""
        return None

    def session(self, task: TaskT) -> AbstractAsyncContextManager[Any]:
        """What is open while one episode runs, its rewards included: a sandbox, a browser, a game. Nothing by default."""
        return nullcontext()

    def accuracy(self, rollout: Rollout) -> float:
        """What evaluation averages: the reward marked ``accuracy=True``, else the total. 0 for a rollout that failed."""
        for name, mark in reward_marks(type(self)).items():
            if mark.accuracy:
                return rollout.rewards.get(name, 0.0)
        return rollout.reward

    def answer_key(self, task: TaskT, rollout: Rollout) -> str | None:
        """The final answer in normal form, for majority votes (cons@k). None: it cannot be voted on."""
        return None

    # What episodes and evaluation call: the methods above in this process, or wherever they run (``strop.environments.hosted``).

    @property
    def title(self) -> str:
        """What messages call it."""
        return type(self).__name__

    async def first_messages(self, task: TaskT) -> Messages:
        return self.prompt(task)

    async def rewarded(self, task: TaskT, rollout: Rollout) -> Scored:
        """Raises RewardError."""
        return await score(self, task, rollout)

    async def judged(self, task: TaskT, rollout: Rollout) -> Judged:
        """What evaluation counts, of a rollout with its rewards."""
        return Judged(self.accuracy(rollout), self.answer_key(task, rollout))


def reward_marks(kind: type[Environment[Any]]) -> dict[str, RewardMark]:
    """The rewards of an environment class, in the order in which they are written, a parent's first."""
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    found = ((name, getattr(getattr(kind, name, None), "__reward__", None)) for name in names)
    return {name: mark for name, mark in found if isinstance(mark, RewardMark)}


@dataclass(frozen=True)
class Scored:
    reward: float  # the weighted sum of ``rewards``
    rewards: Mapping[str, float]


@dataclass(frozen=True)
class Judged:
    accuracy: float
    answer: str | None  # in normal form, for votes


async def score(environment: Environment[TaskT], task: TaskT, rollout: Rollout) -> Scored:
    """Ask every reward, in order. Raises RewardError when one raises or is no finite number."""
    rewards: dict[str, float] = {}
    total = 0.0
    for name, mark in reward_marks(type(environment)).items():
        where = f"{type(environment).__name__}.{name}"
        try:
            value = getattr(environment, name)(task, rollout)
            if inspect.isawaitable(value):
                value = await value
        except Exception as error:
            raise RewardError(f"{where} raised {type(error).__name__} on task {task.id!r}: {error}") from error
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"{where} returned {value!r:.80} on task {task.id!r}; a reward is a finite number or a bool")
        rewards[name] = float(value)
        total += environment.reward_weights.get(name, mark.weight) * float(value)
    return Scored(total, rewards)


@dataclass(frozen=True)
class GeneratedTasks(Sequence[T]):
    """``size`` tasks, each made from its index when it is asked for; ``make`` must depend on the index alone."""

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
    """A task that carries its conversation, worded by the data section's prompt options."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, kw_only=True)
class DatasetEnvironment(Environment[PromptedTask]):
    """An environment over the rows of a dataset: add a reward and it is complete."""

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        rows, template = data.rows(), data.template()

        def make(index: int) -> PromptedTask:
            row = rows[index]
            return PromptedTask(
                id=row.id,
                question=row.question,
                answer=row.answer,
                metadata=row.metadata,
                messages=template.messages(row.question),
            )

        return GeneratedTasks(len(rows), make)

    def prompt(self, task: PromptedTask) -> Messages:
        return task.messages
