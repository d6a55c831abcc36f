"""An environment in which an earlier self of the policy plays, however random the policy is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.data.sources.source import DataSource
from strop.environments.base import Environment, GeneratedTasks, reward
from strop.environments.policy_client import PastSelvesRule, get_policy
from strop.types import Rollout, Task, user


@dataclass(frozen=True, kw_only=True)
class Versus(Environment[Task]):
    """Whoever writes the larger letters wins."""

    share: float = 1.0
    every: int = 2
    size: int = 2

    @property
    def past_selves(self) -> PastSelvesRule:
        return PastSelvesRule(snapshot_every=self.every, pool_size=self.size)

    def tasks(self, data: DataSource) -> Sequence[Task]:
        return GeneratedTasks(1000, lambda index: Task(id=str(index), question=f"write {index}"))

    @reward()
    async def won(self, task: Task, rollout: Rollout) -> bool:
        model = get_policy().past(self.share)
        said = await model.complete((user(task.question),), seed=rollout.seed)
        rollout.metrics["age"] = rollout.version - model.version
        rollout.metrics["said"] = sum(map(ord, said)) % 1009
        return sum(map(ord, rollout.text)) > sum(map(ord, said))
