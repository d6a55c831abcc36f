"""Objectives that bound the change of each token otherwise than PPO's clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import Aggregation, bounded_exp, bounded_logprobs
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.corrections import Importance
from strop.algorithms.policy_gradient.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.parts import Advantage, BoundedObjective, Correction, Objective, PolicyTokens
from strop.lazy_torch import Tensor, torch


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
    """CISPO (MiniMax-M1, arXiv 2506.13585): the ratio is a clipped weight without gradient, so that every token keeps its gradient.

    GRPO's advantage, clipped weights, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, the share of tokens whose weight was clipped; probs_ratio and its maximum.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = ClippedWeight()


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
    """SAPO (arXiv 2511.20347): a smooth gate instead of the clip, steeper for negative advantages.

    GRPO's advantage, a soft gate on the ratio, mean over rollouts of their means.

    Metrics: sapo_gate, the factor of each token's gradient in addition to its ratio (1 at ratio 1); probs_ratio and its maximum.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = SoftGate()
    aggregation: Aggregation = "sequence_mean"


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
    """DPPO (arXiv 2602.04879): a trust region on probabilities instead of their ratio, around the sampler instead of the previous policy.

    GRPO's advantage, a mask by total variation from the sampler, mean over all tokens of the batch.

    Metrics: divergence, the mean |pi - mu| of sampled tokens; divergence_masked, the share of tokens without gradient;
    ratio_capped; probs_ratio and its maximum, of policy to sampler.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = DivergenceMask()


@dataclass(frozen=True, kw_only=True)
class SecondMomentMask(BoundedObjective):
    """M r A with r = pi / mu and a mask M, which is 0 for the tokens with the largest log^2 r.

    As many tokens are masked as needed for the mean log^2 r of the others to be at most ``limit``. The mask is computed over the whole
    optimizer step. As in the paper, the mean and the mask only consider tokens that the update moves further away (A > 0 and r > 1, or
    A < 0 and r < 1); with ``outward_only`` False they consider all tokens, as in AReaL. r is relative to the sampler, so no correction is
    needed.
    """

    zero_gradient_without_advantage = True
    corrects_for_sampler: ClassVar[bool] = True
    uses_ratio_to: ClassVar[bool] = False
    needs_step_outputs: ClassVar[bool] = True
    bound_columns: ClassVar[tuple[str, ...]] = ("second_moment_masked",)
    limit: float = 0.04  # nats^2
    outward_only: bool = True

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise ValueError(f"limit is {self.limit}, which masks all tokens whose probability changed; set for example 0.04")

    def prepare_step(self, tokens: PolicyTokens) -> Mapping[str, Tensor]:
        logs = tokens.sampler_log_ratio
        considered = tokens.batch.mask > 0
        if self.outward_only:
            considered = considered & (logs * tokens.advantages > 0)
        kept = torch.ones_like(tokens.batch.mask)
        kept[considered] = smallest_within_mean(logs[considered].double().square(), self.limit).to(kept.dtype)
        return {"second_moment_kept": kept}

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        logs = tokens.sampler_log_ratio
        ratio, kept = bounded_exp(logs), tokens.batch.column("second_moment_kept")
        return kept * ratio * tokens.advantages, {
            "second_moment": logs.square(),
            "second_moment_masked": 1 - kept,
            "probs_ratio": ratio,
        }

    def unbounded(self, tokens: PolicyTokens) -> Tensor:
        return bounded_exp(tokens.sampler_log_ratio) * tokens.advantages


def smallest_within_mean(squares: Tensor, limit: float) -> Tensor:
    """Return which of the values [n] are among the smallest ones whose mean is at most ``limit``, [n] bool."""
    ascending, order = squares.sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1, dtype=squares.dtype, device=squares.device)
    kept = torch.zeros(len(squares), dtype=torch.bool, device=squares.device)
    kept[order] = means <= limit  # the running means of ascending values ascend, so the smallest values are kept
    return kept


@dataclass(frozen=True, kw_only=True)
class M2PO(PolicyGradient):
    """M2PO (arXiv 2510.01161): no clip for stale samples, but a mask of the few tokens that make the second moment of the log-ratio large.

    GRPO's advantage, unclipped ratios to the sampler with a mask, mean over all tokens of the batch.

    Metrics: second_moment, the mean of log^2 r over counted tokens; second_moment_masked, the share of tokens without gradient;
    probs_ratio and its maximum, of policy to sampler.
    """

    name: ClassVar[str] = "m2po"

    advantage: Advantage = GroupRelative()
    objective: Objective = SecondMomentMask()


@dataclass(frozen=True, kw_only=True)
class DecoupledPPO(PolicyGradient):
    """Decoupled PPO (arXiv 2505.24298, after 2110.00641): separates the sampling policy from the proximal policy.

    w min(rho A, clip(rho) A) with rho = pi / pi_o and w = pi_o / mu. The clip is relative to pi_o, the learner before the update, no matter
    how old the samples are. ``ratio_to`` between approximates log pi_o by log mu + a (log pi - log mu), an idea of AReaL, which derives a
    from each token's age; here a is ``proximal_weight``.

    GRPO's advantage, PPO's clip around the learner before the update, importance weights of learner to sampler.

    Metrics: importance_weight, the mean w; ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip()
    corrections: tuple[Correction, ...] = (Importance(),)
