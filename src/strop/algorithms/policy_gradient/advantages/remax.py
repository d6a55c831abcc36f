"""ReMax (arXiv 2310.10505): REINFORCE with the reward of the greedy response as baseline.

Each prompt gets one more rollout that is sampled greedily and not trained on. One sampled rollout per prompt is enough. verl's ``remax``
is this credit with PPO's loss.

Metrics: probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import Aggregation, rounding_of
from strop.algorithms.policy_gradient.advantages.reinforce import Reinforce
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class GreedyBaseline(Advantage):
    """R - R(greedy); exactly 0 if they differ by rounding errors only."""

    greedy_baseline: ClassVar[bool] = True
    min_group_size: ClassVar[int] = 1

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return the credit of each rollout, [G]. Raises ValueError if the group has no greedy rollout."""
        if group.greedy_reward is None:
            raise ValueError("the credit needs a greedy rollout as baseline, but this group has none")
        greedy = torch.full_like(group.rewards, group.greedy_reward)
        difference = group.rewards - greedy
        rounding = rounding_of(group.rewards) * torch.maximum(group.rewards.abs(), greedy.abs())
        return torch.where(difference.abs() > rounding, difference, 0.0)


@dataclass(frozen=True, kw_only=True)
class ReMax(PolicyGradient):
    """The greedy rollout's reward as baseline, REINFORCE, sums over rollouts."""

    advantage: Advantage = GreedyBaseline()
    objective: Objective = Reinforce()
    aggregation: Aggregation = "sequence_sum"
