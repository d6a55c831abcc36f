"""Open waits: ``with waiting(who, on=whom)`` around whatever may not come back.

An open wait is an edge from who waits to what is waited for. Its parent is the wait that was open where it was begun (a context variable:
an asyncio task and ``asyncio.to_thread`` inherit it). A wait whose parent is over by now, as that of a group that was begun ahead of its
step, hangs below whoever waits for it by name.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal, NamedTuple

Kind = Literal["", "environment", "generation", "training", "weight_sync", "checkpoint"]  # whose limit a wait has; "": none

_innermost: ContextVar[waiting | None] = ContextVar("strop_waiting", default=None)
_open: dict[int, waiting] = {}  # in the order in which they were begun; one item is added or removed at a time, so no lock
_number = itertools.count()


class waiting:
    """``with waiting("weight sync", on="engine 1", kind="weight_sync"):`` names a wait for as long as the block runs.

    ``who`` and ``on`` are words for a person; a number that tells one from another belongs to them. ``kind`` says which of the
    watchdog's limits applies, ``limit`` gives one of its own (seconds). ``detail`` is only shown. From any thread or asyncio task.
    """

    __slots__ = ("detail", "kind", "limit", "number", "on", "parent", "since", "task", "thread", "who")

    def __init__(self, who: str, *, on: str, kind: Kind = "", limit: float | None = None, detail: str = "") -> None:
        self.who, self.on, self.kind, self.limit, self.detail = who, on, kind, limit, detail

    def __enter__(self) -> waiting:
        self.parent = _innermost.get()
        _innermost.set(self)
        self.thread = threading.get_ident()
        self.task = _current_task()
        self.number = next(_number)
        self.since = time.monotonic()
        _open[self.number] = self
        return self

    def __exit__(self, *_: object) -> None:
        _open.pop(self.number, None)
        _innermost.set(self.parent)
        self.parent = self.task = None  # what a task keeps of its context must not keep alive what is over


def _current_task() -> asyncio.Task[object] | None:
    loop = asyncio._get_running_loop()  # None outside of one; the public function raises, which costs more than all of the above
    return None if loop is None else asyncio.current_task(loop)


class Wait(NamedTuple):
    """An open wait as it was at one moment. (A tuple, for there may be thousands, every few seconds.)"""

    number: int  # identity; later ones are larger
    who: str
    on: str
    detail: str
    kind: Kind
    limit: float | None  # seconds; None: it may take as long as it likes
    seconds: float  # since it was begun
    parent: int | None  # the number of the wait that it is part of
    thread: int
    running: bool  # its task is the one that the event loop runs now: where the loop is blocked, it is what blocks it

    @property
    def over(self) -> bool:
        return self.limit is not None and self.seconds > self.limit


def open_waits(
    limits: Mapping[str, float] = MappingProxyType({}), *, loop: asyncio.AbstractEventLoop | None = None
) -> tuple[Wait, ...]:
    """Every open wait, the oldest first. ``limits`` are seconds by kind; 0 and a kind that is missing are none.

    ``loop``: the event loop whose running task is to be marked.
    """
    found = list(_open.values())  # a copy is one step of the interpreter: nobody changes it meanwhile
    now, running = time.monotonic(), None if loop is None else asyncio.current_task(loop)
    by_number = {wait.number: wait for wait in found}
    awaited = {wait.on: wait for wait in reversed(found)}  # of several that wait for the same, the oldest
    return tuple(
        Wait(
            number=wait.number,
            who=wait.who,
            on=wait.on,
            detail=wait.detail,
            kind=wait.kind,
            limit=(limits.get(wait.kind) or None) if wait.limit is None else wait.limit or None,
            seconds=now - wait.since,
            parent=_parent(wait, by_number, awaited),
            thread=wait.thread,
            running=running is not None and wait.task is running,
        )
        for wait in found
    )


def _parent(wait: waiting, by_number: Mapping[int, waiting], awaited: Mapping[str, waiting]) -> int | None:
    begun_in = wait.parent
    if begun_in is not None and begun_in.number in by_number:
        return begun_in.number
    by_name = awaited.get(wait.who)
    return None if by_name is None or by_name is wait or by_name.who == wait.on else by_name.number


def chain(wait: Wait, waits: Iterable[Wait]) -> list[Wait]:
    """From the outermost wait to this one."""
    by_number = {other.number: other for other in waits}
    found = [wait]
    while (parent := by_number.get(-1 if found[-1].parent is None else found[-1].parent)) is not None and parent not in found:
        found.append(parent)
    return found[::-1]


def told(wait: Wait, waits: Iterable[Wait]) -> str:
    """The chain as a sentence: ``training loop -> generation -> group 87 -> environment 'sandbox', turn 2 (task x)``."""
    links = chain(wait, waits)
    words = [links[0].who]
    for link in links:
        words += [link.who] if link.who not in (words[-1], "") else []
        words.append(f"{link.on} ({link.detail})" if link.detail else link.on)
    return " -> ".join(words)
