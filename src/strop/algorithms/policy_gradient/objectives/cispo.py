"""CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is a clipped weight without gradient, so that every token keeps its gradient.

Metrics: ratio_outside_clip, the share of tokens whose weight was clipped; probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import bounded_logprobs
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.bounded_objective import BoundedObjective
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClippedWeight(BoundedObjective):
    """stop_gradient(clip(ratio, 1 - low, 1 + high)) A log pi.

    The paper has no lower bound (``low`` 1) and does not report the upper one; ScaleRL (2510.13786) caps the weight at 5 (``high`` 4).
    TRL clamps the weight to its epsilon_high instead of 1 + epsilon_high: with PPO's 0.2 an on-policy weight of 1 would become 0.2.
    """

    zero_gradient_without_advantage = True
    name: ClassVar[str] = "cispo"
    bound_columns: ClassVar[tuple[str, ...]] = ("ratio_outside_clip",)
    low: float = 1.0
    high: float = 4.0

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1 or self.high < 0:
            raise ValueError(
                f"the weight is clipped to [1 - {self.low}, 1 + {self.high}]: low must lie in [0, 1], and high must be at least 0"
            )

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = tokens.ratio.detach()
        weight = ratio.clamp(1 - self.low, 1 + self.high)
        return weight * tokens.advantages * bounded_logprobs(tokens.logprobs), {
            "ratio_outside_clip": (ratio != weight).to(ratio.dtype)
        }

    def unbounded(self, tokens: PolicyTokens) -> Tensor:
        return tokens.ratio.detach() * tokens.advantages * bounded_logprobs(tokens.logprobs)


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyGradient):
    """GRPO's advantage, clipped weights, mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = ClippedWeight()
