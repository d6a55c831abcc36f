"""Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): drops failed rollouts that the policy would no longer sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from strop.algorithms.functional import sequence_mean, sequence_sum
from strop.algorithms.policy_gradient.corrections.importance import log_ratios
from strop.algorithms.policy_gradient.corrections.rejection import Rejection
from strop.algorithms.policy_gradient.parts import Mismatch
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Opsm(Rejection):
    """Drops a rollout if A < 0 and the mean of log mu - log pi exceeds ``delta`` nats per token. Rollouts with A >= 0 are always kept.

    A is the sum of the credit over the rollout's counted tokens, and pi the current policy, after the updates made so far from this batch.
    The paper gives no value for ``delta``. Logs ``opsm_cut`` and ``opsm_divergence``.
    """

    name: ClassVar[str] = "opsm"
    measure_name: ClassVar[str] = "divergence"
    delta: float = 0.1

    def __post_init__(self) -> None:
        if self.delta < 0:
            raise ValueError(
                f"delta is {self.delta}: rollouts on which sampler and learner agree would be dropped; set 0 or more, for example 0.1"
            )

    def measure(self, mismatch: Mismatch) -> Tensor:
        current = mismatch if mismatch.current_log_ratio is None else replace(mismatch, log_ratio=mismatch.current_log_ratio)
        return -sequence_mean(log_ratios(current), mismatch.batch)[mismatch.batch.sequence]

    def accepts(self, measured: Tensor, mismatch: Mismatch) -> Tensor:
        credit = sequence_sum(mismatch.advantages.double(), mismatch.batch)[mismatch.batch.sequence]
        return (credit >= 0) | (measured <= self.delta)
