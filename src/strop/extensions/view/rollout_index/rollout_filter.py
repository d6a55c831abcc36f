"""A query over the rollout index: conditions and an order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from strop.extensions.view.rollout_index.index_segment import IndexSegment
from strop.extensions.view.rollout_index.step_scalars import StepScalars

RolloutOrder = Literal["step", "-step", "reward", "-reward", "tokens", "-tokens", "advantage", "-advantage"]
ORDERS: tuple[str, ...] = get_args(RolloutOrder)


@dataclass(frozen=True, kw_only=True)
class RolloutFilter:
    """Conditions that a rollout must all meet; None or empty means no condition. Ranges include their ends."""

    steps: tuple[int, int] | None = None
    task: str | None = None
    environment: str | None = None
    ending: str | None = None
    kept: bool | None = None
    reward: tuple[float | None, float | None] = (None, None)
    tokens: tuple[float | None, float | None] = (None, None)

    def match(self, scalars: StepScalars) -> np.ndarray | None:
        """Return a mask over the rollouts, [N]; None for all of them."""
        mask: np.ndarray | None = None

        def demand(condition: np.ndarray) -> None:
            nonlocal mask
            mask = condition if mask is None else mask & condition

        if self.steps is not None:
            demand((scalars.numbers["step"] >= self.steps[0]) & (scalars.numbers["step"] <= self.steps[1]))
        for name, wanted in (("task_id", self.task), ("environment", self.environment), ("ending", self.ending)):
            if wanted is not None:
                words = scalars.words[name]
                demand(scalars.codes[name] == (words.index(wanted) if wanted in words else -1))
        if self.kept is not None:
            demand(scalars.numbers["kept"] == self.kept)
        for name, (low, high) in (("reward", self.reward), ("tokens", self.tokens)):
            if low is not None:
                demand(scalars.numbers[name] >= low)
            if high is not None:
                demand(scalars.numbers[name] <= high)
        return mask

    def may_match(self, segment: IndexSegment) -> bool:
        """Return whether a segment can contain matching rollouts, judging only by its steps."""
        if self.steps is None or not segment.stamps:
            return True
        return min(segment.stamps) <= self.steps[1] and max(segment.stamps) >= self.steps[0]


@dataclass(frozen=True)
class FoundRollouts:
    """The rollouts found by a filter, in the requested order, as positions in the segments."""

    segments: tuple[IndexSegment, ...]
    places: np.ndarray  # [N] over the concatenation of the segments
    starts: np.ndarray  # [S] start of each segment in it

    def __len__(self) -> int:
        return len(self.places)

    def take(self, first: int, count: int) -> list[tuple[StepScalars, int]]:
        """Return the columns and the row in them for ``count`` rollouts from ``first`` on."""
        places = self.places[max(first, 0) : max(first, 0) + max(count, 0)]
        owners = np.searchsorted(self.starts, places, side="right") - 1
        return [
            (self.segments[owner].scalars, int(place - self.starts[owner])) for owner, place in zip(owners, places, strict=True)
        ]

    def column(self, name: str) -> np.ndarray:
        """Return a number per rollout, [N], in the requested order."""
        columns = [segment.scalars.numbers[name] for segment in self.segments]
        return np.concatenate(columns)[self.places] if columns else np.empty(0, np.int64)

    def keep(self, mask: np.ndarray) -> FoundRollouts:
        """Return the rollouts of a mask, [N]."""
        return FoundRollouts(self.segments, self.places[mask], self.starts)


def find_rollouts(segments: Sequence[IndexSegment], wanted: RolloutFilter, order: str = "-step") -> FoundRollouts:
    """Return the rollouts of segments (in order of steps) that match a filter. Those without a sort value come last."""
    lengths = [len(segment.scalars) for segment in segments]
    starts = np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64) if segments else np.empty(0, np.int64)
    name, falling = order.removeprefix("-"), order.startswith("-")
    kind = np.int32 if sum(lengths) < 2**31 else np.int64
    found, keys = [np.empty(0, kind)], [np.empty(0)]
    for segment, start in zip(segments, starts, strict=True):
        if not wanted.may_match(segment):
            continue
        mask = wanted.match(segment.scalars)
        rows = np.arange(len(segment.scalars)) if mask is None else np.flatnonzero(mask)
        found.append((start + rows).astype(kind))
        keys.append(segment.scalars.numbers[name][rows])
    places: np.ndarray = np.concatenate(found)
    if order != "step":  # segments and their rows are already in this order
        values = np.concatenate(keys)
        missing = np.isnan(values)
        ranked = np.argsort(np.where(missing, np.inf, -values if falling else values), kind="stable")
        places = places[ranked]
    return FoundRollouts(tuple(segments), places, starts)
