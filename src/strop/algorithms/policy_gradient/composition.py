"""The composition of a policy gradient from parts: its options, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from strop.algorithms.base import Algorithm, TokenOutputs
from strop.algorithms.functional import POLICY_COLUMNS, POLICY_LOGPROBS, Aggregation, aggregate, bounded_difference
from strop.algorithms.kl import Kl
from strop.algorithms.loss_terms import CLIPPED, CORRECTION, SELECTED, LossTerm, LossTerms
from strop.algorithms.policy_gradient.bounded_objective import BoundedObjective
from strop.algorithms.policy_gradient.corrections.step_weights import correction_weights
from strop.algorithms.policy_gradient.part_checks import has_no_gradient_without_advantage
from strop.algorithms.policy_gradient.parts import Advantage, Correction, Mismatch, Objective, PolicyTokens, Selection, Shaping
from strop.algorithms.policy_gradient.process.turn_advantages import replace_advantages
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
