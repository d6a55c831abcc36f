"""Tokens treated by their part in the policy's entropy: those that reduce it most, or those that have most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens, Selection
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


def covariances(tokens: PolicyTokens) -> Tensor:
    """Return (A - mean A) (log pi - mean log pi), with means over counted tokens, [N] float64; -inf for tokens that do not count."""
    counted = tokens.batch.mask > 0
    advantages, logprobs = tokens.advantages.double(), tokens.logprobs.detach().double()
    products = (advantages - advantages[counted].mean()) * (logprobs - logprobs[counted].mean())
    return torch.where(counted, products, -torch.inf)


@dataclass(frozen=True, kw_only=True)
class CovarianceClip(Clip):
    """PPO's clip, multiplied by 0 for ``share`` of the counted tokens, chosen among those with a covariance between ``lowest`` and
    ``highest``.

    At least one token is chosen, as in the authors' code, and none that the clip already leaves without gradient. ``choose`` uniform
    samples them with a seed derived from the step's tokens, so that runs are reproducible; largest takes those with the largest covariance.
    """

    zero_gradient_without_advantage = True
    needs_step_outputs: ClassVar[bool] = True
    bound_columns: ClassVar[tuple[str, ...]] = ("ratio_clipped", "covariance_clipped")
    share: float = 2e-4
    lowest: float = 1.0
    highest: float = 5.0
    choose: Literal["uniform", "largest"] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share <= 1 or self.lowest >= self.highest:
            raise ValueError(
                f"share is {self.share}, lowest {self.lowest} and highest {self.highest}: the share must lie in (0, 1], and lowest must be "
                "below highest"
            )

    def prepare_step(self, tokens: PolicyTokens) -> Mapping[str, Tensor]:
        kept = torch.ones_like(tokens.batch.mask)
        if bool((tokens.batch.mask > 0).any()):
            kept[self._choose_tokens(tokens)] = 0.0
        return {"covariance_kept": kept}

    def _choose_tokens(self, tokens: PolicyTokens) -> Tensor:
        """Return the indices into N of the tokens that get no gradient."""
        covariance = covariances(tokens)
        _, columns = self.clipped(tokens.ratio, tokens.advantages)
        eligible = (
            ((covariance > self.lowest) & (covariance < self.highest) & (columns["ratio_clipped"] == 0)).nonzero().squeeze(1)
        )
        count = max(int(self.share * tokens.batch.totals.tokens), 1)
        if self.choose == "largest":
            return eligible[covariance[eligible].argsort(descending=True, stable=True)[:count]]
        generator = torch.Generator().manual_seed(_seed(tokens.batch))
        return eligible[torch.randperm(len(eligible), generator=generator)[:count]]

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        objective, columns = super().__call__(tokens)
        kept = tokens.batch.column("covariance_kept")
        return objective * kept, {**columns, "covariance_clipped": 1 - kept}


def _seed(batch: Batch) -> int:
    """Derive a seed from the sampled tokens in their order, so that it depends on this step only."""
    positions = torch.arange(1, len(batch.target) + 1)
    return int((batch.target.cpu() * positions % 2_147_483_647).sum()) + int(batch.versions.sum())


@dataclass(frozen=True, kw_only=True)
class ClipCov(PolicyGradient):
    """Clip-Cov (arXiv 2505.22617): removes the gradient of a few of the tokens that reduce the policy's entropy most.

    GRPO's advantage, PPO's clip without some tokens of high covariance, mean over all tokens of the batch.

    Metrics: covariance_clipped, the share of tokens without gradient; ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = CovarianceClip()


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
    """KL-Cov (arXiv 2505.22617): a KL term on the tokens that reduce the policy's entropy most, and none on the others.

    GRPO's advantage, ratios without a clip, a KL term on tokens of high covariance, mean over all tokens of the batch.

    Metrics: covariance_penalised, the share of tokens with the KL term; probs_ratio and its maximum.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = CovarianceKl()


# Training on the tokens with the largest entropy only (80/20, arXiv 2506.01939).


@dataclass(frozen=True, kw_only=True)
class TopEntropy(Selection):
    """Selects the ``share`` of counted tokens with the largest entropy over the whole optimizer step.

    Selects at least one token, and all tokens that tie with the last selected one. The others still count in every total, as in the paper.
    TRL computes the quantile over each micro-batch. Logs tokens_selected.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}: the share of tokens to train on must lie in (0, 1]")

    def choose(self, tokens: PolicyTokens) -> Tensor:
        counted = tokens.batch.mask > 0
        entropy = tokens.entropy.detach()
        if not bool(counted.any()):
            return torch.zeros_like(tokens.batch.mask)
        descending = entropy[counted].sort(descending=True).values
        threshold = descending[max(round(self.share * len(descending)), 1) - 1]
        return (counted & (entropy >= threshold)).to(tokens.batch.mask.dtype)
