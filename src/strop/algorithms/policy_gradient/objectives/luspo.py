"""LUSPO (arXiv 2602.05261): GSPO with each rollout weighted by its length, which removes the bias toward short rollouts.

A rollout's term is |y| x min(s A, clip(s) A), the sum over its tokens instead of their mean. The clip bounds are those of GSPO.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum, of rollouts' ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.functional import Aggregation
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.objectives.gspo import SequenceClip
from strop.algorithms.policy_gradient.parts import Advantage, Objective


@dataclass(frozen=True, kw_only=True)
class LUSPO(PolicyGradient):
    """GRPO's advantage, one ratio per rollout, sums over rollouts."""

    advantage: Advantage = GroupRelative()
    objective: Objective = SequenceClip()
    aggregation: Aggregation = "sequence_sum"
