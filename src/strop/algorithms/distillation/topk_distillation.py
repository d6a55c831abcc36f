"""Distillation on the teacher's most likely tokens (GKD, arXiv 2306.13649): the divergence instead of a sample of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from strop import metrics
from strop.algorithms.base import Algorithm, Plan, TokenOutputs
from strop.algorithms.functional import Aggregation, aggregate
from strop.algorithms.loss_terms import LossTerm, LossTerms
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch, Group

TEACHER_CANDIDATES = "teacher_candidates"  # a batch column, [N, K]: the teacher's log-probabilities of the tokens in CANDIDATES
LOG_ZERO = -100.0  # nats: the log-probability of an impossible token, so that no divergence is infinite
MIN_REST_PROBABILITY = 1e-7  # the accuracy of 1 minus a sum of float32 probabilities


@dataclass(frozen=True, kw_only=True)
class TopKDistillation(Algorithm):
    """The mean over sampled tokens of a divergence between teacher p and student q.

    ``kl_type`` forward is KL(p || q), which is mass-covering; reverse is KL(q || p), which is mode-seeking; mixed is ``mixed_kl_weight`` x
    forward + (1 - ``mixed_kl_weight``) x reverse; jsd is beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, the
    generalized Jensen-Shannon divergence. Divided by beta it tends to forward for beta to 0, and divided by 1 - beta to reverse for beta
    to 1.

    p and q are only known for the teacher's K tokens. ``outside`` bucket combines the other tokens into one more event with the remaining
    probability, so that the divergence is a lower bound of the full one and the student is pushed away from tokens that the teacher would
    not choose. renormalise divides both by their probability mass on the K tokens, and ignores what the student does elsewhere. It is
    NeMo-RL's zero_outside_topk=false. NeMo-RL's true is similar to bucket: it renormalizes the teacher on the K tokens and gives every
    other token exp(-100), while bucket keeps the teacher's mass outside the K tokens.

    The gradient goes through the student's log-probabilities of the candidates, with the student's sampling temperature and filters.
    The teacher should use the same temperature, and both should be unfiltered, because the student cannot learn tokens that a filter
    removes. There is no correction for staleness: the divergence is that of the current student, on rollouts that an older one sampled.

    The columns TEACHER_CANDIDATES and CANDIDATES come from the same source (``strop.learner.torch.teacher.TeacherTopK``).

    Metrics: loss; kl_forward and kl_reverse, for every ``kl_type``; teacher_mass and student_mass, the probability mass of the candidates.
    """

    kl_type: Literal["forward", "reverse", "mixed", "jsd"] = "reverse"
    mixed_kl_weight: float = 0.5
    beta: float = 0.5
    outside: Literal["bucket", "renormalise"] = "bucket"
    aggregation: Aggregation = "token_mean"
    constant_length: int | None = None

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({TEACHER_CANDIDATES})

    def validate(self, plan: Plan) -> Iterator[str]:
        if not 0 <= self.mixed_kl_weight <= 1:
            yield f"mixed_kl_weight is {self.mixed_kl_weight}: it is the weight of the forward KL; set it in [0, 1]"
        if self.kl_type == "jsd" and not 0 < self.beta < 1:
            yield f"beta is {self.beta}, where the divergence is 0; set it between 0 and 1, or kl_type forward or reverse"
        if self.aggregation == "constant_length" and not self.constant_length:
            yield "aggregation constant_length divides by constant_length, which is null; set it, for instance to max_new_tokens"

    def advantages(self, group: Group) -> Tensor:
        """Return zeros, because rewards are only logged."""
        return torch.zeros(len(group.rollouts), dtype=torch.float64)

    def term(self, outputs: TokenOutputs, batch: Batch) -> tuple[LossTerm, dict[str, Tensor]]:
        """Return the loss term, and columns [N] whose means over counted tokens are logged."""
        if outputs.candidates is None:
            raise ValueError(
                "the student's log-probabilities of the teacher's tokens are missing: the batch has no column CANDIDATES"
            )
        teacher, student = batch.column(TEACHER_CANDIDATES).to(outputs.candidates.dtype), outputs.candidates
        p, q = (complete_distribution(logs, self.outside) for logs in (teacher, student))
        reduce = partial(aggregate, how=self.aggregation, constant_length=self.constant_length)
        term = LossTerm("divergence", 1.0, self.divergence(p, q), reduce)
        logged = {
            "kl_forward": kl_divergence(p, q),
            "kl_reverse": kl_divergence(q, p),
            "teacher_mass": teacher.exp().sum(-1),
            "student_mass": student.exp().sum(-1),
        }
        return term, logged

    def loss_terms(self, outputs: TokenOutputs, batch: Batch, learner: str = "policy") -> LossTerms:
        return LossTerms([self.term(outputs, batch)[0]])

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        term, logged = self.term(outputs, batch)
        loss = term.total(batch)
        return loss, {
            **{name: metrics.total(aggregate(column.detach(), batch)) for name, column in logged.items()},
            "loss": metrics.total(loss),
        }

    def divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """Compute the divergence, [N], from log-probabilities of the same events by teacher and student, [N, events] each."""
        match self.kl_type:
            case "forward":
                return kl_divergence(p, q)
            case "reverse":
                return kl_divergence(q, p)
            case "mixed":
                return self.mixed_kl_weight * kl_divergence(p, q) + (1 - self.mixed_kl_weight) * kl_divergence(q, p)
            case "jsd":
                mixture = torch.logaddexp(p + math.log(self.beta), q + math.log1p(-self.beta))
                return self.beta * kl_divergence(p, mixture) + (1 - self.beta) * kl_divergence(q, mixture)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Compute KL(p || q) from log-probabilities, [N, events] -> [N]."""
    return (p.exp() * (p - q)).sum(-1)


def complete_distribution(logs: Tensor, outside: Literal["bucket", "renormalise"]) -> Tensor:
    """Turn log-probabilities of K tokens [N, K] into a distribution.

    Renormalized, [N, K], or with all other tokens as one more event, [N, K + 1].
    """
    logs = logs.clamp(min=LOG_ZERO)
    mass = logs.logsumexp(-1, keepdim=True)
    if outside == "renormalise":
        return logs - mass
    return torch.cat([logs, (-torch.expm1(mass)).clamp(min=MIN_REST_PROBABILITY).log()], dim=-1)
