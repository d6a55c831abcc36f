"""What user code raises besides exceptions: exits and cancellations of its own, kept apart from those of the run."""

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
exit_process: Callable[[int], NoReturn] = os._exit  # as it is outside of runs, for the run's own ends
_contained: ContextVar[bool] = ContextVar("code is contained", default=False)


class RunExited(RuntimeError):
    """SystemExit was raised where no rollout could record it, such as a task of asyncio or a library's callback."""


class NotAnException(Exception):
    """Stands for what user code raised that is no Exception, such as SystemExit. The name of its type is the original's."""


@contextmanager
def contain_exits() -> Iterator[None]:
    """Raise a ``NotAnException`` for SystemExit, KeyboardInterrupt, CancelledError or GeneratorExit that the code inside raises itself.

    They would end the run, or the task that awaits the code, without a word. A Ctrl-C of the terminal and a cancellation from outside
    pass, and so does the closing of a coroutine that nobody awaits any more.
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
        with suppress(ValueError):  # a coroutine that nobody awaits any more is closed in another context
            _contained.reset(inside)


@contextmanager
def _containing_hard_exits() -> Iterator[None]:
    """Let ``os._exit`` raise SystemExit where ``contain_exits`` is around it in this process: nothing could report such an end.

    Processes that user code forks end by it as ever, and so do libraries that call it elsewhere.
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
    """Await ``work`` in a task of its own. Raises NotAnException if the work cancels that task; a cancellation from outside passes.

    A library's timeout that goes wrong does so, and within one task it cannot be told from a cancellation by who awaits it.
    """
    task = asyncio.ensure_future(work)
    try:
        return await task
    except asyncio.CancelledError as error:
        outer = _current_task()
        if not task.cancelled() or (outer is not None and outer.cancelling() > 0):
            raise
        raise type("CancelledError", (NotAnException,), {})("the code cancelled the task that it runs in") from error


def is_interrupt(error: BaseException) -> bool:
    """Whether this is a KeyboardInterrupt by a signal, which comes in the main thread and whose last frame is the signal's handler."""
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler: Any = signal.getsignal(signal.SIGINT)
    if handler == signal.SIG_IGN:  # a shell starts its background jobs that way: no signal becomes an exception
        return False
    while isinstance(handler, functools.partial):
        handler = handler.func
    code = getattr(handler, "__code__", None)  # of asyncio's handler; Python's own is no function of Python
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return code is None or trace is None or trace.tb_frame.f_code is code


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, which never ends with the exit code of user code, nor by its ``os._exit``.

    Raises RunExited if code that nobody awaits calls sys.exit().
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
