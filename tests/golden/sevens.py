"""An environment in which every rollout earns something, so that a curve of twenty steps shows learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.types import Rollout, Task


@dataclass(frozen=True, kw_only=True)
class Sevens(Environment[Task]):
    """The reward is the share of sevens among the characters, and a tenth for each digit."""

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(100, lambda index: Task(id=str(index), question=f"{index} sevens, please"))

    @reward(weight=1.0, accuracy=True)
    def sevens(self, task: Task, rollout: Rollout) -> float:
        return rollout.text.count("7") / max(len(rollout.text), 1)

    @reward(weight=0.1)
    def digits(self, task: Task, rollout: Rollout) -> float:
        return float(sum(letter.isdigit() for letter in rollout.text))
