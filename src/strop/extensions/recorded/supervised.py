"""Training on recorded data: supervised fine-tuning, and reward models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from strop import metrics
from strop.algorithms.base import Algorithm, LossTerm, LossTerms, TokenOutputs, ValueOutputs, add_terms
from strop.algorithms.functional import aggregate
from strop.extensions.recorded.preference.base import mean_over_pairs, mean_over_rollouts, pair_advantages, view_as_pairs
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True)
class SFT(Algorithm):
    """Supervised fine-tuning: the negative log-likelihood of the data, and Dynamic Fine-Tuning (arXiv 2508.05629).

    -log pi(token) over the loss tokens; with ``dft``, each is weighted by stop_gradient(pi(token)).

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


@dataclass(frozen=True, kw_only=True)
class RewardModel(Algorithm):
    """Training of reward models, which score whole rollouts, on preference pairs or on given scores.

    bradley_terry: -log sigmoid(r(chosen) - r(rejected) - margin) + centering (r(chosen) + r(rejected))^2, mean over pairs.
    regression: (r - reward)^2, mean over rollouts of groups of any size.

    r is the score at the rollout's last token. With ``use_margin``, the margin is the difference of the pair's rewards, as in Llama 2
    (arXiv 2307.09288); else it is 0. ``centering`` keeps scores around 0, which the difference alone does not (2312.09244 uses 0.01).

    Metrics: loss; scores_mean and scores_mean_square, over rollouts (their variance is the latter minus the square of the former); and for
    pairs accuracy, the share with r(chosen) > r(rejected), margin, the mean of r(chosen) - r(rejected), scores_chosen_mean and
    scores_rejected_mean.
    """

    recorded_data: ClassVar[Literal["preferences"]] = "preferences"
    whole_groups: ClassVar[bool] = True
    predict: ClassVar[Literal["tokens", "last_token"]] = "last_token"
    kind: Literal["bradley_terry", "regression"] = "bradley_terry"
    use_margin: bool = False
    centering: float = 0.0

    def __post_init__(self) -> None:
        if self.centering < 0:
            raise ValueError(f"centering is {self.centering}: a negative weight drives scores away from 0; set 0 for none")
        if self.kind == "regression" and (self.use_margin or self.centering):
            raise ValueError("use_margin and centering apply to pairs, but kind regression fits single scores: unset them")

    def advantages(self, group: Group) -> Tensor:
        if self.kind == "bradley_terry":
            return pair_advantages(group)
        return torch.ones(len(group.rollouts), dtype=torch.float64)

    def loss_terms(self, outputs: ValueOutputs, batch: Batch, learner: str = "policy") -> LossTerms:
        return LossTerms([self._score(outputs, batch)[0]])

    def _score(self, outputs: ValueOutputs, batch: Batch) -> tuple[LossTerm, Mapping[str, Tensor]]:
        scores = outputs.values.double()
        if len(scores) != batch.num_sequences:
            raise ValueError(
                f"found {len(scores)} scores for {batch.num_sequences} rollouts, but a reward model must return one score per rollout"
            )
        if self.kind == "bradley_terry":
            return self._bradley_terry_term(scores, batch)
        return LossTerm("regression", 1.0, (scores - batch.rewards).square(), mean_over_rollouts, "rollout"), {}

    def loss(self, outputs: ValueOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        term, logged = self._score(outputs, batch)
        loss, scores = term.total(batch), outputs.values.detach().double()
        weighted = scores / max(batch.totals.sequences, 1)
        logged = {"loss": loss, "scores_mean": weighted.sum(), **logged}
        logged["scores_mean_square"] = (weighted * scores).sum()
        return loss, {name: metrics.total(value) for name, value in logged.items()}

    def _bradley_terry_term(self, scores: Tensor, batch: Batch) -> tuple[LossTerm, Mapping[str, Tensor]]:
        chosen, rejected = view_as_pairs(scores, batch).unbind(1)
        target = view_as_pairs(batch.rewards, batch)
        margin = target[:, 0] - target[:, 1] if self.use_margin else 0.0
        losses = -torch.nn.functional.logsigmoid(chosen - rejected - margin) + self.centering * (chosen + rejected).square()
        columns = {
            "accuracy": (chosen > rejected).double(),
            "margin": (chosen - rejected).detach(),
            "scores_chosen_mean": chosen.detach(),
            "scores_rejected_mean": rejected.detach(),
        }
        logged = {name: mean_over_pairs(column, batch) for name, column in columns.items()}
        return LossTerm("ranking", 1.0, losses, mean_over_pairs, "group"), logged
