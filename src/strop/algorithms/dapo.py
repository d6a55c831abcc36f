"""DAPO (arXiv 2503.14476): GRPO with a higher upper clip, dynamic sampling, a loss per token, soft overlong punishment.

Four changes: clip to [1 - 0.2, 1 + 0.28]; a group of nothing but successes or failures makes room for another (judged by the
rewards as they were before the punishment); the mean over all tokens of the batch, not of rollouts' means; `overlong.py`. The
punishment is off until its ``max_length`` is known (grpo.reward_shaping). The paper also tries overlong filtering, here
``overlong_filtering``. TRL's ``dapo`` is the aggregation alone.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum; groups_dropped_by_filter counts what was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.algorithms.clip import Clip
from strop.algorithms.grpo import GroupRelative
from strop.algorithms.overlong import SoftOverlong
from strop.algorithms.parts import Advantage, Objective, Shaping
from strop.algorithms.policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class DAPO(PolicyGradient):
    """GRPO's advantage, clip-higher, dynamic sampling, the mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip(high=0.28)
    shaping: Shaping | None = SoftOverlong()
    drop_constant_groups: bool = True
