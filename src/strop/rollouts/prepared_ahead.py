"""Prompts and groups of recorded data that are prepared before the loop requests them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy

from strop.models.chat_template import ChatTemplate, images_of
from strop.types import Group, Messages

log = logging.getLogger(__name__)


class PromptsAhead:
    """Renders and tokenizes prompts in a thread before their groups are started.

    Only prompts known in advance are prepared: rows of data. An episode asks the chat template for its prompt as usual and finds the
    tokens cached.
    """

    def __init__(self, peek: Callable[[int], Messages | None], template: ChatTemplate, *, ahead: int) -> None:
        """``peek(index)`` returns the prompt of a task that has not started; None if it is not known yet. ``ahead``: how many
        prompts to prepare.
        """
        self._peek, self._template, self._ahead = peek, template, ahead
        self._own = deepcopy(template)  # a tokenizer must not be shared by two threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._next = 0

    def advance(self, index: int) -> None:
        """Prepare the prompts after a group that was started."""
        first, self._next = max(self._next, index + 1), max(self._next, index + 1 + self._ahead)
        for position in range(first, self._next):
            self._thread.submit(self._prepare, position)

    def _prepare(self, index: int) -> None:
        try:
            messages = self._peek(index)
            if messages is not None and not images_of(messages):  # images are read with their task
                self._template.remember_prompt(messages, self._own.encode_prompt(messages))
        except Exception as error:  # the error is recorded on the group when it is started
            log.debug("the prompt of position %d cannot be made ahead", index, exc_info=error)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)


class GroupsAhead:
    """Prepares, in threads, the groups of recorded data at the positions after the current one.

    They are not part of the run's state: a resumed run prepares them again.
    """

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
