"""Policy gradients: one algorithm with independently chosen parts. GRPO, DAPO, RLOO and others are compositions of parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from strop import metrics
from strop.algorithms.base import LossTerm, LossTerms, Plan, TokenOutputs, add_terms
from strop.algorithms.functional import aggregate, sequence_sum, varies
from strop.algorithms.policy_gradient import step_weights
from strop.algorithms.policy_gradient.composition import Composition, check_composition, split_terms
from strop.algorithms.policy_gradient.parts import GroupRewards, check_per_token
from strop.algorithms.policy_gradient.rewards import (
    compared_rewards,
    mask_sequence_errors,
    rewards_by_name,
    shape_rewards,
    subtract_kl,
)
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch, Group


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Composition):
    """loss = -aggregate(objective x corrections x selection) + KL term - entropy bonus."""

    def validate(self, plan: Plan) -> Iterator[str]:
        yield from check_composition(self, plan)

    def keep(self, group: Group) -> bool:
        return not self.drop_constant_groups or any(varies(rewards) for rewards in compared_rewards(group, self.advantage))

    def rewards(self, group: Group) -> Tensor:
        return shape_rewards(group.rollouts, self.shaping)

    def advantages(self, group: Group) -> Tensor:
        by_name = rewards_by_name(group) if self.advantage.needs_named_rewards else {}
        greedy_reward = None if group.baseline is None else float(shape_rewards([group.baseline], self.shaping))
        return self.advantage.rollout_advantages(
            GroupRewards(rewards=self.rewards(group), lengths=group.lengths, by_name=by_name, greedy_reward=greedy_reward)
        )

    def rollout_mask(self, group: Group) -> Tensor:
        return torch.tensor([not (self.overlong_filtering and rollout.truncated) for rollout in group.rollouts])

    def token_credit(self, batch: Batch) -> Batch:
        adjusted = batch
        if self.kl is not None and self.kl.weight and self.kl.place != "loss":
            adjusted = subtract_kl(self.kl, batch, self.advantage)
        advantages = self.advantage.token_advantages(step_weights.with_credit_weights(adjusted, self.corrections, self.advantage))
        return replace(batch, advantages=self.bound_advantages(advantages, batch))

    def prepare_step(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        columns: dict[str, Tensor] = {}
        if outputs is not None:
            if (threshold := self.seq_logprob_error_threshold) is not None:
                batch = mask_sequence_errors(batch, self.old_logprobs(outputs.logprobs, batch)[1], threshold)
            if self.weighs_whole_steps:
                mismatch, options = self.mismatch(outputs.logprobs, batch), {"normalize": self.normalize_weights}
                batch = step_weights.correct_step(
                    batch, mismatch, self.corrections, rejected_in_divisor=self.rejected_in_divisor, **options
                )
            if self.selection is not None:
                columns["selected"] = self.selection.choose(self.policy_tokens(outputs, batch))
            if self.objective.needs_step_outputs:
                columns.update(self.objective.prepare_step(self.policy_tokens(outputs, batch)))
            if self.entropy_target is not None:
                below = aggregate(outputs.entropy, batch) < self.entropy_target
                columns["entropy_bonus"] = torch.full((len(batch.target),), float(below))
        if self.positive_nll:
            positive = (batch.rewards > 0).float()[batch.sequence] * batch.mask
            columns["positive"] = positive * (batch.totals.tokens / max(float(positive.sum()), 1.0))
        return batch.with_columns(columns)

    def zero_gradient(self, batch: Batch, learner: str = "policy") -> Tensor:
        """Return the rollouts with all advantages 0, [S] bool, mostly of groups that do not vary; none if the loss has other terms."""
        return (sequence_sum(batch.advantages.abs(), batch) == 0) & self.learns_from_advantages_alone(learner)

    def terms(self, outputs: TokenOutputs, batch: Batch) -> tuple[list[LossTerm], dict[str, Tensor]]:
        """Return what the loss adds up, and columns [N] whose means over counted tokens are logged."""
        tokens = self.policy_tokens(outputs, batch)
        objective, columns = check_per_token(self.objective, "__call__", self.objective(tokens), len(tokens.logprobs))
        weights, correction_columns = step_weights.correction_weights(self.corrections, self.mismatch(outputs.logprobs, batch))
        stages, columns = {"objective": objective, "correction": objective * weights}, {**columns, **correction_columns}
        if "selected" in batch.columns:
            stages["selection"] = stages["correction"] * batch.column("selected")
            columns["tokens_selected"] = batch.column("selected")
        terms = [LossTerm("objective", -1.0, [*stages.values()][-1], self.aggregate_tokens, stages=stages)]
        columns = {"probs_ratio": tokens.ratio, **columns}
        if self.kl is not None and self.kl.weight:
            kl = self.kl.estimate(outputs.logprobs, batch)
            columns["kl_penalty"] = kl
            if self.kl.place == "loss":
                weighed = self.kl.weigh(outputs.logprobs, tokens.sampler_log_ratio, batch) if self.kl.unbiased else kl
                terms.append(LossTerm("kl", self.kl.weight, weighed, self.aggregate_tokens))
        if self.entropy_bonus:
            bonus = outputs.entropy * batch.columns.get("entropy_bonus", batch.mask)
            terms.append(LossTerm("entropy", -self.entropy_bonus, bonus, self.aggregate_tokens))
        if self.positive_nll:
            terms.append(LossTerm("positive_nll", -self.positive_nll, outputs.logprobs * batch.column("positive"), aggregate))
        return terms, columns

    def loss(self, outputs: TokenOutputs, batch: Batch) -> tuple[Tensor, Metrics]:
        terms, columns = self.terms(outputs, batch)
        loss = add_terms(terms, batch)
        logged = {name: metrics.total(aggregate(column.detach(), batch)) for name, column in columns.items()}
        logged["probs_ratio_max"] = metrics.maximum((columns["probs_ratio"] * batch.mask).max() if len(batch.mask) else 0.0)
        return loss, {**logged, **step_weights.logged_steps(batch), "loss": metrics.total(loss)}

    def loss_terms(self, outputs: TokenOutputs, batch: Batch, learner: str = "policy") -> LossTerms | None:
        return split_terms(self, outputs, batch, *self.terms(outputs, batch))
