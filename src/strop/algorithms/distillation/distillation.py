"""On-policy distillation by the policy gradient (Thinking Machines, "On-Policy Distillation", 2025; GKD, arXiv 2306.13649).

The student samples and the teacher scores. The reward of a token is log pi_T(token) - log pi(token), the negative of a sample of the
reverse KL divergence KL(pi || pi_T) at that position. A token gets only its own reward, not those of later tokens (discount 0).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.base import Plan
from strop.algorithms.functional import POLICY_LOGPROBS, logprobs_before_update
from strop.algorithms.policy_gradient.advantages.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor, torch
from strop.types import Batch

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
    """The teacher's advantage with any objective; by default PPO's clip, whose ratio is 1 with one optimizer step per batch.

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
