"""Credit of tokens by a critic: generalised advantage estimation over tokens and turns, PPO and VAPO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from strop import metrics
from strop.algorithms.base import LossFn, LossTerm, LossTerms, Plan, ValueOutputs, add_terms
from strop.algorithms.functional import RELATIVE_ROUNDING, aggregate, logprobs_before_update, varies, whiten
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.grpo import Clip
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Objective
from strop.algorithms.policy_gradient.rewards import discounted_sums
from strop.algorithms.policy_gradient.turns import STEP_REWARDS, discount_later_turns, find_turns, sum_of_steps
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
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
class PPO(PolicyGradient):
    """Proximal policy optimization with a critic (arXiv 1707.06347), as used for language models (InstructGPT, 2203.02155).

    policy: the loss of a policy gradient, with GAE's credit for each token
    value:  value_scale x mean over tokens of max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2

    Two learners, ``policy`` and ``value``, which train on the same batch with separate optimizers. A group may be a single rollout.

    The last token of a rollout gets the rollout's reward minus its step rewards, which are placed where each step ends
    (``strop.environments.base.reward`` with ``per_turn``); all others get 0. ``kl.place`` says where the KL term goes:
    token_reward subtracts weight x estimate from each token's reward (InstructGPT, with estimator k1), reward subtracts their sum
    from the last token's reward, and loss adds the term to the policy's loss.

    Before ``policy_training_start_step`` only the critic trains. The critic has its own optimizer, so ``value_scale`` only has an effect
    if its gradient norm is clipped, or if its optimizer is not scale-invariant.

    Metrics: those of a policy gradient; value_loss; value_clipped, the share of tokens for which the clipped loss is larger;
    value_error, mean |V - R|; and, for the critic before the update, explained_variance, 1 - var(R - V) / var(R), which is left out if
    the returns do not vary (R depends on V unless ``lambda_value`` is 1), values_mean and returns_mean.
    """

    advantage: Gae = Gae()
    objective: Objective = Clip()
    value_scale: float = 1.0
    value_clip: float | None = 0.2  # in units of the reward; None: no clipping
    policy_training_start_step: int = 0

    def validate(self, plan: Plan) -> Iterator[str]:
        yield from super().validate(plan)
        if self.value_scale <= 0:
            yield f"value_scale is {self.value_scale}: the critic would learn nothing; set it above 0"
        if self.kl is not None and self.kl.weight and self.kl.place == "token_credit":
            yield "kl.place is token_credit, which GAE would overwrite; set it to token_reward, or to loss"
        if self.value_clip is not None and self.value_clip <= 0:
            yield f"value_clip is {self.value_clip}: the values could not change; set it above 0, or to null for no clipping"

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | self.advantage.requires

    def token_rewards(self, batch: Batch) -> Tensor:
        """Return the reward of each token, [N] float64, with the KL term if it is part of the reward."""
        kl = self.kl if self.kl is not None and self.kl.weight else None
        if kl is not None and kl.place == "reward":
            return place_rewards(batch.rewards - kl.weight_in(batch) * kl.sum_per_rollout(batch), batch)
        rewards = place_rewards(batch.rewards, batch)
        if kl is not None and kl.place == "token_reward":
            rewards = rewards - kl.weight_in(batch) * kl.estimate(logprobs_before_update(batch), batch).double()
        return rewards

    def token_credit(self, batch: Batch) -> Batch:
        batch = batch.with_column(TOKEN_REWARDS, self.token_rewards(batch))
        return super().token_credit(batch.with_column(RETURNS, self.advantage.returns(batch)))

    def losses(self, step: int) -> dict[str, LossFn]:
        value: dict[str, LossFn] = {"value": self.value_loss}
        return value if step < self.policy_training_start_step else {**value, "policy": self.loss}

    def loss_terms(self, outputs: Any, batch: Batch, learner: str = "policy") -> LossTerms | None:
        return LossTerms(self.value_terms(outputs, batch)[0]) if learner == "value" else super().loss_terms(outputs, batch)

    def value_terms(self, outputs: ValueOutputs, batch: Batch) -> tuple[list[LossTerm], dict[str, Tensor]]:
        """Return the terms of the critic's loss, and columns [N] whose means over counted tokens are logged."""
        values, returns = outputs.values, batch.column(RETURNS)
        errors = (values - returns).square()
        is_clipped = torch.zeros_like(errors)
        if self.value_clip is not None:
            old_values = batch.column(VALUES)
            clipped_errors = (old_values + (values - old_values).clamp(-self.value_clip, self.value_clip) - returns).square()
            is_clipped = ((values - old_values).abs() > self.value_clip).to(errors.dtype) * (clipped_errors > errors)
            errors = torch.maximum(errors, clipped_errors)
        logged = {"clipped": is_clipped, "error": (values - returns).abs()}
        return [LossTerm("value_error", self.value_scale / 2, errors, aggregate)], logged

    def value_loss(self, outputs: ValueOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        terms, logged = self.value_terms(outputs, batch)
        loss = add_terms(terms, batch)
        return loss, {
            **{name: metrics.total(aggregate(column.detach(), batch)) for name, column in logged.items()},
            "loss": metrics.total(loss),
        }

    def zero_gradient(self, batch: Batch, learner: str = "policy") -> Tensor:
        """Return the rollouts without gradient, [S] bool; none for the critic, which learns from every rollout."""
        return (
            super().zero_gradient(batch, learner) if learner == "policy" else torch.zeros(batch.num_sequences, dtype=torch.bool)
        )

    def report(self, batch: Batch) -> dict[str, float]:
        counted = batch.mask > 0
        values, returns = (batch.column(name)[counted].double() for name in (VALUES, RETURNS))
        if not len(returns):
            return {}
        logged = super().report(batch) | {"train/values_mean": float(values.mean()), "train/returns_mean": float(returns.mean())}
        if varies(returns):
            unexplained = (returns - values).var(correction=0) / returns.var(correction=0)
            logged["train/explained_variance"] = 1 - float(unexplained)
        return logged


@dataclass(frozen=True, kw_only=True)
class VAPO(PPO):
    """VAPO (arXiv 2504.05118): PPO with a critic for long reasoning.

    PPO with plain returns (lambda 1) as the critic's targets, a policy lambda of 1 - 1 / (0.05 l) for a rollout of l tokens, DAPO's
    clip, a log-likelihood term of weight 0.1 on correct rollouts, and 50 steps in which only the critic trains.

    A rollout of at most 20 tokens has lambda 0. A rollout with a reward above 0 is correct. The paper initializes the critic from a reward
    model and samples 16 rollouts per prompt; set both in the run's configuration. The paper does not say whether advantages are whitened;
    here they are, as in PPO.

    Metrics: PPO's.
    """

    advantage: Gae = Gae(lambda_value=1.0, length_adaptive_alpha=0.05)
    objective: Objective = Clip(low=0.2, high=0.28)
    positive_nll: float = 0.1
    policy_training_start_step: int = 50


@dataclass(frozen=True, kw_only=True)
class BiLevelPPO(PPO):
    """Bi-level GAE (VAGEN, Wang et al. 2025, arXiv 2510.16907; RAGEN, arXiv 2504.20073): over turns, then over the tokens of each turn.

    PPO whose critic's errors are discounted over turns, and within each turn over tokens. Metrics: PPO's.
    """

    name: ClassVar[str] = "bi_level_gae"

    advantage: Gae = BiLevelGae()
