"""Soft overlong punishment (DAPO, arXiv 2503.14476): responses near the length limit lose reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from strop.algorithms.parts import Shaping


@dataclass(frozen=True, kw_only=True)
class SoftOverlong(Shaping):
    """R - penalty x clip((length - (max_length - buffer)) / buffer, 0, 1), length in sampled tokens.

    ``max_length`` None: no punishment. ``truncated_factor`` first multiplies the reward of a rollout that a length limit cut;
    in NeMo-RL that option (``stop_properly_penalty_coef``) takes the place of the punishment, here both apply.
    """

    name: ClassVar[str] = "soft_overlong"
    buffer: int = 4096  # tokens before max_length over which the punishment grows
    penalty: float = 1.0  # the whole punishment, from max_length on
    max_length: int | None = None  # sampled tokens
    truncated_factor: float | None = None

    def __post_init__(self) -> None:
        if self.buffer < 1 or self.penalty < 0:
            raise ValueError(
                f"the buffer is {self.buffer} tokens, the penalty {self.penalty}: set at least 1 token, and 0 or more"
            )
        if self.max_length is not None and self.buffer > self.max_length:
            raise ValueError(
                f"the punishment begins {self.buffer} tokens before the longest response, which has {self.max_length}: every "
                "response would be punished; set a smaller buffer"
            )
        if self.truncated_factor is not None and not 0 <= self.truncated_factor <= 1:
            raise ValueError(f"truncated_factor is {self.truncated_factor}: it takes reward away and must lie in [0, 1]")

    def shape(self, rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        if self.truncated_factor is not None:
            rewards = torch.where(truncated, rewards * self.truncated_factor, rewards)
        if self.max_length is None:
            return rewards
        over = (lengths - (self.max_length - self.buffer)) / self.buffer
        return rewards - self.penalty * over.clamp(0, 1)
