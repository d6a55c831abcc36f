"""How the episodes of one group keep time: each by itself, or on the clock of the engine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from strop.generation.base import Generator

T = TypeVar("T")


class GroupClock(Protocol):
    """Keeps the time of a group: when its answers and its end count."""

    def version(self, generator: Generator) -> int:
        """Return the version of the weights with which the group began."""
        ...

    def episode(self, sample: int, work: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        """Run the episode of a sample; it ends when its last answer counts."""
        ...

    def rewards(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        """Compute the rewards of the whole group; they are there when they count."""
        ...


class OwnTime:
    """Everything counts when it happens."""

    def version(self, generator: Generator) -> int:
        return generator.version

    def episode(self, sample: int, work: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        return work()

    def rewards(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Coroutine[Any, Any, T]:
        return work()


OWN_TIME = OwnTime()
