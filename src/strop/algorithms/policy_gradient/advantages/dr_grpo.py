"""Dr. GRPO (arXiv 2503.20783): GRPO without the divisions by the group's standard deviation and by each rollout's length.

The credit is R - m. The loss is the sum over tokens, divided by rollouts x a constant length: set ``constant_length``, for example to the
maximum response length. TRL's ``dr_grpo`` divides by max_completion_length, and by default still divides by the standard deviation;
verl's seq-mean-token-sum-norm divides by the longest response of the batch unless a length is set, so its scale changes with the batch,
and not by the number of rollouts.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.functional import Aggregation
from strop.algorithms.policy_gradient.advantages.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, Objective


@dataclass(frozen=True, kw_only=True)
class DrGRPO(PolicyGradient):
    """The group's mean as baseline, no scaling, PPO's clip, sums over rollouts divided by a constant length."""

    advantage: Advantage = GroupRelative(normalize=False)
    objective: Objective = Clip()
    aggregation: Aggregation = "constant_length"
