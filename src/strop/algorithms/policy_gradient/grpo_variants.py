"""What differs from GRPO in few options: Dr. GRPO, and DAPO with its punishment of long responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import Aggregation
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.grpo import Clip, GroupRelative
from strop.algorithms.policy_gradient.parts import Advantage, Objective, Shaping
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class DrGRPO(PolicyGradient):
    """Dr. GRPO (arXiv 2503.20783): GRPO without the divisions by the group's standard deviation and by each rollout's length.

    The credit is R - m. The loss is the sum over tokens, divided by rollouts x a constant length: set ``constant_length``, for
    example to the maximum response length. TRL's ``dr_grpo`` divides by max_completion_length, and by default still divides by
    the standard deviation; verl's seq-mean-token-sum-norm divides by the longest response of the batch unless a length is set,
    so its scale changes with the batch, and not by the number of rollouts.

    The group's mean as baseline, no scaling, PPO's clip, sums over rollouts divided by a constant length.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
    """

    advantage: Advantage = GroupRelative(normalize=False)
    objective: Objective = Clip()
    aggregation: Aggregation = "constant_length"


# Soft overlong punishment (DAPO, arXiv 2503.14476): responses near the length limit lose reward.


@dataclass(frozen=True, kw_only=True)
class SoftOverlong(Shaping):
    """R - penalty x clip((length - (max_length - buffer)) / buffer, 0, 1), length in sampled tokens.

    Without ``max_length`` there is no punishment. ``truncated_factor`` first multiplies the reward of truncated rollouts. The key
    ``stop_properly_penalty_coef`` sets it with ``penalty`` 0, as in NeMo-RL; if both are set as options of the part, both apply.
    """

    name: ClassVar[str] = "soft_overlong"
    buffer: int = 4096  # number of tokens before max_length over which the punishment grows
    penalty: float = 1.0  # the full punishment, from max_length on
    max_length: int | None = None  # sampled tokens
    truncated_factor: float | None = None

    def __post_init__(self) -> None:
        if self.buffer < 1 or self.penalty < 0:
            raise ValueError(
                f"buffer is {self.buffer} tokens and penalty {self.penalty}: set buffer to at least 1 and penalty to at least 0"
            )
        if self.penalty and self.max_length is not None and self.buffer > self.max_length:
            raise ValueError(
                f"buffer is {self.buffer} tokens, but max_length is {self.max_length}: every response would be punished; set buffer to "
                "at most max_length"
            )
        if self.truncated_factor is not None and not 0 <= self.truncated_factor <= 1:
            raise ValueError(f"truncated_factor is {self.truncated_factor}: it reduces the reward and must lie in [0, 1]")

    def shape(self, rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        if self.truncated_factor is not None:
            rewards = torch.where(truncated, rewards * self.truncated_factor, rewards)
        if self.max_length is None:
            return rewards
        over = (lengths - (self.max_length - self.buffer)) / self.buffer
        return rewards - self.penalty * over.clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class DAPO(PolicyGradient):
    """DAPO (arXiv 2503.14476): GRPO with a higher upper clip, dynamic sampling, a token-level loss, soft overlong punishment.

    It changes four things: the clip is [1 - 0.2, 1 + 0.28]; groups with only successes or only failures, by the rewards before
    the punishment, are replaced; the loss is the mean over all tokens of the batch instead of over the rollouts' means; and
    long responses are punished (``overlong.py``). The punishment is off until ``max_length`` is set (grpo.reward_shaping). The
    paper also tries overlong filtering, here ``overlong_filtering``. TRL's ``dapo`` is the aggregation only.

    GRPO's advantage, clip-higher, dynamic sampling, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum; groups_dropped_by_filter counts the replaced groups.
    """

    advantage: Advantage = GroupRelative()
    objective: Objective = Clip(high=0.28)
    shaping: Shaping | None = SoftOverlong()
    drop_constant_groups: bool = True
