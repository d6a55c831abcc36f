"""The KL term to a reference policy: its estimator, its weight, and its place in the reward or the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strop.algorithms.functional import bounded_exp, logprobs_before_update, sequence_sum
from strop.lazy_torch import Tensor, torch
from strop.types import Batch

KlEstimator = Literal["k1", "k2", "k3"]

REFERENCE_LOGPROBS = "reference_logprobs"  # a batch column, [N]: the reference's log-probabilities of the predicted tokens


@dataclass(frozen=True, kw_only=True)
class Kl:
    """``weight`` x an estimate of KL(policy || reference), in one of four places.

    loss: added to the loss, with its gradient (GRPO). reward: the sum over a rollout is subtracted from its reward, before the baseline.
    token_reward: each token's estimate is subtracted from that token's reward, so that it lowers the credit of this and all earlier
    tokens (PPO as in InstructGPT, arXiv 2203.02155; REINFORCE++, 2501.03262). token_credit: subtracted from the credit of that token alone,
    before the credit is whitened (NeMo-RL's reinforce_plus_plus).
    Outside the loss it is measured with the policy before the update, so that it is 0 where that policy is the reference, whoever sampled.
    ``unbiased`` multiplies the estimate in the loss by the ratio of the policy to the sampler, so that the gradient of k1 and k3 is that
    of the KL divergence itself, however old the samples are (2512.02556, 2506.09477). ``score_gradient`` multiplies it by
    exp(log pi - stop_gradient(log pi)), which is 1 and has the same gradient while the policy is the one that sampled (NeMo-RL's KL term).
    """

    weight: float = 0.01
    estimator: KlEstimator = "k3"
    place: Literal["loss", "reward", "token_reward", "token_credit"] = "loss"
    unbiased: bool = False
    score_gradient: bool = False
    input_clamp: float | None = 20.0  # nats
    output_clamp: float | None = 10.0

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"the weight of the KL term is {self.weight}: a negative one drives the policy away; set 0 for none")
        if self.unbiased and self.place != "loss":
            raise ValueError(
                f"unbiased applies to a KL term in the loss, but the KL term is in the {self.place}: set place to loss or unbiased to false"
            )

        if self.unbiased and self.estimator == "k2":
            raise ValueError(
                "unbiased gives the estimators k1 and k3 the gradient of the KL divergence, but with k2 it gives that of E[k2], another "
                "quantity; set the estimator to k1 or k3, or unbiased to false, with which k2 has that gradient on-policy"
            )

    def estimate(self, logprobs: Tensor, batch: Batch) -> Tensor:  # [N]
        reference = batch.column(REFERENCE_LOGPROBS)
        weights = (logprobs - logprobs.detach()).exp() if self.score_gradient and not self.unbiased else None
        clamps = {"input_clamp": self.input_clamp, "output_clamp": self.output_clamp}
        return kl_estimate(logprobs, reference, self.estimator, weights=weights, **clamps)

    def weigh(self, estimates: Tensor, log_ratio: Tensor) -> Tensor:
        """Return estimates in the loss [N], if ``unbiased`` times the ratio of policy to sampler, whose logarithm is ``log_ratio``."""
        return estimates * bounded_exp(log_ratio) if self.unbiased else estimates

    def sum_per_rollout(self, batch: Batch) -> Tensor:
        """Sum the estimate over each rollout, for the policy before the update, [S] float64."""
        return sequence_sum(self.estimate(logprobs_before_update(batch), batch).double(), batch)

    def sum_to_go(self, batch: Batch) -> Tensor:
        """Sum the estimate over each token and all later tokens of its rollout, for the policy before the update, [N] float64."""
        estimates = torch.where(batch.mask > 0, self.estimate(logprobs_before_update(batch), batch).double(), 0.0)
        total = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, batch.sequence, estimates)
        preceding = estimates.cumsum(0) - estimates
        first = torch.full((batch.num_sequences,), len(estimates)).scatter_reduce(
            0, batch.sequence, torch.arange(len(estimates)), "amin"
        )
        preceding_rollout = torch.cat([preceding, preceding.new_zeros(1)])[first]
        return total[batch.sequence] - (preceding - preceding_rollout[batch.sequence])


def kl_estimate(
    logprobs: Tensor,
    reference: Tensor,
    estimator: KlEstimator,
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) per token from tokens that the policy sampled (Schulman, 2020), [N].

    With d = log reference - log policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d. ``input_clamp`` bounds d and ``output_clamp`` the
    estimate, and with them the gradient of outliers.
    """
    difference = reference - logprobs
    if input_clamp is not None:
        difference = difference.clamp(-input_clamp, input_clamp)
    match estimator:
        case "k1":
            estimate = -difference
        case "k2":
            estimate = difference.square() / 2
        case "k3":
            estimate = torch.expm1(difference) - difference
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)
