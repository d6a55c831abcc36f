"""Processes forked by user code: they must not continue in Strop's code, nor outlive the run.

A reward that calls ``os.fork`` and lets the child return would leave a second run in the same folders and on the same
connections.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_PARENT_DEATH_SIGNAL = 1  # prctl
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_in_user_code: ContextVar[bool] = ContextVar("strop_in_user_code", default=False)
_children: set[int] = set()  # forked in user code, and not reaped yet
_before: set[int] = set()
_said = mmap.mmap(-1, 1)  # shared with forks: only the first one that is ended is reported


async def run_in_one_process(function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any, **named: Any) -> T:
    """Await a function that calls user code. A fork that returns from that code exits at once, and ended forks are reaped."""
    return await _Steps(function(*arguments, **named))


class _Steps(Awaitable[T]):
    """A coroutine that checks the process after each of its steps."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, None, T]:
        _in_user_code.set(True)
        work = self._work  # a local, for the watchdog's stacks
        process, step = os.getpid(), partial(work.send, None)
        while True:
            try:
                future = step()
            except StopIteration as end:
                value: T = end.value
                return value
            finally:
                if os.getpid() != process:
                    _exit_fork()
                reap_forks()
            try:
                yield future
            except BaseException as error:  # the task is cancelled, or closed
                step = partial(work.throw, error)
            else:
                step = partial(work.send, None)


def reap_forks() -> None:
    """Wait for ended forks, without blocking, so that none stays in the process table."""
    if not _children:
        return
    managed = {child.pid for child in multiprocessing.active_children()}  # multiprocessing reaps its own children
    for child in [*_children]:
        try:
            ended = child in managed or os.waitpid(child, os.WNOHANG)[0] == child
        except ChildProcessError:  # already reaped by the code that forked it
            ended = True
        if ended:
            _children.discard(child)


def end_forks() -> None:
    """Kill the forks that still run. Called at the end of a run and of this process."""
    reap_forks()
    for child in [*_children]:
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        _children.discard(child)


def _exit_fork() -> None:
    if not _said[0]:
        _said[0] = 1
        text = "a reward or an environment forked this process and let the child return: such children are ended at once. Call os._exit "
        os.write(2, f"warning: {text}in the child, or start it with subprocess\n".encode())
    os._exit(1)


def _list_children() -> set[int]:
    with suppress(OSError):  # no /proc, or a kernel without this file
        return {int(child) for child in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()}
    return set()


def _before_fork() -> None:
    if _in_user_code.get():
        _before.clear()
        _before.update(_list_children())


def _after_fork_in_parent() -> None:
    if _in_user_code.get():
        _children.update(_list_children() - _before)


def _after_fork_in_child() -> None:
    _children.clear()
    if _in_user_code.get() and _libc is not None and threading.current_thread() is threading.main_thread():
        _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # also if the run itself is killed


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
atexit.register(end_forks)
