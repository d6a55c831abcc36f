"""Rejection of tokens or rollouts by an estimate of the divergence between sampler and learner (verl's ``rollout_rs``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.algorithms.functional import MAX_EXPONENT, bounded_exp, sequence_mean, sequence_sum
from strop.algorithms.policy_gradient.corrections.importance import check_ratio_range, log_ratios
from strop.algorithms.policy_gradient.corrections.rejection import Rejection
from strop.algorithms.policy_gradient.parts import Mismatch
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class DivergenceRejection(Rejection):
    """Keeps tokens, or rollouts by the sum, mean or maximum over their counted tokens, with an estimate within bounds.

    k2 = (log w)^2 / 2 and k3 = w - 1 - log w are at most ``high`` nats. k1 is log w, with low <= exp(k1) <= high: ``token`` drops tokens
    as ``mis`` does, without weights for the others, ``mean`` is ``geometric_rejection``, and ``sum`` compares the product of w. verl's
    bounds of k1 are those of mu / pi_old: "0.8_1.6" there is low 0.625 and high 1.25 here.

    Logs ``divergence_rejection_cut`` and ``divergence_rejection_estimate``, which for k1 is the ratio.
    """

    name: ClassVar[str] = "divergence_rejection"
    measure_name: ClassVar[str] = "estimate"
    estimator: Literal["k1", "k2", "k3"] = "k3"
    level: Literal["token", "sum", "mean", "max"] = "mean"
    low: float = 0.0  # of k1 only
    high: float = 0.01

    def __post_init__(self) -> None:
        if self.estimator == "k1":
            check_ratio_range(self.low, self.high, "exp(k1)")
            if not self.low <= 1 <= self.high:
                raise ValueError(
                    f"low is {self.low} and high {self.high}: where sampler and learner agree exp(k1) is 1, and would be rejected; set low "
                    "to at most 1 and high to at least 1, for example 0.5 and 2.0"
                )
        elif self.high <= 0 or self.low:
            raise ValueError(
                f"low is {self.low} and high {self.high}: {self.estimator} is never negative, and 0 only where sampler and learner agree "
                "to the last bit; set high above 0, for example 0.01, and low to 0"
            )
        if self.estimator == "k1" and self.level == "max":
            raise ValueError("level max is the largest divergence, and k1 has both signs; set the estimator to k2 or k3")

    def measure(self, mismatch: Mismatch) -> Tensor:
        logs, batch = log_ratios(mismatch), mismatch.batch
        match self.estimator:
            case "k1":
                estimates = logs
            case "k2":
                estimates = logs.square() / 2
            case "k3":
                estimates = torch.expm1(logs.clamp(max=MAX_EXPONENT)) - logs
        match self.level:
            case "sum":
                estimates = sequence_sum(estimates, batch)[batch.sequence]
            case "mean":
                estimates = sequence_mean(estimates, batch)[batch.sequence]
            case "max":  # at least 0, as every k2 and k3, and 0 for tokens that do not count
                largest = estimates.new_zeros(batch.num_sequences).scatter_reduce(0, batch.sequence, estimates, "amax")
                estimates = largest[batch.sequence]
        return bounded_exp(estimates) if self.estimator == "k1" else estimates

    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        return (measured >= self.low) & (measured <= self.high)
