"""KPop (Guo, Sun et al., "Taming training-inference mismatch with adaptive masking regions", 2026): masking of tokens by a binary KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import MAX_LOG_RATIO
from strop.algorithms.policy_gradient.corrections.importance import log_ratios
from strop.algorithms.policy_gradient.parts import Correction, Mismatch
from strop.lazy_torch import Tensor, torch

MIN_REST = 2.0**-24  # a probability closer to 1 than this is 1 in float32, so the remaining probability is at least this


@dataclass(frozen=True, kw_only=True)
class Kpop(Correction):
    """1 where max(D(pi_o, mu), D(mu, pi_o)) <= phi nats, else 0; D(p, q) = p log(p / q) + (1 - p) log((1 - p) / (1 - q)).

    The vocabulary is reduced to two events, the sampled token and all others, so the ratio of a likely token may differ less than that of
    an unlikely one. Tokens are only kept or dropped: add ``importance`` or ``tis`` to weight by the ratio. Dropped tokens still count in
    the denominators of the loss. The authors tried phi from 0.1 to 2. Logs ``kpop_cut``, the share of dropped tokens, and
    ``kpop_divergence``.
    """

    reweights: ClassVar[bool] = False
    phi: float = 0.1

    def __post_init__(self) -> None:
        if self.phi <= 0:
            raise ValueError(
                f"phi is {self.phi}: it bounds a divergence, which is 0 only where sampler and learner agree to the last bit; "
                "set for example 0.1"
            )

    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        sampler = mismatch.batch.rollout_logprobs.double().clamp(min=-MAX_LOG_RATIO, max=0.0)
        learner = (sampler + log_ratios(mismatch)).clamp(max=0.0)
        divergence = torch.maximum(_binary_kl(learner, sampler), _binary_kl(sampler, learner))
        dtype = mismatch.log_ratio.dtype
        kept = (divergence <= self.phi).to(dtype)
        return kept, {"kpop_cut": 1 - kept, "kpop_divergence": divergence.to(dtype)}


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the KL divergence of two Bernoulli variables from the logarithms of their probabilities, [N] float64."""
    rest_p, rest_q = (-torch.expm1(log).clamp(max=-MIN_REST) for log in (log_p, log_q))
    return log_p.exp() * (log_p - log_q) + rest_p * (rest_p.log() - rest_q.log())
