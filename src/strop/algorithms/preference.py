"""What the losses over preference pairs share: log-probabilities of whole completions, an SFT term, metrics.

A pair is a group of two rollouts, the chosen completion and the rejected one. A pair loss compares one number h for each:

    h(y) = sum over the taught tokens of y of log pi(token) - log pi_ref(token)
    loss = preference_weight x mean over pairs of compare(h(chosen), h(rejected)) + sft_weight x -log pi(chosen)

``average_log_probs`` makes h the mean over those tokens; without a reference it is of log pi alone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from strop import metrics
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.algorithms.functional import sequence_mean, sequence_sum
from strop.algorithms.kl import REFERENCE
from strop.algorithms.pairs import mean_over_pairs, pair_credit, pairs
from strop.metrics import Metrics
from strop.types import Batch, Group

SFT_WEIGHT = "sft_weight"  # a batch column, [N] float64: what a token's log-probability weighs in the SFT term


@dataclass(frozen=True, kw_only=True)
class PairwisePreference(Algorithm):
    """The base of losses over pairs. Both terms are means over the pairs of the optimizer step.

    ``sft_aggregation``: -log pi(chosen) summed over a completion's tokens, or averaged over them (NeMo-RL's ``sft_average_log_probs``
    false and true), or ``token_mean``, the mean over all chosen tokens of the step (TRL's loss type "sft" has that of a micro-batch).

    Metrics: loss; preference_loss; sft_loss where it has a weight; accuracy, the share of pairs with h(chosen) > h(rejected);
    rewards_chosen_mean, rewards_rejected_mean and margin, their difference, of the implicit reward beta h; logprobs_chosen and
    logprobs_rejected, log pi of the completions, summed or averaged over tokens as h is.
    """

    recorded: ClassVar[Literal["preferences"]] = "preferences"
    whole_groups: ClassVar[bool] = True
    preference_weight: float = 1.0
    sft_weight: float = 0.0
    sft_aggregation: Literal["sequence_sum", "sequence_mean", "token_mean"] = "sequence_mean"
    average_log_probs: bool = False

    def __post_init__(self) -> None:
        if min(self.preference_weight, self.sft_weight) < 0 or not self.preference_weight + self.sft_weight:
            raise ValueError(
                f"preference_weight is {self.preference_weight} and sft_weight {self.sft_weight}: neither may be negative, and without "
                "one above 0 nothing is learned"
            )

    @abstractmethod
    def compare(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """The loss of each pair, [P] float64, from h of its completions, [P] float64 each."""

    @property
    def reward_scale(self) -> float:
        """What h is multiplied by to give the implicit reward that is logged."""
        return 1.0

    def advantages(self, group: Group) -> Tensor:
        return pair_credit(group)

    def survey(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        """The SFT term's weights: how many tokens were chosen is known of the whole optimizer step only."""
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
        return batch.with_extra(SFT_WEIGHT, weight)

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        counted = pairs(batch.sequence_lengths, batch).sum(1) > 0
        logprobs = self._of_completions(outputs.logprobs, batch)
        reference = batch.extra(REFERENCE) if REFERENCE in self.requires else None
        compared = logprobs if reference is None else self._of_completions(outputs.logprobs - reference, batch)
        preference = self.compare(*compared.unbind(1))
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
            sft = -(outputs.logprobs * batch.extra(SFT_WEIGHT)).sum()
            loss = loss + self.sft_weight * sft
            logged["sft_loss"] = sft.item()
        return loss, {name: metrics.total(value) for name, value in {**logged, "loss": loss.item()}.items()}

    def _of_completions(self, values: Tensor, batch: Batch) -> Tensor:
        """One number for each completion, [N] -> [P, 2] float64: sums over thousands of tokens leave float32 few digits."""
        reduce = sequence_mean if self.average_log_probs else sequence_sum
        return pairs(reduce(values.double(), batch), batch)


@dataclass(frozen=True, kw_only=True)
class ReferencedPreference(PairwisePreference):
    """Pair losses that measure against a reference policy. ``beta`` is the price of moving away from it: 0.05 in NeMo-RL, 0.1 in papers."""

    beta: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("beta", self.beta)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({REFERENCE})

    @property
    def reward_scale(self) -> float:
        return self.beta


@dataclass(frozen=True, kw_only=True)
class NoisyPreference(ReferencedPreference):
    """Pair losses that know how often a label is wrong: ``label_smoothing`` is the share of pairs whose completions are swapped."""

    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing}: it is the share of pairs whose label is wrong, at least 0 and below 0.5, "
                "where labels say nothing"
            )


def require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} is {value}: it must be above 0")
