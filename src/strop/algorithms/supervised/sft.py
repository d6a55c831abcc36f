"""Supervised fine-tuning: the negative log-likelihood of the data, and Dynamic Fine-Tuning (arXiv 2508.05629)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from strop import metrics
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.algorithms.functional import aggregate
from strop.algorithms.loss_terms import LossTerm, LossTerms, add_terms
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm):
    """-log pi(token) over the loss tokens; with ``dft``, each is weighted by stop_gradient(pi(token)).

    Cross-entropy weighs a token's gradient by 1 / pi(token), so that unlikely tokens dominate; DFT removes that factor. ``aggregation``
    token_mean averages over all loss tokens of the optimizer step, independent of the micro-batches; sequence_mean averages over examples,
    so that a short answer counts as much as a long one.

    Metrics: loss; nll, the mean negative log-probability of a loss token in nats, which equals the loss without ``dft`` and with
    token_mean.
    """

    recorded_data: ClassVar[Literal["conversations"]] = "conversations"
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    dft: bool = False

    def advantages(self, group: Group) -> Tensor:
        return torch.ones(len(group.rollouts), dtype=torch.float64)

    def loss_terms(self, outputs: TokenOutputs, batch: Batch, learner: str = "policy") -> LossTerms:
        nll = -outputs.logprobs
        weighted = nll * outputs.logprobs.detach().exp() if self.dft else nll
        return LossTerms([LossTerm("nll", 1.0, weighted, partial(aggregate, how=self.aggregation))])

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        nll = -outputs.logprobs
        loss = add_terms(self.loss_terms(outputs, batch).terms, batch)
        return loss, {"loss": metrics.total(loss), "nll": metrics.total(aggregate(nll.detach(), batch))}
