"""Generalized advantage estimation (arXiv 1506.02438): credit of tokens from rewards and a critic's values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from strop.algorithms.functional import RELATIVE_ROUNDING, whiten
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards
from strop.algorithms.policy_gradient.process.steps import STEP_REWARDS, sum_of_steps
from strop.algorithms.policy_gradient.rewards import discounted_sums
from strop.lazy_torch import Tensor, torch
from strop.types import Batch

VALUES = "values"  # a batch column, [N]: the critic's value before each token, with its weights before the update
TOKEN_REWARDS = "token_rewards"  # a batch column, [N] float64: the reward of each token
RETURNS = "returns"  # a batch column, [N]: the critic's targets


@dataclass(frozen=True, kw_only=True)
class Gae(Advantage):
    """A_t = sum over k of (gamma lambda)^k delta_{t+k}, with delta_t = r_t + gamma V_{t+1} - V_t.

    A time step is a sampled token; tokens of prompts and of the environment are no time steps. V_t is the critic's value of everything
    before token t, so the value after the last token of a turn is that of the state after the environment's response. After the last
    token of a rollout the value is 0, whether the rollout stopped or reached a length limit: the limit is part of the task, as in TRL and
    verl, and the critic never reads the last token. (``overlong_filtering`` leaves rollouts that reached the limit out of both losses.)

    ``lambda_value`` is the lambda of the critic's targets V + A. VAPO's decoupled GAE (2504.05118) sets it to 1, so that the targets are
    plain discounted returns. ``length_adaptive_alpha`` a > 0 sets the policy's lambda to 1 - 1 / (a l), at least 0, for a rollout of l
    sampled tokens (VAPO: 0.05). ``whiten`` subtracts the mean of the advantages and divides by their standard deviation, over all counted
    tokens of the batch, with Bessel's correction if ``deviation`` is unbiased; the result is exactly 0 if they do not vary. The critic's
    targets are never whitened.
    """

    min_group_size: ClassVar[int] = 1
    requires: ClassVar[frozenset[str]] = frozenset({VALUES})
    gamma: float = 1.0
    lambda_policy: float = 0.95
    lambda_value: float | None = None  # None: the policy's
    length_adaptive_alpha: float = 0.0
    whiten: bool = True
    deviation: Literal["population", "unbiased"] = "population"

    def __post_init__(self) -> None:
        for name in ("gamma", "lambda_policy", "lambda_value"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}; it discounts the credit of later tokens and must lie in [0, 1]")
        if self.length_adaptive_alpha < 0:
            raise ValueError(f"length_adaptive_alpha is {self.length_adaptive_alpha}; set it above 0, or to 0 for a fixed lambda")

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return the plain reward, because the critic's values are not known yet."""
        return group.rewards

    def token_advantages(self, batch: Batch) -> Tensor:
        """Compute advantages, [N] float32, from the columns TOKEN_REWARDS and VALUES."""
        advantages = self._discounted_errors(batch, self.lambdas(batch))
        return (self._whiten_or_zero(advantages, batch) if self.whiten else advantages).float()

    def returns(self, batch: Batch) -> Tensor:
        """Compute the critic's targets, [N] float32, from the same columns."""
        lambda_value = self.lambda_policy if self.lambda_value is None else self.lambda_value
        lambdas = torch.full((len(batch.target),), lambda_value, dtype=torch.float64)
        return (batch.column(VALUES).double() + self._discounted_errors(batch, lambdas)).float()

    def lambdas(self, batch: Batch) -> Tensor:
        """Return the lambda of the policy's advantages for each token, [N] float64; it is the same for all tokens of a rollout."""
        if not self.length_adaptive_alpha:
            return torch.full((len(batch.target),), self.lambda_policy, dtype=torch.float64)
        lengths = torch.bincount(batch.sequence, minlength=batch.num_sequences).double()
        adaptive = 1 - 1 / (self.length_adaptive_alpha * lengths.clamp(min=1))
        return adaptive.clamp(min=0)[batch.sequence]

    def _discounted_errors(self, batch: Batch, lambdas: Tensor) -> Tensor:  # [N] float64
        values = batch.column(VALUES).double()
        next_values = torch.zeros_like(values)
        same_rollout = batch.sequence[1:] == batch.sequence[:-1]
        next_values[:-1] = values[1:].where(same_rollout, 0.0)
        errors = batch.column(TOKEN_REWARDS) + self.gamma * next_values - values
        return discounted_sums(errors, self.gamma * lambdas, batch)

    def _whiten_or_zero(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Whiten; return zeros if the advantages are within the rounding error of the float32 values and rewards behind them."""
        counted = batch.mask > 0
        terms = torch.stack([batch.column(VALUES).double(), batch.rewards[batch.sequence]]).abs()
        if not counted.any() or advantages[counted].abs().max() <= RELATIVE_ROUNDING * terms[:, counted].max():
            return torch.zeros_like(advantages)
        return whiten(advantages, batch.mask, unbiased=self.deviation == "unbiased")


def place_rewards(rewards: Tensor, batch: Batch) -> Tensor:
    """Place the rewards of rollouts [S] at their tokens, [N] float64: step rewards where each step ends, the rest at the last
    token.
    """
    at_end = place_at_last_token(rewards - sum_of_steps(batch), batch)
    return at_end + batch.columns[STEP_REWARDS] if STEP_REWARDS in batch.columns else at_end


def place_at_last_token(rewards: Tensor, batch: Batch) -> Tensor:
    """Place the rewards of rollouts [S] at the last sampled token of each, [N] float64; 0 elsewhere.

    The reward of a rollout without sampled tokens is lost.
    """
    count = len(batch.target)
    last = torch.full((batch.num_sequences,), -1).scatter_reduce(0, batch.sequence, torch.arange(count), "amax")
    token_rewards = torch.zeros(count, dtype=torch.float64)
    token_rewards[last[last >= 0]] = rewards.double()[last >= 0]
    return token_rewards
