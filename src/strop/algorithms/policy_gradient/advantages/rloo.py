"""RLOO (arXiv 2402.14740): REINFORCE on whole rollouts, each relative to the other rollouts of its group.

The credit is G / (G - 1) times the mean-centered reward. A rollout is one action: its log-probability is the sum over its tokens. The
paper includes the KL term in the reward (``kl`` with place reward, estimator k1); by default there is none here. TRL's RLOO trainer clips
a ratio of whole rollouts instead, and verl's uses PPO's loss per token.

Metrics: probs_ratio and its maximum; kl_penalty if the KL term has a weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.functional import Aggregation
from strop.algorithms.group_advantages import group_advantages
from strop.algorithms.policy_gradient.advantages.reinforce import Reinforce
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Advantage):
    """R - mean of the group's other rewards; exactly 0 if the group does not vary."""

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group_advantages(group.rewards, leave_one_out=True, normalize=False)


@dataclass(frozen=True, kw_only=True)
class RLOO(PolicyGradient):
    """The other rollouts' mean as baseline, REINFORCE, sums over rollouts."""

    advantage: Advantage = LeaveOneOut()
    objective: Objective = Reinforce()
    aggregation: Aggregation = "sequence_sum"
