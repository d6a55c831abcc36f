"""The optimal token baseline (verl's ``optimal_token_baseline``): a baseline of least variance for each token position within a
group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import POLICY_LOGPROBS, POLICY_SQUARES, RELATIVE_ROUNDING
from strop.algorithms.policy_gradient.corrections.step_weights import CORRECTION_WEIGHTS
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards
from strop.algorithms.policy_gradient.process.steps import STEP_REWARDS, sum_to_go
from strop.lazy_torch import Tensor, torch
from strop.types import Batch

MIN_ENERGY = 1e-8  # added to the sum of weights: if all tokens so far were certain, the baseline is 0, as in verl


@dataclass(frozen=True, kw_only=True)
class OptimalTokenBaseline(Advantage):
    """A_t = G_t - sum(W_t G_t) / sum(W_t), the sums over the rollouts of the group that have a t-th sampled token.

    G_t is the remaining reward, including step rewards and a KL term in ``token_reward``. W_t is the sum over the
    tokens up to t of 1 - 2 pi + sum over the vocabulary of pi^2: the squared norm of the gradient of log pi with respect to the logits,
    under the policy before the update, times the squared weight of a correction that reweights. That costs a forward pass of the policy
    for each batch.

    Tokens are counted from the first sampled one, without those of an environment. Where a single rollout goes on, its baseline is its own
    return and its credit 0; with ``zero_tail``, as verl's multi-turn form does, there is no baseline for these tokens. The credit is
    exactly 0 if the returns of the group do not vary.
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
    """Return W of each token, [N] float64, with 1 - 2 pi + sum of pi^2 as (1 - pi)^2 + squares of the others, which cannot cancel."""
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
