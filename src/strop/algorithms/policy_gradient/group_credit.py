"""Credit of tokens from the rewards of groups: shaping, the advantage, a KL term in the reward, whitening and clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strop.algorithms.base import Algorithm
from strop.algorithms.functional import varies
from strop.algorithms.kl import REFERENCE_LOGPROBS, Kl
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Shaping
from strop.types import Batch, Group, Rollout


@dataclass(frozen=True, kw_only=True)
class GroupCredit(Algorithm):
    """Algorithms whose credit is an ``Advantage`` over the rewards of a group."""

    advantage: Advantage
    shaping: Shaping | None = None
    kl: Kl | None = None
    advantage_low: float | None = None  # clip advantages from below
    advantage_high: float | None = None
    drop_constant_groups: bool = False  # dynamic sampling (DAPO): replace groups with equal rewards
    overlong_filtering: bool = False  # truncated rollouts count in the baseline, but not in the loss

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({REFERENCE_LOGPROBS}) if self.kl is not None and self.kl.weight else frozenset()

    @property
    def greedy_baseline(self) -> bool:
        return self.advantage.greedy_baseline

    def keep(self, group: Group) -> bool:
        return not self.drop_constant_groups or any(varies(rewards) for rewards in self._compared_rewards(group))

    def _compared_rewards(self, group: Group) -> list[Tensor]:
        """Return the rewards that this group's credit is computed from. If none of them varies, the group has no signal."""
        if self.advantage.needs_named_rewards:
            return list(_rewards_by_name(group).values())
        baseline = [] if group.baseline is None else [group.baseline.reward]
        return [torch.cat([group.rewards, torch.tensor(baseline, dtype=torch.float64)])]

    def rollout_mask(self, group: Group) -> Tensor:
        return torch.tensor([not (self.overlong_filtering and rollout.truncated) for rollout in group.rollouts])

    def rewards(self, group: Group) -> Tensor:
        return self._shape_rewards(group.rollouts)

    def _shape_rewards(self, rollouts: Sequence[Rollout]) -> Tensor:  # [rollouts] float64
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float64)
        if self.shaping is None:
            return rewards
        lengths = torch.tensor([rollout.sampled_tokens for rollout in rollouts], dtype=torch.float64)
        return self.shaping.shape(rewards, lengths, torch.tensor([rollout.truncated for rollout in rollouts]))

    def advantages(self, group: Group) -> Tensor:
        by_name = _rewards_by_name(group) if self.advantage.needs_named_rewards else {}
        greedy_reward = None if group.baseline is None else float(self._shape_rewards([group.baseline]))
        return self.advantage.rollout_advantages(
            GroupRewards(rewards=self.rewards(group), lengths=group.lengths, by_name=by_name, greedy_reward=greedy_reward)
        )

    def token_credit(self, batch: Batch) -> Batch:
        adjusted = batch
        if self.kl is not None and self.kl.weight and self.kl.place != "loss":
            adjusted = self._with_kl_in_reward(self.kl, batch)
        advantages = self.advantage.token_advantages(adjusted)
        if self.advantage_low is not None or self.advantage_high is not None:
            advantages = advantages.clamp(self.advantage_low, self.advantage_high)
        return replace(batch, advantages=advantages)

    def _with_kl_in_reward(self, kl: Kl, batch: Batch) -> Batch:
        if kl.place == "token_reward":
            return replace(batch, advantages=(batch.advantages - kl.weight * kl.sum_to_go(batch)).float())
        rewards = batch.rewards - kl.weight * kl.sum_per_rollout(batch)
        lengths = torch.bincount(batch.sequence, minlength=batch.num_sequences).double()
        advantages = torch.zeros_like(rewards)
        for group in range(batch.num_groups):
            members = batch.group == group
            advantages[members] = self.advantage.rollout_advantages(
                GroupRewards(rewards=rewards[members], lengths=lengths[members])
            )
        return replace(batch, rewards=rewards, advantages=advantages.float()[batch.sequence])


def _rewards_by_name(group: Group) -> dict[str, Tensor]:
    """Return each reward of a group's rollouts by name, [G] float64, unweighted; 0 for rollouts without it."""
    names = sorted({name for rollout in group.rollouts for name in rollout.rewards})
    return {
        name: torch.tensor([rollout.rewards.get(name, 0.0) for rollout in group.rollouts], dtype=torch.float64) for name in names
    }
