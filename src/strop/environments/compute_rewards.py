"""Call the rewards of an environment, check their results, and sum them.

An exception from a reward, or a result that is not a finite number, raises RewardError, which is recorded on the rollout (law 7).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from strop.environments.base import Environment, TaskT
from strop.environments.rewards import (
    Gate,
    RewardError,
    RewardFunction,
    RewardResult,
    find_closed_gate,
    is_earned,
    multiply_gates,
    to_number,
)
from strop.safety.exits import contain_exits
from strop.types import Rollout, StepReward, Task
from strop.user_code import describe_error, describe_value

LARGEST_REWARD = 1e30  # float32 ends at 3.4e38, and groups and batches sum rewards


async def compute_rewards(environment: Environment[TaskT], task: TaskT, rollout: Rollout) -> RewardResult:
    """Compute the rewards of a single rollout in order. If one returns None, the rest is skipped and the rollout cannot be scored. Raises
    RewardError if one raises or is not a finite number.

    Rewards marked ``concurrent`` run in parallel, as soon as their gates are known. The order of sums and metrics and the raised
    error are the same as without concurrency."""
    async with _RewardCalls(environment, task, rollout) as calls:
        return await _sum_rewards(environment, task, rollout, calls)


async def _sum_rewards(environment: Environment[TaskT], task: TaskT, rollout: Rollout, calls: _RewardCalls) -> RewardResult:
    rewards: dict[str, float] = {}
    steps: dict[int, float] = {}
    total = 0.0
    for name, each in calls.functions.items():
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
    """The reward calls of a rollout: concurrent ones run as tasks, each with its own metrics."""

    def __init__(self, environment: Environment[Any], task: Task, rollout: Rollout) -> None:
        self.functions = {
            name: each for name, each in environment.reward_functions.items() if not each.mark.group and is_earned(each, rollout)
        }
        self._task, self._rollout = task, rollout
        self._waiting = [name for name, each in self.functions.items() if each.mark.concurrent]
        self._running: dict[str, tuple[asyncio.Task[Any], Rollout]] = {}

    async def __aenter__(self) -> _RewardCalls:
        return self

    def start_ready(self, current: str, rewards: Mapping[str, float]) -> None:
        """Start the concurrent rewards whose gates are open. Those before ``current`` are known."""
        known = list(self.functions)
        known = known[: known.index(current)]
        for name in list(self._waiting):
            gates = self.functions[name].mark.gates
            if all(gate.reward in known for gate in gates):
                self._waiting.remove(name)
                if find_closed_gate(gates, rewards) is None:
                    own = replace(self._rollout, metrics={})
                    self._running[name] = asyncio.create_task(_call_reward(self.functions[name], self._task, own)), own

    async def result(self, name: str) -> Any:
        """Return the result of a reward. Raises RewardError."""
        if name not in self._running:
            return await _call_reward(self.functions[name], self._task, self._rollout)
        running, own = self._running.pop(name)
        returned = await running
        self._rollout.metrics.update(own.metrics)
        return returned

    async def __aexit__(self, *error: object) -> None:
        for running, _ in self._running.values():
            running.cancel()
        await asyncio.gather(*(running for running, _ in self._running.values()), return_exceptions=True)


def name_of(environment: Environment[Any]) -> str:
    """The name used in messages."""
    return type(environment).__name__


def _read_turn_states(environment: Environment[TaskT], task: TaskT, rollout: Rollout) -> tuple[str | None, ...]:
    """Return the states of a rollout's turns. Raises RewardError."""
    try:
        with contain_exits():
            states = environment.turn_states(task, rollout)
    except Exception as error:
        raise RewardError(f"{name_of(environment)}.turn_states raised {describe_error(error)} on task {task.id!r}") from error
    listed = isinstance(states, Sequence) and not isinstance(states, str)
    if not listed or len(states) not in (0, len(rollout.policy_turns)) or not all(isinstance(one, str | None) for one in states):
        raise RewardError(
            f"{name_of(environment)}.turn_states returned {describe_value(states)} on task {task.id!r}; return a list with one text, or "
            f"None, for each of the {len(rollout.policy_turns)} turns of the policy, or an empty one"
        )
    return tuple(states)


def read_step_rewards(each: RewardFunction, task: Task, rollout: Rollout, returned: Any) -> list[tuple[int, float]]:
    """Return (index of the step's last token among the sampled ones, reward) for each step of a ``per_turn`` reward. Raises
    RewardError.
    """
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
        if not each.mark.group or not is_earned(each, rollouts[0]):
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
    """Call a group reward; None stands for a rollout that it cannot score. Raises RewardError."""
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
    """Add the group reward ``name`` to a rollout's rewards; ``closed`` is the gate that the rollout did not pass."""
    if value is None:
        return result
    each, weight = environment.reward_functions[name], weight_of(environment, name, rollout)
    if closed is None and each.mark.gates:
        value *= multiply_gates(each.mark.gates, result.rewards)
    _log_weighted(each, name, rollout, weight * value)
    return replace(result, reward=result.reward + weight * value, rewards={**result.rewards, name: value})


def weight_of(environment: Environment[Any], name: str, rollout: Rollout) -> float:
    """Return the weight of a reward: from the configuration, else from its schedule at the version that started the rollout, else
    its own.
    """
    mark = environment.reward_functions[name].mark
    own = mark.weight if mark.schedule is None else mark.schedule.at(rollout.version)
    return environment.reward_weights.get(name, own)


def _log_weighted(each: RewardFunction, name: str, rollout: Rollout, weighted: float) -> None:
    if each.mark.log_weighted:
        rollout.metrics[f"weighted/{name}"] = weighted


def _check_metrics(environment: Environment[Any], task: Task, rollout: Rollout) -> Mapping[str, float]:
    """Convert an environment's metrics to floats. Raises RewardError for a name or value that cannot be logged."""
    for name, given in rollout.metrics.items():
        if not isinstance(name, str) or not name.isprintable() or name in ("", "reward"):
            raise RewardError(
                f"{name_of(environment)} set the metric {describe_value(name)} on task {task.id!r}; the name of a metric is a printable "
                "text other than 'reward'"
            )
        if (value := to_number(given)) is None:
            raise RewardError(
                f"{name_of(environment)} set the metric {name!r} to {describe_value(given)} on task {task.id!r}; a metric is a finite "
                "number or a bool"
            )
        rollout.metrics[name] = value
    return rollout.metrics


def check_total(environment: Environment[Any], task: Task, total: float, rewards: Mapping[str, float]) -> None:
    """Raise RewardError if finite rewards have a weighted sum that is not finite."""
    if not math.isfinite(total):
        largest = max(rewards, key=lambda name: abs(rewards[name]))
        raise RewardError(
            f"the rewards of {name_of(environment)} sum to {total} on task {task.id!r}: {largest} returned {rewards[largest]:.4g}; keep "
            "rewards, and reward_weights times rewards, below 1e300"
        )
    if abs(total) > LARGEST_REWARD:
        raise RewardError(
            f"the reward of {name_of(environment)} is {total:.4g} on task {task.id!r}, and its advantages would not be finite in "
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
