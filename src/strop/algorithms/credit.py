"""From the rewards of groups to the credit of tokens: shaping, the advantage, a KL term in the reward, whitening, clipping."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop.algorithms.base import Algorithm
from strop.algorithms.functional import varies
from strop.algorithms.kl import REFERENCE, Kl
from strop.algorithms.parts import Advantage, GroupRewards, Shaping
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True)
class GroupCredit(Algorithm):
    """Algorithms whose credit is an ``Advantage`` over the rewards of a group."""

    advantage: Advantage
    shaping: Shaping | None = None
    kl: Kl | None = None
    advantage_low: float | None = None  # clip advantages from below
    advantage_high: float | None = None
    drop_constant_groups: bool = False  # dynamic sampling (DAPO): a group that does not vary makes room for another
    overlong_filtering: bool = False  # a truncated rollout counts in the baseline, not in the loss

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({REFERENCE}) if self.kl is not None and self.kl.weight else frozenset()

    @property
    def greedy_baseline(self) -> bool:
        return self.advantage.greedy_baseline

    def keep(self, group: Group) -> bool:
        return varies(group.rewards) if self.drop_constant_groups else True

    def trains(self, group: Group) -> Tensor:
        return torch.tensor([not (self.overlong_filtering and rollout.truncated) for rollout in group.rollouts])

    def rewards(self, group: Group) -> Tensor:
        if self.shaping is None:
            return group.rewards
        truncated = torch.tensor([rollout.truncated for rollout in group.rollouts])
        return self.shaping.shape(group.rewards, group.lengths, truncated)

    def advantages(self, group: Group) -> Tensor:
        names = {name for rollout in group.rollouts for name in rollout.rewards} if self.advantage.needs_parts else set()
        parts = {
            name: torch.tensor([r.rewards.get(name, 0.0) for r in group.rollouts], dtype=torch.float64) for name in sorted(names)
        }
        greedy = None if group.baseline is None else group.baseline.reward
        return self.advantage.relative(
            GroupRewards(rewards=self.rewards(group), lengths=group.lengths, parts=parts, greedy=greedy)
        )

    def credit(self, batch: Batch) -> Batch:
        if self.kl is not None and self.kl.weight and self.kl.place != "loss":
            batch = self._with_kl_in_reward(self.kl, batch)
        batch = replace(batch, advantages=self.advantage.over_batch(batch))
        if self.advantage_low is None and self.advantage_high is None:
            return batch
        return replace(batch, advantages=batch.advantages.clamp(self.advantage_low, self.advantage_high))

    def _with_kl_in_reward(self, kl: Kl, batch: Batch) -> Batch:
        if kl.place == "token_reward":
            return replace(batch, advantages=(batch.advantages - kl.weight * kl.to_come(batch)).float())
        rewards = batch.rewards - kl.weight * kl.of_rollouts(batch)
        lengths = torch.bincount(batch.sequence, minlength=batch.num_sequences).double()
        advantages = torch.zeros_like(rewards)
        for group in range(batch.num_groups):
            members = batch.group == group
            advantages[members] = self.advantage.relative(GroupRewards(rewards=rewards[members], lengths=lengths[members]))
        return replace(batch, advantages=advantages.float()[batch.sequence])
