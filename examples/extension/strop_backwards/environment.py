"""Words to spell backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from string import ascii_lowercase

from strop.data.sources.source import DataSource
from strop.environments.base import DEFAULT_NUM_TASKS, Environment, GeneratedTasks, reward
from strop.sampling import mix_seed
from strop.types import Rollout, Task


@dataclass(frozen=True, kw_only=True)
class Backwards(Environment[Task]):
    """Asks for a random word backwards."""

    letters: int = 5

    def tasks(self, data: DataSource) -> Sequence[Task]:
        def make(index: int) -> Task:
            word = "".join(Random(mix_seed(data.seed, index)).choices(ascii_lowercase, k=self.letters))
            return Task(id=word, question=f"Spell {word} backwards.", answer=word[::-1])

        return GeneratedTasks(data.size or DEFAULT_NUM_TASKS, make)

    @reward(weight=1.0, accuracy=True)
    def correct(self, task: Task, rollout: Rollout) -> bool:
        return task.answer in rollout.content
