"""OPO (arXiv 2505.23585): on-policy REINFORCE with the baseline that minimizes variance.

The optimal baseline weighs rewards by the squared norm of each rollout's gradient. If the gradients of tokens are nearly orthogonal, that
norm is proportional to the length l, so b = sum l R / sum l over the group. The derivation is for sums over a rollout's tokens without a
ratio; verl's recipe takes the mean over tokens.

Metrics: probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.functional import Aggregation, varies
from strop.algorithms.policy_gradient.advantages.reinforce import Reinforce
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class LengthWeighted(Advantage):
    """R - sum(l R) / sum(l), with l the sampled tokens of each rollout; exactly 0 if the group does not vary."""

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        total = group.lengths.sum()
        if not varies(group.rewards) or total == 0:
            return torch.zeros_like(group.rewards)
        return group.rewards - (group.lengths * group.rewards).sum() / total


@dataclass(frozen=True, kw_only=True)
class OPO(PolicyGradient):
    """The length-weighted mean as baseline, REINFORCE, sums over rollouts."""

    advantage: Advantage = LengthWeighted()
    objective: Objective = Reinforce()
    aggregation: Aggregation = "sequence_sum"
