"""A policy gradient composed of parts: its options, what follows from them, and which combinations cannot work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from strop.algorithms.base import CLIPPED, CORRECTION, SELECTED, Algorithm, LossTerm, LossTerms, Plan, TokenOutputs
from strop.algorithms.functional import POLICY_COLUMNS, POLICY_LOGPROBS, Aggregation, aggregate, bounded_difference
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.parts import (
    Advantage,
    BoundedObjective,
    Correction,
    Mismatch,
    Objective,
    PolicyTokens,
    Selection,
    Shaping,
    has_no_gradient_without_advantage,
)
from strop.algorithms.policy_gradient.rewards import check_threshold
from strop.algorithms.policy_gradient.step_weights import correction_weights
from strop.algorithms.policy_gradient.turns import replace_advantages
from strop.lazy_torch import Tensor
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class Composition(Algorithm):
    """The parts and options of a policy gradient."""

    advantage: Advantage
    objective: Objective
    corrections: tuple[Correction, ...] = ()
    selection: Selection | None = None
    shaping: Shaping | None = None
    kl: Kl | None = None
    aggregation: Aggregation = "token_mean"
    constant_length: int | None = None
    ratio_to: Literal["learner", "sampler", "between"] = "learner"  # the policy in the denominator of the ratio
    proximal_weight: float = 0.5  # for ratio_to between: the weight a of the policy in log pi_o = log mu + a (log pi - log mu)
    on_policy_ratio: bool = False  # the ratio is exp(logprob - stop_gradient(logprob)), with value 1
    entropy_bonus: float = 0.0  # weight of the entropy in the objective, which is maximized
    entropy_target: float | None = None  # nats: the bonus applies only while the step's mean entropy is below this
    positive_nll: float = 0.0  # weight of -log-probability of rollouts with a positive reward (VAPO, arXiv 2504.05118)

    advantage_low: float | None = None  # clip advantages from below
    advantage_high: float | None = None
    drop_constant_groups: bool = False  # dynamic sampling (DAPO): replace groups with equal rewards
    overlong_filtering: bool = False  # truncated rollouts count in the baseline, but not in the loss
    # leave out rollouts whose mean exp|learner's log-probability - sampler's| is above this (NeMo-RL)
    seq_logprob_error_threshold: float | None = None
    normalize_weights: bool = False  # divide the weights of corrections by their mean over the optimizer step (verl)
    rejected_in_divisor: bool = True  # False: tokens that a correction rejects leave the divisor of the loss too (verl)

    @property
    def requires(self) -> frozenset[str]:
        in_kl = frozenset[str]() if self.kl is None else self.kl.requires
        return in_kl | (self.advantage.requires & POLICY_COLUMNS)

    @property
    def weighs_whole_steps(self) -> bool:
        """Whether the weights of corrections depend on the whole optimizer step."""
        return bool(self.corrections) and (self.normalize_weights or not self.rejected_in_divisor)

    @property
    def greedy_baseline(self) -> bool:
        return self.advantage.greedy_baseline

    @property
    def needs_step_outputs(self) -> bool:
        optional = (self.selection, self.entropy_target, self.seq_logprob_error_threshold)
        needed = self.objective.needs_step_outputs or self.weighs_whole_steps
        return needed or any(option is not None for option in optional)

    def learns_from_advantages_alone(self, learner: str) -> bool:
        """Whether ``learner``'s loss has no term left when all advantages of a rollout are 0."""
        kl_in_loss = self.kl is not None and self.kl.weight and self.kl.place == "loss"
        others = kl_in_loss or self.entropy_bonus or self.positive_nll
        return learner == "policy" and not others and has_no_gradient_without_advantage(self.objective)

    def bound_advantages(self, advantages: Tensor, batch: Batch) -> Tensor:
        """Return the advantages [N] within their bounds, with the advantages given to single turns in their place."""
        if self.advantage_low is not None or self.advantage_high is not None:
            advantages = advantages.clamp(self.advantage_low, self.advantage_high)
        return replace_advantages(advantages, batch)

    def report(self, batch: Batch) -> dict[str, float]:
        return {} if self.kl is None else self.kl.report(batch)

    def old_logprobs(self, logprobs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [N] from before the update: those in the denominator of the ratio, and the learner's.

        With one optimizer step per batch, the learner's are the current ones. ``ratio_to`` between approximates them.
        """
        current = logprobs.detach()
        learner = batch.columns.get(POLICY_LOGPROBS, current)
        if self.ratio_to == "between":
            learner = batch.rollout_logprobs + self.proximal_weight * bounded_difference(current, batch.rollout_logprobs)
        older = batch.rollout_logprobs if self.ratio_to == "sampler" else learner
        return current if self.on_policy_ratio else older, learner

    def policy_tokens(self, outputs: TokenOutputs, batch: Batch) -> PolicyTokens:
        old_logprobs, _ = self.old_logprobs(outputs.logprobs, batch)
        return PolicyTokens(
            logprobs=outputs.logprobs, old_logprobs=old_logprobs, rollout_logprobs=batch.rollout_logprobs, entropy=outputs.entropy,
            advantages=batch.advantages, batch=batch,
        )  # fmt: skip

    def aggregate_tokens(self, values: Tensor, batch: Batch) -> Tensor:
        """Reduce a term of the loss from its values for each token, [N] -> []."""
        return aggregate(values, batch, self.aggregation, self.constant_length)

    def mismatch(self, logprobs: Tensor, batch: Batch) -> Mismatch:
        """Return how far the learner is from the sampler, the input of corrections. ``logprobs`` [N] are the current policy's."""
        _, learner = self.old_logprobs(logprobs, batch)
        return Mismatch(
            log_ratio=learner - batch.rollout_logprobs, current_log_ratio=logprobs.detach() - batch.rollout_logprobs,
            advantages=batch.advantages, batch=batch,
        )  # fmt: skip


def split_terms(
    algorithm: Composition, outputs: TokenOutputs, batch: Batch, terms: Sequence[LossTerm], columns: Mapping[str, Tensor]
) -> LossTerms:
    """Split the loss into terms: the objective without a clip, and the change made by each part.

    Stages without effect, because the algorithm has no such part, are left out. ``columns``: the logged columns of the loss, [N]
    each.
    """
    objective, *others = terms
    stages = dict(objective.stages)
    known: dict[str, Tensor] = {}
    if isinstance(algorithm.objective, BoundedObjective):
        unbounded = algorithm.objective.unbounded(algorithm.policy_tokens(outputs, batch))
        stages = {"objective": unbounded, "clip": stages.pop("objective"), **stages}
        known[CLIPPED] = sum((columns[name] for name in algorithm.objective.bound_columns), 0 * outputs.logprobs).clamp(max=1)
    if algorithm.corrections:
        known[CORRECTION] = correction_weights(algorithm.corrections, algorithm.mismatch(outputs.logprobs, batch))[0]
    else:
        del stages["correction"]
    if "tokens_selected" in columns:
        known[SELECTED] = columns["tokens_selected"]
    return LossTerms(
        terms=[replace(objective, stages=stages), *others], columns={name: each.detach() for name, each in known.items()}
    )


# The checks that the parts of a policy gradient fit together.


def check_composition(algorithm: Composition, plan: Plan) -> Iterator[str]:
    """Yield a message for each problem of the composition: what is set, why it cannot work, and what to set instead."""
    for part in (algorithm.advantage, algorithm.objective, *algorithm.corrections, algorithm.selection, algorithm.shaping):
        if part is not None:
            yield from part.validate(plan)
    if missing := sorted(algorithm.advantage.requires - algorithm.requires):
        yield (
            f"{type(algorithm.advantage).__name__} reads the columns {missing}, which this algorithm does not require; use gae with ppo, "
            "and reverse_kl with distillation"
        )
    yield from _check_rewards(algorithm)
    yield from _check_aggregation(algorithm)
    yield from _check_ratio(algorithm, plan)
    yield from _check_sampler(algorithm, plan)
    if algorithm.drop_constant_groups and plan.group_size < 2 and not algorithm.advantage.greedy_baseline:
        yield (
            "dynamic sampling drops groups with equal rewards, and a group of one always has equal rewards; raise "
            "num_generations_per_prompt, or set use_dynamic_sampling=false"
        )
    low, high = algorithm.advantage_low, algorithm.advantage_high
    if low is not None and high is not None and low > high:
        yield (
            f"advantages are clipped to [{low}, {high}], which is empty; set advantage_clip_low below advantage_clip_high, or one of "
            "them to null"
        )
    yield from check_threshold(algorithm.seq_logprob_error_threshold)
    if algorithm.entropy_target is not None and not algorithm.entropy_bonus:
        yield "entropy_target is set, but entropy_bonus is 0, so it has no effect; set both"


def _check_rewards(algorithm: Composition) -> Iterator[str]:
    advantage, kl = algorithm.advantage, algorithm.kl
    if advantage.needs_named_rewards and algorithm.shaping is not None:
        yield (
            f"{type(algorithm.shaping).__name__} changes the sum of the rewards, but {type(advantage).__name__} uses each reward "
            "separately: remove the shaping, or make it a reward of the environment"
        )
    in_reward = kl is not None and bool(kl.weight) and kl.place == "reward"
    if in_reward and (advantage.greedy_baseline or advantage.needs_named_rewards):
        yield (
            f"{type(advantage).__name__} defines no baseline for a KL term in the rollout's reward; "
            "put the KL term in the loss, or in token_reward"
        )
    if advantage.divides_by_mean and (algorithm.shaping is not None or in_reward):
        source = "the KL term in the reward" if in_reward else f"the shaping {type(algorithm.shaping).__name__}"
        yield (
            f"{type(advantage).__name__} divides by the mean reward as a success rate, but {source} makes rewards negative; "
            "remove it, or put the KL term in the loss"
        )


def _check_aggregation(algorithm: Composition) -> Iterator[str]:
    if algorithm.aggregation == "constant_length" and not algorithm.constant_length:
        yield (
            "aggregation constant_length divides by constant_length, which is not set; set it (loss_fn.constant_length), for instance "
            "to ${policy.generation.max_new_tokens}"
        )
    if algorithm.objective.sequence_level and algorithm.aggregation == "token_mean":
        yield (
            f"{type(algorithm.objective).__name__} has one ratio per rollout, so a mean over tokens gives long rollouts more weight; "
            "set aggregation sequence_mean (loss_fn.token_level_loss=false, as GSPO does)"
        )


def _check_sampler(algorithm: Composition, plan: Plan) -> Iterator[str]:
    """Rollouts sampled with rounded weights are off-policy by more than rounding errors, so the loss must correct for it."""
    corrects = algorithm.ratio_to != "learner" or algorithm.objective.corrects_for_sampler or bool(algorithm.corrections)
    if plan.quantized_rollouts and not corrects:
        yield (
            f"rollouts are sampled with weights in {plan.quantized_rollouts}, which differ from the trained weights, and nothing in the "
            "loss corrects for that; set loss_fn.use_importance_sampling_correction=true, best with "
            "loss_fn.truncated_importance_sampling_type=tis and loss_fn.truncated_importance_sampling_ratio=2"
        )


def _check_ratio(algorithm: Composition, plan: Plan) -> Iterator[str]:
    reweighting = [type(correction).__name__ for correction in algorithm.corrections if correction.reweights]
    if algorithm.normalize_weights and not reweighting:
        yield (
            "normalize_weights divides the weights of a correction by their mean, but no correction reweights; add one, for example tis, "
            "or set it to false"
        )
    if not algorithm.rejected_in_divisor and not any(correction.rejects for correction in algorithm.corrections):
        yield (
            "rejected_in_divisor is false, but no correction rejects anything; add one that does, for example geometric_rejection, or "
            "set it to true"
        )
    if len(reweighting) > 1:
        yield f"{' and '.join(reweighting)} each multiply by the ratio of learner to sampler: keep one of them"
    if reweighting and (algorithm.ratio_to == "sampler" or algorithm.objective.corrects_for_sampler):
        yield (
            f"{reweighting[0]} multiplies by the ratio of learner to sampler, but the objective's ratio is already relative to the "
            "sampler: it would count twice. Remove the correction, or set ratio_to learner"
        )
    if algorithm.on_policy_ratio and algorithm.ratio_to != "learner":
        yield (
            f"on_policy_ratio makes the ratio 1, but ratio_to {algorithm.ratio_to} makes it relative to the sampler: set only one "
            "of them"
        )
    objective = type(algorithm.objective).__name__
    setting = "on_policy_ratio" if algorithm.on_policy_ratio else f"ratio_to {algorithm.ratio_to}"
    if not algorithm.objective.uses_ratio_to and setting != "ratio_to learner":
        yield (
            f"{objective} has no ratio, or defines its own, so {setting} would change nothing; remove it, or change the objective"
        )
    if not 0 <= algorithm.proximal_weight <= 1:
        yield f"proximal_weight is {algorithm.proximal_weight}, not between 0 (sampler) and 1 (policy); set for example 0.5"
    drifts = algorithm.ratio_to != "learner" or plan.optimizer_steps > 1
    if algorithm.objective.needs_drift and (algorithm.on_policy_ratio or not drifts):
        yield (
            f"{objective} keeps the policy near where it was before the update, but with one optimizer step per batch it has not "
            "moved, so the term has no effect; run several optimizer steps per batch, or set ratio_to sampler"
        )
    if algorithm.on_policy_ratio and plan.optimizer_steps > 1:
        yield (
            f"on_policy_ratio (loss_fn.force_on_policy_ratio) sets the ratio to 1, but there are {plan.optimizer_steps} optimizer steps "
            "per batch, and from the second on the ratio is not 1; set it to false, or run one optimizer step per batch"
        )
