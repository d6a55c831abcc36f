"""Group Relative Policy Optimization (GRPO): its advantage, PPO's clip, and the algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.base import Plan
from strop.algorithms.functional import Deviation, bounded_logprobs, clipped_surrogate, group_advantages
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, BoundedObjective, GroupRewards, Objective, PolicyTokens
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GroupRelative(Advantage):
    """(r - mean) / (standard deviation + eps) within a group; exactly 0 if the group does not vary."""

    baseline: bool = True  # False: the plain reward
    leave_one_out: bool = False  # the baseline of a rollout is the mean of the others
    normalize: bool = True  # divide by the deviation
    deviation: Deviation = "population"

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
        return group_advantages(
            group.rewards, baseline=self.baseline, leave_one_out=self.leave_one_out, normalize=self.normalize, deviation=self.deviation,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Clip(BoundedObjective):
    """PPO's objective (arXiv 1707.06347): min(ratio A, clip(ratio, 1 - low, 1 + high) A).

    ``high`` > ``low`` is DAPO's clip-higher (2503.14476). ``dual`` c > 1 bounds the objective from below by c A for A < 0
    (1912.09729). ``two_sided`` d > 1 limits the unclipped ratio to d, which also bounds the objective for A < 0 (2505.07291).
    """

    zero_gradient_without_advantage = True
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    two_sided: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 or self.high < 0:
            raise ValueError(
                f"the ratio is clipped to [1 - {self.low}, 1 + {self.high}]: low must lie in [0, 1], and high must be at least 0"
            )
        for option, bound in (("dual", self.dual), ("two_sided", self.two_sided)):
            if bound is not None and bound <= 1:
                raise ValueError(
                    f"{option} is {bound}: it is an upper bound of the ratio; set it above 1, or to null for no bound"
                )
        if self.two_sided is not None and self.two_sided < 1 + self.high:
            raise ValueError(
                f"two_sided is {self.two_sided}, below 1 + high = {1 + self.high}: high would have no effect; raise two_sided"
            )
        if self.dual is not None and self.two_sided is not None:
            raise ValueError("dual and two_sided both bound the ratio for negative advantages: set only one of them")

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        return self.clipped(tokens.ratio, tokens.advantages)

    def unbounded(self, tokens: PolicyTokens) -> Tensor:
        return tokens.ratio * tokens.advantages

    def clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        bounded = ratio if self.two_sided is None else ratio.clamp(max=self.two_sided)
        objective = clipped_surrogate(bounded, advantages, low=self.low, high=self.high, dual=self.dual)
        outside_clip = (ratio < 1 - self.low) | (ratio > 1 + self.high)
        lowered = ratio.clamp(1 - self.low, 1 + self.high) * advantages < bounded * advantages
        return objective, {"ratio_outside_clip": outside_clip.to(ratio.dtype), "ratio_clipped": lowered.to(ratio.dtype)}


@dataclass(frozen=True, kw_only=True)
class Reinforce(Objective):
    """A log pi."""

    zero_gradient_without_advantage = True
    uses_ratio_to: ClassVar[bool] = False

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        return tokens.advantages * bounded_logprobs(tokens.logprobs), {}


@dataclass(frozen=True, kw_only=True)
class GRPO(PolicyGradient):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300): the credit of a rollout is relative to its group.

    The group's mean as baseline, its deviation as scale, PPO's clip, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum; kl_penalty if the KL term has a weight.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip()
