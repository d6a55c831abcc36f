"""The checks that the parts of a policy gradient fit together."""

from __future__ import annotations

from collections.abc import Iterator

from strop.algorithms.base import Plan
from strop.algorithms.policy_gradient.composition import Composition
from strop.algorithms.policy_gradient.sequence_error import check_threshold


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
