"""Proximal policy optimization with a critic (arXiv 1707.06347), as used for language models (InstructGPT, 2203.02155).

policy: the loss of a policy gradient, with GAE's credit for each token
value:  value_scale x mean over tokens of max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from strop import metrics
from strop.algorithms.base import LossFn, Plan, ValueOutputs
from strop.algorithms.critic.gae import RETURNS, TOKEN_REWARDS, VALUES, Gae, place_rewards
from strop.algorithms.functional import aggregate, logprobs_before_update, varies
from strop.algorithms.loss_terms import LossTerm, LossTerms, add_terms
from strop.algorithms.policy_gradient.advantages.grpo import Clip
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Objective
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class PPO(PolicyGradient):
    """Two learners, ``policy`` and ``value``, which train on the same batch with separate optimizers. A group may be a single rollout.

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
