"""The terms that a loss adds up, and what each token, rollout or group contributed to them.

An algorithm computes its loss from its terms (``add_terms``), so what is reported about tokens always matches the training loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Literal

from strop.lazy_torch import Tensor, torch
from strop.types import Batch


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
