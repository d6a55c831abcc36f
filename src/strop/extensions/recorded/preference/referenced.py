"""Pair losses with a reference policy: their options (length desensitisation, WPO weights, f-divergences), and each loss with its paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.algorithms.base import SQUARED_PROBS, TokenOutputs
from strop.algorithms.functional import MAX_EXPONENT, bounded_exp, sequence_mean
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.extensions.recorded.preference.base import (
    PairwisePreference,
    check_label_smoothing,
    require_positive,
    smoothed_logistic,
)
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


@dataclass(frozen=True, kw_only=True)
class DPO(ComparedPreference):
    """Direct Preference Optimization (arXiv 2305.18290).

    -log sigmoid(beta (h(chosen) - h(rejected))), with h = log pi - log pi_ref of a completion.

    The loss is log 2 at the reference policy. With ``average_log_probs``, h is the mean per token (NeMo-RL's preference_average_log_probs,
    TRL's "sigmoid_norm").
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -torch.nn.functional.logsigmoid(self.beta * (chosen - rejected))


@dataclass(frozen=True, kw_only=True)
class CDPO(NoisyPreference):
    """Conservative DPO (Mitchell, A note on DPO with noisy preferences, 2023): DPO, arXiv 2305.18290, with smoothed labels.

    -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d), with d = h(chosen) - h(rejected) and e = ``label_smoothing``.

    Its minimum is at a finite margin, beta d = log((1 - e) / e). ``robust_dpo`` corrects the bias of label smoothing.
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return smoothed_logistic(self.beta * (chosen - rejected), self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class RobustDPO(NoisyPreference):
    """Robust DPO: an unbiased estimate of DPO's loss under labels that are flipped at a known rate (arXiv 2403.00409).

    (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e), with d = h(chosen) - h(rejected), e = ``label_smoothing``.

    The loss has no lower bound: it decreases linearly for large d.
    """

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        scaled = self.beta * (chosen - rejected)
        loss, flipped_loss = -torch.nn.functional.logsigmoid(scaled), -torch.nn.functional.logsigmoid(-scaled)
        return ((1 - self.label_smoothing) * loss - self.label_smoothing * flipped_loss) / (1 - 2 * self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class IPO(ComparedPreference):
    """Identity Preference Optimization (arXiv 2310.12036, equation 17).

    (h(chosen) - h(rejected) - 1 / (2 beta))^2, with beta the paper's tau: the gap has a finite target.

    In the paper h is a sum over tokens. Its authors averaged over tokens in their experiments, as do TRL and the default here;
    ``average_log_probs`` false is the formula of the paper.
    """

    average_log_probs: bool = True

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.beta)).square()


@dataclass(frozen=True, kw_only=True)
class EXOPair(NoisyPreference):
    """Efficient exact optimization on pairs (EXO, arXiv 2402.00856, equation 16).

    KL(p || q) over the two completions, with p(chosen) = sigmoid(beta d), q(chosen) = 1 - e and e = ``label_smoothing``.

    d = h(chosen) - h(rejected). DPO minimizes the opposite direction, KL(q || p). e must be above 0, because q(rejected) = 0 makes the
    divergence infinite; the paper recommends 0.001.
    """

    name: ClassVar[str] = "exo_pair"

    label_smoothing: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.label_smoothing:
            raise ValueError(
                "label_smoothing is 0, which makes the divergence of EXO infinite; set it above 0, for example to 0.001"
            )

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = self.beta * (chosen - rejected)
        log_p = torch.nn.functional.logsigmoid(torch.stack([margin, -margin], -1))
        log_q = log_p.new_tensor([math.log1p(-self.label_smoothing), math.log(self.label_smoothing)])
        return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class NCAPair(ReferencedPreference):
    """Noise contrastive alignment on pairs (NCA, arXiv 2402.05369).

    -log sigmoid(r_c) - (log sigmoid(-r_c) + log sigmoid(-r_r)) / 2, with r = beta h of the chosen and the rejected completion.

    It has its minimum at a finite r_c, so the chosen completion does not become less likely, as it may under DPO. The loss is 2 log 2 at
    the reference policy.
    """

    name: ClassVar[str] = "nca_pair"

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        logsigmoid, chosen, rejected = torch.nn.functional.logsigmoid, self.beta * chosen, self.beta * rejected
        return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


@dataclass(frozen=True, kw_only=True)
class BCOPair(ReferencedPreference):
    """Binary classifier optimization on pairs (BCO, arXiv 2404.04656), without its shift of the reward.

    -log sigmoid(r_c) - log sigmoid(-r_r), with r = beta h: a classifier of chosen against rejected completions, which bounds DPO's loss.

    The loss is 2 log 2 at the reference policy.
    """

    name: ClassVar[str] = "bco_pair"

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        logsigmoid = torch.nn.functional.logsigmoid
        return -logsigmoid(self.beta * chosen) - logsigmoid(-self.beta * rejected)


@dataclass(frozen=True, kw_only=True)
class DiscoPOP(ComparedPreference):
    """DiscoPOP, the log-ratio modulated loss that a language model discovered (arXiv 2406.08414, equation 5).

    (1 - w) x -log sigmoid(m) + w exp(-m), with m = beta (h(chosen) - h(rejected)) and w = sigmoid(m / ``tau``).

    Pairs with a negative margin have DPO's loss, those with a positive one an exponential loss. It is not convex: with ``tau`` below 0.1,
    as in the paper, it has a local minimum at a small negative margin, and its gradient at margin 0 lowers the margin.
    """

    name: ClassVar[str] = "discopop"

    tau: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("tau", self.tau)

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        margin = self.beta * (chosen - rejected)
        exponential = (margin / self.tau).sigmoid()
        return -torch.nn.functional.logsigmoid(margin) * (1 - exponential) + bounded_exp(-margin) * exponential


@dataclass(frozen=True, kw_only=True)
class SLiC(ComparedPreference):
    """The hinge loss of SLiC-HF (arXiv 2305.10425) on DPO's implicit reward, as normalized by RSO (2309.06657); TRL's "hinge".

    max(0, 1 - beta (h(chosen) - h(rejected))). A pair with a gap of at least 1 / beta has no gradient.

    The original SLiC-HF has no reference and adds an SFT term (``sft_weight``).
    """

    name: ClassVar[str] = "slic"

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (1 - self.beta * (chosen - rejected)).relu()


@dataclass(frozen=True, kw_only=True)
class SPPOHard(ReferencedPreference):
    """Self-play preference optimization (SPPO, arXiv 2405.00675, equation 4.7) with hard labels.

    (h(chosen) - 1 / (2 beta))^2 + (h(rejected) + 1 / (2 beta))^2: the win rates of the paper are 1 and 0.

    Each log-ratio has its own target, so both completions of a pair move. 1 / beta is the paper's eta.
    """

    name: ClassVar[str] = "sppo_hard"

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        target = 1 / (2 * self.beta)
        return (chosen - target).square() + (rejected + target).square()


@dataclass(frozen=True, kw_only=True)
class APOZero(ReferencedPreference):
    """Anchored Preference Optimization, zero (arXiv 2408.06266, equation 7): for data better than the policy's own samples.

    1 - sigmoid(beta h(chosen)) + sigmoid(beta h(rejected)): the chosen completion becomes more likely, the rejected one less.

    The loss is 1 at the reference policy.
    """

    name: ClassVar[str] = "apo_zero"

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (-self.beta * chosen).sigmoid() + (self.beta * rejected).sigmoid()


@dataclass(frozen=True, kw_only=True)
class APODown(ReferencedPreference):
    """Anchored Preference Optimization, down (arXiv 2408.06266, equation 8): for data worse than the policy's own samples.

    sigmoid(beta h(chosen)) + 1 - sigmoid(beta (h(chosen) - h(rejected))).

    Both completions become less likely, the rejected one more so. The loss is 1 at the reference policy, where its gradient in h(chosen)
    is 0.
    """

    name: ClassVar[str] = "apo_down"

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (self.beta * chosen).sigmoid() + (-self.beta * (chosen - rejected)).sigmoid()
