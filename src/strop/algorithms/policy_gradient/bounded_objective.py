"""Objectives that bound what a token may contribute, and what the contribution would be without the bound."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from strop.algorithms.policy_gradient.parts import Objective, PolicyTokens
from strop.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BoundedObjective(Objective):
    """An objective with a clip or a mask, whose effect the token ledger shows separately."""

    bound_columns: ClassVar[tuple[str, ...]] = ("ratio_clipped",)  # columns of the objective's result: 1 where the bound acts

    @abstractmethod
    def unbounded(self, tokens: PolicyTokens) -> Tensor:
        """Return what each token would contribute without the bound, [N]."""
