"""Supervised fine-tuning: the negative log-probability of what the data says, and Dynamic Fine-Tuning (arXiv 2508.05629)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from strop import metrics
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.algorithms.functional import aggregate
from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm):
    """-log pi(token) over the taught tokens; with ``dft`` each is weighted by stop_gradient(pi(token)).

    The cross-entropy weighs a token's gradient by 1 / pi(token), which unlikely tokens dominate; DFT takes that factor out.
    ``token_mean`` is the mean over all taught tokens of the optimizer step, whatever the micro-batches; ``sequence_mean`` the mean over
    examples of their own means, so that a short answer counts as much as a long one.

    Metrics: loss; nll, the mean negative log-probability of a taught token in nats, which is the loss unless ``dft`` or
    ``sequence_mean``.
    """

    recorded: ClassVar[Literal["conversations"]] = "conversations"
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    dft: bool = False

    def advantages(self, group: Group) -> Tensor:
        return torch.ones(len(group.rollouts), dtype=torch.float64)

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        nll = -outputs.logprobs
        weighted = nll * outputs.logprobs.detach().exp() if self.dft else nll
        loss = aggregate(weighted, batch, self.aggregation)
        return loss, {"loss": metrics.total(loss.item()), "nll": metrics.total(aggregate(nll.detach(), batch).item())}
