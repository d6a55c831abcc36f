"""VESPO (arXiv 2602.10693): weighs whole rollouts by a smooth function of their ratio to the sampler.

Metrics: rollout_weight, the mean of phi(w) over tokens; probs_ratio and its maximum, of the products w.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import bounded_exp, bounded_logprobs, sequence_sum
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class GammaWeight(Objective):
    """stop_gradient(phi(w)) A log pi, phi(w) = w^k exp(lambda (1 - w)), w = product over the rollout of pi / mu.

    phi(1) = 1, and phi falls to 0 on both sides of k / lambda. k and lambda depend on the sign of A; the defaults are the authors'. The
    product is not normalized by length. The authors multiply the ratio to the learner before the update by a bounded correction; here w is
    directly relative to the sampler, which is the same while that bound is not reached.
    """

    zero_gradient_without_advantage = True
    corrects_for_sampler: ClassVar[bool] = True
    uses_ratio_to: ClassVar[bool] = False
    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __post_init__(self) -> None:
        if min(self.k_positive, self.k_negative) < 0 or min(self.lambda_positive, self.lambda_negative) <= 0:
            raise ValueError(
                f"k is {self.k_positive} and {self.k_negative}, lambda {self.lambda_positive} and {self.lambda_negative}: with a negative "
                "k the weight of an unlikely rollout has no bound, and with a lambda of 0 or less that of a likely one; set k >= 0 and "
                "lambda > 0"
            )

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        log_ratio = sequence_sum(tokens.sampler_log_ratio.detach(), tokens.batch)[tokens.batch.sequence]
        ratio = bounded_exp(log_ratio)
        positive = tokens.advantages >= 0
        k = torch.where(positive, self.k_positive, self.k_negative).to(log_ratio.dtype)
        decay = torch.where(positive, self.lambda_positive, self.lambda_negative).to(log_ratio.dtype)
        weight = bounded_exp(k * log_ratio + decay * (1 - ratio))
        return weight * tokens.advantages * bounded_logprobs(tokens.logprobs), {"rollout_weight": weight, "probs_ratio": ratio}


@dataclass(frozen=True, kw_only=True)
class VESPO(PolicyGradient):
    """GRPO's advantage, gamma weights of whole rollouts, mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = GammaWeight()
