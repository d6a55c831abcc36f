"""The KL term to a reference policy: its estimator, its weight, and its place in the reward or the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strop.algorithms.functional import POLICY_LOGPROBS, bounded_exp, logprobs_before_update, sequence_mean, sequence_sum
from strop.lazy_torch import Tensor, torch
from strop.types import Batch

KlEstimator = Literal["k1", "k2", "k3", "abs"]

REFERENCE_LOGPROBS = "reference_logprobs"  # a batch column, [N]: the reference's log-probabilities of the predicted tokens
KL_WEIGHT = "kl_weight"  # a batch column, [N] float64: the weight of a KL term that adapts, the same for all tokens
KL_WEIGHT_NEXT = "train/kl_weight_next"  # a metric: that weight in the next batch


@dataclass(frozen=True, kw_only=True)
class Kl:
    """``weight`` x an estimate of KL(policy || reference), in one of four places.

    loss: added to the loss, with its gradient (GRPO). reward: the sum over a rollout is subtracted from its reward, before the baseline.
    token_reward: each token's estimate is subtracted from that token's reward, so that it lowers the credit of this and all earlier
    tokens (PPO as in InstructGPT, arXiv 2203.02155; REINFORCE++, 2501.03262). token_credit: subtracted only from the credit of that token,
    before the credit is whitened (NeMo-RL's reinforce_plus_plus).
    Outside the loss it is measured with the policy before the update, so that it is 0 where that policy is the reference, for any sampler.
    With ``target``, the weight of a term outside the loss is only the first one. After each batch of n rollouts it is multiplied by
    1 + clip(estimate / target - 1, -0.2, 0.2) n / horizon (1909.08593), the estimate being a mean over rollouts of means over tokens.
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
    target: float | None = None  # nats: adapt the weight until the estimate of a token is this; None: a fixed weight
    horizon: int = 10_000  # rollouts; the smaller, the faster the weight adapts

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"the weight of the KL term is {self.weight}: a negative one drives the policy away; set 0 for none")
        if self.unbiased and self.place != "loss":
            raise ValueError(
                f"unbiased applies to a KL term in the loss, but the KL term is in the {self.place}: set place to loss or unbiased to false"
            )

        if self.unbiased and self.estimator in ("k2", "abs"):
            raise ValueError(
                f"unbiased gives the estimators k1 and k3 the gradient of the KL divergence, but with {self.estimator} it gives that of "
                f"E[{self.estimator}], another quantity; set the estimator to k1 or k3, or unbiased to false, with which k2 has that "
                "gradient on-policy"
            )

        if self.target is not None and (self.target <= 0 or self.horizon < 1 or self.place == "loss" or not self.weight):
            raise ValueError(
                f"target is {self.target}, horizon {self.horizon}, weight {self.weight} and place {self.place}: a target adapts the weight "
                "of a KL term in the reward, from a weight above 0; set target above 0, horizon to at least 1 and place to reward or "
                "token_reward, or target to null for a fixed weight"
            )

    @property
    def requires(self) -> frozenset[str]:
        """Names of the columns that the term reads."""
        if not self.weight:
            return frozenset()
        before = [POLICY_LOGPROBS] if self.place != "loss" else []
        return frozenset([REFERENCE_LOGPROBS, *before, *([KL_WEIGHT] if self.target else [])])

    def weight_in(self, batch: Batch) -> float:
        """Return the weight in a batch: ``weight``, or what it has been adapted to."""
        adapted = batch.columns.get(KL_WEIGHT)
        return self.weight if adapted is None or not len(adapted) else float(adapted[0])

    def report(self, batch: Batch) -> dict[str, float]:
        """Return metrics of a weight that adapts; the next batch takes its own from KL_WEIGHT_NEXT."""
        counted = batch.sequence_lengths > 0
        if self.target is None or not counted.any():
            return {}
        weight, estimates = self.weight_in(batch), self.estimate(logprobs_before_update(batch), batch).double()
        distance = float(sequence_mean(estimates, batch)[counted].mean())
        change = min(max(distance / self.target - 1, -0.2), 0.2) * batch.num_sequences / self.horizon
        return {"train/kl_weight": weight, "train/kl_to_reference": distance, KL_WEIGHT_NEXT: weight * (1 + change)}

    def estimate(self, logprobs: Tensor, batch: Batch) -> Tensor:  # [N]
        weights = (logprobs - logprobs.detach()).exp() if self.score_gradient and not self.unbiased else None
        return self._estimate(logprobs, batch, weights)

    def _estimate(self, logprobs: Tensor, batch: Batch, weights: Tensor | None) -> Tensor:
        clamps = {"input_clamp": self.input_clamp, "output_clamp": self.output_clamp}
        return kl_estimate(logprobs, batch.column(REFERENCE_LOGPROBS), self.estimator, weights=weights, **clamps)

    def weigh(self, logprobs: Tensor, log_ratio: Tensor, batch: Batch) -> Tensor:
        """Return estimates times the ratio of policy to sampler, whose logarithm is ``log_ratio``, [N]. The clamps bound the product."""
        return self._estimate(logprobs, batch, bounded_exp(log_ratio))

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
    weights: Tensor | None = None,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) per token from tokens that the policy sampled (Schulman, 2020), [N].

    With d = log reference - log policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, abs = |d|. ``input_clamp`` bounds d and
    ``output_clamp`` the estimate, multiplied by ``weights`` [N], and with them the gradient of outliers.
    """
    difference = reference - logprobs
    if input_clamp is not None:
        if weights is not None:
            weights = torch.where(difference.abs() <= input_clamp, weights, weights.detach())
        difference = difference.clamp(-input_clamp, input_clamp)
    match estimator:
        case "k1":
            estimate = -difference
        case "k2":
            estimate = difference.square() / 2
        case "k3":
            estimate = torch.expm1(difference) - difference
        case "abs":
            estimate = difference.abs()
    if weights is not None:
        estimate = weights * estimate
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)
