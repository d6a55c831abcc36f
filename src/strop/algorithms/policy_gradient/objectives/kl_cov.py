"""KL-Cov (arXiv 2505.22617): a KL term on the tokens that reduce the policy's entropy most, and none on the others.

Metrics: covariance_penalised, the share of tokens with the KL term; probs_ratio and its maximum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.objectives.clip_cov import covariances
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class CovarianceKl(Objective):
    """ratio A, minus ``weight`` x |log ratio| for the ``share`` of counted tokens with the largest covariance; no clip.

    |log ratio| is the authors' estimate of the KL divergence from the policy before the update. Its gradient is 0 at ratio 1, so the term
    has an effect from the second optimizer step of a batch on. At least one token has it. The paper's shares are 2e-3 for a model of
    7B parameters and 2e-4 for one of 32B.
    """

    zero_gradient_without_advantage = False
    needs_step_outputs: ClassVar[bool] = True
    needs_drift: ClassVar[bool] = True
    share: float = 2e-3
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.weight < 0:
            raise ValueError(
                f"share is {self.share} and weight {self.weight}: the share of penalized tokens must lie in (0, 1], and the weight must "
                "not be negative"
            )

    def prepare_step(self, tokens: PolicyTokens) -> Mapping[str, Tensor]:
        penalised = torch.zeros_like(tokens.batch.mask)
        total = tokens.batch.totals.tokens
        if total:
            count = max(int(self.share * total), 1)
            penalised[covariances(tokens).argsort(descending=True, stable=True)[:count]] = 1.0
        return {"covariance_penalised": penalised}

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        penalised = tokens.batch.column("covariance_penalised")
        objective = tokens.ratio * tokens.advantages - self.weight * penalised * tokens.log_ratio.abs()
        return objective, {"covariance_penalised": penalised}


@dataclass(frozen=True, kw_only=True)
class KlCov(PolicyGradient):
    """GRPO's advantage, ratios without a clip, a KL term on tokens of high covariance, mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = CovarianceKl()
