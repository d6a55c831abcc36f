"""DPPO (arXiv 2602.04879): a trust region on probabilities instead of their ratio, around the sampler instead of the previous policy.

Metrics: divergence, the mean |pi - mu| of sampled tokens; divergence_masked, the share of tokens without gradient;
ratio_capped; probs_ratio and its maximum, of policy to sampler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import bounded_exp, bounded_logprobs
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.bounded_objective import BoundedObjective
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class DivergenceMask(BoundedObjective):
    """stop_gradient(min(r, cap)) A log pi where (A > 0 and pi - mu <= high) or (A <= 0 and pi - mu >= -low), else 0; r = pi / mu.

    |pi - mu| of the sampled token is a lower bound of the total variation (the paper's Binary-TV). r is relative to the sampler, so no
    correction is needed. ``low`` and ``high`` are probabilities. The paper's variant with a KL divergence is not implemented.
    """

    zero_gradient_without_advantage = True
    corrects_for_sampler: ClassVar[bool] = True
    uses_ratio_to: ClassVar[bool] = False
    bound_columns: ClassVar[tuple[str, ...]] = ("divergence_masked", "ratio_capped")
    low: float = 0.15
    high: float = 0.15
    cap: float = 20.0

    def __post_init__(self) -> None:
        if not (0 <= self.low <= 1 and 0 <= self.high <= 1):
            raise ValueError(
                f"low is {self.low} and high {self.high}: they bound the change of a probability and must lie in [0, 1]"
            )
        if self.cap < 1:
            raise ValueError(f"cap is {self.cap}: it would scale down tokens whose probability has not changed; set at least 1")

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        policy = tokens.logprobs.detach()
        ratio = bounded_exp(policy - tokens.rollout_logprobs)
        change = policy.exp() - tokens.rollout_logprobs.exp()
        inside = torch.where(tokens.advantages > 0, change <= self.high, change >= -self.low)
        weight = ratio.clamp(max=self.cap) * inside
        return weight * tokens.advantages * bounded_logprobs(tokens.logprobs), {
            "divergence": change.abs(),
            "divergence_masked": (~inside).to(ratio.dtype),
            "ratio_capped": (ratio > self.cap).to(ratio.dtype),
            "probs_ratio": ratio,
        }

    def unbounded(self, tokens: PolicyTokens) -> Tensor:
        return (
            bounded_exp(tokens.logprobs.detach() - tokens.rollout_logprobs)
            * tokens.advantages
            * bounded_logprobs(tokens.logprobs)
        )


@dataclass(frozen=True, kw_only=True)
class DPPO(PolicyGradient):
    """GRPO's advantage, a mask by total variation from the sampler, mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = DivergenceMask()
