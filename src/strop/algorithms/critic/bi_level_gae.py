"""Bi-level GAE (VAGEN, Wang et al. 2025, arXiv 2510.16907; RAGEN, arXiv 2504.20073): over turns, then over the tokens of each turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

from strop.algorithms.critic.gae import TOKEN_REWARDS, VALUES, Gae
from strop.algorithms.critic.ppo import PPO
from strop.algorithms.policy_gradient.process.turns import discount_later_turns, find_turns
from strop.algorithms.policy_gradient.rewards import discounted_sums
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class BiLevelGae(Gae):
    """The advantage of the last token of turn k is that of the turn, and those of the tokens before it follow from it:

    A_k = delta_k + turn_gamma turn_lambda A_{k+1},    delta_k = r_k + turn_gamma V_{k+1} - V_k,    V_k at the last token of turn k
    A_t = delta_t + gamma lambda A_{t+1},              delta_t = r_t + gamma V_{t+1} - V_t,         within a turn

    r_k is the reward at the last token of the turn: that of the steps ending there (``per_turn`` in
    ``strop.environments.base.reward``) and, for the last turn, the outcome. r_t is any reward inside the turn, such as a KL term.
    V_{k+1} is 0 after the last turn. The critic's targets are V + A, with ``lambda_value`` within turns. Where every rollout is
    one turn, this is ``gae`` with the same options. Gae's own options apply to the tokens within a turn.
    """

    lambda_policy: float = 1.0
    turn_gamma: float = 0.95
    turn_lambda: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("turn_gamma", "turn_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it discounts the credit of later turns and must lie in [0, 1]"
                )

    def _discounted_errors(self, batch: Batch, lambdas: Tensor) -> Tensor:  # [N] float64
        values, rewards, turns = batch.column(VALUES).double(), batch.column(TOKEN_REWARDS), find_turns(batch)
        last, rollout = turns.last_token, turns.rollout
        next_values = torch.zeros(len(last), dtype=torch.float64)
        next_values[:-1] = values[last][1:].where(rollout[1:] == rollout[:-1], 0.0)
        of_turns = rewards[last] + self.turn_gamma * next_values - values[last]
        errors = rewards - values
        errors[:-1] += self.gamma * values[1:]  # wrong at the last token of a turn, which is set below
        errors[last] = discount_later_turns(of_turns, rollout, self.turn_gamma * self.turn_lambda)
        return discounted_sums(errors, self.gamma * lambdas, replace(batch, sequence=turns.of_token))


@dataclass(frozen=True, kw_only=True)
class BiLevelPPO(PPO):
    """PPO whose critic's errors are discounted over turns, and within each turn over tokens. Metrics: PPO's."""

    advantage: Gae = BiLevelGae()
