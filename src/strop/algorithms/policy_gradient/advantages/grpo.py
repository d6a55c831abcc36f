"""Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300): the credit of a rollout is relative to its group.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum; kl_penalty if the KL term has a weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from strop.algorithms.base import Plan
from strop.algorithms.functional import group_advantages
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.clip import Clip
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective


@dataclass(frozen=True, kw_only=True)
class GroupRelative(Advantage):
    """(r - mean) / (population standard deviation + eps) within a group; exactly 0 if the group does not vary."""

    baseline: bool = True  # False: the plain reward
    leave_one_out: bool = False  # the baseline of a rollout is the mean of the others
    normalize: bool = True  # divide by the deviation

    def validate(self, plan: Plan) -> Iterator[str]:
        if self.baseline or self.normalize:
            yield from super().validate(plan)

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group_advantages(group.rewards, baseline=self.baseline, leave_one_out=self.leave_one_out, normalize=self.normalize)


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """The group's mean as baseline, its deviation as scale, PPO's clip, mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip()
