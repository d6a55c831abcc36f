"""Alignment via optimal transport without pairs (AOT, arXiv 2406.05882): chosen against rejected completions by rank."""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.base import TokenOutputs
from strop.algorithms.preference.optimal_transport.aot import AOT, match_ranks
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class AOTUnpaired(AOT):
    """-log sigmoid(beta (h(chosen)_(i) - h(rejected)_(i))), mean over i, with smoothed labels: ``label_smoothing`` as in cDPO.

    h_(i) is the i-th smallest over the optimizer step, of the chosen and of the rejected completions by themselves, so it does not matter
    which two completions are a pair. The ranks are those of ``aot``.
    """

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
