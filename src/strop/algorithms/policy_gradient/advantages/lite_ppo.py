"""Lite PPO (arXiv 2508.08221): the group's mean, the batch's standard deviation and a token-level loss.

The credit is (R - m) / s, where s is the standard deviation of all rewards of the batch. It is more stable than a group's deviation when
the rewards of the group hardly differ.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.functional import EPS, varies
from strop.algorithms.group_advantages import group_advantages
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class BatchScaled(Advantage):
    """(R - mean of the group) / (population deviation of the batch's rewards + eps); exactly 0 if the group does not vary."""

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group_advantages(group.rewards, normalize=False)

    def token_advantages(self, batch: Batch) -> Tensor:
        if not varies(batch.rewards):
            return batch.advantages
        scaled = batch.advantages.double() / (batch.rewards.std(correction=0) + EPS)
        return scaled.to(batch.advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class LitePPO(PolicyGradient):
    """The group's mean as baseline, the batch's deviation as scale, PPO's clip, mean over all tokens of the batch."""

    advantage: Advantage = BatchScaled()
    objective: Objective = Clip()
