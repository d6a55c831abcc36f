"""Order policies of a stream: which group is trained on next.

With k = max_staleness, the *deadline* of a group started with weight version v is step v + k: the last step that may train on it.
``Fifo`` and ``Windowed`` meet every deadline; ``DropTooOld`` does not wait for slow groups, and groups that miss theirs are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class PendingGroup:
    """A group that occupies a slot and has not been returned by the stream."""

    index: int
    version: int  # weight version when it was started
    finish_rank: int | None  # number of groups that finished before it; None while it runs


class GroupOrder(Protocol):
    """Chooses the next group of a stream."""

    drops_stale: ClassVar[bool]  # whether it may return groups that are too old to train on, which are then dropped

    def choose(self, pending: Sequence[PendingGroup], *, now: int, taken: int) -> PendingGroup | None:
        """Return the finished group to train on next, or None to wait until another one finishes.

        ``pending`` is sorted by index and not empty. ``now`` is the version of the newest published weights, which is also the step being
        collected; ``taken`` groups were already returned for it. If every group is finished, the result is never None.
        """
        ...

    def sort(self, pending: Sequence[PendingGroup]) -> Sequence[PendingGroup]:
        """Sort the groups into the order in which they would be chosen if all were finished and no others were started."""
        ...


@dataclass(frozen=True)
class Fifo:
    """Returns groups in the order in which they were started: runs are reproducible, but a slow group delays those after it."""

    drops_stale: ClassVar[bool] = False

    def choose(self, pending: Sequence[PendingGroup], *, now: int, taken: int) -> PendingGroup | None:
        return pending[0] if pending[0].finish_rank is not None else None

    def sort(self, pending: Sequence[PendingGroup]) -> Sequence[PendingGroup]:
        return sorted(pending, key=lambda group: group.index)


@dataclass(frozen=True, kw_only=True)
class Windowed:
    """Returns the oldest finished group among the ``window`` oldest, as long as all others can still meet their deadlines.

    The oldest group may always be chosen, so the stream never deadlocks; its deadline bounds how far a slow group can be overtaken.
    """

    window: int  # groups
    groups_per_step: int
    max_staleness: int

    drops_stale: ClassVar[bool] = False

    def choose(self, pending: Sequence[PendingGroup], *, now: int, taken: int) -> PendingGroup | None:
        """Return the oldest finished group of the window that may overtake those of older versions.

        Until the end of step now + j, (j + 1) x groups_per_step - taken more groups can be trained on. Every deadline can be met if, for
        every j, at most that many groups are due by then. Choosing a group uses up one of these positions, but reduces the number of
        due groups only from its own deadline on. So at each earlier deadline, one position must be left over.
        """
        oldest = self.sort(pending)
        for position, group in enumerate(oldest[: self.window]):
            if position and oldest[position - 1].version < group.version:  # the ``position`` groups before it are due earlier
                deadline = oldest[position - 1].version + self.max_staleness
                if position >= (deadline - now + 1) * self.groups_per_step - taken:
                    return None
            if group.finish_rank is not None:
                return group
        return None

    def sort(self, pending: Sequence[PendingGroup]) -> Sequence[PendingGroup]:
        return sorted(pending, key=lambda group: (group.version, group.index))


@dataclass(frozen=True)
class DropTooOld:
    """Returns groups in the order in which they finished; the training loop drops those that are too old by then."""

    drops_stale: ClassVar[bool] = True

    def choose(self, pending: Sequence[PendingGroup], *, now: int, taken: int) -> PendingGroup | None:
        first = self.sort(pending)[0]
        return first if first.finish_rank is not None else None

    def sort(self, pending: Sequence[PendingGroup]) -> Sequence[PendingGroup]:
        return sorted(pending, key=lambda group: (group.finish_rank is None, group.finish_rank or 0, group.index))
