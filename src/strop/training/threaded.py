"""A learner beside the event loop: its calls run in one thread of their own, so that generation and environments go on meanwhile.

Whoever shares its module with a generator in this process must not be wrapped: the two take turns on one thread instead.
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
from strop.metrics import Metrics
from strop.training.base import BackwardResult, ColumnSource, Learner, Scorer, WeightSource
from strop.types import Batch, Group

T = TypeVar("T")

_here = threading.local()  # which LearnerThread the running thread is, if any


class LearnerThread:
    """One thread that runs one call after another, with the torch settings of the thread that made it.

    Torch keeps per thread: the number of threads of a computation, the current device, whether gradients are recorded. The last is the
    caller's at each call.
    """

    def __init__(self, name: str = "strop-learner") -> None:
        threads, token = torch.get_num_threads(), object()
        device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

        def prepare() -> None:
            torch.set_num_threads(threads)
            if device is not None:
                torch.cuda.set_device(device)
            _here.token = token

        self._token = token
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=prepare)

    async def run(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What ``await call()`` gives, run in the thread; its exceptions are raised here.

        A caller that is cancelled waits for the call in progress first: nobody saves or frees what a thread still works on. Cancelled
        again, it does not.
        """
        if getattr(_here, "token", None) is self._token:  # a scorer that asks a learner of the same thread
            return await call()
        context, gradients = contextvars.copy_context(), torch.is_grad_enabled()

        def work() -> T:
            with torch.set_grad_enabled(gradients):
                return asyncio.run(_awaited(call))

        future = asyncio.get_running_loop().run_in_executor(self._executor, context.run, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not future.done():
                await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # the cancellation is what is raised
            raise

    def close(self) -> None:
        """End the thread once its call in progress, if there is one, is over; does not wait."""
        self._executor.shutdown(wait=False, cancel_futures=True)


async def _awaited(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return await call()


@dataclass(frozen=True)
class ThreadedScorer:
    """A scorer whose calls run in ``thread``."""

    scorer: Scorer
    thread: LearnerThread

    async def score(self, batch: Batch) -> Outputs:
        return await self.thread.run(lambda: self.scorer.score(batch))


@dataclass(frozen=True)
class ThreadedColumns:
    """A source of columns whose calls run in ``thread``."""

    source: ColumnSource
    thread: LearnerThread

    async def columns(self, batch: Batch, groups: Sequence[Group]) -> Mapping[str, Tensor]:
        return await self.thread.run(lambda: self.source.columns(batch, groups))


@dataclass(frozen=True)
class ThreadedLearner:
    """A learner whose calls run in ``thread``. Weights, saving and loading stay with the caller, between calls."""

    learner: Learner
    thread: LearnerThread

    async def score(self, batch: Batch) -> Outputs:
        return await self.thread.run(lambda: self.learner.score(batch))

    async def forward_backward(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return await self.thread.run(lambda: self.learner.forward_backward(batch, loss))

    async def measure(self, batch: Batch, loss: LossFn) -> BackwardResult:
        return await self.thread.run(lambda: self.learner.measure(batch, loss))

    async def step(self) -> Metrics:
        return await self.thread.run(self.learner.step)

    def weights(self) -> WeightSource:
        return self.learner.weights()

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        self.learner.save(folder, optimizer=optimizer)

    def load(self, folder: Path) -> None:
        self.learner.load(folder)


def in_thread(learner: Learner, thread: LearnerThread) -> Learner:
    """The same learner beside the event loop."""
    return ThreadedLearner(learner, thread)
