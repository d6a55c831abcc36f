"""The environment interface: tasks, prompts, turns and rewards.

An environment is a frozen dataclass; its fields are its options. It sees tasks and rollouts, never the training loop, an engine
or a device. A new environment is one file, which a configuration names as ``module:Class``.

    tasks ->  prompt  ->  policy turn  ->  respond: more messages, or None to end  ->  rewards
                           ^                |
                           +----------------+

Rewards that compare the rollouts of one task are computed when all of them have ended.

An exception from any method, also SystemExit, is recorded on that rollout; its group is dropped and counted, and training continues
(law 7).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import Any, Generic, TypeVar, overload

from strop.data.messages import make_prompt
from strop.data.sources.source import DataSource, Row
from strop.data.sources.streaming.streamed import is_streamed
from strop.environments.games.policy_client import PastSelvesRule
from strop.environments.verifiers.gate import Gate, find_closed_gate, multiply_gates
from strop.environments.verifiers.weight_schedule import WeightSchedule
from strop.safety.exits import contain_exits
from strop.tools.base import ParsedReply, ToolConfigError
from strop.tools.tool_options import ToolOptions
from strop.tools.toolbox import ToolOffer, current_toolbox
from strop.types import Message, Messages, Rollout, StepReward, Task, user
from strop.user_code import UserCodeError, describe_error, describe_value, import_attribute, suggest_names

TaskT = TypeVar("TaskT", bound=Task)
T = TypeVar("T")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])

DEFAULT_NUM_TASKS = 10_000  # used by generated tasks when data.size is not set


LARGEST_REWARD = 1e30  # float32 ends at 3.4e38, and groups and batches add rewards up


class RewardError(Exception):
    """A reward method raised, or returned something other than a finite number. The message names the environment and the method."""


class EnvironmentConfigError(ValueError):
    """An environment cannot be built as configured. The message says what to set instead."""


def import_user_code(path: str) -> Any:
    """Import ``module:name`` or ``path/to/file.py:name``. Raises EnvironmentConfigError."""
    try:
        return import_attribute(path)
    except UserCodeError as error:
        raise EnvironmentConfigError(str(error)) from error


@dataclass(frozen=True)
class RewardMark:
    weight: float = 1.0
    accuracy: bool = False
    group: bool = False  # called once for all rollouts of a task
    per_turn: bool = False  # a process reward: one for each turn of the policy
    schedule: WeightSchedule | None = None  # the weight by step, in place of ``weight``
    gates: tuple[Gate, ...] = ()  # all must open
    log_weighted: bool = False  # as the metric ``weighted/NAME``, too
    concurrent: bool = False  # it may run beside others: it shares no state with them


@dataclass(frozen=True)
class RewardFunction:
    """A reward of an environment: ``function(task, rollout)``, or ``function(task, rollouts)`` if it is a group's."""

    function: Callable[[Any, Any], Any]
    mark: RewardMark
    source: str  # where it is defined, for messages


def reward(
    weight: float = 1.0, *, accuracy: bool = False, group: bool | None = None, per_turn: bool = False
) -> Callable[[MethodT], MethodT]:
    """Mark a method ``(self, task, rollout) -> float | bool``, sync or async, as a reward that is logged under its name.

    The rollout's reward is the weighted sum of its rewards; a reward of weight 0 is only logged. Evaluation reports the reward
    marked ``accuracy=True`` as accuracy. With ``group`` the method is called once for all rollouts of a task, as
    ``(self, task, rollouts) -> Sequence[float | bool]``; None: if it has a parameter ``rollouts``. A plain function that is a reward
    (``strop.environments.function_environment``) may be marked too.

    With ``per_turn`` it is a process reward, ``(self, task, rollout) -> Sequence``, with one item for each of ``rollout.policy_turns``:
    a number, None for no reward, or for steps inside the turn a mapping from the index of a step's last token in the turn to a number. The
    sum over all steps is the rollout's reward of that name; algorithms that give credit to tokens see each step
    (``strop.algorithms.policy_gradient.process.steps``).
    """
    if callable(weight):
        raise TypeError("write @reward() or @reward(weight=...), with parentheses")

    def mark(method: MethodT) -> MethodT:
        of_group = takes_rollouts(method) if group is None else group
        if of_group and per_turn:
            raise TypeError("a reward is of a group or per_turn, not both: a per_turn reward sees one rollout")
        method.__reward__ = RewardMark(weight, accuracy, of_group, per_turn)  # type: ignore[attr-defined]
        return method

    return mark


@dataclass(frozen=True, kw_only=True)
class Environment(ToolOptions, ABC, Generic[TaskT]):
    """Base class of environments. Subclasses must be ``@dataclass(frozen=True, kw_only=True)`` too."""

    reward_weights: Mapping[str, float] = field(default_factory=dict)  # reward name -> weight, overriding the method's own

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

    def prompt(self, task: TaskT) -> Messages:
        """Return the conversation that the policy continues."""
        return (user(task.question),)

    async def respond(self, task: TaskT, rollout: Rollout) -> Messages | None:
        """Return the messages that follow the policy's last turn, or None to end the episode (the default)."""
        return None

    def stop_strings(self, task: TaskT, rollout: Rollout) -> Sequence[str]:
        """Return the texts that end the policy's next turn, besides ``policy.generation.stop_strings``. Default: none."""
        return ()

    def turn_states(self, task: TaskT, rollout: Rollout) -> Sequence[str | None]:
        """Return the state that each of ``rollout.policy_turns`` was taken in, for algorithms that compare turns taken in the same state
        (``strop.algorithms.policy_gradient.process.gigpo``); None for a turn without one. Called with the rewards. Default: none."""
        return ()

    def session(self, task: TaskT) -> AbstractAsyncContextManager[Any]:
        """Return a context manager that stays open during one episode and its rewards, e.g. a sandbox or a browser. Default: none."""
        return nullcontext()

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
        """Return how the rewards of an environment with these options count, by name."""
        return reward_marks(cls)

    @classmethod
    def list_rewards(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the rewards that an environment with these options has."""
        return tuple(cls.list_marks(options))

    @classmethod
    def list_step_rewards(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of those that are ``per_turn``."""
        return tuple(name for name, mark in cls.list_marks(options).items() if mark.per_turn)

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
        """Return turns that solve a task, for ``strop env check``; none if they are not known, or if ``task.answer`` is enough."""
        return ()

    # Episodes and evaluation call the methods below. They run the methods above in this process, or in another one
    # (``strop.environments.remote``).

    @property
    def title(self) -> str:
        """The name used in messages."""
        return type(self).__name__

    def episode(self, task: TaskT) -> AbstractAsyncContextManager[Any]:
        """Return what is open during one episode: the session, and the tools in it."""
        if not self.has_tools:
            return self.session(task)

        @asynccontextmanager
        async def opened() -> AsyncIterator[None]:
            async with self.session(task), self.open_tools():
                yield

        return opened()

    async def offer_tools(self) -> ToolOffer | None:
        """Return what the open episode offers to the policy; None without tools."""
        toolbox = current_toolbox.get() if self.has_tools else None
        return None if toolbox is None else toolbox.offer

    async def answer_calls(self, rollout: Rollout, reply: ParsedReply) -> Messages | None:
        """Return the results of the calls of the policy's last turn, and what could not be read of it; None ends the episode."""
        toolbox = current_toolbox.get()
        if toolbox is None:
            raise RuntimeError(f"{self.title} has no open tools")
        return await toolbox.answer(reply, rollout.metrics)

    async def first_messages(self, task: TaskT) -> Messages:
        return self.prompt(task)

    async def next_stop_strings(self, task: TaskT, rollout: Rollout) -> Sequence[str]:
        return self.stop_strings(task, rollout)

    async def score_rollout(self, task: TaskT, rollout: Rollout) -> RewardResult:
        """Compute the rewards of a rollout. Raises RewardError."""
        return await compute_rewards(self, task, rollout)

    @property
    def responds(self) -> bool:
        """Whether episodes have more than one turn of the policy, where they are allowed."""
        return self.has_tools or type(self).respond is not Environment.respond

    @property
    def past_selves(self) -> PastSelvesRule | None:
        """Which earlier selves of the policy it plays against (``strop.environments.games.policy_client``). Default: none."""
        return None

    @property
    def prompts_are_of_rows(self) -> bool:
        """Whether the messages of a ``PromptedTask`` are its prompt as it stands, so that it may be tokenized ahead."""
        return False

    @property
    def needs_sandbox(self) -> bool:
        """Whether this process's sandbox runs programs that the policy writes."""
        return any(getattr(each, "needs_sandbox", False) for _, each in self.tool_sets)

    @property
    def is_agent(self) -> bool:
        """Whether episodes are driven by an agent, which asks the policy itself (``strop.environments.agents``)."""
        return False

    async def run_agent(self, task: TaskT, endpoint: Any) -> Any:
        """Run one episode of an agent. Returns an ``AgentResult``."""
        raise NotImplementedError(f"{self.title} is no environment of an agent")

    @property
    def declares_accuracy(self) -> bool:
        """Whether a reward is marked as the accuracy; without one, ``accuracy`` is the reward."""
        return any(each.mark.accuracy for each in self.reward_functions.values())

    @property
    def has_group_rewards(self) -> bool:
        return any(each.mark.group for each in self.reward_functions.values())

    async def score_group(self, task: TaskT, rollouts: Sequence[Rollout]) -> Sequence[RewardResult]:
        """Add the group's rewards to those that the rollouts of a task have. Raises RewardError."""
        return await compute_group_rewards(self, task, rollouts)

    async def grade(self, task: TaskT, rollout: Rollout) -> Grade:
        """Return what evaluation needs of a rollout that has its rewards."""
        return Grade(self.accuracy(rollout), self.answer_key(task, rollout))


def reward_marks(kind: type[Environment[Any]]) -> dict[str, RewardMark]:
    """Return the rewards of an environment class in definition order, parents first."""
    names = dict.fromkeys(name for base in reversed(kind.__mro__) for name in vars(base))
    marks = ((name, getattr(getattr(kind, name, None), "__reward__", None)) for name in names)
    return {name: mark for name, mark in marks if isinstance(mark, RewardMark)}


@dataclass(frozen=True)
class RewardResult:
    reward: float  # the weighted sum of ``rewards``
    rewards: Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the rollout, checked
    step_rewards: tuple[StepReward, ...] = ()  # the parts of ``reward`` that belong to steps
    turn_states: tuple[str | None, ...] = ()  # of each turn of the policy, or empty
    unscored: bool = False  # a reward returned None, so that the rollout counts nowhere


@dataclass(frozen=True)
class Grade:
    accuracy: float
    answer: str | None  # normalized, for majority voting


async def compute_rewards(environment: Environment[TaskT], task: TaskT, rollout: Rollout) -> RewardResult:
    """Compute every reward of a single rollout in order, up to one that returns None: that rollout cannot be scored. Raises
    RewardError if one raises or is not a finite number.

    Rewards marked ``concurrent`` run beside each other, as soon as their gates are known. Everything else is as if they did not: the
    order of sums and of metrics, and which error is raised."""
    async with _RewardCalls(environment, task, rollout) as calls:
        return await _sum_rewards(environment, task, rollout, calls)


async def _sum_rewards(environment: Environment[TaskT], task: TaskT, rollout: Rollout, calls: _RewardCalls) -> RewardResult:
    rewards: dict[str, float] = {}
    steps: dict[int, float] = {}
    total = 0.0
    for name, each in environment.reward_functions.items():
        if each.mark.group:
            continue
        closed = find_closed_gate(each.mark.gates, rewards)
        calls.start_ready(name, rewards)
        if closed is not None and closed.otherwise is None:
            continue
        returned = await calls.result(name) if closed is None else closed.otherwise
        if returned is None:
            return RewardResult(0.0, rewards, _check_metrics(environment, task, rollout), unscored=True)
        weight, factor = (
            weight_of(environment, name, rollout),
            multiply_gates(each.mark.gates, rewards) if closed is None else 1.0,
        )
        if each.mark.per_turn and closed is None:
            values = read_step_rewards(each, task, rollout, returned)
            for token, step in values:
                steps[token] = steps.get(token, 0.0) + weight * factor * step
            returned = math.fsum(step for _, step in values)
        if (value := to_number(returned)) is None:
            raise RewardError(
                f"{each.source} returned {describe_value(returned)} on task {task.id!r}; a reward is a finite number or a bool, or None "
                "for a rollout that cannot be scored, which is left out"
            )
        rewards[name] = value = factor * value if each.mark.gates else value
        total += weight * value
        _log_weighted(each, name, rollout, weight * value)
    check_total(environment, task, total, rewards)
    step_rewards = tuple(StepReward(token, steps[token]) for token in sorted(steps))
    states = _read_turn_states(environment, task, rollout)
    return RewardResult(total, rewards, _check_metrics(environment, task, rollout), step_rewards, states)


class _RewardCalls:
    """The calls of the rewards of a rollout: the concurrent ones as tasks, each of which sets metrics of its own."""

    def __init__(self, environment: Environment[Any], task: Task, rollout: Rollout) -> None:
        self._functions = {name: each for name, each in environment.reward_functions.items() if not each.mark.group}
        self._task, self._rollout = task, rollout
        self._waiting = [name for name, each in self._functions.items() if each.mark.concurrent]
        self._running: dict[str, tuple[asyncio.Task[Any], Rollout]] = {}

    async def __aenter__(self) -> _RewardCalls:
        return self

    def start_ready(self, current: str, rewards: Mapping[str, float]) -> None:
        """Start the concurrent rewards whose gates are open. Those before ``current`` are known."""
        known = list(self._functions)
        known = known[: known.index(current)]
        for name in list(self._waiting):
            gates = self._functions[name].mark.gates
            if all(gate.reward in known for gate in gates):
                self._waiting.remove(name)
                if find_closed_gate(gates, rewards) is None:
                    own = replace(self._rollout, metrics={})
                    self._running[name] = asyncio.create_task(_call_reward(self._functions[name], self._task, own)), own

    async def result(self, name: str) -> Any:
        """Return what a reward returned. Raises RewardError."""
        if name not in self._running:
            return await _call_reward(self._functions[name], self._task, self._rollout)
        running, own = self._running.pop(name)
        returned = await running
        self._rollout.metrics.update(own.metrics)
        return returned

    async def __aexit__(self, *error: object) -> None:
        for running, _ in self._running.values():
            running.cancel()
        await asyncio.gather(*(running for running, _ in self._running.values()), return_exceptions=True)


def _read_turn_states(environment: Environment[TaskT], task: TaskT, rollout: Rollout) -> tuple[str | None, ...]:
    """Return the states of a rollout's turns. Raises RewardError."""
    try:
        with contain_exits():
            states = environment.turn_states(task, rollout)
    except Exception as error:
        raise RewardError(f"{environment.title}.turn_states raised {describe_error(error)} on task {task.id!r}") from error
    listed = isinstance(states, Sequence) and not isinstance(states, str)
    if not listed or len(states) not in (0, len(rollout.policy_turns)) or not all(isinstance(one, str | None) for one in states):
        raise RewardError(
            f"{environment.title}.turn_states returned {describe_value(states)} on task {task.id!r}; return a list with one text, or None, "
            f"for each of the {len(rollout.policy_turns)} turns of the policy, or an empty one"
        )
    return tuple(states)


def read_step_rewards(each: RewardFunction, task: Task, rollout: Rollout, returned: Any) -> list[tuple[int, float]]:
    """Return (index of its last token among the sampled ones, reward) of each step of a ``per_turn`` reward. Raises RewardError."""
    turns = rollout.policy_turns
    wanted = (
        f"a per_turn reward is a list with one item for each of the {len(turns)} turns of the policy: a finite number or a bool, None, or "
        "a mapping from an index among the turn's tokens to a number"
    )
    listed = returned.tolist() if hasattr(returned, "tolist") else returned  # of NumPy or torch
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) != len(turns):
        raise RewardError(f"{each.source} returned {describe_value(returned)} on task {task.id!r}; {wanted}")
    steps: list[tuple[int, float]] = []
    start = 0
    for number, (item, turn) in enumerate(zip(listed, turns, strict=True), 1):
        length = len(turn.tokens)
        given = item if isinstance(item, Mapping) else {} if item is None else {length - 1: item}
        for token, value in given.items():
            step, whole = to_number(value), isinstance(token, int) and not isinstance(item, Mapping)
            if step is None or not isinstance(token, int) or not (whole or 0 <= token < length):
                raise RewardError(
                    f"{each.source} returned {describe_value(item)} for turn {number} ({length} tokens) on task {task.id!r}; {wanted}"
                )
            steps.append((max(start + token, 0), step))
        start += length
    return steps


async def compute_group_rewards(environment: Environment[TaskT], task: TaskT, rollouts: Sequence[Rollout]) -> list[RewardResult]:
    """Compute every reward of a group in order, and add it to each rollout's. Raises RewardError."""
    results = [
        RewardResult(
            rollout.reward,
            rollout.rewards,
            step_rewards=rollout.step_rewards,
            turn_states=rollout.turn_states,
            unscored=rollout.unscored,
        )
        for rollout in rollouts
    ]
    for name, each in environment.reward_functions.items():
        if not each.mark.group:
            continue
        closed = [find_closed_gate(each.mark.gates, result.rewards) for result in results]
        compared = [gate is None and not result.unscored for gate, result in zip(closed, results, strict=True)]
        asked = [rollout for rollout, is_compared in zip(rollouts, compared, strict=True) if is_compared]
        values = iter(await _compare_rollouts(each, task, asked) if asked else ())
        for index, (rollout, gate) in enumerate(zip(rollouts, closed, strict=True)):
            value = next(values) if compared[index] else None if gate is None else gate.otherwise
            if compared[index] and value is None:
                results[index] = replace(results[index], reward=0.0, step_rewards=(), unscored=True)
            elif not results[index].unscored:
                results[index] = _add_reward(environment, name, rollout, results[index], gate, value)
    for result in results:
        check_total(environment, task, result.reward, result.rewards)
    return [
        replace(result, metrics=_check_metrics(environment, task, rollout))
        for result, rollout in zip(results, rollouts, strict=True)
    ]


async def _compare_rollouts(each: RewardFunction, task: Task, rollouts: Sequence[Rollout]) -> list[float | None]:
    """Call the reward of a group; None stands for a rollout that it cannot score. Raises RewardError."""
    returned = await _call_reward(each, task, rollouts)
    listed = returned.tolist() if hasattr(returned, "tolist") else returned  # of NumPy or torch
    given = list(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else []
    values = [to_number(value) for value in given]
    wrong = any(value is None and item is not None for item, value in zip(given, values, strict=True))
    if wrong or len(values) != len(rollouts):
        raise RewardError(
            f"{each.source} returned {describe_value(returned)} on task {task.id!r}; the reward of a group is a list of finite "
            f"numbers or bools, one for each of the {len(rollouts)} rollouts, and None for one that cannot be scored"
        )
    return values


def _add_reward(
    environment: Environment[Any], name: str, rollout: Rollout, result: RewardResult, closed: Gate | None, value: float | None
) -> RewardResult:
    """Add the reward ``name`` of a group to those that a rollout has; ``closed`` is the gate that it did not pass."""
    if value is None:
        return result
    each, weight = environment.reward_functions[name], weight_of(environment, name, rollout)
    if closed is None and each.mark.gates:
        value *= multiply_gates(each.mark.gates, result.rewards)
    _log_weighted(each, name, rollout, weight * value)
    return replace(result, reward=result.reward + weight * value, rewards={**result.rewards, name: value})


def weight_of(environment: Environment[Any], name: str, rollout: Rollout) -> float:
    """Return the weight of a reward: of the configuration, else of its schedule at the version that began the rollout, else its own."""
    mark = environment.reward_functions[name].mark
    own = mark.weight if mark.schedule is None else mark.schedule.at(rollout.version)
    return environment.reward_weights.get(name, own)


def _log_weighted(each: RewardFunction, name: str, rollout: Rollout, weighted: float) -> None:
    if each.mark.log_weighted:
        rollout.metrics[f"weighted/{name}"] = weighted


def _check_metrics(environment: Environment[Any], task: Task, rollout: Rollout) -> Mapping[str, float]:
    """Make the metrics that an environment set floats. Raises RewardError for a name or a value that cannot be logged."""
    for name, given in rollout.metrics.items():
        if not isinstance(name, str) or not name.isprintable() or name in ("", "reward"):
            raise RewardError(
                f"{environment.title} set the metric {describe_value(name)} on task {task.id!r}; the name of a metric is a printable "
                "text other than 'reward'"
            )
        if (value := to_number(given)) is None:
            raise RewardError(
                f"{environment.title} set the metric {name!r} to {describe_value(given)} on task {task.id!r}; a metric is a finite "
                "number or a bool"
            )
        rollout.metrics[name] = value
    return rollout.metrics


def check_total(environment: Environment[Any], task: Task, total: float, rewards: Mapping[str, float]) -> None:
    """Raise RewardError if rewards that are finite have a weighted sum that is not."""
    if not math.isfinite(total):
        largest = max(rewards, key=lambda name: abs(rewards[name]))
        raise RewardError(
            f"the rewards of {environment.title} sum to {total} on task {task.id!r}: {largest} returned {rewards[largest]:.4g}; keep "
            "rewards, and reward_weights times rewards, below 1e300"
        )
    if abs(total) > LARGEST_REWARD:
        raise RewardError(
            f"the reward of {environment.title} is {total:.4g} on task {task.id!r}, and its advantages would not be finite in "
            f"the learner's float32; keep rewards below {LARGEST_REWARD:g}, for instance with reward_scaling"
        )


async def _call_reward(reward: RewardFunction, task: Task, rollouts: Rollout | Sequence[Rollout]) -> Any:
    try:
        with contain_exits():
            value = reward.function(task, rollouts)
            return await value if inspect.isawaitable(value) else value
    except Exception as error:
        kind, _, text = describe_error(error).partition(": ")
        raise RewardError(f"{reward.source} raised {kind} on task {task.id!r}: {text}") from error


def to_number(value: Any) -> float | None:
    """Return a finite number, a bool, or an array or tensor of one element as a float; None for anything else."""
    try:
        item = value.item() if hasattr(value, "item") else value
        number = float(item) if isinstance(item, Real) else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):  # several elements; an integer above all floats
        return None
    return number if math.isfinite(number) else None


def is_finite(value: Any) -> bool:
    return to_number(value) is not None


def takes_rollouts(function: Callable[..., Any]) -> bool:
    """Whether a reward has a parameter ``rollouts``, and so wants all rollouts of a task at once."""
    return "rollouts" in inspect.signature(function).parameters


@dataclass(frozen=True)
class GeneratedTasks(Sequence[T]):
    """A sequence of ``size`` tasks that are generated on access. ``make`` must depend on the index alone."""

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
        """Whether data without a column of reference answers is an error."""
        return True

    def tasks(self, data: DataSource) -> Sequence[PromptedTask]:
        rows, template = data.load_rows(needs_answers=self.needs_answers), data.load_template()

        def make(row: Row) -> PromptedTask:
            messages = make_prompt(row.prompt, template, row.id, row.images)
            return PromptedTask(id=row.id, question=row.question, answer=row.answer, metadata=row.metadata, messages=messages)

        if is_streamed(rows):
            return rows.map(make)
        if len(rows) and data.opened is None:
            make(rows[0])  # a prompt file that does not fit the prompts is an error now, not in each rollout
        return GeneratedTasks(len(rows), lambda index: make(rows[index]))

    @property
    def prompts_are_of_rows(self) -> bool:
        kind = type(self)
        given = (kind.prompt, kind.first_messages) == (DatasetEnvironment.prompt, Environment.first_messages)
        return given and not (self.has_tools or self.is_agent)

    def prompt(self, task: PromptedTask) -> Messages:
        return task.messages
