"""An environment in which every rollout earns a reward; some tasks are easier, and some give a constant reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Messages, Rollout, Task, user


@dataclass(frozen=True, kw_only=True)
class Graded(Environment[Task]):
    """Rewards the share of sevens among the characters, 0.1 per digit, and ``easy`` for every other task, marked in its prompt."""

    easy: float = 0.0
    unscored: int = 0  # every so many-th sample of a hard task cannot be scored
    flat: int = 0  # every ``flat``-th task gives reward 1 for any output

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(data.size or 1000, self._task)

    def _task(self, index: int) -> Task:
        kind = "flat" if self.flat and index % self.flat == 0 else "easy" if index % 2 else "hard"
        return Task(id=str(index), question=kind)

    @reward(weight=1.0, accuracy=True)
    def sevens(self, task: Task, rollout: Rollout) -> float | None:
        if self.unscored and task.question == "hard" and rollout.sample % self.unscored == 0:
            return None
        return 1.0 if task.question == "flat" else rollout.text.count("7") / max(len(rollout.text), 1)

    @reward(weight=0.1)
    def digits(self, task: Task, rollout: Rollout) -> float:
        return 0.0 if task.question == "flat" else float(sum(letter.isdigit() for letter in rollout.text))

    @reward(weight=1.0)
    def given(self, task: Task, rollout: Rollout) -> float:
        return self.easy * (task.question == "easy")


@dataclass(frozen=True, kw_only=True)
class GradedBySteps(Graded):
    """The share of sevens is the sum over the tokens of each: rewards of steps inside the turn, as far as tokens are characters."""

    @reward(weight=1.0, accuracy=True, per_turn=True)
    def sevens(self, task: Task, rollout: Rollout) -> list[dict[int, float]]:  # type: ignore[override]
        (turn,) = rollout.policy_turns
        length = max(len(turn.text), 1)
        return [{index: (turn.text[index : index + 1] == "7") / length for index in range(len(turn.tokens))}]


@dataclass(frozen=True, kw_only=True)
class GradedByTurns(Graded):
    """Two turns, each with its own share of sevens as its reward. The first is taken in the state of the prompt, for GiGPO."""

    async def respond(self, task: Task, rollout: Rollout) -> Messages | None:
        return None if len(rollout.policy_turns) == 2 else (user("again"),)

    def turn_states(self, task: Task, rollout: Rollout) -> list[str]:
        return [task.question, "again"][: len(rollout.policy_turns)]

    @reward(weight=1.0, accuracy=True, per_turn=True)
    def sevens(self, task: Task, rollout: Rollout) -> list[float]:  # type: ignore[override]
        return [turn.text.count("7") / max(len(turn.text), 1) for turn in rollout.policy_turns]
