"""Dump the stacks of all threads and asyncio tasks of this process."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MAX_TASKS = 200


def dump_stacks(path: Path, header: str, loop: asyncio.AbstractEventLoop) -> None:
    """Write the stacks to a file. May be called from any thread. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{header}\n\nThreads, the innermost call first\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
        file.write("\nTasks of the event loop, the innermost call last\n")
        with suppress(RuntimeError):  # the set of tasks may change during iteration
            for task in list(asyncio.all_tasks(loop))[:MAX_TASKS]:
                file.write(f"\n{task.get_name()}\n" + "".join(f"  {line}\n" for line in _await_chain(task.get_coro())))


def _await_chain(coroutine: Any) -> Iterator[str]:
    """Yield a suspended coroutine, what it awaits, and so on. (``Task.print_stack`` shows only the outermost one.)"""
    while coroutine is not None:
        frame = next((value for name in ("cr_frame", "gi_frame", "ag_frame") if (value := getattr(coroutine, name, None))), None)
        if frame is None:
            yield repr(coroutine)
            return
        yield f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        awaited = (value for name in ("cr_await", "gi_yieldfrom", "ag_await") if (value := getattr(coroutine, name, None)))
        stepped = frame.f_locals.get("work")  # a generator that steps a coroutine itself (strop.environments.forks)
        coroutine = stepped if inspect.iscoroutine(stepped) else next(awaited, None)
