"""On-policy distillation by the policy gradient (Thinking Machines, "On-Policy Distillation", 2025; GKD, arXiv 2306.13649).

The student writes, the teacher reads. What a token earns is log pi_T(token) - log pi(token): minus a sample of the reverse KL
divergence KL(pi || pi_T) at that place. A token answers for its own term alone, not for those of later tokens (discount 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from strop.algorithms.base import Plan
from strop.algorithms.clip import Clip
from strop.algorithms.grpo import GroupRelative
from strop.algorithms.parts import Advantage, GroupRewards, Objective
from strop.algorithms.policy_gradient import PolicyGradient
from strop.types import Batch

TEACHER = "teacher_logprobs"  # a batch column, [N]: what the teacher gives the sampled tokens


@dataclass(frozen=True, kw_only=True)
class ReverseKl(Advantage):
    """A_t = log pi_T - log mu, and ``reward_weight`` x what the advantage ``reward`` makes of the environment's rewards.

    mu is the policy that sampled, by the sampler's own record: with it A_t has minus the reverse KL of the policy that
    wrote the rollout for its expectation. Under staleness that policy is older than the one that learns, for which the
    objective's ratio and the corrections account.
    """

    smallest_group: ClassVar[int] = 1
    requires: ClassVar[frozenset[str]] = frozenset({TEACHER})
    reward_weight: float = 0.0
    reward: Advantage = GroupRelative()

    def relative(self, group: GroupRewards) -> Tensor:
        return self.reward.relative(group) if self.reward_weight else torch.zeros_like(group.rewards)

    def over_batch(self, batch: Batch) -> Tensor:
        toward = batch.extra(TEACHER) - batch.sampler_logprobs
        return toward + self.reward_weight * self.reward.over_batch(batch) if self.reward_weight else toward

    def problems(self, plan: Plan) -> Iterator[str]:
        if self.reward_weight < 0:
            yield f"reward_weight is {self.reward_weight}: the policy would be paid for failing; set it to 0 or above"
        if self.reward_weight:
            yield from self.reward.problems(plan)
            if self.reward.greedy_baseline or self.reward.needs_parts:
                yield f"{type(self.reward).__name__} needs more than rewards and cannot be mixed in; choose another reward"


@dataclass(frozen=True, kw_only=True)
class Distillation(PolicyGradient):
    """The teacher's advantage through any objective: PPO's clip by default, whose ratio is 1 with one optimizer step a batch.

    ``advantage_low`` and ``advantage_high`` bound the sum of both advantages: a token that the teacher finds impossible would
    otherwise outweigh all others. The teacher's log-probabilities are wanted at the temperature the student samples with.

    Metrics: those of a policy gradient; teacher_kl, the mean of log mu - log pi_T, which estimates KL(policy || teacher) a token.
    """

    advantage: ReverseKl = ReverseKl()
    objective: Objective = Clip()

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | self.advantage.requires

    def problems(self, plan: Plan) -> Iterator[str]:
        yield from super().problems(plan)
        if self.kl is not None and self.kl.weight and self.kl.place != "loss":
            yield f"the KL term is in the {self.kl.place}, and a teacher's advantage looks at no reward; put it in the loss"
        if self.drop_constant_groups and not self.advantage.reward_weight:
            yield "dynamic sampling drops groups by rewards that are not learned from; set drop_constant_groups to false"

    def report(self, batch: Batch) -> dict[str, float]:
        counted = batch.mask > 0
        apart = (batch.sampler_logprobs - batch.extra(TEACHER))[counted].double()
        return {"train/teacher_kl": float(apart.mean())} if len(apart) else {}
