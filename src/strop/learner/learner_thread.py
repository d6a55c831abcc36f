"""A thread for a learner's computations, so that generation and environments continue on the event loop.

Do not use it for a learner that shares its module with an engine in this process, because the two must alternate on one thread.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class LearnerThread:
    """A single thread that runs calls one after another, with the torch settings of the thread that created it.

    Torch keeps the number of intra-op threads, the current device and the grad mode per thread. The grad mode is the caller's at each call.
    """

    def __init__(self, name: str = "strop-learner") -> None:
        threads = torch.get_num_threads()
        device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

        def prepare() -> None:
            torch.set_num_threads(threads)
            if device is not None:
                torch.cuda.set_device(device)

        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=prepare)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function(*arguments)`` in the thread; return its result or raise its exception.

        A cancelled caller first waits for the call in progress, so that nothing is saved or freed while the thread still uses it. A second
        cancellation does not wait.
        """
        context, gradients = contextvars.copy_context(), torch.is_grad_enabled()

        def work() -> T:
            with torch.set_grad_enabled(gradients):
                return function(*arguments)

        future = asyncio.get_running_loop().run_in_executor(self._executor, context.run, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # mark it as retrieved: the caller gets the cancellation
            raise

    def close(self) -> None:
        """Stop the thread after the call in progress, without waiting for it."""
        self._executor.shutdown(wait=False, cancel_futures=True)
