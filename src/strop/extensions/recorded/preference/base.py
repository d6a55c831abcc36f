"""Losses over preference pairs: the base class, and the functions that such losses share.

A pair is a group of two rollouts, the chosen and the rejected completion. A pair loss compares one number h of each:

    h(y) = sum over the loss tokens of y of log pi(token) - log pi_ref(token)
    loss = preference_weight x mean over pairs of pair_loss(h(chosen), h(rejected)) + sft_weight x -log pi(chosen)

With ``average_log_probs``, h is the mean over those tokens; without a reference, it is computed from log pi only.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop import metrics
from strop.algorithms.base import Algorithm, LossTerm, LossTerms, TokenOutputs, add_terms, sum_tokens
from strop.algorithms.functional import RELATIVE_ROUNDING, sequence_mean, sequence_sum
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch, Group


def view_as_pairs(values: Tensor, batch: Batch) -> Tensor:
    """View a column of rollouts [S] as pairs [P, 2]. Raises ValueError if a group does not have two rollouts."""
    group = batch.group
    if len(group) % 2 or not torch.equal(group[0::2], group[1::2]) or bool((group[1:-1:2] == group[2::2]).any()):
        raise ValueError(
            "a loss over pairs got a group that does not have two rollouts; a learner must not split a group (whole_groups), and a "
            "preference has one chosen and one rejected completion"
        )
    return values.view(-1, 2)


def mean_over_pairs(values: Tensor, batch: Batch) -> Tensor:
    """Return the contribution of these pairs [P] to the mean over all pairs of the optimizer step."""
    return values.sum() / max(batch.totals.groups, 1)


def mean_over_rollouts(values: Tensor, batch: Batch) -> Tensor:
    """Return the contribution of these rollouts [S] to the mean over all rollouts of the optimizer step."""
    return values.sum() / max(batch.totals.sequences, 1)


def pair_advantages(group: Group) -> Tensor:
    """Return placeholder advantages, [2], which the loss does not use. Raises ValueError if the group does not have two rollouts."""
    if len(group.rollouts) != 2:
        raise ValueError(
            f"{group.task.id}: found a group of {len(group.rollouts)} rollouts, but this algorithm needs two: a preference pair, or a "
            "desirable or undesirable completion and an unrelated one"
        )
    return torch.ones(2, dtype=torch.float64)


SFT_WEIGHT = "sft_weight"  # a batch column, [N] float64: the weight of a token's log-probability in the SFT term


@dataclass(frozen=True, kw_only=True)
class PairwisePreference(Algorithm):
    """Base class of losses over pairs. Both terms are means over the pairs of the optimizer step.

    ``sft_aggregation`` sequence_sum and sequence_mean sum or average -log pi(chosen) over a completion's tokens (NeMo-RL's
    ``sft_average_log_probs`` false and true); token_mean averages over all chosen tokens of the step (TRL's loss type "sft" averages over
    those of a micro-batch).

    Metrics: loss; preference_loss; sft_loss if it has a weight; accuracy, the share of pairs whose h(chosen) is above h(rejected) by
    more than rounding; rewards_chosen_mean, rewards_rejected_mean and margin, their difference, of the implicit reward beta h;
    logprobs_chosen and logprobs_rejected, log pi of the completions, summed or averaged over tokens in the same way as h.
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
        chosen = batch.mask.double() * self.chosen_tokens(batch)
        match self.sft_aggregation:
            case "token_mean":
                weight = chosen / chosen.sum().clamp(min=1)
            case "sequence_mean":
                weight = chosen / batch.sequence_lengths.clamp(min=1)[batch.sequence] / max(batch.totals.groups, 1)
            case "sequence_sum":
                weight = chosen / max(batch.totals.groups, 1)
        return batch.with_column(SFT_WEIGHT, weight)

    def terms(self, outputs: TokenOutputs, batch: Batch) -> tuple[list[LossTerm], dict[str, Tensor]]:
        """Return the terms of the loss, and the values to log."""
        counted = self.as_pairs(batch.sequence_lengths, batch).sum(1) > 0
        logprobs = self.per_completion(outputs.logprobs, batch)
        scores = self.scores(outputs, batch)
        preference = self.pair_losses(scores, outputs, batch)
        rewards = self.reward_scale * scores.detach()
        columns = {
            "preference_loss": preference.detach(),
            "accuracy": (scores.diff(dim=1)[:, 0] < -RELATIVE_ROUNDING * logprobs.abs().amax(1)).double(),
            "rewards_chosen_mean": rewards[:, 0],
            "rewards_rejected_mean": rewards[:, 1],
            "margin": rewards[:, 0] - rewards[:, 1],
            "logprobs_chosen": logprobs.detach()[:, 0],
            "logprobs_rejected": logprobs.detach()[:, 1],
        }
        logged = {name: mean_over_pairs(column * counted, batch) for name, column in columns.items()}
        terms = [LossTerm("preference", self.preference_weight, preference * counted, mean_over_pairs, "group")]
        if self.sft_weight:
            terms.append(LossTerm("sft", self.sft_weight, -(outputs.logprobs * batch.column(SFT_WEIGHT)), sum_tokens))
            logged["sft_loss"] = terms[1].reduce(terms[1].values, batch)
        return terms, logged

    def loss_terms(self, outputs: TokenOutputs, batch: Batch, learner: str = "policy") -> LossTerms:
        return LossTerms(self.terms(outputs, batch)[0])

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        terms, logged = self.terms(outputs, batch)
        loss = add_terms(terms, batch)
        return loss, {name: metrics.total(value) for name, value in {**logged, "loss": loss}.items()}

    def scores(self, outputs: TokenOutputs, batch: Batch) -> Tensor:
        """Return h of each completion, [P, 2] float64."""
        return self.per_completion(outputs.logprobs, batch)

    def pair_losses(self, scores: Tensor, outputs: TokenOutputs, batch: Batch) -> Tensor:
        """Return the loss of each pair, [P] float64, from h of its completions, [P, 2]."""
        return self.pair_loss(*scores.unbind(1))

    def as_pairs(self, values: Tensor, batch: Batch) -> Tensor:
        """Arrange a column of rollouts [S] as (chosen, rejected), [P, 2]."""
        return view_as_pairs(values, batch)

    def chosen_tokens(self, batch: Batch) -> Tensor:
        """Return which tokens belong to a chosen completion, [N] bool."""
        return batch.sequence % 2 == 0

    def per_completion(self, values: Tensor, batch: Batch) -> Tensor:
        """Reduce to one number per completion, [N] -> [P, 2], in float64 because float32 sums over thousands of tokens are inaccurate."""
        return self.as_pairs((sequence_mean if self.average_log_probs else sequence_sum)(values.double(), batch), batch)


def require_positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} is {value}: it must be above 0")


def check_label_smoothing(value: float) -> None:
    if not 0 <= value < 0.5:
        raise ValueError(
            f"label_smoothing is {value}: it is the share of pairs with a wrong label; set it to at least 0 and below 0.5, at which labels "
            "contain no information"
        )


def smoothed_logistic(margin: Tensor, smoothing: float) -> Tensor:
    """Return -(1 - e) log sigmoid(margin) - e log sigmoid(-margin), with e = ``smoothing``."""
    logsigmoid = torch.nn.functional.logsigmoid
    return -logsigmoid(margin) if not smoothing else -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
