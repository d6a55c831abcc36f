"""Checks of what a policy gradient's part returns, and of what its class declares about its formula."""

from __future__ import annotations

from collections.abc import Mapping

from strop.algorithms.policy_gradient.parts import Objective, Part
from strop.lazy_torch import Tensor, torch


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
