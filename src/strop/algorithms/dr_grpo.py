"""Dr. GRPO (arXiv 2503.20783): GRPO without its divisions by the group's deviation and each rollout's length.

Credit R - m. The loss sums over tokens and divides by rollouts x a constant length, the same for all of them: set
``constant_length``, for instance to the longest response. TRL's ``dr_grpo`` divides by max_completion_length, and scales by the
deviation unless told not to; verl's seq-mean-token-sum-norm divides by the longest response of the batch unless told a length,
so that its steps change with the batch.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.clip import Clip
from strop.algorithms.functional import Aggregation
from strop.algorithms.grpo import GroupRelative
from strop.algorithms.parts import Advantage, Objective
from strop.algorithms.policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class DrGRPO(PolicyGradient):
    """The group's mean as baseline, no scale, PPO's clip, sums over rollouts divided by a constant length."""

    advantage: Advantage = GroupRelative(normalize=False)
    objective: Objective = Clip()
    aggregation: Aggregation = "constant_length"
