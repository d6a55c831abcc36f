"""DAPO (arXiv 2503.14476): GRPO with a higher upper clip, dynamic sampling, a token-level loss, soft overlong punishment.

It changes four things: the clip is [1 - 0.2, 1 + 0.28]; groups with only successes or only failures, by the rewards before the
punishment, are replaced; the loss is the mean over all tokens of the batch instead of over the rollouts' means; and long responses are
punished (``overlong.py``). The punishment is off until ``max_length`` is set (grpo.reward_shaping). The paper also tries overlong
filtering, here ``overlong_filtering``. TRL's ``dapo`` is the aggregation only.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum; groups_dropped_by_filter counts the replaced groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.policy_gradient.advantages.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.overlong import SoftOverlong
from strop.algorithms.policy_gradient.parts import Advantage, Objective, Shaping


@dataclass(frozen=True, kw_only=True)
class DAPO(PolicyGradient):
    """GRPO's advantage, clip-higher, dynamic sampling, mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip(high=0.28)
    shaping: Shaping | None = SoftOverlong()
    drop_constant_groups: bool = True
