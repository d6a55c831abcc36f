"""Run a learner in its own thread, so that generation and environments continue on the event loop meanwhile.

Do not wrap a learner that shares its module with an engine in this process: the two take turns on one thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop.algorithms.base import LossFn, Outputs
from strop.learner.base import BackwardResult, ColumnSource, Learner, Scorer, WeightSource
from strop.metrics import Metrics
from strop.types import Batch, Group

T = TypeVar("T")

_thread_local = threading.local()  # .token: the LearnerThread that runs the current thread, if any


class LearnerThread:
    """A single thread that runs calls one after another, with the torch settings of the thread that created it.

    Torch keeps the number of intra-op threads, the current device and the grad mode per thread. The grad mode is the caller's at each call.
    """

    def __init__(self, name: str = "strop-learner") -> None:
        threads, token = torch.get_num_threads(), object()
        device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

        def prepare() -> None:
            torch.set_num_threads(threads)
            if device is not None:
                torch.cuda.set_device(device)
            _thread_local.token = token

        self._token = token
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=prepare)

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run ``await call()`` in the thread; return its result or raise its exception.

        A cancelled caller first waits for the call in progress, so that nothing is saved or freed while the thread still uses it. A second
        cancellation does not wait.
        """
        if getattr(_thread_local, "token", None) is self._token:  # a scorer that calls a learner of the same thread
            return await call()
        context, gradients = contextvars.copy_context(), torch.is_grad_enabled()

        def work() -> T:
            with torch.set_grad_enabled(gradients):
                return asyncio.run(call())

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


@dataclass(frozen=True)
class ThreadedScorer:
    """A scorer whose calls run in ``thread``."""

    scorer: Scorer
    thread: LearnerThread

    async def score(self, batch: Batch) -> Outputs:
        return await self.thread.run(lambda: self.scorer.score(batch))


@dataclass(frozen=True)
class ThreadedColumns:
    """A column source whose calls run in ``thread``."""

    source: ColumnSource
    thread: LearnerThread

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        return await self.thread.run(lambda: self.source.columns(batch, groups))


@dataclass(frozen=True)
class ThreadedLearner:
    """A learner whose calls run in ``thread``. ``weights``, ``save`` and ``load`` run in the caller's thread, between calls."""

    learner: Learner
    thread: LearnerThread

    async def score(self, batch: Batch) -> Outputs:
        return await self.thread.run(lambda: self.learner.score(batch))

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return await self.thread.run(lambda: self.learner.forward_backward(batch, loss))

    async def evaluate_loss(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return await self.thread.run(lambda: self.learner.evaluate_loss(batch, loss))

    async def step(self) -> Metrics:
        return await self.thread.run(self.learner.step)

    def weights(self) -> WeightSource:
        return self.learner.weights()

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.learner.save(folder, optimizer=optimizer)

    def load(self, folder: Path) -> None:
        self.learner.load(folder)


def wrap_in_thread(learner: Learner, thread: LearnerThread) -> Learner:
    """Return a learner whose calls run in ``thread``."""
    return ThreadedLearner(learner, thread)
