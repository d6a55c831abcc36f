"""MaxRL (arXiv 2602.02710): the gradient of the log of the success rate, not of the rate: rare successes weigh more.

(R - m) / m. With rewards of 0 and 1 its expectation is the gradient of -sum over k < G of (1 - p)^k / k, which tends to log p
as the group grows; the success rate, what the others maximise, is its first term but for a constant. A group without a success
teaches nothing. The paper changes this one line of an existing loss, here GRPO's.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from strop.algorithms.clip import Clip
from strop.algorithms.functional import varies
from strop.algorithms.parts import Advantage, GroupRewards, Objective
from strop.algorithms.policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class SuccessRate(Advantage):
    """(R - mean) / mean within a group; exactly 0 where the group does not vary."""

    divides_by_mean: ClassVar[bool] = True

    def relative(self, group: GroupRewards) -> Tensor:
        """Raises ValueError for a negative reward."""
        if bool((group.rewards < 0).any()):
            raise ValueError(
                f"a reward of {float(group.rewards.min()):g} was found, but MaxRL divides by the mean reward as by a success "
                "rate; use rewards of 0 and 1, or map yours to [0, 1] with grpo.reward_scaling"
            )
        if not varies(group.rewards):
            return torch.zeros_like(group.rewards)
        return group.rewards / group.rewards.mean() - 1


@dataclass(frozen=True, kw_only=True)
class MaxRL(PolicyGradient):
    """Reward over success rate, PPO's clip, the mean over all tokens of the batch."""

    advantage: Advantage = SuccessRate()
    objective: Objective = Clip()
