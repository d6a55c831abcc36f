"""Losses over completions that were judged one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from strop import metrics
from strop.algorithms.base import Algorithm, LossTerm, LossTerms, TokenOutputs
from strop.algorithms.functional import sequence_sum
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.extensions.recorded.preference.base import mean_over_rollouts, pair_advantages, require_positive, view_as_pairs
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch, Group

REFERENCE_POINT = "kto_reference_point"  # a batch column, [N] float64: z, the same for all tokens of an optimizer step


@dataclass(frozen=True, kw_only=True)
class KTO(Algorithm):
    """Kahneman-Tversky Optimization (arXiv 2402.01306): learning from unpaired completions that are desirable or undesirable.

    desirable: weight (1 - sigmoid(beta (h - z))); undesirable: weight (1 - sigmoid(beta (z - h))); mean over completions.

    h = log pi - log pi_ref, summed over a completion's loss tokens. z estimates KL(pi || pi_ref): the mean of h over completions of other
    prompts, at least 0, without gradient. A group consists of a completion, with reward 1 if it is desirable and 0 otherwise, and an
    unrelated completion after the same prompt, which is only used for z. z is computed over the whole optimizer step with the weights
    before it; other implementations compute it over a micro-batch.

    Metrics: loss; reference_point, z; rewards_desirable and rewards_undesirable, the mean of beta h over completions of each kind.
    """

    recorded_data: ClassVar[Literal["judgements"]] = "judgements"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            require_positive(name, getattr(self, name))

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({REFERENCE_LOGPROBS})

    @property
    def needs_step_outputs(self) -> bool:
        return True

    def rollout_mask(self, group: Group) -> Tensor:
        return torch.arange(len(group.rollouts)) == 0

    def advantages(self, group: Group) -> Tensor:
        return pair_advantages(group)

    def prepare_step(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        if outputs is None:
            raise ValueError("KTO's reference point needs the log-probabilities of the whole optimizer step, but none were given")
        unmasked = replace(batch, mask=torch.ones_like(batch.mask))
        unrelated = view_as_pairs(_completion_log_ratios(outputs, unmasked), batch)[:, 1]
        return batch.with_column(REFERENCE_POINT, unrelated.mean().clamp(min=0).expand(len(batch.target)))

    def zero_gradient(self, batch: Batch, learner: str = "policy") -> Tensor:
        return batch.sequence_lengths == 0

    def term(self, outputs: TokenOutputs, batch: Batch) -> tuple[LossTerm, Metrics]:
        """Return the loss term, and the values to log."""
        counted = batch.sequence_lengths > 0
        log_ratio = _completion_log_ratios(outputs, batch)
        reference_point = torch.zeros_like(log_ratio).scatter(0, batch.sequence, batch.column(REFERENCE_POINT))
        gain = self.beta * (log_ratio - reference_point)
        desirable = batch.rewards > 0.5
        losses = torch.where(desirable, self.desirable_weight * (-gain).sigmoid(), self.undesirable_weight * gain.sigmoid())
        logged = {"reference_point": metrics.maximum(reference_point.max())}
        for name, selected in (("desirable", desirable & counted), ("undesirable", ~desirable & counted)):
            if count := int(selected.sum()):
                logged[f"rewards_{name}"] = metrics.mean(self.beta * log_ratio[selected].mean().item(), count)
        return LossTerm("preference", 1.0, losses * counted, mean_over_rollouts, "rollout"), logged

    def loss_terms(self, outputs: TokenOutputs, batch: Batch, learner: str = "policy") -> LossTerms:
        return LossTerms([self.term(outputs, batch)[0]])

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        term, logged = self.term(outputs, batch)
        loss = term.total(batch)
        return loss, {"loss": metrics.total(loss), **logged}


def _completion_log_ratios(outputs: TokenOutputs, batch: Batch) -> Tensor:
    """Return log pi - log pi_ref of completions, [S] float64; 0 for those that do not count."""
    return sequence_sum((outputs.logprobs - batch.column(REFERENCE_LOGPROBS)).double(), batch)


@dataclass(frozen=True, kw_only=True)
class APOZeroUnpaired(KTO):
    """Anchored Preference Optimization, zero (arXiv 2408.06266), on completions that were judged one by one.

    desirable: weight (1 - sigmoid(beta h)); undesirable: weight sigmoid(beta h); mean over completions: KTO with the reference point 0.

    It needs no estimate of the KL divergence. It is for desirable completions that are better than what the policy writes.
    """

    name: ClassVar[str] = "apo_zero_unpaired"

    @property
    def needs_step_outputs(self) -> bool:
        return False

    def prepare_step(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        return batch.with_column(REFERENCE_POINT, torch.zeros(len(batch.target), dtype=torch.float64))
