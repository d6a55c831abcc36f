"""Tapered off-policy REINFORCE (TOPR, arXiv 2503.14286): what did well is imitated, what did badly unlearned only as far as the policy
would still write it.

Metrics: topr_weight, the mean weight of tokens; topr_tapered, the share of tokens with A < 0 whose rollout's ratio is below the cap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from strop.algorithms.functional import Aggregation, sequence_sum
from strop.algorithms.grpo import GroupRelative
from strop.algorithms.parts import Advantage, Objective, PolicyTokens
from strop.algorithms.policy_gradient import PolicyGradient


@dataclass(frozen=True, kw_only=True)
class Tapered(Objective):
    """A log pi where A >= 0; sg(min(r, cap)) A log pi where A < 0, with r = prod over a rollout of pi / mu.

    mu is the sampler's policy, whatever its age: there is no proximal policy and no clip. A rollout the policy has unlearned has r near 0
    and is left alone, which is what keeps the policy from falling apart far from mu.
    """

    sequence_level: ClassVar[bool] = True
    own_correction: ClassVar[bool] = True
    cap: float = 1.0

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ValueError(
                f"cap is {self.cap}: rollouts that did badly would have no weight; set it above 0, 1 as in the paper"
            )

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        batch = tokens.batch
        rollout = sequence_sum((tokens.logprobs - tokens.sampler).detach(), batch)[batch.sequence]
        ceiling = torch.log(torch.tensor(self.cap, dtype=rollout.dtype, device=rollout.device))
        bad = tokens.advantages < 0
        weight = torch.where(bad, torch.minimum(rollout, ceiling).exp(), torch.ones_like(rollout))
        tapered = (bad & (rollout < ceiling)).to(weight.dtype)
        return weight * tokens.advantages * tokens.logprobs, {"topr_weight": weight, "topr_tapered": tapered}


@dataclass(frozen=True, kw_only=True)
class TOPR(PolicyGradient):
    """Rewards minus their group's mean, and the log-probability of a rollout as the sum over its tokens."""

    advantage: Advantage = GroupRelative(normalize=False)
    objective: Objective = Tapered()
    aggregation: Aggregation = "sequence_sum"
