"""Decoupled PPO (arXiv 2505.24298, after 2110.00641): separates the sampling policy from the proximal policy.

w min(rho A, clip(rho) A) with rho = pi / pi_o and w = pi_o / mu. The clip is relative to pi_o, the learner before the update, no matter
how old the samples are. ``ratio_to`` between approximates log pi_o by log mu + a (log pi - log mu), an idea of AReaL, which derives a
from each token's age; here a is ``proximal_weight``.

Metrics: importance_weight, the mean w; ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.policy_gradient.advantages.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.corrections.importance import Importance
from strop.algorithms.policy_gradient.parts import Advantage, Correction, Objective


@dataclass(frozen=True, kw_only=True)
class DecoupledPPO(PolicyGradient):
    """GRPO's advantage, PPO's clip around the learner before the update, importance weights of learner to sampler."""

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip()
    corrections: tuple[Correction, ...] = (Importance(),)
