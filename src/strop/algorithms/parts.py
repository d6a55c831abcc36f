"""The parts a policy-gradient algorithm is composed of, and what each of them is shown.

    rewards of a group -> Advantage -> [N] credit -> Objective -> [N] terms -> x Correction x Selection -> aggregate -> loss

A part is a frozen dataclass. Its class name in snake case, or ``name`` where it sets one, is what a configuration calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from strop.algorithms.base import Plan
from strop.algorithms.functional import exponential
from strop.types import Batch


@dataclass(frozen=True, kw_only=True)
class GroupRewards:
    """What a baseline may look at in one group."""

    rewards: Tensor  # [G] float64
    lengths: Tensor  # [G] float64: sampled tokens
    parts: Mapping[str, Tensor] = field(default_factory=dict)  # [G] float64: each reward by name, not weighted
    greedy: float | None = None  # the reward of the group's greedy rollout, where one was asked for


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """What an objective is shown of the N sampled tokens of (a part of) an optimizer step. Whole rollouts, always."""

    logprobs: Tensor  # [N] of the policy that is trained, differentiable
    before: Tensor  # [N] of the older policy the ratio is taken to; no gradient
    sampler: Tensor  # [N] as the sampler recorded them
    entropy: Tensor  # [N] differentiable
    advantages: Tensor  # [N]
    batch: Batch

    @property
    def log_ratio(self) -> Tensor:  # [N]
        return self.logprobs - self.before

    @property
    def ratio(self) -> Tensor:  # [N]
        return exponential(self.log_ratio)


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """What a correction is shown: by how much the learner's policy before the update differs from the one that sampled."""

    log_ratio: Tensor  # [N] log-probability by the learner before the update minus by the sampler; no gradient
    advantages: Tensor  # [N]
    batch: Batch
    now: Tensor | None = None  # [N] the same by the learner as it is now; None: it has not been updated yet


@dataclass(frozen=True, kw_only=True)
class Part(ABC):  # noqa: B024 - what is abstract differs from part to part
    """What all parts share."""

    name: ClassVar[str] = ""  # what a configuration calls it; empty: the class name in snake case

    def problems(self, plan: Plan) -> Iterator[str]:
        """Why this part makes no sense in such a run."""
        return iter(())


@dataclass(frozen=True, kw_only=True)
class Advantage(Part):
    """Rewards of a group -> credit of its rollouts."""

    greedy_baseline: ClassVar[bool] = False  # needs a greedy rollout beside each group
    needs_parts: ClassVar[bool] = False  # looks at rewards by name
    divides_by_mean: ClassVar[bool] = False  # takes the mean reward for a success rate: none may be negative
    smallest_group: ClassVar[int] = 2
    requires: ClassVar[frozenset[str]] = frozenset()  # columns that ``over_batch`` reads

    @abstractmethod
    def relative(self, group: GroupRewards) -> Tensor:
        """Credit per rollout, [G] float64."""

    def over_batch(self, batch: Batch) -> Tensor:
        """Credit per token, [N], once the whole batch is known: where advantages are whitened."""
        return batch.advantages

    def problems(self, plan: Plan) -> Iterator[str]:
        if plan.group_size < self.smallest_group:
            yield (
                f"the group size is {plan.group_size}, but {type(self).__name__} compares the rollouts of a group, at least "
                f"{self.smallest_group} of them; raise num_generations_per_prompt"
            )


@dataclass(frozen=True, kw_only=True)
class Objective(Part):
    """Log-probabilities and credit -> what each token contributes, to be maximised."""

    silent_without_credit: ClassVar[bool] = True  # a rollout whose advantages are all 0 has exactly no gradient
    surveys: ClassVar[bool] = False  # ``survey`` needs the outputs of the whole optimizer step
    sequence_level: ClassVar[bool] = False  # one ratio a rollout: a mean over tokens would weigh long rollouts twice
    own_correction: ClassVar[bool] = False  # takes its ratio to the sampler by itself
    takes_ratio: ClassVar[bool] = True  # to the policy that ``ratio_to`` names; False: to none, or to one of its own
    needs_drift: ClassVar[bool] = False  # does nothing as long as the ratio is 1

    @abstractmethod
    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        """The contribution of each token, [N], and columns [N] whose means over counted tokens are logged."""

    def survey(self, tokens: PolicyTokens) -> Mapping[str, Tensor]:
        """Columns [N] that depend on the whole optimizer step, whose tokens are all shown here; its batch gets them."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Correction(Part):
    """Weights for tokens whose probabilities under sampler and learner differ. They carry no gradient."""

    reweights: ClassVar[bool] = True  # False: only keeps or drops

    @abstractmethod
    def weights(self, mismatch: Mismatch) -> tuple[Tensor, dict[str, Tensor]]:
        """One weight per token, [N], and columns [N] whose means over counted tokens are logged."""


@dataclass(frozen=True, kw_only=True)
class Selection(Part):
    """Which tokens have a gradient at all, decided on the whole optimizer step. The others still count in every total."""

    @abstractmethod
    def choose(self, tokens: PolicyTokens) -> Tensor:
        """[N] float: 1 where the token is trained on, 0 where it is not."""


@dataclass(frozen=True, kw_only=True)
class Shaping(Part):
    """A change of rewards before any baseline sees them."""

    @abstractmethod
    def shape(self, rewards: Tensor, lengths: Tensor, truncated: Tensor) -> Tensor:
        """rewards [G] float64, sampled tokens [G], whether a length limit cut the rollout [G] bool -> rewards [G]."""
