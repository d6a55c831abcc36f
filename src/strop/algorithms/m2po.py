"""M2PO (arXiv 2510.01161): stale samples unclipped, but for the few tokens that make the ratio's second moment large.

Metrics: second_moment, the mean of log^2 r over counted tokens; second_moment_masked, the share of tokens without a gradient;
probs_ratio and its maximum, of policy to sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from strop.algorithms.functional import exponential
from strop.algorithms.grpo import GroupRelative
from strop.algorithms.parts import Advantage, Objective, PolicyTokens
from strop.algorithms.policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class SecondMomentMask(Objective):
    """M r A, r = pi / mu, M = 0 for the tokens of largest log^2 r until the mean of the others' is at most ``limit``, else 1.

    The mask is decided on the whole optimizer step. As in the paper only tokens that the update pushes further away (A > 0 and
    r > 1, or A < 0 and r < 1) are looked at, in the mean and by the mask; ``outward_only`` False looks at all of them, as AReaL
    does. r is taken to the sampler, so that there is no correction beside it.
    """

    own_correction: ClassVar[bool] = True
    takes_ratio: ClassVar[bool] = False
    surveys: ClassVar[bool] = True
    limit: float = 0.04  # nats^2
    outward_only: bool = True

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise ValueError(
                f"the second moment is limited to {self.limit}, which masks all tokens that moved; set for instance 0.04"
            )

    def survey(self, tokens: PolicyTokens) -> Mapping[str, Tensor]:
        logs = tokens.logprobs - tokens.sampler
        looked_at = tokens.batch.mask > 0
        if self.outward_only:
            looked_at = looked_at & (logs * tokens.advantages > 0)
        kept = torch.ones_like(tokens.batch.mask)
        kept[looked_at] = within_limit(logs[looked_at].double().square(), self.limit).to(kept.dtype)
        return {"second_moment_kept": kept}

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        logs = tokens.logprobs - tokens.sampler
        ratio, kept = exponential(logs), tokens.batch.extra("second_moment_kept")
        return kept * ratio * tokens.advantages, {
            "second_moment": logs.square(),
            "second_moment_masked": 1 - kept,
            "probs_ratio": ratio,
        }


def within_limit(squares: Tensor, limit: float) -> Tensor:
    """Which of the values [n], the smallest first, have a mean of at most ``limit`` together, [n] bool."""
    ascending, order = squares.sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1, dtype=squares.dtype, device=squares.device)
    kept = torch.zeros(len(squares), dtype=torch.bool, device=squares.device)
    kept[order] = means <= limit  # means of ascending values ascend, so that those kept are the smallest
    return kept


@dataclass(frozen=True, kw_only=True)
class M2PO(PolicyGradient):
    """GRPO's advantage, ratios to the sampler without a clip but for those masked, the mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = SecondMomentMask()
