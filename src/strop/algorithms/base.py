"""The interface of an algorithm: credit, a loss for each learner and a group filter.

An algorithm is a frozen dataclass that holds both its options and its code. It depends only on types and tensors, not on the training loop,
engines or devices. A new algorithm is one file: in this package, where it has the name of the file, or anywhere else as ``module:Class``.

It computes its loss from its terms (``add_terms``), so what is reported about tokens always matches the training loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any, ClassVar, Literal

from strop.algorithms.functional import concatenate_per_rollout
from strop.lazy_torch import Tensor, torch
from strop.metrics import Metrics
from strop.types import Batch, Group, RolloutCredit


@dataclass(frozen=True, eq=False)
class LossTerm:
    """One term of a loss: ``weight`` x ``reduce(values)``. ``reduce`` is linear and divides by ``batch.totals``."""

    name: str
    weight: float
    values: Tensor  # [N], [S] or [groups], as ``per`` says; differentiable
    reduce: Callable[[Tensor, Batch], Tensor]  # (values, batch) -> 0-dimensional
    per: Literal["token", "rollout", "group"] = "token"
    # ``values`` after each step that produced them, by the name of the step: objective, clip, correction. The last entry is
    # ``values``.
    stages: Mapping[str, Tensor] = field(default_factory=dict)

    def total(self, batch: Batch) -> Tensor:
        """Return what the term adds to the loss, 0-dimensional."""
        return self.weight * self.reduce(self.values, batch)

    def parts(self) -> list[LossTerm]:
        """Return one term per stage: the first as it is, then the change made by each further stage. They sum to this term."""
        if not self.stages:
            return [self]
        values = list(self.stages.values())
        changes = [values[0], *(after - before for before, after in pairwise(values))]
        return [replace(self, name=name, values=each, stages={}) for name, each in zip(self.stages, changes, strict=True)]

    def per_token(self, batch: Batch) -> Tensor:
        """Return what each token added to the loss, [N] float64; the sum is ``total``.

        What is computed for a whole rollout or group is spread evenly over its counted tokens.
        """
        values = self.values.detach().double()
        leaf = torch.zeros_like(values, requires_grad=True)
        (share,) = torch.autograd.grad(self.reduce(leaf, batch), leaf)  # of a linear function: its coefficients
        added = self.weight * torch.where(share != 0, values * share, 0.0)
        return added if self.per == "token" else _spread(added, self.per, batch)


@dataclass(frozen=True, eq=False)
class LossTerms:
    """The terms of a loss, and further per-token information."""

    terms: Sequence[LossTerm]
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # [N]: CLIPPED, CORRECTION, SELECTED


CLIPPED = "clipped"  # 1 where a bound changes or removes the gradient of the token's contribution
CORRECTION = "correction"  # product of the correction weights
SELECTED = "selected"  # 0 for tokens outside the selection that has a gradient


def add_terms(terms: Sequence[LossTerm], batch: Batch) -> Tensor:
    """Return the loss that the terms make, 0-dimensional."""
    return reduce(add, (term.total(batch) for term in terms))


def sum_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Reduce values [N] that are already divided."""
    return values.sum()


def _spread(values: Tensor, per: Literal["rollout", "group"], batch: Batch) -> Tensor:
    """Spread one value for each rollout [S] or group evenly over its counted tokens, [N]; over all of them if none counts."""
    unit = batch.sequence if per == "rollout" else batch.group[batch.sequence]
    counted = (batch.mask > 0).double()
    numbers = values.new_zeros(len(values)).index_add(0, unit, counted)[unit]
    everything = torch.bincount(unit, minlength=len(values))[unit]
    return values[unit] * torch.where(numbers > 0, counted / numbers.clamp(min=1), 1 / everything)


@dataclass(frozen=True)
class TokenOutputs:
    """Outputs of a language model for the N predicted tokens, under the sampling distribution."""

    logprobs: Tensor  # [N] float32, differentiable
    entropy: Tensor  # [N] float32, of the same distribution, differentiable
    candidates: Tensor | None = None  # [N, K] log-probabilities of the tokens in the batch's column CANDIDATES, differentiable
    log_sum_sq_probs: Tensor | None = None  # [N] log of the sum over the vocabulary of p^2, for a batch with SQUARED_PROBS


@dataclass(frozen=True)
class ValueOutputs:
    """Outputs of a network with a scalar head for the N predicted tokens: a critic's values or a reward model's scores."""

    values: Tensor  # [N] float32, differentiable


Outputs = TokenOutputs | ValueOutputs
LossFn = Callable[[Any, Batch], tuple[Tensor, Metrics]]  # (outputs of the learner's network, batch) -> (loss, metrics)

CANDIDATES = "candidates"  # a batch column, [N, K] int64: token ids whose log-probabilities the loss needs besides the target's
SQUARED_PROBS = "squared_probs"  # a batch column, [N], of any content: the loss needs ``log_sum_sq_probs``


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Properties of a run that determine whether it can use an algorithm."""

    group_size: int = 1
    optimizer_steps: int = 1  # per batch
    max_staleness: int = 0
    environment_rewards: tuple[str, ...] = ()  # names, if known
    step_rewards: bool = True  # whether an environment rewards steps of a rollout
    quantized_rollouts: str = ""  # number format of the sampling weights, if it differs from the learner's
    turn_states: bool = True  # whether an environment reports the state in which a turn was taken


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Base class of algorithms: credit, losses and a group filter.
    A loss must divide by ``batch.totals`` only, never by the size of its inputs: it is called once per micro-batch and the results are
    summed (law 1). Compute what depends on the whole optimizer step in ``prepare_step``.
    """

    # Kind of recorded data it trains on; empty if it trains on sampled rollouts.
    recorded_data: ClassVar[Literal["", "conversations", "preferences", "judgements"]] = ""
    whole_groups: ClassVar[bool] = False  # its loss compares the rollouts of a group, so a micro-batch must not split one
    predict: ClassVar[Literal["tokens", "last_token"]] = "tokens"  # every sampled token, or one value at the last of a rollout

    @property
    def requires(self) -> frozenset[str]:
        """Names of the columns that must be computed before ``token_credit``, such as ``reference_logprobs``."""
        return frozenset()

    @property
    def greedy_baseline(self) -> bool:
        """Whether each group needs one more rollout that is sampled greedily and not trained on (``Group.baseline``)."""
        return False

    @property
    def needs_step_outputs(self) -> bool:
        """Whether ``prepare_step`` needs the outputs of the whole optimizer step, at the cost of one more forward pass per step."""
        return False

    def validate(self, plan: Plan) -> Iterator[str]:
        """Yield a message, with the fix, for each reason why this algorithm cannot be used in such a run."""
        return iter(())

    def keep(self, group: Group) -> bool:
        """Return whether to train on the group. If not, it is dropped and its slot goes to a new task."""
        return True

    def rollout_mask(self, group: Group) -> Tensor:
        """Return which rollouts count in the loss, [G] bool. The others count in the baseline but not in ``Batch.totals``."""
        return torch.ones(len(group.rollouts), dtype=torch.bool)

    def rewards(self, group: Group) -> Tensor:
        """Return the rewards that the algorithm uses, [G] float64, for example after shaping."""
        return group.rewards

    @abstractmethod
    def advantages(self, group: Group) -> Tensor:
        """Return the credit of each rollout, [G]."""

    def group_credit(self, groups: Sequence[Group]) -> RolloutCredit:
        """Collect ``rewards``, ``advantages`` and ``rollout_mask`` of all rollouts. Raises ValueError if a length differs."""
        return RolloutCredit(
            rewards=concatenate_per_rollout(self.rewards, groups).double(),
            advantages=concatenate_per_rollout(self.advantages, groups).double(),
            mask=concatenate_per_rollout(self.rollout_mask, groups),
            predict=self.predict,
        )

    def token_credit(self, batch: Batch) -> Batch:
        """Compute the credit of each token of the whole batch from the required columns. By default it is the rollout's advantage."""
        return batch

    def report(self, batch: Batch) -> dict[str, float]:
        """Return further metrics of a batch with its credit."""
        return {}

    def prepare_step(self, batch: Batch, outputs: TokenOutputs | None) -> Batch:
        """Add the columns that depend on the whole optimizer step, before it is split into micro-batches.

        ``outputs`` are computed with the weights before this step, without gradient; None unless ``needs_step_outputs``.
        """
        return batch

    def zero_gradient(self, batch: Batch, learner: str = "policy") -> Tensor:
        """Return the rollouts whose loss gradient for ``learner`` is exactly zero, [S] bool; by default none.

        They count in every total and metric, but run without a backward pass, which saves two thirds of their cost.
        """
        return torch.zeros(batch.num_sequences, dtype=torch.bool)

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> tuple[Tensor, Metrics]:
        """Return the loss to minimize, already divided by ``batch.totals``, and its metrics."""

    def loss_terms(self, outputs: Any, batch: Batch, learner: str = "policy") -> LossTerms | None:
        """Return the terms that make up ``learner``'s loss, for the token ledger; None if the algorithm does not expose them."""
        return None

    def losses(self, step: int) -> dict[str, LossFn]:
        """Return one loss for each learner that trains in ``step`` (counted from 0); most algorithms only have a policy."""
        return {"policy": self.loss}
