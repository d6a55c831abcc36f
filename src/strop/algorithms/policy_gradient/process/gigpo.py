"""GiGPO (Feng et al. 2025, arXiv 2505.10978): credits rollouts within their group, and turns among turns taken in the same state.

Metrics: those of ``grpo``; turns_compared, the share of turns whose state occurs in at least one other turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from strop.algorithms.base import Plan
from strop.algorithms.group_advantages import Deviation, group_advantages, indices_by_label
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.algorithms.policy_gradient.process.turns import discount_later_turns, find_turns
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


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
    """GRPO whose credit also compares the turns of a group that were taken in the same state."""

    advantage: Advantage = StepGrouped()
    objective: Objective = Clip()

    def report(self, batch: Batch) -> dict[str, float]:
        turns = find_turns(batch)
        compared = sum(len(same) for same in indices_by_label(turns.states) if len(same) > 1)
        return {"train/turns_compared": compared / max(len(turns.rollout), 1)}
