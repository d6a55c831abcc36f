"""Objectives with one ratio or weight for a whole rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import Aggregation, bounded_exp, bounded_logprobs, geometric_mean, sequence_sum
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.parts import Advantage, BoundedObjective, Objective, PolicyTokens
from strop.lazy_torch import Tensor, torch


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
    """Group Sequence Policy Optimization (arXiv 2507.18071): one clipped ratio per rollout.

    GRPO's advantage, one ratio per rollout, mean over rollouts of their means.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum, of rollouts' ratios.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = SequenceClip()
    aggregation: Aggregation = "sequence_mean"


@dataclass(frozen=True, kw_only=True)
class LUSPO(PolicyGradient):
    """LUSPO (arXiv 2602.05261): GSPO with each rollout weighted by its length, which removes the bias toward short rollouts.

    A rollout's term is |y| x min(s A, clip(s) A), the sum over its tokens instead of their mean. The clip bounds are those of GSPO.

    GRPO's advantage, one ratio per rollout, sums over rollouts.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum, of rollouts' ratios.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = SequenceClip()
    aggregation: Aggregation = "sequence_sum"


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
    """GMPO (arXiv 2507.20673): the geometric mean of a rollout's ratios, after clipping each of them.

    GRPO's advantage, geometric means of clipped ratios, mean over rollouts of their means.

    Metrics: ratio_outside_clip, ratio_clipped (tokens without gradient), probs_ratio and its maximum, of rollouts' clipped means.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = GeometricMean()
    aggregation: Aggregation = "sequence_mean"


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
    """Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286).

    Good rollouts are imitated; bad rollouts are unlearned only as far as the policy would still sample them.

    The group's mean as baseline, tapered weights, sums over rollouts.

    Metrics: topr_weight, the mean weight of tokens; topr_tapered, the share of tokens with A < 0 in rollouts with a ratio below the cap.
    """

    advantage: Advantage = GroupRelative(normalize=False)
    objective: Objective = Tapered()
    aggregation: Aggregation = "sequence_sum"


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
    """VESPO (arXiv 2602.10693): weighs whole rollouts by a smooth function of their ratio to the sampler.

    GRPO's advantage, gamma weights of whole rollouts, mean over all tokens of the batch.

    Metrics: rollout_weight, the mean of phi(w) over tokens; probs_ratio and its maximum, of the products w.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = GammaWeight()
