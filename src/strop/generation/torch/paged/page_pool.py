"""Assigns the pages of the key-value cache to their owners.

The pages that single sequences write into are a *stack* without gaps: pages 0 to M - 1. Attention can then read all of them as one view of
the cache, without gathering. Pages shared by sequences are *held* at the other end. When a page of the stack is freed, the last one
moves into its place; when the stack grows into a held page, that one moves up.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Protocol


class PageOwner(Protocol):
    """An owner, which refers to pages by number."""

    def renumber_page(self, old: int, new: int) -> None:
        """Called when a page has moved."""
        ...


class PagePool:
    """Pages 0 to ``size`` - 1: the stack, held pages, and free ones."""

    def __init__(self, size: int, copy_page: Callable[[int, int], object]) -> None:
        """``copy_page(source, target)`` copies the contents of a page."""
        self.size = size
        self.copy_page = copy_page
        self.stack: list[PageOwner] = []  # owner of each page of the stack
        self.held: dict[int, PageOwner] = {}
        self.free = list(range(size))  # ascending

    def push(self, owner: PageOwner) -> int | None:
        """Push a page onto the stack and return its number; None if no page is free."""
        if not self.free:
            return None
        page = len(self.stack)
        if page in self.held:
            self._move_up(page)
        else:
            lowest = self.free.pop(0)
            assert lowest == page, f"page {page} is neither held nor free"
        self.stack.append(owner)
        return page

    def _move_up(self, page: int) -> None:
        target, owner = self.free.pop(), self.held.pop(page)
        self.copy_page(page, target)
        self.held[target] = owner
        owner.renumber_page(page, target)

    def pop(self, page: int) -> None:
        """Free a page of the stack; the last one moves into its place."""
        last = len(self.stack) - 1
        if page != last:
            self.copy_page(last, page)
            self.stack[page] = self.stack[last]
            self.stack[page].renumber_page(last, page)
        self.stack.pop()
        self.free.insert(0, last)

    def hold(self, owner: PageOwner) -> int | None:
        """Hold the highest free page and return its number; None if no page is free."""
        if not self.free:
            return None
        page = self.free.pop()
        self.held[page] = owner
        return page

    def release(self, page: int) -> None:
        """Free a held page."""
        del self.held[page]
        insort(self.free, page)
