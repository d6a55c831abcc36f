"""MaxRL (arXiv 2602.02710): the gradient of the log of the success rate instead of the rate, so that rare successes weigh more.

The credit is (R - m) / m. With rewards of 0 and 1 its expectation is the gradient of -sum over k < G of (1 - p)^k / k, which tends to
log p for large groups. Its first term is, up to a constant, the success rate, which other algorithms maximize. A group without a success
gives no credit. The paper changes only this line of an existing loss; here that loss is GRPO's.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import varies
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class SuccessRate(Advantage):
    """(R - mean) / mean within a group; exactly 0 if the group does not vary."""

    divides_by_mean: ClassVar[bool] = True

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return the credit of each rollout, [G]. Raises ValueError for a negative reward."""
        if bool((group.rewards < 0).any()):
            raise ValueError(
                f"a reward is {float(group.rewards.min()):g}, but MaxRL divides by the mean reward as a success "
                "rate; use rewards of 0 and 1, or map yours to [0, 1] with grpo.reward_scaling"
            )
        if not varies(group.rewards):
            return torch.zeros_like(group.rewards)
        return group.rewards / group.rewards.mean() - 1


@dataclass(frozen=True, kw_only=True)
class MaxRL(PolicyGradient):
    """Reward relative to the success rate, PPO's clip, mean over all tokens of the batch."""

    advantage: Advantage = SuccessRate()
    objective: Objective = Clip()
