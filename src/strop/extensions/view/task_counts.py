"""How often the tasks of a run were sampled, how they were rewarded, and how that changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strop.extensions.view.rollout_filter import natural_key
from strop.extensions.view.step_scalars import StepScalars
from strop.safety.printable import make_printable

LONGEST_QUESTION = 300  # characters


@dataclass(frozen=True)
class TaskCount:
    """Of one task: rollouts, steps, the first and the last of them, and sums over the rewarded rollouts: 1, x, y, x x and x y, for x the
    step and y the reward.
    """

    rollouts: int
    steps: int
    first: int
    last: int
    sums: tuple[float, float, float, float, float]

    def join(self, other: TaskCount) -> TaskCount:
        one, two, three, four, five = (a + b for a, b in zip(self.sums, other.sums, strict=True))
        first, last = min(self.first, other.first), max(self.last, other.last)
        return TaskCount(self.rollouts + other.rollouts, self.steps + other.steps, first, last, (one, two, three, four, five))

    @property
    def reward(self) -> float | None:
        """The mean reward."""
        return self.sums[2] / self.sums[0] if self.sums[0] else None

    @property
    def change(self) -> float | None:
        """By how much a straight line through the rewards rises from the first to the last step."""
        count, x, y, xx, xy = self.sums
        spread = count * xx - x * x
        return (count * xy - x * y) / spread * (self.last - self.first) if spread > 0 else None

    def describe(self) -> dict[str, Any]:
        """Return what a list of tasks says of it."""
        return {
            "rollouts": self.rollouts, "steps": self.steps, "last_step": self.last, "reward": self.reward, "change": self.change,
        }  # fmt: skip


def count_tasks(scalars: StepScalars) -> Iterator[tuple[str, TaskCount]]:
    """Yield the tasks of some steps, which are in order."""
    codes, words = scalars.codes["task_id"], scalars.words["task_id"]
    at, rewards = scalars.numbers["step"].astype(np.float64), scalars.numbers["reward"]
    finite, size = np.isfinite(rewards), len(words)
    x, y = at[finite], rewards[finite]
    sums = [np.bincount(codes[finite], weights=weights, minlength=size) for weights in (np.ones_like(x), x, y, x * x, x * y)]
    rollouts = np.bincount(codes, minlength=size)
    steps = np.bincount(np.unique(codes.astype(np.int64) << 32 | scalars.numbers["step"]) >> 32, minlength=size)
    first, last = np.zeros(size, np.int64), np.zeros(size, np.int64)
    first[codes[::-1]], last[codes] = at[::-1], at  # of several rows of a task the last one stays
    columns = (
        words,
        rollouts.tolist(),
        steps.tolist(),
        first.tolist(),
        last.tolist(),
        zip(*(each.tolist() for each in sums), strict=True),
    )
    for word, count, num_steps, begin, end, of_rewards in zip(*columns, strict=True):
        if count:
            yield word, TaskCount(count, num_steps, begin, end, of_rewards)


def sort_tasks(counts: Mapping[str, TaskCount], order: str) -> list[str]:
    """Return the names in an order: a value of ``describe``, falling after a minus, without which by name. Those without one come last."""
    names = sorted(counts, key=natural_key, reverse=order == "-task")
    name, sign = order.removeprefix("-"), -1 if order.startswith("-") else 1
    if name in ("rollouts", "steps", "last_step", "reward", "change"):
        values = {task: count.describe()[name] for task, count in counts.items()}
        names.sort(key=lambda task: (values[task] is None, sign * (values[task] or 0)))
    return names


def make_question(messages: Sequence[Mapping[str, Any]], prompt: str) -> str:
    """Return the last message before the answer, or the end of a prompt without messages, on one line."""
    asked = [message.get("content") or "" for message in messages if message.get("role") != "assistant"]
    text = " ".join((asked[-1] if asked else prompt[-LONGEST_QUESTION:]).split())
    return make_printable(text[:LONGEST_QUESTION])
