"""Base classes of pair losses with a reference policy, and their options: length desensitisation, WPO weights, f-divergences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from strop.algorithms.base import SQUARED_PROBS, TokenOutputs
from strop.algorithms.functional import MAX_EXPONENT, sequence_mean
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.algorithms.preference.base import PairwisePreference, check_label_smoothing, require_positive
from strop.lazy_torch import Tensor, torch
from strop.types import Batch

Divergence = Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"]


@dataclass(frozen=True, kw_only=True)
class ReferencedPreference(PairwisePreference):
    """Base class of pair losses with a reference policy. ``beta`` is the cost of moving away from it: 0.05 in NeMo-RL, 0.1 in papers.

    ``ld_alpha`` multiplies the log-probabilities of those tokens of the longer completion that lie beyond the length of the shorter one
    (LD-DPO, arXiv 2409.06411); None is 1. ``use_weighting`` multiplies the loss of a pair by the product over its completions of
    exp(mean over tokens of log p - log sum over the vocabulary of p^2), without gradient: how likely the policy is to write the pair
    itself (WPO, 2406.11827, equation 2, with its alignment by the policy's own samples).
    """

    beta: float = 0.05
    ld_alpha: float | None = None
    use_weighting: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("beta", self.beta)
        if self.ld_alpha is not None and not 0 <= self.ld_alpha <= 1:
            raise ValueError(
                f"ld_alpha is {self.ld_alpha}: it is the weight of tokens beyond the length of the shorter completion; set it between 0 "
                "and 1, or to null for 1"
            )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({REFERENCE_LOGPROBS})

    @property
    def reward_scale(self) -> float:
        return self.beta

    def prepare_step(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        batch = super().prepare_step(batch, outputs)
        return batch.with_column(SQUARED_PROBS, torch.ones(len(batch.target))) if self.use_weighting else batch

    def scores(self, outputs: TokenOutputs, batch: Batch) -> Tensor:
        return self.per_completion(outputs.logprobs - batch.column(REFERENCE_LOGPROBS), batch)

    def per_completion(self, values: Tensor, batch: Batch) -> Tensor:
        return super().per_completion(
            values if self.ld_alpha is None else values * self._length_weights(batch, self.ld_alpha), batch
        )

    def pair_losses(self, scores: Tensor, outputs: TokenOutputs, batch: Batch) -> Tensor:
        losses = super().pair_losses(scores, outputs, batch)
        if not self.use_weighting:
            return losses
        if outputs.log_sum_sq_probs is None:
            raise ValueError("use_weighting needs log_sum_sq_probs of every token, which the network did not return")
        likelihood = sequence_mean((outputs.logprobs.detach() - outputs.log_sum_sq_probs).double(), batch)
        return losses * self.as_pairs(likelihood, batch).sum(1).exp()

    def _length_weights(self, batch: Batch, beyond: float) -> Tensor:
        """Return ``beyond`` for counted tokens after the length of the shorter completion of their pair, and 1 for the others, [N]."""
        lengths = batch.sequence_lengths.long()  # integers are summed exactly, in any order
        position = batch.mask.long().cumsum(0) - (lengths.cumsum(0) - lengths)[batch.sequence]  # from 1
        shorter = self.as_pairs(lengths, batch).amin(1)
        return torch.where(position > shorter[batch.group[batch.sequence]], beyond, 1.0)


@dataclass(frozen=True, kw_only=True)
class ComparedPreference(ReferencedPreference):
    """Base class of pair losses that depend only on the difference of the two scores, so that another divergence may replace the
    KL.

    The score of a completion is f'(pi / pi_ref), the derivative of the divergence's generator (f-DPO, arXiv 2309.16240): h itself for
    reverse_kl, 1 - exp(-h) for forward_kl, log 2 + log sigmoid(h) for js_divergence, and (exp((a - 1) h) - 1) / (a - 1) with a =
    ``f_alpha_divergence_coef`` for alpha_divergence. With ``average_log_probs`` it is divided by the completion's length.
    """

    f_divergence_type: Divergence = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5

    def scores(self, outputs: TokenOutputs, batch: Batch) -> Tensor:
        scores = super().scores(outputs, batch)
        if self.f_divergence_type == "reverse_kl":
            return scores
        lengths = self.as_pairs(batch.sequence_lengths.double(), batch).clamp(min=1) if self.average_log_probs else 1.0
        return self._score(scores * lengths) / lengths

    def _score(self, log_ratio: Tensor) -> Tensor:
        """Return f'(exp(log_ratio))."""
        excess = self.f_alpha_divergence_coef - 1
        match self.f_divergence_type:
            case "forward_kl":
                return -torch.expm1((-log_ratio).clamp(max=MAX_EXPONENT))
            case "js_divergence":
                return math.log(2) + torch.nn.functional.logsigmoid(log_ratio)
            case "alpha_divergence" if excess:
                return torch.expm1((excess * log_ratio).clamp(max=MAX_EXPONENT)) / excess
            case _:  # the limit of the alpha-divergence at 1 is the reverse KL
                return log_ratio


@dataclass(frozen=True, kw_only=True)
class NoisyPreference(ComparedPreference):
    """Base class of pair losses for noisy labels: ``label_smoothing`` is the share of pairs whose label is wrong."""

    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label_smoothing(self.label_smoothing)
