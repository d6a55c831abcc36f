"""Alignment via optimal transport (AOT, arXiv 2406.05882): completions are compared by their rank in the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.base import TokenOutputs
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.extensions.recorded.preference.base import check_label_smoothing, smoothed_logistic
from strop.extensions.recorded.preference.referenced import ReferencedPreference
from strop.lazy_torch import Tensor, torch
from strop.types import Batch

PARTNERS = (
    "aot_partner_0",
    "aot_partner_1",
)  # batch columns, [N] float64: two numbers for each pair, the same for all its tokens


@dataclass(frozen=True, kw_only=True)
class AOT(ReferencedPreference):
    """Alignment via optimal transport on pairs (AOT, arXiv 2406.05882): the distribution of margins, not the margin of each pair.

    -log sigmoid(beta (m_(i) - m_ref_(i))), mean over i, with smoothed labels: ``label_smoothing`` as in cDPO.

    m = log pi(chosen) - log pi(rejected) of a pair, and m_(i) the i-th smallest over the pairs of the optimizer step; likewise m_ref of
    the reference. So the policy's margins need to exceed the reference's in distribution. The ranks are those over the whole optimizer
    step, by the weights it starts from, at the price of one more forward pass; other implementations sort a micro-batch.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_label_smoothing(self.label_smoothing)
        if self.use_weighting:
            raise ValueError("use_weighting weighs pairs, but this loss compares margins across pairs; set it to false")

    @property
    def needs_step_outputs(self) -> bool:
        return True

    def prepare_step(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        if outputs is None:
            raise ValueError("sorting needs the log-probabilities of the whole optimizer step, but none were given")
        batch = super().prepare_step(batch, outputs)
        counted = self.as_pairs(batch.sequence_lengths, batch).sum(1) > 0
        columns = torch.zeros(len(counted), 2, dtype=torch.float64)
        columns[counted] = self.partners(outputs, batch, counted)
        pair = batch.group[batch.sequence]
        return batch.with_columns({name: columns[pair, side] for side, name in enumerate(PARTNERS)})

    def partners(self, outputs: TokenOutputs, batch: Batch, counted: Tensor) -> Tensor:
        """Return two numbers for each counted pair, [P, 2]: here its own reference margin, and the one of its rank."""
        policy = self.per_completion(outputs.logprobs, batch)[counted]
        reference = self.per_completion(batch.column(REFERENCE_LOGPROBS), batch)[counted]
        margins, reference_margins = policy[:, 0] - policy[:, 1], reference[:, 0] - reference[:, 1]
        return torch.stack([reference_margins, match_ranks(margins, reference_margins)], 1)

    def pair_losses(self, scores: Tensor, outputs: TokenOutputs, batch: Batch) -> Tensor:
        own, matched = self.partners_of_pairs(batch)
        return self.pair_loss(scores[:, 0] + own - matched, scores[:, 1])

    def pair_loss(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return smoothed_logistic(self.beta * (chosen - rejected), self.label_smoothing)

    def partners_of_pairs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the columns that ``prepare_step`` added, [P] each."""
        pair = batch.group[batch.sequence]
        first, second = (
            torch.zeros(batch.num_groups, dtype=torch.float64, device=pair.device).scatter(0, pair, batch.column(name))
            for name in PARTNERS
        )
        return first, second


def match_ranks(values: Tensor, others: Tensor) -> Tensor:
    """Return for each of ``values`` [P] the one of ``others`` [P] that has the same rank."""
    matched = torch.empty_like(others)
    matched[values.argsort(stable=True)] = others.sort(stable=True).values
    return matched


@dataclass(frozen=True, kw_only=True)
class AOTUnpaired(AOT):
    """Alignment via optimal transport without pairs (AOT, arXiv 2406.05882): chosen against rejected completions by rank.

    -log sigmoid(beta (h(chosen)_(i) - h(rejected)_(i))), mean over i, with smoothed labels: ``label_smoothing`` as in cDPO.

    h_(i) is the i-th smallest over the optimizer step, of the chosen and of the rejected completions by themselves, so it does not matter
    which two completions are a pair. The ranks are those of ``aot``.
    """

    name: ClassVar[str] = "aot_unpaired"

    def partners(self, outputs: TokenOutputs, batch: Batch, counted: Tensor) -> Tensor:
        """Return h of the rejected completion that has the rank of the pair's chosen one, and of the chosen one for its rejected one."""
        chosen, rejected = self.scores(outputs, batch)[counted].unbind(1)
        return torch.stack([match_ranks(chosen, rejected), match_ranks(rejected, chosen)], 1)

    def pair_losses(self, scores: Tensor, outputs: TokenOutputs, batch: Batch) -> Tensor:
        chosen, rejected = scores.unbind(1)
        rejected_partner, chosen_partner = self.partners_of_pairs(batch)
        # A match stands in the loss of both its completions, which may be in different micro-batches, and counts once in its value.
        of_rejected = self.pair_loss(chosen_partner, rejected)
        return self.pair_loss(chosen, rejected_partner) + of_rejected - of_rejected.detach()
