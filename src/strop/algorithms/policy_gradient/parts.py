"""The parts of a policy-gradient algorithm, and their inputs.

rewards of a group -> Advantage -> [N] credit -> Objective -> [N] terms -> x Correction x Selection -> aggregate -> loss
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from strop.algorithms.base import Plan
from strop.algorithms.functional import bounded_difference, bounded_exp
from strop.lazy_torch import Tensor, torch
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """The rewards of one group, the input of an ``Advantage``."""

    rewards: Tensor  # [G] float64
    lengths: Tensor  # [G] float64: sampled tokens
    by_name: Mapping[str, Tensor] = field(default_factory=dict)  # [G] float64: each reward by name, unweighted
    greedy_reward: float | None = None  # the reward of the group's greedy rollout, if there is one


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """The N sampled tokens of an optimizer step, or of a micro-batch of whole rollouts: the input of an ``Objective``."""

    logprobs: Tensor  # [N] of the trained policy, differentiable
    old_logprobs: Tensor  # [N] log-probabilities in the denominator of the ratio; no gradient
    rollout_logprobs: Tensor  # [N] log-probabilities recorded by the sampler
    entropy: Tensor  # [N] differentiable
    advantages: Tensor  # [N]
    batch: Batch

    @property
    def log_ratio(self) -> Tensor:  # [N]
        return bounded_difference(self.logprobs, self.old_logprobs)

    @property
    def sampler_log_ratio(self) -> Tensor:  # [N] log of the ratio to the sampling policy
        return bounded_difference(self.logprobs, self.rollout_logprobs)

    @property
    def ratio(self) -> Tensor:  # [N]
        return bounded_exp(self.log_ratio)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The difference between the learner's policy before the update and the sampling policy: the input of a ``Correction``."""

    log_ratio: Tensor  # [N] learner's log-probability before the update minus the sampler's; no gradient
    advantages: Tensor  # [N]
    batch: Batch
    current_log_ratio: Tensor | None = None  # [N] the same with the current learner; None: it has not been updated yet


@dataclass(frozen=True, kw_only=True)
class Part(ABC):  # noqa: B024 - the abstract methods differ between parts
    """The base class of all parts."""

    name: ClassVar[str] = ""  # name in a configuration; empty: the class name in snake case

    def validate(self, plan: Plan) -> Iterator[str]:
        """Yield a message for each reason why this part cannot be used in such a run."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Advantage(Part):
    """Computes the credit of rollouts from the rewards of their group."""

    greedy_baseline: ClassVar[bool] = False  # needs a greedy rollout for each group
    needs_named_rewards: ClassVar[bool] = False  # reads rewards by name
    needs_step_rewards: ClassVar[bool] = False  # reads step rewards
    reads_weights: ClassVar[bool] = False  # reads the column CORRECTION_WEIGHTS
    divides_by_mean: ClassVar[bool] = False  # divides by the mean reward as a success rate, so no reward may be negative
    min_group_size: ClassVar[int] = 2
    requires: ClassVar[frozenset[str]] = frozenset()  # columns that ``token_advantages`` reads

    @abstractmethod
    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        """Return the credit of each rollout, [G] float64."""

    def token_advantages(self, batch: Batch) -> Tensor:
        """Return the credit of each token, [N], from the whole batch, for example by whitening."""
        return batch.advantages

    def validate(self, plan: Plan) -> Iterator[str]:
        if plan.group_size < self.min_group_size:
            yield (
                f"the group size is {plan.group_size}, but {type(self).__name__} compares at least {self.min_group_size} rollouts of a "
                "group; raise num_generations_per_prompt"
            )


@dataclass(frozen=True, kw_only=True)
class Objective(Part):
    """Computes the contribution of each token to the objective, which is maximized, from log-probabilities and credit."""

    zero_gradient_without_advantage: ClassVar[bool] = False  # ``__call__``'s class declares: no gradient if all are 0
    needs_step_outputs: ClassVar[bool] = False  # ``prepare_step`` needs the outputs of the whole optimizer step
    sequence_level: ClassVar[bool] = False  # has one ratio per rollout; a mean over tokens would give long rollouts more weight
    corrects_for_sampler: ClassVar[bool] = False  # its ratio is already relative to the sampler
    uses_ratio_to: ClassVar[bool] = True  # its ratio is relative to the policy of ``ratio_to``; False: no ratio, or its own
    needs_drift: ClassVar[bool] = False  # has no effect while the ratio is 1

    @abstractmethod
    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the contribution of each token, [N], and columns [N] whose means over counted tokens are logged."""

    def prepare_step(self, tokens: PolicyTokens) -> Mapping[str, Tensor]:
        """Return columns [N] to add to the batch that depend on the whole optimizer step. ``tokens`` are all its tokens."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Correction(Part):
    """Weights tokens by the difference between their probabilities under sampler and learner. The weights have no gradient."""

    reweights: ClassVar[bool] = True  # False: tokens are only kept or dropped
    rejects: ClassVar[bool] = True  # a weight of 0 is a rejection

    @abstractmethod
    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weight of each token, [N], and columns [N] whose means over counted tokens are logged."""


@dataclass(frozen=True, kw_only=True)
class Selection(Part):
    """Selects the tokens that have a gradient, over the whole optimizer step. The others still count in every total."""

    @abstractmethod
    def choose(self, tokens: PolicyTokens) -> Tensor:
        """Return 1 for tokens to train on and 0 for the others, [N] float."""


@dataclass(frozen=True, kw_only=True)
class Shaping(Part):
    """Changes rewards before a baseline is computed."""

    @abstractmethod
    def shape(self, rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        """Return the shaped rewards [G], from rewards [G] float64, ``lengths`` [G] in sampled tokens and ``truncated`` [G] bool."""


# Objectives that bound what a token may contribute, and what the contribution would be without the bound.


@dataclass(frozen=True, kw_only=True)
class BoundedObjective(Objective):
    """An objective with a clip or a mask, whose effect the token ledger shows separately."""

    bound_columns: ClassVar[tuple[str, ...]] = ("ratio_clipped",)  # columns of the objective's result: 1 where the bound acts

    @abstractmethod
    def unbounded(self, tokens: PolicyTokens) -> Tensor:
        """Return what each token would contribute without the bound, [N]."""


def check_per_token(part: Part, method: str, returned: object, size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a part's result if it has one value for each of the ``size`` tokens, and columns. Raises ValueError."""
    values, columns = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    if isinstance(values, torch.Tensor) and values.shape == (size,) and isinstance(columns, Mapping):
        return values, dict(columns)
    found = f"a tensor of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
    raise ValueError(
        f"{type(part).__name__}.{method} returned {found}{'' if isinstance(columns, Mapping) else ' and no columns'}, but there are {size} "
        "tokens, whose values are weighted, masked and summed afterwards. Return one value for each token, before any sum or mean, and a "
        "dict of columns to log, which may be empty: (values, {})"
    )


def has_no_gradient_without_advantage(objective: Objective) -> bool:
    """Whether the class that defines the objective's formula, or a subclass after it, declares that it has none; a base class
    declares it for itself only.
    """
    kinds = type(objective).__mro__
    formula = next(place for place, kind in enumerate(kinds) if "__call__" in vars(kind))
    said = any("zero_gradient_without_advantage" in vars(kind) for kind in kinds[: formula + 1])
    return said and objective.zero_gradient_without_advantage
