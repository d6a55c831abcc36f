"""REINFORCE with different baselines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.base import Plan
from strop.algorithms.functional import (
    POLICY_LOGPROBS,
    POLICY_SQUARES,
    RELATIVE_ROUNDING,
    Aggregation,
    group_advantages,
    rounding_of,
    varies,
    whiten,
)
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.grpo import Clip, Reinforce
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.algorithms.policy_gradient.rewards import discounted_sums
from strop.algorithms.policy_gradient.step_weights import CORRECTION_WEIGHTS
from strop.algorithms.policy_gradient.turns import STEP_REWARDS, sum_to_go
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class PlainReward(Advantage):
    """R, or with ``batch_mean`` R minus the mean reward of all rollouts of the batch. Groups have no effect."""

    min_group_size: ClassVar[int] = 1
    batch_mean: bool = False

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group.rewards

    def token_advantages(self, batch: Batch) -> Tensor:
        if not self.batch_mean:
            return batch.advantages
        return batch.advantages - batch.rewards.mean().to(batch.advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class REINFORCE(PolicyGradient):
    """REINFORCE (Williams, 1992): each token's log-probability, weighted by the credit of its rollout. No ratio, no clip.

    The gradient assumes on-policy samples. With stale rollouts or several optimizer steps per batch, add a correction
    (``importance``, ``tis``), which weighs tokens by the ratio of the learner before the update to the sampler.

    The plain reward, sums over each rollout's tokens: the score function of whole rollouts.

    Metrics: probs_ratio and its maximum, of the policy to itself before the update, although the objective has no ratio.
    """

    advantage: Advantage = PlainReward()
    objective: Objective = Reinforce()
    aggregation: Aggregation = "sequence_sum"


@dataclass(frozen=True, kw_only=True)
class LeaveOneOut(Advantage):
    """R - mean of the group's other rewards; exactly 0 if the group does not vary."""

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group_advantages(group.rewards, leave_one_out=True, normalize=False)


@dataclass(frozen=True, kw_only=True)
class RLOO(PolicyGradient):
    """RLOO (arXiv 2402.14740): REINFORCE on whole rollouts, each relative to the other rollouts of its group.

    The credit is G / (G - 1) times the mean-centered reward. A rollout is one action: its log-probability is the sum over its
    tokens. The paper includes the KL term in the reward (``kl`` with place reward, estimator k1); by default there is none
    here. TRL's RLOO trainer clips a ratio of whole rollouts instead, and verl's uses PPO's loss per token.

    The other rollouts' mean as baseline, REINFORCE, sums over rollouts.

    Metrics: probs_ratio and its maximum; kl_penalty if the KL term has a weight.
    """

    advantage: Advantage = LeaveOneOut()
    objective: Objective = Reinforce()
    aggregation: Aggregation = "sequence_sum"


@dataclass(frozen=True, kw_only=True)
class GreedyBaseline(Advantage):
    """R - R(greedy); exactly 0 if they differ by rounding errors only."""

    greedy_baseline: ClassVar[bool] = True
    min_group_size: ClassVar[int] = 1

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return the credit of each rollout, [G]. Raises ValueError if the group has no greedy rollout."""
        if group.greedy_reward is None:
            raise ValueError("the credit needs a greedy rollout as baseline, but this group has none")
        greedy = torch.full_like(group.rewards, group.greedy_reward)
        difference = group.rewards - greedy
        rounding = rounding_of(group.rewards) * torch.maximum(group.rewards.abs(), greedy.abs())
        return torch.where(difference.abs() > rounding, difference, 0.0)


@dataclass(frozen=True, kw_only=True)
class ReMax(PolicyGradient):
    """ReMax (arXiv 2310.10505): REINFORCE with the reward of the greedy response as baseline.

    Each prompt gets one more rollout that is sampled greedily and not trained on. One sampled rollout per prompt is enough.
    verl's ``remax`` is this credit with PPO's loss.

    The greedy rollout's reward as baseline, REINFORCE, sums over rollouts.

    Metrics: probs_ratio and its maximum.
    """

    name: ClassVar[str] = "remax"

    advantage: Advantage = GreedyBaseline()
    objective: Objective = Reinforce()
    aggregation: Aggregation = "sequence_sum"


@dataclass(frozen=True, kw_only=True)
class LengthWeighted(Advantage):
    """R - sum(l R) / sum(l), with l the sampled tokens of each rollout; exactly 0 if the group does not vary."""

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        total = group.lengths.sum()
        if not varies(group.rewards) or total == 0:
            return torch.zeros_like(group.rewards)
        return group.rewards - (group.lengths * group.rewards).sum() / total


@dataclass(frozen=True, kw_only=True)
class OPO(PolicyGradient):
    """OPO (arXiv 2505.23585): on-policy REINFORCE with the baseline that minimizes variance.

    The optimal baseline weighs rewards by the squared norm of each rollout's gradient. If the gradients of tokens are nearly
    orthogonal, that norm is proportional to the length l, so b = sum l R / sum l over the group. The derivation is for sums
    over a rollout's tokens without a ratio; verl's recipe takes the mean over tokens.

    The length-weighted mean as baseline, REINFORCE, sums over rollouts.

    Metrics: probs_ratio and its maximum.
    """

    advantage: Advantage = LengthWeighted()
    objective: Objective = Reinforce()
    aggregation: Aggregation = "sequence_sum"


# The optimal token baseline (verl's ``optimal_token_baseline``): a baseline of least variance for each token position within a
# group.

MIN_ENERGY = 1e-8  # added to the sum of weights: if all tokens so far were certain, the baseline is 0, as in verl


@dataclass(frozen=True, kw_only=True)
class OptimalTokenBaseline(Advantage):
    """A_t = G_t - sum(W_t G_t) / sum(W_t), the sums over the rollouts of the group that have a t-th sampled token.

    G_t is the remaining reward, including step rewards and a KL term in ``token_reward``. W_t is the sum over the tokens up to
    t of 1 - 2 pi + sum over the vocabulary of pi^2: the squared norm of the gradient of log pi with respect to the logits,
    under the policy before the update, times the squared weight of a correction that reweights. That costs a forward pass of
    the policy for each batch.

    Tokens are counted from the first sampled one, without those of an environment. Where a single rollout goes on, its baseline
    is its own return and its credit 0; with ``zero_tail``, as verl's multi-turn form does, there is no baseline for these
    tokens. The credit is exactly 0 if the returns of the group do not vary.
    """

    requires: ClassVar[frozenset[str]] = frozenset({POLICY_LOGPROBS, POLICY_SQUARES})
    reads_weights: ClassVar[bool] = True
    zero_tail: bool = False

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return the plain reward, because the probabilities of tokens are not known yet."""
        return group.rewards

    def token_advantages(self, batch: Batch) -> Tensor:
        returns, energy = _returns(batch), _energy(batch)
        group, place = batch.group[batch.sequence], _places(batch)
        span = int(place.max()) + 1 if len(place) else 1
        at = group * span + place  # one number per position of each group

        def sum_at(values: Tensor) -> Tensor:
            return values.new_zeros(batch.num_groups * span).index_add(0, at, values)[at]

        baseline = sum_at(returns * energy) / (sum_at(energy) + MIN_ENERGY)
        if self.zero_tail:
            baseline = torch.where(sum_at(torch.ones_like(returns)) == 1, 0.0, baseline)
        return torch.where(_varies(returns, group, batch.num_groups), returns - baseline, 0.0).to(batch.advantages.dtype)


def _returns(batch: Batch) -> Tensor:
    """Return the reward still to come at each token, [N] float64."""
    returns = batch.advantages.double()
    if STEP_REWARDS not in batch.columns:
        return returns
    steps = batch.columns[STEP_REWARDS]
    earlier = steps.new_zeros(batch.num_sequences).index_add(0, batch.sequence, steps)[batch.sequence] - sum_to_go(steps, batch)
    return returns - earlier


def _energy(batch: Batch) -> Tensor:
    """Return W of each token, [N] float64, with 1 - 2 pi + sum of pi^2 as (1 - pi)^2 + squares of the others, which cannot
    cancel."""
    logprobs, squares = batch.column(POLICY_LOGPROBS).double(), batch.column(POLICY_SQUARES).double()
    others = (squares.exp() - (2 * logprobs).exp()).clamp(min=0)
    energy = torch.expm1(logprobs).square() + others
    if CORRECTION_WEIGHTS in batch.columns:
        energy = energy * batch.columns[CORRECTION_WEIGHTS].double().square()
    total = energy.new_zeros(batch.num_sequences).index_add(0, batch.sequence, energy)
    return (total[batch.sequence] - sum_to_go(energy, batch) + energy).clamp(min=0)


def _places(batch: Batch) -> Tensor:
    """Return the number of sampled tokens of its rollout before each token, [N] int64."""
    lengths = torch.bincount(batch.sequence, minlength=batch.num_sequences)
    return torch.arange(len(batch.sequence)) - (lengths.cumsum(0) - lengths)[batch.sequence]


def _varies(returns: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return whether the returns of each token's group differ by more than rounding errors, [N] bool."""
    empty = returns.new_zeros(groups)
    high = empty.scatter_reduce(0, group, returns, "amax", include_self=False)
    low = empty.scatter_reduce(0, group, returns, "amin", include_self=False)
    return (high - low > RELATIVE_ROUNDING * torch.maximum(high.abs(), low.abs()))[group]


@dataclass(frozen=True, kw_only=True)
class BatchWhitened(Advantage):
    """R, or with ``group_mean`` R - mean of its group, whitened over the counted tokens of the batch.

    All rollouts of a group that does not vary get the same small credit, because the batch's mean is subtracted: with
    ``group_mean``, the mean over rollouts is 0, but the mean over tokens is not, because long rollouts count more. If nothing
    in the batch varies, all credit is exactly 0.

    ``gamma`` below 1 discounts by the distance in tokens: the reward, which is at the last token, and later KL terms.
    """

    group_mean: bool = False
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma}; it discounts the credit of earlier tokens and must lie in (0, 1]")

    def validate(self, plan: Plan) -> Iterator[str]:
        if self.group_mean:
            yield from super().validate(plan)

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group_advantages(group.rewards, normalize=False) if self.group_mean else group.rewards

    def token_advantages(self, batch: Batch) -> Tensor:
        credit = batch.advantages.double()
        if self.gamma != 1:
            same_rollout = batch.sequence[1:] == batch.sequence[:-1]
            later = torch.cat([credit[1:].where(same_rollout, 0.0), credit.new_zeros(len(credit[:1]))])
            credit = discounted_sums(credit - later, torch.full_like(credit, self.gamma), batch)
        return whiten(credit, batch.mask).to(batch.advantages.dtype)


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(PolicyGradient):
    """REINFORCE++ (arXiv 2501.03262): no group baseline; the credit is whitened over all tokens of the batch.

    A_t = R - beta x sum over this and later tokens of log pi_sampler - log pi_reference, then (A - mean) / deviation over the
    whole batch, then PPO's clip. A group may be a single rollout. The standard deviation is that of the population; verl's
    whitening, over the same counted tokens, is Bessel-corrected.

    Reward minus the KL terms of this and later tokens, whitened over the batch, PPO's clip, mean over all tokens of the batch.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum, kl_penalty.
    """

    advantage: Advantage = BatchWhitened()
    objective: Objective = Clip()
    kl: Kl | None = Kl(weight=0.01, estimator="k1", place="token_reward")


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaseline(PolicyGradient):
    """REINFORCE++-baseline (arXiv 2501.03262): the group's mean is subtracted, and the result is whitened over the batch.

    A = R - m, then (A - mean) / deviation over all tokens of the batch, then PPO's clip. The KL term is k2 in the loss, which
    has the gradient of the KL divergence on-policy. In contrast to GRPO the scale is that of the batch, so that small
    differences between the rewards of a group are not amplified.

    The group's mean as baseline, whitened over the batch, PPO's clip, k2 in the loss.

    Metrics: ratio_outside_clip, ratio_clipped, probs_ratio and its maximum, kl_penalty.
    """

    name: ClassVar[str] = "reinforce_pp_baseline"

    advantage: Advantage = BatchWhitened(group_mean=True)
    objective: Objective = Clip()
    kl: Kl | None = Kl(weight=0.01, estimator="k2", place="loss")
