"""Exits and cancellations raised by user code, kept separate from those of the run."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
exit_process: Callable[[int], NoReturn] = os._exit  # the original, used to end the run itself
_contained: ContextVar[bool] = ContextVar("code is contained", default=False)


class RunExited(RuntimeError):
    """SystemExit was raised where no rollout could record it, for example in an asyncio task or a library's callback."""


class NotAnException(Exception):
    """Stands for something raised by user code that is not an Exception, such as SystemExit. Its type has the original's name."""


@contextmanager
def contain_exits() -> Iterator[None]:
    """Convert SystemExit, KeyboardInterrupt, CancelledError or GeneratorExit raised by the block itself into a
    ``NotAnException``.

    They would silently end the run, or the task that awaits the code. A Ctrl-C in the terminal and a cancellation from outside
    pass, and so does the closing of a coroutine that is no longer awaited.
    """
    task = _current_task()
    inside = _contained.set(True)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        cancelled = isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)
        closed = isinstance(error, GeneratorExit) and task is not None and _current_task() is not task
        if cancelled or closed or is_interrupt(error):
            raise
        raise type(type(error).__name__, (NotAnException,), {})(str(error)) from error
    finally:
        with suppress(ValueError):  # a coroutine that is no longer awaited is closed in another context
            _contained.reset(inside)


@contextmanager
def _containing_hard_exits() -> Iterator[None]:
    """Make ``os._exit`` raise SystemExit inside ``contain_exits`` in this process, because such an exit could not be reported.

    Processes forked by user code still exit by it, and so do libraries that call it elsewhere.
    """
    process = os.getpid()

    def exit_or_raise(status: int) -> NoReturn:
        if os.getpid() == process and _contained.get():
            raise SystemExit(f"os._exit({status})")
        exit_process(status)

    before, os._exit = os._exit, exit_or_raise
    try:
        yield
    finally:
        os._exit = before


async def contain_cancellation(work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` in a separate task. Raises NotAnException if the work cancels that task; a cancellation from outside passes.

    A library's faulty timeout can cause this, and within one task it cannot be distinguished from a cancellation by the awaiting
    code.
    """
    task = asyncio.ensure_future(work)
    try:
        return await task
    except asyncio.CancelledError as error:
        outer = _current_task()
        if not task.cancelled() or (outer is not None and outer.cancelling() > 0):
            raise
        raise type("CancelledError", (NotAnException,), {})("the code cancelled its own task") from error


def is_interrupt(error: BaseException) -> bool:
    """Whether this is a KeyboardInterrupt caused by a signal: raised in the main thread, with the signal handler as its last
    frame.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler: Any = signal.getsignal(signal.SIGINT)
    if handler == signal.SIG_IGN:  # a shell starts background jobs like this: no signal becomes an exception
        return False
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)  # asyncio's handler; Python's own is not a Python function
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return code is None or trace is None or trace.tb_frame.f_code is code


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Like ``asyncio.run``, but never ends with user code's exit code, or by its ``os._exit``.

    Raises RunExited if code that is not awaited calls sys.exit().
    """
    try:
        with _containing_hard_exits():
            return asyncio.run(work)
    except SystemExit as error:
        raise RunExited(
            f"a reward, an environment or a library ended the run with SystemExit({error.code!r}); raise an exception there instead, which "
            "costs one rollout"
        ) from error


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # there is no event loop
        return None
