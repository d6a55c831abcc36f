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
        if plan.group_size >= self.min_group_size or not (self.baseline or self.leave_one_out or self.normalize):
            return
        if self.leave_one_out:
            reason = "a leave-one-out baseline is the mean of the other rollouts of the group, and a group of one has none"
            fix = "grpo.use_leave_one_out_baseline=false"
        elif self.baseline:
            reason = "a reward minus the mean of a group of one is always 0, so there is nothing to learn"
            fix = "grpo.minus_baseline=false and grpo.normalize_rewards=false"
        else:
            reason, fix = "a group of one has no standard deviation to normalise by", "grpo.normalize_rewards=false"
        yield (
            f"the group size is {plan.group_size}, but {type(self).__name__} compares at least {self.min_group_size} rollouts of a "
            f"group: {reason}; raise num_generations_per_prompt to 2 or more, or set {fix}"
        )

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group_advantages(group.rewards, baseline=self.baseline, leave_one_out=self.leave_one_out, normalize=self.normalize)


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """The group's mean as baseline, its deviation as scale, PPO's clip, mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip()
