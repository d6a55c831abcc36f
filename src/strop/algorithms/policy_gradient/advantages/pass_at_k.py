"""Pass@k training (arXiv 2503.19595): a rollout's credit is how much the best of k rollouts loses without it.

Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

from strop.algorithms.base import Plan
from strop.algorithms.functional import EPS, varies
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class BestOfK(Advantage):
    """The best reward of a set of k rollouts minus the best of its other k - 1, averaged over all sets that contain the rollout.

    ``k`` None is the whole group: the best rollout gets best - second best, and all others 0 (the paper's estimator; summed over the group,
    it is unbiased for the gradient of E max). A smaller k averages over all sets. ``analytic`` instead subtracts the mean over all sets and
    divides by their deviation (2508.10751 for rewards of 0 and 1; here for any rewards), so the credit has both signs and sums to 0. The
    credit is exactly 0 if the group does not vary.
    """

    k: int | None = None
    analytic: bool = False

    def __post_init__(self) -> None:
        if self.k is not None and self.k < 2:
            raise ValueError(f"k is {self.k}: a rollout is compared with k - 1 others; set at least 2, or choose grpo for k = 1")

    def validate(self, plan: Plan) -> Iterator[str]:
        yield from super().validate(plan)
        k = plan.group_size if self.k is None else self.k
        if k > plan.group_size:
            yield (
                f"pass@{k} needs at least {k} rollouts per group, but a group has {plan.group_size}; lower k, or raise "
                "num_generations_per_prompt"
            )
        if self.analytic and k >= plan.group_size:
            yield f"the analytic pass@{k} compares sets of {k}, but a group of {plan.group_size} has only one; set k below that"

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        if not varies(group.rewards):
            return torch.zeros_like(group.rewards)
        ascending, order = group.rewards.sort(stable=True)
        size = len(ascending)
        chances = best_of_others(size, size if self.k is None else min(self.k, size))
        own, others = ascending[:, None], ascending[None, :]
        credit = torch.zeros_like(ascending)
        if self.analytic:
            best = torch.maximum(own, others)
            expected_best = (chances * best).sum(1)
            deviation = (chances * (best - expected_best.mean()).square()).sum(1).mean().sqrt()
            credit[order] = (expected_best - expected_best.mean()) / (deviation + EPS)
        else:
            credit[order] = (chances * (own - others).clamp(min=0)).sum(1)
        return credit


def best_of_others(size: int, k: int) -> Tensor:
    """Return the share of the sets of k with rollout i in which j is the best of the others, [G, G] float64, counted from the worst."""
    sets = comb(size - 1, k - 1)
    below = [[j - (j > i) for j in range(size)] for i in range(size)]  # rollouts worse than j, without i
    shares = [[comb(count, k - 2) / sets if j != i else 0.0 for j, count in enumerate(row)] for i, row in enumerate(below)]
    return torch.tensor(shares, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class PassAtK(PolicyGradient):
    """Best minus second best of the group, PPO's clip, mean over all tokens of the batch."""

    advantage: Advantage = BestOfK()
    objective: Objective = Clip()
