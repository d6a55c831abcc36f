"""REINFORCE++-baseline (arXiv 2501.03262): the group's mean is subtracted, and the result is whitened over the batch.

A = R - m, then (A - mean) / deviation over all tokens of the batch, then PPO's clip. The KL term is k2 in the loss, which has the
gradient of the KL divergence on-policy. In contrast to GRPO the scale is that of the batch, so that small differences between the
rewards of a group are not amplified.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum, kl_penalty.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.advantages.reinforce_pp import BatchWhitened
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, Objective


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaseline(PolicyGradient):
    """The group's mean as baseline, whitened over the batch, PPO's clip, k2 in the loss."""

    advantage: Advantage = BatchWhitened(group_mean=True)
    objective: Objective = Clip()
    kl: Kl | None = Kl(weight=0.01, estimator="k2", place="loss")
