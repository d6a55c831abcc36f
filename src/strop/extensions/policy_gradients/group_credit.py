"""Other credit relative to a group: by its success rate, its best rollouts, several rewards, or the scale of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import comb
from typing import ClassVar

from strop.algorithms.base import Plan
from strop.algorithms.functional import EPS, Deviation, group_advantages, varies
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.grpo import Clip
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class SuccessRate(Advantage):
    """(R - mean) / mean within a group; exactly 0 if the group does not vary."""

    divides_by_mean: ClassVar[bool] = True

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return the credit of each rollout, [G]. Raises ValueError for a negative reward."""
        if bool((group.rewards < 0).any()):
            raise ValueError(
                f"a reward is {float(group.rewards.min()):g}, but MaxRL divides by the mean reward as a success "
                "rate; use rewards of 0 and 1, or map yours to [0, 1] with grpo.reward_scaling"
            )
        if not varies(group.rewards):
            return torch.zeros_like(group.rewards)
        return group.rewards / group.rewards.mean() - 1


@dataclass(frozen=True, kw_only=True)
class MaxRL(PolicyGradient):
    """MaxRL (arXiv 2602.02710): the gradient of the log of the success rate instead of the rate, so that rare successes weigh
    more.

    The credit is (R - m) / m. With rewards of 0 and 1 its expectation is the gradient of -sum over k < G of (1 - p)^k / k,
    which tends to log p for large groups. Its first term is, up to a constant, the success rate, which other algorithms
    maximize. A group without a success gives no credit. The paper changes only this line of an existing loss; here that loss is
    GRPO's.

    Reward relative to the success rate, PPO's clip, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
    """

    name: ClassVar[str] = "maxrl"

    advantage: Advantage = SuccessRate()
    objective: Objective = Clip()


@dataclass(frozen=True, kw_only=True)
class BatchScaled(Advantage):
    """(R - mean of the group) / (population deviation of the batch's rewards + eps); exactly 0 if the group does not vary."""

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group_advantages(group.rewards, normalize=False)

    def token_advantages(self, batch: Batch) -> Tensor:
        if not varies(batch.rewards):
            return batch.advantages
        scaled = batch.advantages.double() / (batch.rewards.std(correction=0) + EPS)
        return scaled.to(batch.advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class LitePPO(PolicyGradient):
    """Lite PPO (arXiv 2508.08221): the group's mean, the batch's standard deviation and a token-level loss.

    The credit is (R - m) / s, where s is the standard deviation of all rewards of the batch. It is more stable than a group's
    deviation when the rewards of the group hardly differ.

    The group's mean as baseline, the batch's deviation as scale, PPO's clip, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
    """

    advantage: Advantage = BatchScaled()
    objective: Objective = Clip()


@dataclass(frozen=True, kw_only=True)
class BestOfK(Advantage):
    """The best reward of a set of k rollouts minus the best of its other k - 1, averaged over all sets that contain the rollout.

    ``k`` None is the whole group: the best rollout gets best - second best, and all others 0 (the paper's estimator; summed
    over the group, it is unbiased for the gradient of E max). A smaller k averages over all sets. ``analytic`` instead
    subtracts the mean over all sets and divides by their deviation (2508.10751 for rewards of 0 and 1; here for any rewards),
    so the credit has both signs and sums to 0. The credit is exactly 0 if the group does not vary.
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
    """Return the share of the sets of k with rollout i in which j is the best of the others, [G, G] float64, counted from the
    worst."""
    sets = comb(size - 1, k - 1)
    below = [[j - (j > i) for j in range(size)] for i in range(size)]  # rollouts worse than j, without i
    shares = [[comb(count, k - 2) / sets if j != i else 0.0 for j, count in enumerate(row)] for i, row in enumerate(below)]
    return torch.tensor(shares, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class PassAtK(PolicyGradient):
    """Pass@k training (arXiv 2503.19595): a rollout's credit is how much the best of k rollouts loses without it.

    Best minus second best of the group, PPO's clip, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
    """

    advantage: Advantage = BestOfK()
    objective: Objective = Clip()


@dataclass(frozen=True, kw_only=True)
class DecoupledRewards(Advantage):
    """The sum over rewards k of weight_k (R_k - mean_k) / (deviation_k + eps) in the group, divided by its deviation in the
    batch.

    A reward that does not vary in a group adds exactly 0. The mean of the sum over the batch is 0, because it is 0 in each
    group; it is not subtracted again, so that groups without signal keep a credit of 0. The deviation in the batch is over
    rollouts, as in the paper and TRL; verl whitens over tokens. ``weights`` maps the names of rewards to weights; rewards
    without a weight are ignored. A list has one weight for each reward, in the order of their names, and null is weight 1 for
    each, including those that an environment only logs, as in NeMo-RL. The environment's own weights are not used.

    ``deviation`` is the deviation within each group; unless it is population, both deviations have Bessel's correction. With
    others, the credit of a group does not add up to 0, and the mean over the batch is subtracted.
    """

    needs_named_rewards: ClassVar[bool] = True
    weights: Mapping[str, float] | tuple[float, ...] | None = field(default_factory=dict)
    leave_one_out: bool = False
    normalize: bool = True
    deviation: Deviation = "population"

    def validate(self, plan: Plan) -> Iterator[str]:
        yield from super().validate(plan)
        known = ", ".join(plan.environment_rewards) or "train/rewards/* in the log"
        if not isinstance(self.weights, Mapping):
            yield from self._check_unnamed_weights(plan, known)
            return
        if len(self.weights) < 2:
            yield (
                f"GDPO normalizes each reward separately and adds them, but {len(self.weights)} rewards have a weight; set the "
                f"weights of at least two in algorithm.kwargs.advantage.weights (available: {known}), or choose grpo for a "
                "single reward"
            )
        unknown = [name for name in self.weights if name not in plan.environment_rewards]
        if plan.environment_rewards and unknown:
            yield f"GDPO has weights for rewards that no environment returns: {', '.join(unknown)}; available are {known}"

    def _check_unnamed_weights(self, plan: Plan, known: str) -> Iterator[str]:
        found = len(plan.environment_rewards)
        wanted = 2 if self.weights is None else len(self.weights)
        if self.weights is not None and wanted < 2:
            yield f"GDPO normalizes each reward separately and adds them, but has {wanted} weights; choose grpo for a single reward"
        elif found and (found < wanted if self.weights is None else found != wanted):
            needed = "at least 2 rewards" if self.weights is None else f"a reward for each of {wanted} weights"
            yield f"GDPO needs {needed}, but the environments return {found}: {known}; set the weights by name, or choose grpo"

    def named_weights(self, names: Iterable[str]) -> Mapping[str, float]:
        """Return the weight of each reward. Raises ValueError if there are not as many weights as rewards."""
        names = sorted(names)
        if isinstance(self.weights, tuple):
            if len(self.weights) != len(names):
                raise ValueError(f"GDPO has {len(self.weights)} weights, but the rewards of this group are {names}")
            return dict(zip(names, self.weights, strict=True))
        return self.weights or dict.fromkeys(names, 1.0)

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return the weighted sum of the normalized rewards, [G]. Raises ValueError if the group has no reward with a weight."""
        weights = self.named_weights(group.by_name)
        weighted = {name: rewards for name, rewards in group.by_name.items() if name in weights}
        if not weighted:
            raise ValueError(f"GDPO has weights for {sorted(weights)}, but the rewards of this group are {sorted(group.by_name)}")
        return torch.stack([weights[name] * self._relative(rewards) for name, rewards in weighted.items()]).sum(0)

    def _relative(self, rewards: Tensor) -> Tensor:
        return group_advantages(rewards, leave_one_out=self.leave_one_out, normalize=self.normalize, deviation=self.deviation)

    def token_advantages(self, batch: Batch) -> Tensor:
        tokens = torch.bincount(batch.sequence, minlength=batch.num_sequences)
        sums = torch.zeros(batch.num_sequences, dtype=torch.float64).index_add(0, batch.sequence, batch.advantages.double())
        credit = (sums / tokens.clamp(min=1))[tokens > 0]
        if self.deviation == "population":
            mean, deviation = 0.0, credit.square().mean().sqrt()
        else:
            mean = float(credit.mean()) if self.deviation == "others" else 0.0
            deviation = ((credit - mean).square().sum() / max(len(credit) - 1, 1)).sqrt()
        return ((batch.advantages.double() - mean) / (deviation + EPS)).to(batch.advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class GDPO(PolicyGradient):
    """GDPO (arXiv 2601.05242): normalizes each of several rewards within its group before adding them, so that none dominates.

    Each reward normalized by its group, their sum by the batch, PPO's clip, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum.
    """

    advantage: Advantage = DecoupledRewards()
    objective: Objective = Clip()
