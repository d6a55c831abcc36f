"""Distillation from a teacher, on sampled tokens or on the teacher's most likely ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from strop import metrics
from strop.algorithms.base import Algorithm, LossTerm, LossTerms, Plan, TokenOutputs
from strop.algorithms.functional import POLICY_LOGPROBS, Aggregation, aggregate, logprobs_before_update
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch, Group

TEACHER_LOGPROBS = "teacher_logprobs"  # a batch column, [N]: the teacher's log-probabilities of the sampled tokens


@dataclass(frozen=True, kw_only=True)
class ReverseKl(Advantage):
    """A_t = log pi_T - log pi_old, plus ``reward_weight`` x the advantage ``reward`` of the environment's rewards.

    pi_old is the policy before the update, also if an older one sampled (MOPD, arXiv 2601.02780): where it is the teacher, all credit is
    0. With an importance correction to the sampler, the expected gradient is that of the reverse KL in the states that were sampled.
    """

    min_group_size: ClassVar[int] = 1
    requires: ClassVar[frozenset[str]] = frozenset({TEACHER_LOGPROBS})
    reward_weight: float = 0.0
    reward: Advantage = GroupRelative()

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return self.reward.rollout_advantages(group) if self.reward_weight else torch.zeros_like(group.rewards)

    def token_advantages(self, batch: Batch) -> Tensor:
        advantages = batch.column(TEACHER_LOGPROBS) - logprobs_before_update(batch)
        return advantages + self.reward_weight * self.reward.token_advantages(batch) if self.reward_weight else advantages

    def validate(self, plan: Plan) -> Iterator[str]:
        if self.reward_weight < 0:
            yield f"reward_weight is {self.reward_weight}: a negative weight rewards failure; set it to 0 or above"
        if self.reward_weight:
            yield from self.reward.validate(plan)
            if self.reward.greedy_baseline or self.reward.needs_named_rewards:
                yield f"{type(self.reward).__name__} needs more than the total reward and cannot be combined; choose another reward"


@dataclass(frozen=True, kw_only=True)
class Distillation(PolicyGradient):
    """On-policy distillation by the policy gradient (Thinking Machines, "On-Policy Distillation", 2025; GKD, arXiv 2306.13649).

    The student samples and the teacher scores. The reward of a token is log pi_T(token) - log pi(token), the negative of a sample of the
    reverse KL divergence KL(pi || pi_T) at that position. A token gets only its own reward, not those of later tokens (discount 0).

    The teacher's advantage with any objective; by default PPO's clip, whose ratio is 1 with one optimizer step per batch.

    ``advantage_low`` and ``advantage_high`` bound the sum of both advantages; otherwise a token with a teacher probability near 0 would
    outweigh all others. The teacher's log-probabilities must be computed at the student's sampling temperature.

    Metrics: those of a policy gradient; teacher_kl, the mean of log mu - log pi_T, an estimate of KL(policy || teacher) per token.
    """

    advantage: ReverseKl = ReverseKl()
    objective: Objective = Clip()

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | self.advantage.requires | {POLICY_LOGPROBS}

    def validate(self, plan: Plan) -> Iterator[str]:
        yield from super().validate(plan)
        if self.kl is not None and self.kl.weight and self.kl.place != "loss":
            yield f"the KL term is in the {self.kl.place}, but a teacher's advantage does not use the reward; put it in the loss"
        if self.drop_constant_groups and not self.advantage.reward_weight:
            yield "dynamic sampling drops groups by rewards that have no weight in the loss; set drop_constant_groups to false"

    def report(self, batch: Batch) -> dict[str, float]:
        counted = batch.mask > 0
        log_ratio = (batch.rollout_logprobs - batch.column(TEACHER_LOGPROBS))[counted].double()
        return {"train/teacher_kl": float(log_ratio.mean())} if len(log_ratio) else {}


TEACHER_CANDIDATES = "teacher_candidates"  # a batch column, [N, K]: the teacher's log-probabilities of the tokens in CANDIDATES
TEACHER_COLUMNS = frozenset({TEACHER_LOGPROBS, TEACHER_CANDIDATES})
LOG_ZERO = -100.0  # nats: the log-probability of an impossible token, so that no divergence is infinite
MIN_REST_PROBABILITY = 1e-7  # the accuracy of 1 minus a sum of float32 probabilities


@dataclass(frozen=True, kw_only=True)
class TopKDistillation(Algorithm):
    """Distillation on the teacher's most likely tokens (GKD, arXiv 2306.13649): the divergence instead of a sample of it.

    The mean over sampled tokens of a divergence between teacher p and student q.

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

    The columns TEACHER_CANDIDATES and CANDIDATES come from the same source (``strop.extensions.distillation.teacher.TeacherTopK``).

    Metrics: loss; kl_forward and kl_reverse, for every ``kl_type``; teacher_mass and student_mass, the probability mass of the candidates.
    """

    name: ClassVar[str] = "topk_distillation"

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
