"""GRPO and what differs from it in few options: Dr. GRPO, and DAPO with its punishment of long responses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.base import Plan
from strop.algorithms.functional import Aggregation, Deviation, clipped_surrogate, group_advantages
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, BoundedObjective, GroupRewards, Objective, PolicyTokens, Shaping
from strop.lazy_torch import Tensor, torch


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
class GRPO(PolicyGradient):
    """Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300): the credit of a rollout is relative to its group.

    The group's mean as baseline, its deviation as scale, PPO's clip, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum; kl_penalty if the KL term has a weight.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip()


@dataclass(frozen=True, kw_only=True)
class DrGRPO(PolicyGradient):
    """Dr. GRPO (arXiv 2503.20783): GRPO without the divisions by the group's standard deviation and by each rollout's length.

    The credit is R - m. The loss is the sum over tokens, divided by rollouts x a constant length: set ``constant_length``, for
    example to the maximum response length. TRL's ``dr_grpo`` divides by max_completion_length, and by default still divides by
    the standard deviation; verl's seq-mean-token-sum-norm divides by the longest response of the batch unless a length is set,
    so its scale changes with the batch, and not by the number of rollouts.

    The group's mean as baseline, no scaling, PPO's clip, sums over rollouts divided by a constant length.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
    """

    advantage: Advantage = GroupRelative(normalize=False)
    objective: Objective = Clip()
    aggregation: Aggregation = "constant_length"


# Soft overlong punishment (DAPO, arXiv 2503.14476): responses near the length limit lose reward.


@dataclass(frozen=True, kw_only=True)
class SoftOverlong(Shaping):
    """R - penalty x clip((length - (max_length - buffer)) / buffer, 0, 1), length in sampled tokens.

    Without ``max_length`` there is no punishment. ``truncated_factor`` first multiplies the reward of truncated rollouts. The key
    ``stop_properly_penalty_coef`` sets it with ``penalty`` 0, as in NeMo-RL; if both are set as options of the part, both apply.
    """

    name: ClassVar[str] = "soft_overlong"
    buffer: int = 4096  # number of tokens before max_length over which the punishment grows
    penalty: float = 1.0  # the full punishment, from max_length on
    max_length: int | None = None  # sampled tokens
    truncated_factor: float | None = None

    def __post_init__(self) -> None:
        if self.buffer < 1 or self.penalty < 0:
            raise ValueError(
                f"buffer is {self.buffer} tokens and penalty {self.penalty}: set buffer to at least 1 and penalty to at least 0"
            )
        if self.penalty and self.max_length is not None and self.buffer > self.max_length:
            raise ValueError(
                f"buffer is {self.buffer} tokens, but max_length is {self.max_length}: every response would be punished; set buffer to "
                "at most max_length"
            )
        if self.truncated_factor is not None and not 0 <= self.truncated_factor <= 1:
            raise ValueError(f"truncated_factor is {self.truncated_factor}: it reduces the reward and must lie in [0, 1]")

    def shape(self, rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        if self.truncated_factor is not None:
            rewards = torch.where(truncated, rewards * self.truncated_factor, rewards)
        if self.max_length is None:
            return rewards
        over = (lengths - (self.max_length - self.buffer)) / self.buffer
        return rewards - self.penalty * over.clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class DAPO(PolicyGradient):
    """DAPO (arXiv 2503.14476): GRPO with a higher upper clip, dynamic sampling, a token-level loss, soft overlong punishment.

    It changes four things: the clip is [1 - 0.2, 1 + 0.28]; groups with only successes or only failures, by the rewards before
    the punishment, are replaced; the loss is the mean over all tokens of the batch instead of over the rollouts' means; and
    long responses are punished (``overlong.py``). The punishment is off until ``max_length`` is set (grpo.reward_shaping). The
    paper also tries overlong filtering, here ``overlong_filtering``. TRL's ``dapo`` is the aggregation only.

    GRPO's advantage, clip-higher, dynamic sampling, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum; groups_dropped_by_filter counts the replaced groups.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip(high=0.28)
    shaping: Shaping | None = SoftOverlong()
    drop_constant_groups: bool = True
