"""Building Strop's algorithms for a test from parts by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from strop import algorithm_factory
from strop.algorithms.base import Algorithm
from strop.algorithms.policy_gradient.base import PolicyGradient
from strop.algorithms.policy_gradient.parts import Advantage, GroupRewards, Part


@dataclass(frozen=True, kw_only=True)
class Given(Advantage):
    """Rewards as they are: for tests of what comes after credit."""

    def rollout_advantages(self, group: GroupRewards) -> Tensor:
        return group.rewards


def part(name: str, **options: Any) -> Any:
    """The part that a configuration calls ``name``."""
    if name not in algorithm_factory.all_parts():
        pytest.skip(f"{name} is an extension's", allow_module_level=True)
    kind: type[Part] = algorithm_factory.all_parts()[name]
    return kind(**options)


def algorithm(name: str, **options: Any) -> Algorithm:
    if name not in algorithm_factory.all_algorithms():
        pytest.skip(f"{name} is an extension's", allow_module_level=True)
    return algorithm_factory.all_algorithms()[name](**options)


def policy_gradient(**options: Any) -> PolicyGradient:
    """A policy gradient with the clip and rewards as advantages, unless told otherwise. Truncated rollouts do not count."""
    return PolicyGradient(**{"advantage": Given(), "objective": part("clip"), "overlong_filtering": True, **options})
