"""Rejection of rollouts on which sampler and learner disagree too much. The other rollouts are not reweighted."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import MAX_EXPONENT, sequence_mean
from strop.algorithms.policy_gradient.corrections.importance import check_ratio_range, geometric_mean_weights, log_ratios
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Rejection(Correction):
    """Weight 1 for tokens of kept rollouts and 0 for the others, which still count in the denominators of the loss.

    Logs ``<name>_cut``, the share of dropped tokens, and the measure that is compared with the bounds.
    """

    reweights: ClassVar[bool] = False
    measure_name: ClassVar[str]  # name of the measure in the logged metrics

    @abstractmethod
    def measure(self, mismatch: Mismatch) -> Tensor:
        """Return the measure of each token's rollout that is compared with the bounds, [N] float64."""

    @abstractmethod
    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        """Return whether each token's rollout is kept, [N] bool."""

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        measured = self.measure(mismatch)
        kept = self.accepts(measured, mismatch).to(mismatch.log_ratio.dtype)
        return kept, {f"{self.name}_cut": 1 - kept, f"{self.name}_{self.measure_name}": measured.to(kept.dtype)}


@dataclass(frozen=True, kw_only=True)
class GeometricRejection(Rejection):
    """Keeps rollouts with low <= exp(mean log w) <= high, independent of their length ("When speed kills stability", 2025).

    Logs ``geometric_rejection_cut`` and ``geometric_rejection_ratio``.
    """

    name: ClassVar[str] = "geometric_rejection"
    measure_name: ClassVar[str] = "ratio"
    low: float = 0.999
    high: float = 1.001

    def __post_init__(self) -> None:
        check_ratio_range(self.low, self.high, "the geometric mean of w")

    def measure(self, mismatch: Mismatch) -> Tensor:
        return geometric_mean_weights(mismatch)

    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        return (measured >= self.low) & (measured <= self.high)


@dataclass(frozen=True, kw_only=True)
class K3Rejection(Rejection):
    """Keeps rollouts with a mean of w - log w - 1, a non-negative estimate of KL(mu || pi_o), of at most ``cap`` nats.

    Logs ``k3_rejection_cut`` and ``k3_rejection_divergence``.
    """

    name: ClassVar[str] = "k3_rejection"
    measure_name: ClassVar[str] = "divergence"
    cap: float = 0.01

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ValueError(
                f"cap is {self.cap}: w - log w - 1 is 0 only where sampler and learner agree to the last bit, so every other rollout would "
                "be dropped; set for example 0.01"
            )

    def measure(self, mismatch: Mismatch) -> Tensor:
        ratios = log_ratios(mismatch)
        divergence = sequence_mean(torch.expm1(ratios.clamp(max=MAX_EXPONENT)) - ratios, mismatch.batch)
        return divergence[mismatch.batch.sequence]

    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        return measured <= self.cap
