"""Group Sequence Policy Optimization (arXiv 2507.18071): one clipped ratio per rollout.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum, of rollouts' ratios.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import Aggregation, geometric_mean
from strop.algorithms.policy_gradient.advantages.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SequenceClip(Clip):
    """PPO's clip of s = exp(mean over a rollout of log ratio), the same for each of its tokens.

    The entry of each token has the gradient of its own log-probability (the paper's GSPO-token form). Their mean over a rollout is the
    gradient of s.
    """

    zero_gradient_without_advantage = True
    sequence_level: ClassVar[bool] = True
    low: float = 3e-4
    high: float = 4e-4

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = geometric_mean(tokens.log_ratio, tokens.batch)
        objective, columns = self.clipped(ratio, tokens.advantages)
        return objective, {**columns, "probs_ratio": ratio}

    def unbounded(self, tokens: PolicyTokens) -> Tensor:
        return geometric_mean(tokens.log_ratio, tokens.batch) * tokens.advantages


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyGradient):
    """GRPO's advantage, one ratio per rollout, mean over rollouts of their means."""

    advantage: Advantage = GroupRelative()
    objective: Objective = SequenceClip()
    aggregation: Aggregation = "sequence_mean"
