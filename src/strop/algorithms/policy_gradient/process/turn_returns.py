"""Discounted returns of turns, compared within the group: Kevin (Baronio et al. 2025, arXiv 2507.11948).

Metrics: those of ``grpo``.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.group_advantages import Deviation, group_advantages, indices_by_label
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.algorithms.policy_gradient.process.turns import discount_later_turns, find_turns
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


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
    """The reward of each turn is its discounted return, compared with the other turns of its group."""

    advantage: Advantage = DiscountedTurns()
    objective: Objective = Clip()
