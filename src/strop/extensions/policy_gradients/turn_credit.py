"""Credit of single steps or turns of a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.base import Plan
from strop.algorithms.functional import Deviation, group_advantages
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.grpo import Clip
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.algorithms.policy_gradient.turns import (
    STEP_ENDS,
    STEP_REWARDS,
    discount_later_turns,
    find_turns,
    indices_by_label,
    relative_steps,
    sum_of_steps,
    sum_to_go,
)
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
    """GRPO with process supervision (DeepSeekMath, arXiv 2402.03300, section 4.1.3): token credit from step rewards.

    GRPO with credit from step rewards (marked ``per_turn``) and from the outcome (all other rewards).

    Metrics: those of ``grpo``; steps_per_sample, the mean number of rewarded steps of a rollout.
    """

    advantage: Advantage = StepRelative()
    objective: Objective = Clip()

    def report(self, batch: Batch) -> dict[str, float]:
        steps = batch.columns[STEP_ENDS].sum() if STEP_ENDS in batch.columns else 0.0
        return {"train/steps_per_sample": float(steps) / batch.num_sequences}


@dataclass(frozen=True, kw_only=True)
class DiscountedTurns(Advantage):
    """A of turn t = (G_t - mean) / (deviation + eps), with G_t = sum over this and later turns k of gamma^(k - t) r_k.

    Mean and deviation are over all turns of the group or, with ``same_turn``, over the t-th turns of all rollouts: a
    time-dependent baseline. r_k is the reward of the steps of turn k (rewards marked ``per_turn``); the rest of the rollout's
    reward goes to its last turn. With gamma 0 a turn is credited for its own reward only.
    """

    gamma: float = 0.4  # over turns
    same_turn: bool = False
    normalize: bool = True
    deviation: Deviation = "population"

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; it discounts the rewards of later turns and must lie in [0, 1]")

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return 0: turns are separated later, from the batch's columns."""
        return torch.zeros_like(group.rewards)

    def token_advantages(self, batch: Batch) -> Tensor:
        turns = find_turns(batch)
        returns = discount_later_turns(turns.rewards(batch), turns.rollout, self.gamma)
        label = batch.group[turns.rollout]
        if self.same_turn:
            first = torch.searchsorted(turns.rollout, turns.rollout)
            label = label * (len(returns) + 1) + torch.arange(len(returns)) - first
        credit = torch.zeros_like(returns)
        for same in indices_by_label(label):
            credit[same] = group_advantages(returns[same], normalize=self.normalize, deviation=self.deviation)
        return (batch.advantages.double() + credit[turns.of_token]).to(batch.advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class TurnReturns(PolicyGradient):
    """Discounted returns of turns, compared within the group: Kevin (Baronio et al. 2025, arXiv 2507.11948).

    The reward of each turn is its discounted return, compared with the other turns of its group.

    Metrics: those of ``grpo``.
    """

    advantage: Advantage = DiscountedTurns()
    objective: Objective = Clip()


@dataclass(frozen=True, kw_only=True)
class StepGrouped(Advantage):
    """A = A_episode + step_weight x A_step, the same for all tokens of a turn.

    A_episode is GRPO's: (R - mean) / (deviation + eps) over the rollouts of the group. A_step is the same over all turns of the
    group that were taken in one state (``Environment.turn_states``), also several turns of one rollout, with R replaced by the
    turn's return, the sum over this and later turns k of gamma^(k - t) r_k. It is 0 if no other turn was taken in the same state,
    or if the returns do not vary. ``normalize=False`` divides by 1, the paper's other choice of F_norm.

    r_k is the reward of the steps of turn k (rewards marked ``per_turn``); the rest of the rollout's reward goes to its last
    turn.
    """

    step_weight: float = 1.0  # the paper's omega
    gamma: float = 0.95  # over turns
    normalize: bool = True
    deviation: Deviation = "population"

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; it discounts the rewards of later turns and must lie in [0, 1]")

    def validate(self, plan: Plan) -> Iterator[str]:
        yield from super().validate(plan)
        if not plan.turn_states:
            yield (
                f"{type(self).__name__} compares turns that were taken in the same state, but no environment of this run reports the "
                "state of a turn; define turn_states in it, or set algorithm.name to grpo"
            )

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return self._relative(group.rewards)

    def token_advantages(self, batch: Batch) -> Tensor:
        turns = find_turns(batch)
        returns = discount_later_turns(turns.rewards(batch), turns.rollout, self.gamma)
        of_steps = torch.zeros_like(returns)
        for same in indices_by_label(turns.states):
            of_steps[same] = self._relative(returns[same])
        return (batch.advantages.double() + self.step_weight * of_steps[turns.of_token]).to(batch.advantages.dtype)

    def _relative(self, rewards: Tensor) -> Tensor:
        return group_advantages(rewards, normalize=self.normalize, deviation=self.deviation)


@dataclass(frozen=True, kw_only=True)
class GiGPO(PolicyGradient):
    """GiGPO (Feng et al. 2025, arXiv 2505.10978): credits rollouts within their group, and turns among turns taken in the same state.

    GRPO whose credit also compares the turns of a group that were taken in the same state.

    Metrics: those of ``grpo``; turns_compared, the share of turns whose state occurs in at least one other turn.
    """

    name: ClassVar[str] = "gigpo"

    advantage: Advantage = StepGrouped()
    objective: Objective = Clip()

    def report(self, batch: Batch) -> dict[str, float]:
        turns = find_turns(batch)
        compared = sum(len(same) for same in indices_by_label(turns.states) if len(same) > 1)
        return {"train/turns_compared": compared / max(len(turns.rollout), 1)}
