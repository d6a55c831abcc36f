"""The composition of a policy gradient from parts, and the checks that its parts fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from strop.algorithms.base import Algorithm, Plan
from strop.algorithms.functional import Aggregation
from strop.algorithms.kl import Kl
from strop.algorithms.policy_gradient.parts import Advantage, Correction, Objective, Selection, Shaping
from strop.algorithms.policy_gradient.sequence_error import check_threshold


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

    @property
    def requires(self) -> frozenset[str]:
        return frozenset() if self.kl is None else self.kl.requires

    @property
    def greedy_baseline(self) -> bool:
        return self.advantage.greedy_baseline

    @property
    def needs_step_outputs(self) -> bool:
        optional = (self.selection, self.entropy_target, self.seq_logprob_error_threshold)
        return self.objective.needs_step_outputs or any(option is not None for option in optional)

    def validate(self, plan: Plan) -> Iterator[str]:
        """Yield a message for each problem of the composition: what is set, why it cannot work, and what to set instead."""
        for part in (self.advantage, self.objective, *self.corrections, self.selection, self.shaping):
            if part is not None:
                yield from part.validate(plan)
        if missing := sorted(self.advantage.requires - self.requires):
            yield (
                f"{type(self.advantage).__name__} reads the columns {missing}, which this algorithm does not require; use gae with ppo, "
                "and reverse_kl with distillation"
            )
        yield from _check_rewards(self)
        yield from _check_aggregation(self)
        yield from _check_ratio(self, plan)
        if self.drop_constant_groups and plan.group_size < 2 and not self.advantage.greedy_baseline:
            yield (
                "dynamic sampling drops groups with equal rewards, and a group of one always has equal rewards; raise "
                "num_generations_per_prompt, or set use_dynamic_sampling=false"
            )
        low, high = self.advantage_low, self.advantage_high
        if low is not None and high is not None and low > high:
            yield (
                f"advantages are clipped to [{low}, {high}], which is empty; set advantage_clip_low below advantage_clip_high, or one of "
                "them to null"
            )
        yield from check_threshold(self.seq_logprob_error_threshold)
        if self.entropy_target is not None and not self.entropy_bonus:
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


def _check_ratio(algorithm: Composition, plan: Plan) -> Iterator[str]:
    reweighting = [type(correction).__name__ for correction in algorithm.corrections if correction.reweights]
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
