"""Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286).

Good rollouts are imitated; bad rollouts are unlearned only as far as the policy would still sample them.

Metrics: topr_weight, the mean weight of tokens; topr_tapered, the share of tokens with A < 0 in rollouts with a ratio below the cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import Aggregation, bounded_logprobs, sequence_sum
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Tapered(Objective):
    """A log pi for A >= 0, and stop_gradient(min(r, cap)) A log pi for A < 0, with r = product over the rollout of pi / mu.

    mu is the sampling policy, of any age: there is no proximal policy and no clip. A rollout that the policy has unlearned has r near 0
    and almost no gradient, which keeps the policy stable far from mu.
    """

    zero_gradient_without_advantage = True
    sequence_level: ClassVar[bool] = True
    corrects_for_sampler: ClassVar[bool] = True
    cap: float = 1.0

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ValueError(
                f"cap is {self.cap}: rollouts with a negative advantage would have no weight; set it above 0 (1 in the paper)"
            )

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        batch = tokens.batch
        log_ratio = sequence_sum(tokens.sampler_log_ratio.detach(), batch)[batch.sequence]
        log_cap = torch.log(torch.tensor(self.cap, dtype=log_ratio.dtype, device=log_ratio.device))
        negative = tokens.advantages < 0
        weight = torch.where(negative, torch.minimum(log_ratio, log_cap).exp(), torch.ones_like(log_ratio))
        tapered = (negative & (log_ratio < log_cap)).to(weight.dtype)
        return weight * tokens.advantages * bounded_logprobs(tokens.logprobs), {"topr_weight": weight, "topr_tapered": tapered}


@dataclass(frozen=True, kw_only=True)
class TOPR(PolicyGradient):
    """The group's mean as baseline, tapered weights, sums over rollouts."""

    advantage: Advantage = GroupRelative(normalize=False)
    objective: Objective = Tapered()
    aggregation: Aggregation = "sequence_sum"
