"""REINFORCE++ (arXiv 2501.03262): no group baseline; the credit is whitened over all tokens of the batch.

A_t = R - beta x sum over this and later tokens of log pi_sampler - log pi_reference, then (A - mean) / deviation over the whole batch,
then PPO's clip. A group may be a single rollout. The standard deviation is that of the population; verl's
whitening, over the same counted tokens, is Bessel-corrected.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum, kl_penalty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.algorithms.base import Plan
from strop.algorithms.functional import whiten
from strop.algorithms.group_advantages import group_advantages
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.algorithms.policy_gradient.rewards import discounted_sums
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class BatchWhitened(Advantage):
    """R, or with ``group_mean`` R - mean of its group, whitened over the counted tokens of the batch.

    All rollouts of a group that does not vary get the same small credit, because the batch's mean is subtracted: with ``group_mean``, the
    mean over rollouts is 0, but the mean over tokens is not, because long rollouts count more. If nothing in the batch varies, all credit
    is exactly 0.

    ``gamma`` below 1 discounts by the distance in tokens: the reward, which is at the last token, and later KL terms.
    """

    group_mean: bool = False
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; it discounts the credit of earlier tokens and must lie in (0, 1]")

    def validate(self, plan: Plan) -> Iterator[str]:
        if self.group_mean:
            yield from super().validate(plan)

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group_advantages(group.rewards, normalize=False) if self.group_mean else group.rewards

    def token_advantages(self, batch: Batch) -> Tensor:
        credit = batch.advantages.double()
        if self.gamma != 1:
            same_rollout = batch.sequence[1:] == batch.sequence[:-1]
            later = torch.cat([credit[1:].where(same_rollout, 0.0), credit.new_zeros(len(credit[:1]))])
            credit = discounted_sums(credit - later, torch.full_like(credit, self.gamma), batch)
        return whiten(credit, batch.mask).to(batch.advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(PolicyGradient):
    """Reward minus the KL terms of this and later tokens, whitened over the batch, PPO's clip, mean over all tokens of the batch."""

    advantage: Advantage = BatchWhitened()
    objective: Objective = Clip()
    kl: Kl | None = Kl(weight=0.01, estimator="k1", place="token_reward")
