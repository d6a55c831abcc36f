"""Base classes of losses over preference pairs: log-probabilities of completions, an SFT term and metrics.

A pair is a group of two rollouts, the chosen and the rejected completion. A pair loss compares one number h of each:

    h(y) = sum over the loss tokens of y of log pi(token) - log pi_ref(token)
    loss = preference_weight x mean over pairs of pair_loss(h(chosen), h(rejected)) + sft_weight x -log pi(chosen)

With ``average_log_probs``, h is the mean over those tokens. Without a reference, h is computed from log pi only.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop import metrics
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.algorithms.functional import sequence_mean, sequence_sum
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.algorithms.preference.pairs import mean_over_pairs, pair_advantages, view_as_pairs
from strop.lazy_torch import Tensor
from strop.metrics import Metrics
from strop.types import Batch, Group

SFT_WEIGHT = "sft_weight"  # a batch column, [N] float64: the weight of a token's log-probability in the SFT term


@dataclass(frozen=True, kw_only=True)
class PairwisePreference(Algorithm):
    """Base class of losses over pairs. Both terms are means over the pairs of the optimizer step.

    ``sft_aggregation`` sequence_sum and sequence_mean sum or average -log pi(chosen) over a completion's tokens (NeMo-RL's
    ``sft_average_log_probs`` false and true); token_mean averages over all chosen tokens of the step (TRL's loss type "sft" averages over
    those of a micro-batch).

    Metrics: loss; preference_loss; sft_loss if it has a weight; accuracy, the share of pairs with h(chosen) > h(rejected);
    rewards_chosen_mean, rewards_rejected_mean and margin, their difference, of the implicit reward beta h; logprobs_chosen and
    logprobs_rejected, log pi of the completions, summed or averaged over tokens in the same way as h.
    """

    recorded_data: ClassVar[Literal["preferences"]] = "preferences"
    whole_groups: ClassVar[bool] = True
    preference_weight: float = 1.0
    sft_weight: float = 0.0
    sft_aggregation: Literal["sequence_sum", "sequence_mean", "token_mean"] = "sequence_mean"
    average_log_probs: bool = False

    def __post_init__(self) -> None:
        if min(self.preference_weight, self.sft_weight) < 0 or not self.preference_weight + self.sft_weight:
            raise ValueError(
                f"preference_weight is {self.preference_weight} and sft_weight {self.sft_weight}: neither may be negative, and "
                "at least one must be above 0"
            )

    @abstractmethod
    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """Return the loss of each pair, [P] float64, from h of its completions, [P] float64 each."""

    @property
    def reward_scale(self) -> float:
        """The factor of h in the implicit reward that is logged."""
        return 1.0

    def advantages(self, group: Group) -> Tensor:
        return pair_advantages(group)

    def prepare_step(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        """Add the weights of the SFT term, which depend on the number of chosen tokens of the whole optimizer step."""
        if not self.sft_weight:
            return batch
        chosen = batch.mask.double() * (batch.sequence % 2 == 0)
        match self.sft_aggregation:
            case "token_mean":
                weight = chosen / chosen.sum().clamp(min=1)
            case "sequence_mean":
                weight = chosen / batch.sequence_lengths.clamp(min=1)[batch.sequence] / max(batch.totals.groups, 1)
            case "sequence_sum":
                weight = chosen / max(batch.totals.groups, 1)
        return batch.with_column(SFT_WEIGHT, weight)

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        counted = view_as_pairs(batch.sequence_lengths, batch).sum(1) > 0
        logprobs = self._per_completion(outputs.logprobs, batch)
        reference = batch.column(REFERENCE_LOGPROBS) if REFERENCE_LOGPROBS in self.requires else None
        compared = logprobs if reference is None else self._per_completion(outputs.logprobs - reference, batch)
        preference = self.pair_loss(*compared.unbind(1))
        rewards = self.reward_scale * compared.detach()
        columns = {
            "preference_loss": preference.detach(),
            "accuracy": (rewards[:, 0] > rewards[:, 1]).double(),
            "rewards_chosen_mean": rewards[:, 0],
            "rewards_rejected_mean": rewards[:, 1],
            "margin": rewards[:, 0] - rewards[:, 1],
            "logprobs_chosen": logprobs.detach()[:, 0],
            "logprobs_rejected": logprobs.detach()[:, 1],
        }
        logged = {name: mean_over_pairs(column * counted, batch).item() for name, column in columns.items()}
        loss = self.preference_weight * mean_over_pairs(preference * counted, batch)
        if self.sft_weight:
            sft = -(outputs.logprobs * batch.column(SFT_WEIGHT)).sum()
            loss = loss + self.sft_weight * sft
            logged["sft_loss"] = sft.item()
        return loss, {name: metrics.total(value) for name, value in {**logged, "loss": loss.item()}.items()}

    def _per_completion(self, values: Tensor, batch: Batch) -> Tensor:
        """Reduce to one number per completion, [N] -> [P, 2], in float64 because float32 sums over thousands of tokens are inaccurate."""
        reduce = sequence_mean if self.average_log_probs else sequence_sum
        return view_as_pairs(reduce(values.double(), batch), batch)


@dataclass(frozen=True, kw_only=True)
class ReferencedPreference(PairwisePreference):
    """Base class of pair losses with a reference policy. ``beta`` is the cost of moving away from it: 0.05 in NeMo-RL, 0.1 in papers."""

    beta: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("beta", self.beta)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({REFERENCE_LOGPROBS})

    @property
    def reward_scale(self) -> float:
        return self.beta


@dataclass(frozen=True, kw_only=True)
class NoisyPreference(ReferencedPreference):
    """Base class of pair losses for noisy labels: ``label_smoothing`` is the share of pairs whose label is wrong."""

    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}: it is the share of pairs with a wrong label; set it to at least 0 and below "
                "0.5, at which labels contain no information"
            )


def require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} is {value}: it must be above 0")
