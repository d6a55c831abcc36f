"""M2PO (arXiv 2510.01161): no clip for stale samples, but a mask of the few tokens that make the second moment of the log-ratio large.

Metrics: second_moment, the mean of log^2 r over counted tokens; second_moment_masked, the share of tokens without gradient;
probs_ratio and its maximum, of policy to sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import bounded_exp
from strop.algorithms.policy_gradient.advantages.grpo import GroupRelative
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.bounded_objective import BoundedObjective
from strop.algorithms.policy_gradient.parts import Advantage, Objective, PolicyTokens
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class SecondMomentMask(BoundedObjective):
    """M r A with r = pi / mu and a mask M, which is 0 for the tokens with the largest log^2 r.

    As many tokens are masked as needed for the mean log^2 r of the others to be at most ``limit``. The mask is computed over the whole
    optimizer step. As in the paper, the mean and the mask only consider tokens that the update moves further away (A > 0 and r > 1, or
    A < 0 and r < 1); with ``outward_only`` False they consider all tokens, as in AReaL. r is relative to the sampler, so no correction is
    needed.
    """

    zero_gradient_without_advantage = True
    corrects_for_sampler: ClassVar[bool] = True
    uses_ratio_to: ClassVar[bool] = False
    needs_step_outputs: ClassVar[bool] = True
    bound_columns: ClassVar[tuple[str, ...]] = ("second_moment_masked",)
    limit: float = 0.04  # nats^2
    outward_only: bool = True

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise ValueError(f"limit is {self.limit}, which masks all tokens whose probability changed; set for example 0.04")

    def prepare_step(self, tokens: PolicyTokens) -> Mapping[str, Tensor]:
        logs = tokens.sampler_log_ratio
        considered = tokens.batch.mask > 0
        if self.outward_only:
            considered = considered & (logs * tokens.advantages > 0)
        kept = torch.ones_like(tokens.batch.mask)
        kept[considered] = smallest_within_mean(logs[considered].double().square(), self.limit).to(kept.dtype)
        return {"second_moment_kept": kept}

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        logs = tokens.sampler_log_ratio
        ratio, kept = bounded_exp(logs), tokens.batch.column("second_moment_kept")
        return kept * ratio * tokens.advantages, {
            "second_moment": logs.square(),
            "second_moment_masked": 1 - kept,
            "probs_ratio": ratio,
        }

    def unbounded(self, tokens: PolicyTokens) -> Tensor:
        return bounded_exp(tokens.sampler_log_ratio) * tokens.advantages


def smallest_within_mean(squares: Tensor, limit: float) -> Tensor:
    """Return which of the values [n] are among the smallest ones whose mean is at most ``limit``, [n] bool."""
    ascending, order = squares.sort(stable=True)
    means = ascending.cumsum(0) / torch.arange(1, len(squares) + 1, dtype=squares.dtype, device=squares.device)
    kept = torch.zeros(len(squares), dtype=torch.bool, device=squares.device)
    kept[order] = means <= limit  # the running means of ascending values ascend, so the smallest values are kept
    return kept


@dataclass(frozen=True, kw_only=True)
class M2PO(PolicyGradient):
    """GRPO's advantage, unclipped ratios to the sampler with a mask, mean over all tokens of the batch."""

    advantage: Advantage = GroupRelative()
    objective: Objective = SecondMomentMask()
