"""How the parts of a reward count: gates that let others pass, and weights that change from step to step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A reward is computed only if the reward ``reward`` is at least ``at_least``; otherwise it is ``otherwise``."""

    reward: str
    at_least: float = 1.0
    otherwise: float | None = 0.0  # None: the rollout does not get the reward at all
    multiply: bool = False  # the reward is multiplied by the gate's reward

    def opens(self, rewards: Mapping[str, float]) -> bool:
        """Return whether the gate is open; a reward that the rollout lacks opens nothing."""
        return self.reward in rewards and rewards[self.reward] >= self.at_least


def find_closed_gate(gates: Sequence[Gate], rewards: Mapping[str, float]) -> Gate | None:
    return next((gate for gate in gates if not gate.opens(rewards)), None)


def multiply_gates(gates: Sequence[Gate], rewards: Mapping[str, float]) -> float:
    """Return the product of the factors of open gates."""
    factor = 1.0
    for gate in gates:
        factor *= rewards[gate.reward] if gate.multiply else 1.0
    return factor


def sort_by_gates(gates: Mapping[str, Sequence[Gate]]) -> list[str]:
    """Return the names of rewards in their order, but each after the rewards of its gates. Raises ValueError for a cycle."""
    ordered: dict[str, None] = {}

    def place(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(
                f"the gates of the rewards form a cycle: {' -> '.join((*path[path.index(name) :], name))}; remove one"
            )
        if name not in ordered:
            for gate in gates[name]:
                place(gate.reward, (*path, name))
            ordered[name] = None

    for name in gates:
        place(name, ())
    return list(ordered)


@dataclass(frozen=True)
class WeightSchedule:
    """A weight by step: as given at the steps of ``points``, constant before the first and after the last, and interpolated by
    ``kind`` in between.
    """

    kind: Literal["linear", "cosine", "steps"]  # steps: the weight of the previous point
    points: tuple[tuple[int, float], ...]  # (step, weight), steps ascending

    def at(self, step: int) -> float:
        after = bisect_right([start for start, _ in self.points], step)
        if after == 0:
            return self.points[0][1]
        if after == len(self.points) or self.kind == "steps":
            return self.points[after - 1][1]
        (start, first), (end, second) = self.points[after - 1], self.points[after]
        share = (step - start) / (end - start)
        if self.kind == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return first + share * (second - first)
