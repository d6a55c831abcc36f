"""REINFORCE (Williams, 1992): each token's log-probability, weighted by the credit of its rollout. No ratio, no clip.

The gradient assumes on-policy samples. With stale rollouts or several optimizer steps per batch, add a correction (``importance``,
``tis``), which weighs tokens by the ratio of the learner before the update to the sampler.

Metrics: probs_ratio and its maximum, of the policy to itself before the update, although the objective has no ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.functional import Aggregation, bounded_logprobs
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective, PolicyTokens
from strop.lazy_torch import Tensor
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class Reinforce(Objective):
    """A log pi."""

    zero_gradient_without_advantage = True
    uses_ratio_to: ClassVar[bool] = False

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        return tokens.advantages * bounded_logprobs(tokens.logprobs), {}


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
    """The plain reward, sums over each rollout's tokens: the score function of whole rollouts."""

    advantage: Advantage = PlainReward()
    objective: Objective = Reinforce()
    aggregation: Aggregation = "sequence_sum"
