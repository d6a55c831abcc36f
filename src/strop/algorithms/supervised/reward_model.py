"""Training of reward models, which score whole rollouts, on preference pairs or on given scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from strop import metrics
from strop.algorithms.base import Algorithm, ValueOutputs
from strop.algorithms.loss_terms import LossTerm, LossTerms
from strop.algorithms.preference.pairs import mean_over_pairs, mean_over_rollouts, pair_advantages, view_as_pairs
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True)
class RewardModel(Algorithm):
    """bradley_terry: -log sigmoid(r(chosen) - r(rejected) - margin) + centering (r(chosen) + r(rejected))^2, mean over pairs.
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
