"""Soft overlong punishment (DAPO, arXiv 2503.14476): responses near the length limit lose reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.policy_gradient.parts import Shaping
from strop.lazy_torch import Tensor, torch


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
