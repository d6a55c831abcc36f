"""Which group is trained on next: the order policies of a stream.

With k = max_staleness and G groups per step, a group begun by version v has its *deadline* at step v + k: the last step that may train on
it. ``Fifo`` and ``Windowed`` keep every deadline; ``DropTooOld`` waits for nobody, and what misses its deadline is not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(frozen=True)
class Held:
    """A group that holds a slot and was not handed out."""

    index: int
    version: int  # of the weights when it was begun
    finished: int | None  # how many groups finished before it; None while it runs


class Order(Protocol):
    """Chooses among the groups of a stream."""

    drops: ClassVar[bool]  # whether groups may come out that are too old to be trained on

    def choose(self, held: Sequence[Held], *, now: int, taken: int) -> Held | None:
        """The finished group to hand out next; None waits until another one finishes.

        ``held`` is in the order of indices and not empty; ``now`` is the version of the newest published weights, which is the step that is
        being collected; ``taken`` groups are handed out for it already. Where every group is finished it never returns None.
        """
        ...

    def queue(self, held: Sequence[Held]) -> Sequence[Held]:
        """Those groups in the order in which they would go if all were finished and no other were begun."""
        ...


@dataclass(frozen=True)
class Fifo:
    """In the order in which groups were begun: a run can be repeated, and a slow group holds up those behind it."""

    drops: ClassVar[bool] = False

    def choose(self, held: Sequence[Held], *, now: int, taken: int) -> Held | None:
        return held[0] if held[0].finished is not None else None

    def queue(self, held: Sequence[Held]) -> Sequence[Held]:
        return sorted(held, key=lambda group: group.index)


@dataclass(frozen=True, kw_only=True)
class Windowed:
    """Any finished group among the ``window`` oldest goes first, as long as all others can still meet their deadlines.

    The oldest may always go, so nothing is ever stuck; how far a slow group can be overtaken is bounded by its deadline.
    """

    window: int  # groups
    groups_per_step: int
    max_staleness: int

    drops: ClassVar[bool] = False

    def choose(self, held: Sequence[Held], *, now: int, taken: int) -> Held | None:
        """The oldest finished group of the window that may overtake those of older versions.

        Until the end of step now + j there is room for (j + 1) x groups_per_step - taken more. Every deadline can be met if, for every j,
        at most so many groups are due by then. Handing one out takes a place, and is one due less only from its own deadline on: all due
        before must have a place to spare.
        """
        oldest = self.queue(held)
        for place, group in enumerate(oldest[: self.window]):
            if place and oldest[place - 1].version < group.version:  # the ``place`` groups before it are due before it
                deadline = oldest[place - 1].version + self.max_staleness
                if place >= (deadline - now + 1) * self.groups_per_step - taken:
                    return None
            if group.finished is not None:
                return group
        return None

    def queue(self, held: Sequence[Held]) -> Sequence[Held]:
        return sorted(held, key=lambda group: (group.version, group.index))


@dataclass(frozen=True)
class DropTooOld:
    """In the order in which groups finished; whoever takes them drops those that are too old by then."""

    drops: ClassVar[bool] = True

    def choose(self, held: Sequence[Held], *, now: int, taken: int) -> Held | None:
        first = self.queue(held)[0]
        return first if first.finished is not None else None

    def queue(self, held: Sequence[Held]) -> Sequence[Held]:
        return sorted(held, key=lambda group: (group.finished is None, group.finished or 0, group.index))
