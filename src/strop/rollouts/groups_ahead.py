"""Prepares groups of recorded data before the loop requests them. Prepared groups are not part of the run's state: a resumed run
prepares them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from strop.types import Group


class GroupsAhead:
    """Prepares, in threads, the groups at the positions after the current one."""

    def __init__(self, make: Callable[[int], Group], has: Callable[[int], bool], *, ahead: int, threads: int) -> None:
        """``make(index)`` must be safe to call in threads; ``has(index)`` returns whether the position exists."""
        self._make, self._has, self._ahead = make, has, ahead
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="groups")
        self._groups: dict[int, Future[Group]] = {}

    async def read(self, index: int) -> Group:
        for passed in [each for each in self._groups if each < index]:  # left between groups that a resumed run prepares again
            self._groups.pop(passed).cancel()
        for position in range(index, index + 1 + self._ahead):
            if position not in self._groups and (position == index or self._has(position)):
                self._groups[position] = self._threads.submit(self._make, position)
        return await asyncio.wrap_future(self._groups.pop(index))

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
