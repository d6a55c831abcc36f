"""Group Sequence Policy Optimization (arXiv 2507.18071): one ratio per rollout, clipped as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from strop.algorithms.clip import Clip
from strop.algorithms.functional import Aggregation, sequence_mean
from strop.algorithms.grpo import GroupRelative
from strop.algorithms.parts import Advantage, Objective, PolicyTokens
from strop.algorithms.policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class SequenceClip(Clip):
    """PPO's clip of s = exp(mean over a rollout of log ratio), the same for each of its tokens.

    s carries the gradient of each token's own log-probability (the paper's GSPO-token form): the sum over a rollout is the gradient of s.
    """

    sequence_level: ClassVar[bool] = True
    low: float = 3e-4
    high: float = 4e-4

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = sequence_ratio(tokens)
        objective, columns = self.clipped(ratio, tokens.advantages)
        return objective, {**columns, "probs_ratio": ratio}


def sequence_ratio(tokens: PolicyTokens) -> Tensor:
    """The geometric mean of each rollout's ratios, [N], with the gradient of the token's own log-probability."""
    shared = sequence_mean(tokens.log_ratio.detach(), tokens.batch)[tokens.batch.sequence]
    return (shared + tokens.logprobs - tokens.logprobs.detach()).exp()


@dataclass(frozen=True, kw_only=True)
class GSPO(PolicyGradient):
    """GRPO's advantage, the ratio and the mean per rollout."""

    advantage: Advantage = GroupRelative()
    objective: Objective = SequenceClip()
    aggregation: Aggregation = "sequence_mean"
