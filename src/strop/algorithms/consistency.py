"""Which parts of a policy gradient do not go together, and why: said when a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strop.algorithms.base import Plan

if TYPE_CHECKING:
    from strop.algorithms.policy_gradient import PolicyGradient


def problems_of(algorithm: PolicyGradient, plan: Plan) -> Iterator[str]:
    """What was found, why it cannot work, and what to set instead; nothing where the composition makes sense."""
    for part in (algorithm.advantage, algorithm.objective, *algorithm.corrections, algorithm.selection, algorithm.shaping):
        if part is not None:
            yield from part.problems(plan)
    yield from _aggregation(algorithm)
    yield from _kl(algorithm)
    yield from _ratio(algorithm, plan)
    if algorithm.drop_constant_groups and plan.group_size < 2:
        yield "dynamic sampling drops groups whose rewards are all equal, and every group of one is; raise num_generations_per_prompt"
    low, high = algorithm.advantage_low, algorithm.advantage_high
    if low is not None and high is not None and low > high:
        yield f"advantages are clipped to [{low}, {high}], which is empty; set advantage_clip_low below advantage_clip_high"
    if algorithm.entropy_target is not None and not algorithm.entropy_bonus:
        yield "entropy_target is set and entropy_bonus is 0: there is no bonus to be paid; set both"


def _aggregation(algorithm: PolicyGradient) -> Iterator[str]:
    if algorithm.aggregation == "constant_length" and not algorithm.constant_length:
        yield "aggregation constant_length divides by constant_length, which is not set; set it, for instance to max_new_tokens"
    if algorithm.objective.sequence_level and algorithm.aggregation == "token_mean":
        yield (
            f"{type(algorithm.objective).__name__} has one ratio per rollout, and a mean over tokens weighs long rollouts twice; "
            "set aggregation sequence_mean"
        )


def _kl(algorithm: PolicyGradient) -> Iterator[str]:
    kl = algorithm.kl
    if kl is None or not kl.weight or kl.place != "reward":
        return
    if algorithm.advantage.greedy_baseline or algorithm.advantage.needs_parts:
        yield (
            f"{type(algorithm.advantage).__name__} does not say what a KL term in the rollout's reward is measured against; "
            "put the KL term in the loss, or in token_reward"
        )


def _ratio(algorithm: PolicyGradient, plan: Plan) -> Iterator[str]:
    reweighting = [type(correction).__name__ for correction in algorithm.corrections if correction.reweights]
    if len(reweighting) > 1:
        yield f"{' and '.join(reweighting)} each multiply by the ratio of learner to sampler: keep one of them"
    if reweighting and (algorithm.ratio_to == "sampler" or algorithm.objective.own_correction):
        yield (
            f"{reweighting[0]} multiplies by the ratio of learner to sampler, and the objective's own ratio is already taken to the "
            "sampler: it would count twice. Drop the correction, or set ratio_to learner"
        )
    if algorithm.on_policy_ratio and algorithm.ratio_to == "sampler":
        yield "on_policy_ratio makes the ratio 1, and ratio_to sampler takes it to the sampler's probabilities: set one of them"
    if algorithm.on_policy_ratio and plan.optimizer_steps > 1:
        yield (
            f"on_policy_ratio takes the ratio as 1, but a batch makes {plan.optimizer_steps} optimizer steps and from the second on it is "
            "not; set it to false, or make one step of a batch"
        )
