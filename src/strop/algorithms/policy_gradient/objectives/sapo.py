"""SAPO (arXiv 2511.20347): a smooth gate instead of the clip, steeper for negative advantages.

Metrics: sapo_gate, the factor of each token's gradient in addition to its ratio (1 at ratio 1); probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.functional import Aggregation
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class SoftGate(Objective):
    """(4 / tau) sigmoid(tau (ratio - 1)) A, with tau by the sign of A. On-policy its gradient is A grad log pi."""

    zero_gradient_without_advantage = True
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        if min(self.tau_positive, self.tau_negative) <= 0:
            raise ValueError(f"tau_positive is {self.tau_positive} and tau_negative {self.tau_negative}; both must be above 0")

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = tokens.ratio
        tau = torch.where(tokens.advantages > 0, self.tau_positive, self.tau_negative).to(ratio.dtype)
        gate = torch.sigmoid(tau * (ratio - 1))
        return 4 / tau * gate * tokens.advantages, {"sapo_gate": 4 * gate * (1 - gate)}


@dataclass(frozen=True, kw_only=True)
class SAPO(PolicyGradient):
    """GRPO's advantage, a soft gate on the ratio, mean over rollouts of their means."""

    advantage: Advantage = GroupRelative()
    objective: Objective = SoftGate()
    aggregation: Aggregation = "sequence_mean"
