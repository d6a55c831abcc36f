"""GMPO (arXiv 2507.20673): the geometric mean of a rollout's ratios, after clipping each of them.

Metrics: ratio_outside_clip, ratio_clipped (tokens without gradient), probs_ratio and its maximum, of rollouts' clipped means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import Aggregation, geometric_mean
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.bounded_objective import BoundedObjective
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class GeometricMean(BoundedObjective):
    """A x exp(mean over the rollout of c), c = min(log ratio, high) where A > 0 and max(log ratio, -low) where A < 0.

    ``low`` and ``high`` are in nats: the paper clips to (exp(-0.4), exp(0.4)). As in PPO, the clip acts in the direction in which A moves
    the policy. Each token's entry carries its own part of the gradient, so that the mean over the rollout is the paper's term in value
    and gradient.
    """

    zero_gradient_without_advantage = True
    sequence_level: ClassVar[bool] = True
    low: float = 0.4
    high: float = 0.4

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < 0:
            raise ValueError(f"log-ratios are clipped to [-{self.low}, {self.high}]: neither low nor high may be negative")

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        logs = tokens.log_ratio
        clipped = logs.clamp(-self.low, self.high)
        bounded = torch.where(tokens.advantages >= 0, torch.minimum(logs, clipped), torch.maximum(logs, clipped))
        ratio = geometric_mean(bounded, tokens.batch)
        columns = {"ratio_outside_clip": clipped != logs, "ratio_clipped": bounded != logs}
        return ratio * tokens.advantages, {
            **{name: column.to(ratio.dtype) for name, column in columns.items()},
            "probs_ratio": ratio,
        }

    def unbounded(self, tokens: PolicyTokens) -> Tensor:
        return geometric_mean(tokens.log_ratio, tokens.batch) * tokens.advantages


@dataclass(frozen=True, kw_only=True)
class GMPO(PolicyGradient):
    """GRPO's advantage, geometric means of clipped ratios, mean over rollouts of their means."""

    advantage: Advantage = GroupRelative()
    objective: Objective = GeometricMean()
    aggregation: Aggregation = "sequence_mean"
