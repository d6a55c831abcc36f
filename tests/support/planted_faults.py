"""Environments with one fault each, and one without."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Messages, Rollout, Task, user


@dataclass(frozen=True, kw_only=True)
class Sound(Environment[Task]):
    """What is the square of a number? Nothing is wrong with it."""

    def make(self, index: int, data: DataSource) -> Task:
        number = 1000 + 2 * index + data.held_out
        return Task(id=f"{data.held_out}:{index}", question=f"What is the square of {number}?", answer=str(number**2))

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(data.size or 64, lambda index: self.make(index, data))

    @reward(weight=1.0, accuracy=True)
    def correct(self, task: Task, rollout: Rollout) -> float:
        return self.score(task, rollout)

    def score(self, task: Task, rollout: Rollout) -> float:
        return float(rollout.text.strip() == task.answer)


class RandomTasks(Sound):
    def make(self, index: int, data: DataSource) -> Task:
        number = random.randint(1000, 9999)
        return Task(id=str(index), question=f"What is the square of {number}?", answer=str(number**2))


class DrawnInOrder(Sound):
    def tasks(self, data: DataSource) -> Sequence[Task]:
        generator = random.Random(3)

        def make(index: int) -> Task:
            number = generator.randint(1000, 10**9)
            return Task(id=f"{index}", question=f"What is the square of {number}?", answer=str(number**2))

        return GeneratedTasks(64, make)


class EmptyPrompts(Sound):
    def make(self, index: int, data: DataSource) -> Task:
        return Task(
            id=f"{data.held_out}:{index}", question="  " if index % 8 == 0 else f"{index} squared?", answer=f"{index**2}!"
        )


class BrokenTask(Sound):
    def prompt(self, task: Task) -> Messages:
        return (user(task.question if not task.id.endswith("3") else task.metadata["missing"]),)


class Overlapping(Sound):
    def make(self, index: int, data: DataSource) -> Task:
        return Task(
            id=f"{data.held_out}:{index}", question=f"What is the square of {index + 1000}?", answer=str((index + 1000) ** 2)
        )


class NearlyOverlapping(Sound):
    def make(self, index: int, data: DataSource) -> Task:
        question = f"what is the  SQUARE of {index + 1000}" if data.held_out else f"What is the square of {index + 1000}?"
        return Task(id=f"{data.held_out}:{index}", question=question, answer=str((index + 1000) ** 2))


class RaisesOnNonsense(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return float(int(rollout.text) == int(task.answer))


class NotFinite(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return super().score(task, rollout) if rollout.text else float("nan")


class HidesMissingModule(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        try:
            import a_module_that_is_not_installed  # noqa: F401
        except ImportError:
            return 0.0
        return 1.0


class HidesErrors(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        try:
            return float(eval_nothing(rollout.text) == task.metadata["answer"] or task.answer == rollout.text)
        except Exception:
            return 0.1 if task.answer == rollout.text and task.id.endswith("0") else 0.0


def eval_nothing(text: str) -> str:
    return text


class RandomReward(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return super().score(task, rollout) * (0.95 + 0.05 * random.random())


class CountsCalls(Sound):
    calls = count()

    def score(self, task: Task, rollout: Rollout) -> float:
        return super().score(task, rollout) * (1.0 if next(self.calls) % 2 else 0.97)


class DependsOnNeighbours(Sound):
    running: ClassVar[list[int]] = []

    @reward(weight=1.0, accuracy=True)
    async def correct(self, task: Task, rollout: Rollout) -> float:  # type: ignore[override]
        self.running.append(1)
        await asyncio.sleep(0)
        beside = len(self.running)
        await asyncio.sleep(0)
        self.running.pop()
        return self.score(task, rollout) - 0.001 * beside


class WrongReference(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return float(rollout.text.strip() == task.answer and not task.id.endswith("4"))


class NeverRight(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return 0.0


class PaysForEmpty(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return float(rollout.text.strip() in (task.answer, ""))


class PaysForLength(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return super().score(task, rollout) + len(rollout.text) / 1000


class PaysForSubstring(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return float(task.answer in rollout.text)


class PaysForZero(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return float(task.answer.startswith(rollout.text[:1] or "x") or rollout.text == "0")


class PaysForFormat(Sound):
    @reward(weight=10.0)
    def tags(self, task: Task, rollout: Rollout) -> bool:
        return "<answer>" in rollout.text and "</answer>" in rollout.text


class PaysForThePrompt(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return float(rollout.text.strip() == task.answer or task.question in rollout.text)


class PaysForRefusal(Sound):
    def score(self, task: Task, rollout: Rollout) -> float:
        return float(rollout.text.strip() == task.answer or "can't help" in rollout.text)


class ConstantAnswer(Sound):
    def make(self, index: int, data: DataSource) -> Task:
        return Task(id=f"{data.held_out}:{index}", question=f"Is {index + 200} a number?", answer="yes" if index else "no")


class RespondsAtRandom(Sound):
    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        if rollout.text == task.answer:
            return None
        return (user(f"Try again, {random.SystemRandom().random()}."),)


class RemembersRespond(Sound):
    turns: ClassVar[dict[str, int]] = {}

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        self.turns[task.id] = self.turns.get(task.id, 0) + 1
        return None if rollout.text == task.answer else (user(f"That was turn {self.turns[task.id]}."),)


opened_now: ContextVar[str] = ContextVar("opened_now", default="")


@dataclass(frozen=True, kw_only=True)
class SoundGame(Sound):
    """Nothing is wrong with this one either: several turns, in a session."""

    def session(self, task: Task) -> Any:
        @asynccontextmanager
        async def opened() -> AsyncIterator[None]:
            token = opened_now.set(task.id)
            try:
                yield
            finally:
                opened_now.reset(token)

        return opened()

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        assert opened_now.get() == task.id
        return None if rollout.text == task.answer else (user(f"No; that was try {len(rollout.policy_turns)}."),)


FAULTS: dict[type[Sound], str] = {
    RandomTasks: "tasks_same",
    DrawnInOrder: "tasks_same",
    EmptyPrompts: "tasks_valid",
    BrokenTask: "tasks_valid",
    Overlapping: "splits",
    NearlyOverlapping: "splits",
    RaisesOnNonsense: "reward_errors",
    NotFinite: "reward_errors",
    HidesMissingModule: "reference",
    HidesErrors: "reference",
    RandomReward: "reward_deterministic",
    CountsCalls: "reward_deterministic",
    DependsOnNeighbours: "reward_deterministic",
    WrongReference: "reference",
    NeverRight: "reference",
    PaysForEmpty: "degenerate",
    PaysForLength: "degenerate",
    PaysForSubstring: "degenerate",
    PaysForZero: "degenerate",
    PaysForFormat: "degenerate",
    PaysForThePrompt: "degenerate",
    PaysForRefusal: "degenerate",
    ConstantAnswer: "degenerate",
    RespondsAtRandom: "reward_deterministic",
    RemembersRespond: "reward_deterministic",
}
