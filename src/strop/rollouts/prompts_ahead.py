"""Prompts that are rendered and tokenized before their groups are started, in a thread.

Only what is certain is made ahead: prompts that are rows of data. An episode asks the chat template for its prompt as ever, which then
knows the tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

from strop.models.chat_template import ChatTemplate, images_of
from strop.types import Messages

log = logging.getLogger(__name__)


class PromptsAhead:
    def __init__(self, peek: Callable[[int], Messages | None], template: ChatTemplate, *, ahead: int) -> None:
        """``peek(index)`` returns the prompt of a task that is not started yet; None if it is not known. ``ahead``: how many."""
        self._peek, self._template, self._ahead = peek, template, ahead
        self._own = deepcopy(template)  # a tokenizer is not for two threads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._next = 0

    def advance(self, index: int) -> None:
        """Make the prompts after a group that is started."""
        first, self._next = max(self._next, index + 1), max(self._next, index + 1 + self._ahead)
        for position in range(first, self._next):
            self._thread.submit(self._prepare, position)

    def _prepare(self, index: int) -> None:
        try:
            messages = self._peek(index)
            if messages is not None and not images_of(messages):  # images are read where their task is
                self._template.remember_prompt(messages, self._own.encode_prompt(messages))
        except Exception as error:  # the group records it when it is started
            log.debug("the prompt of position %d cannot be made ahead", index, exc_info=error)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
