"""GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3): token credit from step rewards.

Metrics: those of ``grpo``; steps_per_sample, the mean number of rewarded steps of a rollout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.base import Plan
from strop.algorithms.group_advantages import group_advantages, indices_by_label
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.algorithms.policy_gradient.process.steps import STEP_ENDS, STEP_REWARDS, relative_steps, sum_of_steps, sum_to_go
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class StepRelative(Advantage):
    """A_t = advantage of the outcome + sum over the steps that end at t or later of (r - mean) / (deviation + eps).

    Mean and population deviation of r are over all steps of the group. The outcome is the rollout's reward minus its step
    rewards, and its advantage is GRPO's: 0 if all reward comes from steps, as in the paper. With ``leave_one_out`` both baselines
    are means over the other rollouts: of their outcomes, and of their mean step rewards. Without ``normalize``, this is the sum
    in PRIME (2502.01456) before whitening.
    """

    needs_step_rewards: ClassVar[bool] = True
    leave_one_out: bool = False
    normalize: bool = True

    def validate(self, plan: Plan) -> Iterator[str]:
        yield from super().validate(plan)
        if not plan.step_rewards:
            yield (
                f"{type(self).__name__} gives credit to steps, but no environment of this run rewards steps; mark a reward with "
                "per_turn=True, or set algorithm.name to grpo"
            )

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return 0: outcome and steps are separated later, from the batch's columns."""
        return torch.zeros_like(group.rewards)

    def token_advantages(self, batch: Batch) -> Tensor:
        outcome, advantages = batch.rewards - sum_of_steps(batch), batch.advantages.double()
        compared = {"leave_one_out": self.leave_one_out, "normalize": self.normalize}
        of_rollouts = torch.zeros_like(outcome)
        for members in indices_by_label(batch.group):
            of_rollouts[members] = group_advantages(outcome[members], leave_one_out=self.leave_one_out, normalize=self.normalize)
        advantages = advantages + of_rollouts[batch.sequence]
        if STEP_REWARDS not in batch.columns:
            return advantages.to(batch.advantages.dtype)
        credit, ends = torch.zeros_like(advantages), (batch.columns[STEP_ENDS] > 0).nonzero().squeeze(1)
        for of_group in indices_by_label(batch.group[batch.sequence[ends]]):
            steps = ends[of_group]
            credit[steps] = relative_steps(batch.columns[STEP_REWARDS][steps], batch.sequence[steps], **compared)
        return (advantages + sum_to_go(credit, batch)).to(batch.advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class ProcessSupervision(PolicyGradient):
    """GRPO with credit from step rewards (marked ``per_turn``) and from the outcome (all other rewards)."""

    advantage: Advantage = StepRelative()
    objective: Objective = Clip()

    def report(self, batch: Batch) -> dict[str, float]:
        steps = batch.columns[STEP_ENDS].sum() if STEP_ENDS in batch.columns else 0.0
        return {"train/steps_per_sample": float(steps) / batch.num_sequences}
