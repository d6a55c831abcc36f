"""Distillation on the teacher's most likely tokens (GKD, arXiv 2306.13649): the divergence itself instead of a sample of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from strop import metrics
from strop.algorithms.base import Algorithm, Plan, TokenOutputs
from strop.algorithms.functional import Aggregation, aggregate
from strop.metrics import Metrics
from strop.types import Batch, Group

TEACHER_CANDIDATES = "teacher_candidates"  # a batch column, [N, K]: the teacher's log-probabilities of the tokens in CANDIDATES
LOG_ZERO = -100.0  # nats: what a token without probability has, so that no divergence is infinite
LEAST_REST = 1e-7  # a sum of float32 probabilities does not know what is left of 1 better than that


@dataclass(frozen=True, kw_only=True)
class TopKDistillation(Algorithm):
    """The mean over tokens of a divergence between teacher p and student q at each place where the student sampled.

    forward: KL(p || q), which covers what the teacher does. reverse: KL(q || p), which leaves what it would not. mixed:
    ``mixed_kl_weight`` x forward + the rest x reverse. jsd: beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q,
    the generalised Jensen-Shannon divergence; over beta it tends to forward as beta tends to 0, over 1 - beta to reverse as
    beta tends to 1.

    Both are known on the teacher's K tokens only. ``outside`` says what becomes of the others: bucket makes them one more
    event, whose probability is what the K leave of 1, so that the divergence is a lower bound of the whole one and a student
    is held back from tokens the teacher would not choose. renormalise divides both by their mass on the K, and is blind to
    what the student does elsewhere. NeMo-RL's zero_outside_topk=false is renormalise. Its true is bucket's relative: there
    the teacher is renormalised on the K and gives each other token exp(-100), where bucket leaves the teacher the mass it has
    outside.

    Gradients go through the student's log-probabilities of the candidates, at the temperature and under the filters it
    samples with. The teacher should be at the same temperature, and neither filtered: what a filter removed from the student
    cannot be taught. Nothing corrects for staleness: the divergence is the current student's, at places that an older one
    came to.

    The column TEACHER_CANDIDATES comes together with CANDIDATES from one source (``strop.training.torch.teachers.TeacherTopK``).

    Metrics: loss; kl_forward and kl_reverse, whatever is trained; teacher_mass and student_mass, the probability of the
    candidates.
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

    def problems(self, plan: Plan) -> Iterator[str]:
        if not 0 <= self.mixed_kl_weight <= 1:
            yield f"mixed_kl_weight is {self.mixed_kl_weight}: it is the forward KL's share; set it in [0, 1]"
        if self.kl_type == "jsd" and not 0 < self.beta < 1:
            yield f"beta is {self.beta}, where the divergence is 0; set it between 0 and 1, or kl_type forward or reverse"
        if self.aggregation == "constant_length" and not self.constant_length:
            yield "aggregation constant_length divides by constant_length, which is null; set it, for instance to max_new_tokens"

    def advantages(self, group: Group) -> Tensor:
        """Zeros: rewards are logged and not learned from."""
        return torch.zeros(len(group.rollouts), dtype=torch.float64)

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        if outputs.candidates is None:
            raise ValueError(
                "the student's log-probabilities of the teacher's tokens are missing: the batch has no column CANDIDATES"
            )
        teacher, student = batch.extra(TEACHER_CANDIDATES).to(outputs.candidates.dtype), outputs.candidates
        p, q = (events(logs, self.outside) for logs in (teacher, student))
        loss = aggregate(self.divergence(p, q), batch, self.aggregation, self.constant_length)
        logged = {
            "kl_forward": divergence(p, q),
            "kl_reverse": divergence(q, p),
            "teacher_mass": teacher.exp().sum(-1),
            "student_mass": student.exp().sum(-1),
        }
        return loss, {
            **{name: metrics.total(aggregate(column.detach(), batch).item()) for name, column in logged.items()},
            "loss": metrics.total(loss.item()),
        }

    def divergence(self, p: Tensor, q: Tensor) -> Tensor:
        """From log-probabilities of the same events by teacher and student, [N, events] each, to [N]."""
        match self.kl_type:
            case "forward":
                return divergence(p, q)
            case "reverse":
                return divergence(q, p)
            case "mixed":
                return self.mixed_kl_weight * divergence(p, q) + (1 - self.mixed_kl_weight) * divergence(q, p)
            case "jsd":
                mixture = torch.logaddexp(p + math.log(self.beta), q + math.log1p(-self.beta))
                return self.beta * divergence(p, mixture) + (1 - self.beta) * divergence(q, mixture)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) from log-probabilities, [N, events] -> [N]."""
    return (p.exp() * (p - q)).sum(-1)


def events(logs: Tensor, outside: Literal["bucket", "renormalise"]) -> Tensor:
    """Log-probabilities of K tokens, [N, K] -> those of a distribution: [N, K] renormalised, or [N, K + 1] with the rest as
    an event.
    """
    logs = logs.clamp(min=LOG_ZERO)
    mass = logs.logsumexp(-1, keepdim=True)
    if outside == "renormalise":
        return logs - mass
    return torch.cat([logs, (-torch.expm1(mass)).clamp(min=LEAST_REST).log()], dim=-1)
